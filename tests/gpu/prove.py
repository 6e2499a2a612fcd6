"""Run the checks and benchmarks of one GPU within a budget; write a JSON and print tables.

prove.sh starts this. On a GPU every part is a process with a budget in seconds, several at a time,
and the benchmark follows alone; in a rehearsal on a CPU one process runs all checks.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import train_gpu
from gpu_report import report

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError, ExitCode
from megatron.config.config import SECTIONS
from megatron.config.parsing.flags import options_of

REPOSITORY = Path(__file__).resolve().parents[2]
TOTAL_S = 580
REHEARSAL_S = 3000
AT_ONCE = 4  # parts that share the GPU
NOT_RUN = "not run"
_PROGRESS = re.compile(r"tests/gpu/(\S+::.* (?:PASSED|FAILED|ERROR|SKIPPED)\b.*)")
"""Line of pytest about a check that has ended."""


@dataclass(frozen=True)
class Part:
    """Files of checks, and the seconds they may take on a GPU."""

    name: str
    files: tuple[str, ...]
    budget: int


PARTS = (
    Part("runs", ("test_gpu_runs.py",), 200),
    Part("training", ("test_gpu_training.py",), 220),
    Part("kernels", ("test_kernels.py", "test_gpu_large_kernels.py"), 120),
    Part("generation", ("test_gpu_generation.py",), 100),
    Part("processes", ("test_gpu_processes.py",), 200),
)
SPEED = "speed"
VARIANTS = {
    "kernels": "--kernels reference",
    "compile": "--compile",
    "loss_chunk_tokens": "--loss-chunk-tokens 2048",
}
"""Flags of further rows of the benchmark, by the field of the config that they set."""


def main(argv: Sequence[str]) -> None:
    """Run the parts and exit with 1 if a check failed.

    Raises:
        ConfigError: there is a GPU that this torch cannot use, or none where one is required.
    """
    parser = ToolParser(description=__doc__)
    names = [part.name for part in PARTS] + [SPEED]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--json", default="results.json", help="file to write the results to")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    parser.add_argument("--require-gpu", action="store_true", help="fail where there is no GPU")
    args = parser.parse_args(argv)
    started_at = time.monotonic()
    rehearsal = args.rehearse or not has_gpu()
    if rehearsal and args.require_gpu:
        raise ConfigError("--require-gpu: no GPU is visible on this machine; look at nvidia-smi")
    if rehearsal:
        print("REHEARSAL on the CPU: tiny networks; nothing here is a result of a GPU", flush=True)
    parts = [part for part in PARTS if part.name in args.parts]
    run = rehearse if rehearsal else prove
    result: dict[str, Any] = {
        "rehearsal": rehearsal,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["bash tests/gpu/prove.sh", *argv]),
        "parts": run(parts),
        "speed": None,
        "device": {"name": "unknown", "torch": "unknown", "cuda": None},
    }
    result["seconds"] = time.monotonic() - started_at
    write(result, args.json)
    if SPEED in args.parts:
        total = REHEARSAL_S if rehearsal else TOTAL_S
        result["parts"].append(
            benchmark(result, "cpu" if rehearsal else "cuda", started_at + total)
        )
        result["seconds"] = time.monotonic() - started_at
        write(result, args.json)
    print(*report(result), sep="\n")
    print(*failures(result), sep="\n")
    if any(part["failed"] for part in result["parts"]):
        sys.exit(ExitCode.FAILED)


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a GPU that torch can use.

    Args:
        devices: folder of device nodes.

    Raises:
        ConfigError: torch cannot use the GPU that is there.
    """
    if not [*devices.glob("nvidia[0-9]*")]:
        return False
    import torch

    if torch.version.cuda is None:
        raise ConfigError(
            f"torch {torch.__version__} is a build for CPUs and this machine has a GPU: install a "
            "CUDA build (docs/install.md), or rehearse on the CPU with --rehearse"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use the GPU of this "
            "machine: compare with the driver in nvidia-smi, and look at CUDA_VISIBLE_DEVICES; or "
            "rehearse on the CPU with --rehearse"
        )
    return True


def prove(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Run every part on the GPU in a process of its own, several at a time."""
    threads = max(1, (os.cpu_count() or 1) // AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda part: outcome_of(part, threads), parts))


def outcome_of(part: Part, threads: int) -> dict[str, Any]:
    """Run a part and count its checks; one that exceeds its budget has failed."""
    started_at = time.monotonic()
    checks, error = run_checks(part.files, part.budget, {"OMP_NUM_THREADS": str(threads)})
    return summary(part, checks, time.monotonic() - started_at, error)


def rehearse(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Run the checks of all parts on the CPU in one process."""
    files = [file for part in parts for file in part.files]
    if not files:
        return []
    environment = {"PROVE_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    checks, error = run_checks(files, REHEARSAL_S, environment)
    outcomes = []
    for part in parts:
        own = [check for check in checks if check["check"].split("::")[0] in part.files]
        seconds = sum(check["seconds"] for check in own)
        outcomes.append(summary(part, own, seconds, "" if own else error or "no check was run"))
    if error:
        outcomes[0] = summary(parts[0], outcomes[0]["checks"], outcomes[0]["seconds"], error)
    return outcomes


def run_checks(
    files: Sequence[str], budget: float, environment: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Run files of this folder; return the outcomes of their checks and what else went wrong."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    record = Path(os.environ.get("TMPDIR", "/tmp")) / f"{'-'.join(files)}.jsonl"
    record.unlink(missing_ok=True)
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist")
    print(f"running the checks of {', '.join(files)} (at most {budget:.0f} s)", flush=True)
    started = subprocess.Popen(
        [sys.executable, *words, *(f"tests/gpu/{file}" for file in files)],
        cwd=REPOSITORY,
        env={**kept, **environment, "PROVE_RECORD": str(record)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        # With the runs and servers that it started: the benchmark needs the GPU alone.
        os.killpg(started.pid, signal.SIGKILL)

    timer = threading.Timer(budget, end)
    timer.start()
    output = []
    for line in started.stdout or ():
        output.append(line)
        if match := _PROGRESS.match(line):
            print(f"  {match[1]}", flush=True)
    timer.cancel()
    code, error = started.wait(), ""
    if is_over.is_set():
        error = f"not finished within {budget} seconds"
    elif code not in (0, 1, 5):  # all passed, some failed, all of a file were skipped
        error = f"pytest: exit code {code}: {''.join(output)[-400:]}"
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines], error


def summary(part: Part, checks: list[dict[str, Any]], seconds: float, error: str) -> dict[str, Any]:
    """Return a part of the results."""
    if error:
        failed = {"check": part.name, "outcome": "failed", "seconds": 0, "reason": error}
        checks = [*checks, failed | {"found": {}}]
    outcomes = [check["outcome"] for check in checks]
    return {
        "name": part.name,
        "budget": part.budget,
        "seconds": seconds,
        "passed": outcomes.count("passed"),
        "failed": outcomes.count("failed"),
        "not_run": outcomes.count(NOT_RUN),
        "checks": checks,
    }


def benchmark(result: dict[str, Any], kind: str, ends_at: float) -> dict[str, Any]:
    """Add the table of speeds, and the device, to the results; return how many rows there are."""
    started_at = time.monotonic()
    part = Part(SPEED, (), round(ends_at - started_at))
    try:
        result["device"] = train_gpu.measured_device(kind, ends_at)
    except ConfigError as error:
        return summary(part, [], time.monotonic() - started_at, str(error))
    speed = result["speed"] = {"device": result["device"], "rows": []}
    plain: dict[tuple[str, int], dict[str, Any]] = {}
    checks = []
    for size, batch, flags, words in cases(kind):
        args = train_gpu.parse(["--device", kind, *words])
        began_at = time.monotonic()
        row = train_gpu.measured_row(
            args, batch, size, "bf16", flags, result["device"], plain, ends_at
        )
        speed["rows"].append(row)
        print(train_gpu.line(row, result["device"]), flush=True)
        reason = row["ours"].get("error") or row["plain"].get("error", "")
        checks.append(
            {
                "check": " ".join(filter(None, [size, batch, row["flags"]])),
                "outcome": NOT_RUN
                if reason.startswith(NOT_RUN)
                else "failed"
                if reason
                else "passed",
                "seconds": round(time.monotonic() - began_at, 1),
                "reason": reason,
                "found": {},
            }
        )
    return summary(part, checks, time.monotonic() - started_at, "")


def cases(kind: str) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield size, batch, flags and further words of each row, the most important first."""
    if kind == "cpu":
        tiny = ("--seq-length", "64", "--rounds", "1", "--steps", "1", "--no-compile")
        yield "tiny", "auto", "", tiny
        return
    yield "345m", "auto", "", ()
    yield "1.3b", "auto", "", ()
    yield "345m", "1", "", ()
    known = options_of(SECTIONS)
    for name, flags in VARIANTS.items():
        if name in known:
            yield "345m", "auto", flags, ("--no-plain",)
    yield "345m", "auto", "", ("--no-plain", "--data", "files")
    yield "2.7b", "auto", "", ()


def failures(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every check that did not pass."""
    for part in result["parts"]:
        for check in part["checks"]:
            if check["outcome"] != "passed":
                yield f"{check['outcome']}: {check['check']}: {check['reason']}"


def commit() -> str:
    """Return the commit of this copy; "unknown" outside a git repository."""
    words = ("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD")
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(result: dict[str, Any], path: str) -> None:
    """Write the results to `path`, and to $OUT when it is set."""
    text = json.dumps(result, indent=1) + "\n"
    folder = os.environ.get("OUT")
    for file in (Path(path), *([Path(folder) / "results.json"] if folder else [])):
        file.write_text(text)


if __name__ == "__main__":
    run_tool(main)
