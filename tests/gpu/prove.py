"""Run a part of what is proved on one GPU within a budget; write its JSON and print tables.

prove.sh starts this. On a GPU the files of checks run at once, each in a process; in a rehearsal on
a CPU one process runs them all. Measurements follow one another, each in a process of its own.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from packages import missing_packages, needed_packages

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError, ExitCode

REPOSITORY = Path(__file__).resolve().parents[2]
BUDGET_S = 570
REHEARSAL_S = 3000
NOT_RUN = "not run"
_PROGRESS = re.compile(r"(test_\S+::.* (?:PASSED|FAILED|ERROR|SKIPPED)\b.*)")
"""Line of pytest about a check that has ended."""

CHECKS = {
    "runs": ("test_gpu_runs.py",),
    "training": ("test_gpu_training.py",),
    "kernels": ("test_kernels.py", "test_gpu_large_kernels.py"),
    "generation": ("test_gpu_generation.py",),
    "processes": ("test_gpu_processes.py",),
}
"""Files of checks that share a process."""

TINY = ("tiny", "auto", "")
FAST = (
    ("345m", "auto", ""),
    ("1.3b", "auto", ""),
    ("345m", "1", ""),
    ("345m", "auto", "--compile"),
    ("345m", "1", "--compile --compile-mode reduce-overhead"),
    ("1.3b", "auto", "--compile"),
    ("345m", "auto", "--kernels reference"),
    ("345m", "auto", "--loss-chunk-tokens 2048"),
    ("1.3b", "auto", "--compile --fp8-format hybrid"),
    ("2.7b", "auto", ""),
)
"""Size, batch and flags of each row of speeds, the most important first."""

WHERE = (("345m", "auto", ""), ("345m", "1", ""), ("1.3b", "auto", ""))
PEERS = (("345m", "auto", ""), ("1.3b", "auto", ""))
GENERATION = {
    "cuda": "--dtypes bf16 --batches 1 8 64 --layers 24 --hidden 1024 --heads 16 --static",
    "cpu": "--dtypes fp32 --batches 1 --layers 2 --hidden 64 --heads 2 --new 4 --rounds 1",
}
KERNELS = ("kernels", "kernel_peers.py")


def main(argv: Sequence[str]) -> None:
    """Run the parts one after the other and exit with 1 if a check failed.

    Raises:
        ConfigError: packages are missing, there is a GPU that this torch cannot use, or none where
            one is required.
    """
    args = parse(argv)
    if missing := missing_packages(needed_packages()):
        raise ConfigError(
            f"packages are missing: {' '.join(missing)}; install them, or collect them on a machine "
            "with a network by `bash tests/gpu/wheels.sh`"
        )
    from gpu_report import report

    rehearsal = args.rehearse or not has_gpu()
    if rehearsal and args.require_gpu:
        raise ConfigError("--require-gpu: no GPU is visible on this machine; look at nvidia-smi")
    if rehearsal:
        print("REHEARSAL on the CPU: tiny networks; nothing here is a result of a GPU", flush=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads would wait for each other
    has_failed = False
    for name in args.parts or PARTS:
        started_at = time.monotonic()
        result: dict[str, Any] = {
            "part": name,
            "rehearsal": rehearsal,
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join(["bash tests/gpu/prove.sh", *argv]),
            "device": {"name": "unknown", "torch": "unknown", "cuda": None},
            "checks": [],
        }
        ends_at = started_at + (args.budget or (REHEARSAL_S if rehearsal else BUDGET_S))
        for _ in PARTS[name](result, "cpu" if rehearsal else "cuda", ends_at):
            result["seconds"] = time.monotonic() - started_at
            write(result, args.out)
        print(*report([result]), *failures(result), sep="\n", flush=True)
        has_failed |= any(check["outcome"] == "failed" for check in result["checks"])
    if has_failed:
        sys.exit(ExitCode.FAILED)


def parse(argv: Sequence[str]) -> Any:
    """Return the options of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, help=f"seconds of each part: {BUDGET_S}")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "gpu_results"), help="folder of the results"
    )
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    parser.add_argument("--require-gpu", action="store_true", help="fail where there is no GPU")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            raise ConfigError(f"no part is called {part}: choose from {', '.join(PARTS)}")
    return args


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


def prove_right(result: dict[str, Any], kind: str, ends_at: float) -> Iterator[None]:
    """Run the files of checks: on a GPU all at once."""
    if kind == "cpu":
        environment = {"PROVE_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        groups = [sum(CHECKS.values(), ())]
    else:
        threads = max(1, (os.cpu_count() or 1) // len(CHECKS))
        environment, groups = {"OMP_NUM_THREADS": str(threads)}, [*CHECKS.values()]
    budget = ends_at - time.monotonic()
    with ThreadPoolExecutor(len(groups)) as pool:
        for checks in pool.map(lambda files: run_checks(files, budget, environment), groups):
            result["checks"] += checks
    yield


def run_checks(
    files: Sequence[str], budget: float, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Run files of this folder; return the outcomes of their checks, and one of what else failed."""
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
        # With the runs and servers that it started: the next part needs the GPU alone.
        os.killpg(started.pid, signal.SIGKILL)

    timer = threading.Timer(budget, end)
    timer.start()
    output = []
    for line in started.stdout or ():
        output.append(line)
        if match := _PROGRESS.search(line):
            print(f"  {match[1]}", flush=True)
    timer.cancel()
    code, error = started.wait(), ""
    if is_over.is_set():
        error = f"not finished within {budget:.0f} seconds"
    elif code not in (0, 1, 5):  # all passed, some failed, all of a file were skipped
        error = f"pytest: exit code {code}: {''.join(output)[-400:]}"
    elif not record.exists():
        error = "no check was run"
    lines = record.read_text().splitlines() if record.exists() else []
    checks = [json.loads(line) for line in lines]
    return [*checks, outcome(", ".join(files), error)] if error else checks


def outcome(name: str, reason: str, seconds: float = 0.0) -> dict[str, Any]:
    """Return a check of the results: passed without a reason."""
    kind = NOT_RUN if reason.startswith(NOT_RUN) else "failed" if reason else "passed"
    found: dict[str, Any] = {"check": name, "outcome": kind, "reason": reason}
    return found | {"seconds": round(seconds, 1), "found": {}}


def prove_fast(result: dict[str, Any], kind: str, ends_at: float) -> Iterator[None]:
    """Time training, without other programs."""
    return timed_rows(result, kind, ends_at, FAST, ("--peers", "none", "--rounds", "3"))


def prove_where(result: dict[str, Any], kind: str, ends_at: float) -> Iterator[None]:
    """List the kernels of a step, by their time."""
    return timed_rows(result, kind, ends_at, WHERE, ("--peers", "none", "--rounds", "1"))


def prove_peers(result: dict[str, Any], kind: str, ends_at: float) -> Iterator[None]:
    """Time training, generation and kernels beside those of other programs."""
    import train_gpu

    words = ("--peers", "plain", "megatron-core", "--rounds", "3")
    yield from timed_rows(result, kind, ends_at, PEERS, words)
    for name, *script in (("generation", "generate.py", *GENERATION[kind].split()), KERNELS):
        began_at = time.monotonic()
        found = train_gpu.run_json([*script, "--device", kind], ends_at)
        result[name] = found.get("rows", [])
        result["checks"].append(outcome(name, found.get("error", ""), time.monotonic() - began_at))
        yield


def timed_rows(
    result: dict[str, Any],
    kind: str,
    ends_at: float,
    rows: Sequence[tuple[str, str, str]],
    words: Sequence[str],
) -> Iterator[None]:
    """Add the device and a row of speeds each to the results."""
    import train_gpu

    if kind == "cpu":
        rows, words = (TINY,), (*words, "--seq-length", "64", "--rounds", "1", "--steps", "1")
        words += ("--compile-plain", "none")
    args = train_gpu.parse(["--device", kind, "--steps", "4", *words])
    try:
        result["device"] = train_gpu.measured_device(kind, ends_at)
    except ConfigError as error:
        result["checks"].append(outcome("device", str(error)))
        yield
        return
    result["speed"] = {"device": result["device"], "rows": []}
    for size, batch, flags in rows:
        began_at = time.monotonic()
        row = train_gpu.measured_row(args, batch, size, "bf16", flags, result["device"], ends_at)
        result["speed"]["rows"].append(row)
        print(train_gpu.line(row, result["device"]), flush=True)
        name = " ".join(filter(None, [size, batch, row["flags"]]))
        seconds = time.monotonic() - began_at
        for side, found in {"": row["ours"], **row["peers"]}.items():
            check = outcome(f"{name} {side}".strip(), found.get("error", ""), seconds)
            result["checks"].append(check)
        yield


PARTS: dict[str, Callable[[dict[str, Any], str, float], Iterator[None]]] = {
    "right": prove_right,
    "fast": prove_fast,
    "where": prove_where,
    "peers": prove_peers,
}


def failures(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every check that did not pass."""
    for check in result["checks"]:
        if check["outcome"] != "passed":
            yield f"{check['outcome']}: {check['check']}: {check['reason']}"


def commit() -> str:
    """Return the commit of this copy; "unknown" outside a git repository."""
    words = ("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD")
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(result: dict[str, Any], folder: str) -> None:
    """Write the results of a part to its file in `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{result['part']}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_tool(main)
