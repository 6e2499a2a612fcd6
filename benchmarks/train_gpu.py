#!/usr/bin/env python
"""Training speed and memory of one GPU, beside other programs with the same model.

`plain` is a PyTorch loop, compiled, with PyTorch's own attention, fused AdamW, and bf16 autocast;
`megatron-core` is that package's GPT without Transformer Engine. Each side runs in a process of its
own, ours first; all read the loss of every step. `--batch auto` takes the
largest micro-batch that the planner expects to fit. MFU is model FLOPs, nothing counted twice, over
the peak of the card's data sheet, and over the rate of large bf16 matrix products in the same run.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from gpu_report import cells, speed_table

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.config.plan.plan import Plan, plan
from megatron.planner.devices import RESERVED_BYTES, known_device
from megatron.planner.memory import memory_of_stages

VOCAB_SIZE = 50257
BATCHES = (32, 16, 8, 4, 2, 1)
"""Micro-batches that `--batch auto` tries, the largest first."""
SIZES = {
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 2",
    "345m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16",
    "1.3b": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16",
    "2.7b": "--num-layers 32 --hidden-size 2560 --num-attention-heads 32",
}
PEERS = ("plain", "megatron-core")


def main(argv: Sequence[str]) -> None:
    """Measure every row and print it."""
    args = parse(argv)
    ends_at = time.monotonic() + args.budget
    device = measured_device(args.device, ends_at)
    result: dict[str, Any] = {"device": device, "rows": []}
    for batch, size, dtype, flags in product(args.batch, args.sizes, args.dtypes, args.flags):
        row = measured_row(args, batch, size, dtype, flags, device, ends_at)
        result["rows"].append(row)
        print(line(row, device), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.table:
        print(*speed_table(result), sep="\n")


def parse(argv: Sequence[str]) -> Any:
    """Return the options of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["345m", "1.3b", "2.7b"])
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument(
        "--batch", nargs="+", default=["auto"], help="samples per step, or auto; each makes a row"
    )
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp16", "fp32"), default=["bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps of a measurement")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    parser.add_argument(
        "--peers", nargs="+", choices=("none", *PEERS), default=["plain"], help="other programs"
    )
    parser.add_argument(
        "--compile-plain",
        choices=("blocks", "whole", "none"),
        default="blocks",
        help="what torch.compile compiles of the plain loop: each block, the network, nothing",
    )
    parser.add_argument(
        "--data",
        choices=("memory", "files"),
        default="memory",
        help="files: tokens of our side come through the data path of a run",
    )
    parser.add_argument(
        "--flags", nargs="+", default=[""], help="more flags of training, in one word for each row"
    )
    parser.add_argument("--table", action="store_true", help="print a table in Markdown too")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument(
        "--budget", type=float, default=3600.0, help="seconds, after which no row begins"
    )
    args = parser.parse_args(argv)
    for batch in args.batch:
        if batch != "auto" and not (batch.isdecimal() and int(batch)):
            raise ConfigError(f"--batch {batch}: give a number of samples, or auto")
    return args


def measured_device(kind: str, ends_at: float) -> dict[str, Any]:
    """Return name, memory, peak and measured rate of the card.

    Raises:
        ConfigError: it cannot be used.
    """
    device = measure({"side": "device", "device": kind, "steps": 10}, ends_at)
    if "error" in device:
        raise ConfigError(f"--device {kind} cannot be measured: {device['error']}")
    known = known_device(device["name"], device["memory_bytes"] or 0)
    return device | {"peak_flops": known.peak_flops("bf16") if known else None}


def measured_row(
    args: Any,
    batch: str,
    size: str,
    dtype: str,
    flags: str,
    device: dict[str, Any],
    ends_at: float,
) -> dict[str, Any]:
    """Return the results of one network, batch, dtype and flags, ours and those of the peers."""
    network = [*SIZES[size].split(), "--seq-length", str(args.seq_length)]
    own = [*network, *([] if dtype == "fp32" else [f"--{dtype}"]), *flags.split()]
    sizes = BATCHES if batch == "auto" else (int(batch),)
    memory = device["memory_bytes"]
    samples, decided = largest_that_fits(own, sizes, memory and memory - RESERVED_BYTES)
    job = {"device": args.device, "rounds": args.rounds, "steps": args.steps, "batch": samples}
    job |= {"seq_length": args.seq_length, "compiles": args.compile_plain}
    sides = {"megatron": own, **{peer: network for peer in args.peers if peer != "none"}}
    found = {
        side: measure(job | {"side": side, "flags": words, "files": args.data == "files"}, ends_at)
        for side, words in sides.items()
    }
    return {
        "size": size,
        "batch": samples,
        "seq_length": args.seq_length,
        "dtype": dtype,
        "flags": " ".join([flags, *(["files"] if args.data == "files" else [])]).strip(),
        "all_flags": own,
        "parameters": decided.model.num_parameters,
        "flops": samples * decided.model.flops_per_sample(recompute=NOTHING),
        "predicted_bytes": bytes_of(decided),
        "ours": found.pop("megatron"),
        "peers": found,
    }


def largest_that_fits(
    flags: Sequence[str], sizes: Sequence[int], room: int | None
) -> tuple[int, Plan]:
    """Return the largest micro-batch that the planner expects to fit, and its plan.

    Args:
        sizes: of micro-batches, the largest first; the last is taken if none fits.
        room: bytes of the GPU; None on a CPU, where two samples are enough.
    """
    if room is None:
        sizes = [min(2, sizes[0])]
    for samples in sizes:
        common = f"--micro-batch-size {samples} --lr 1e-4 --train-iters 1000 --data-path none"
        config, _ = parse_config(
            [*common.split(), "--attention-dropout", "0", "--hidden-dropout", "0", *flags]
        )
        decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device="cuda")
        if room is None or bytes_of(decided) <= room:
            break
    return samples, decided


def bytes_of(decided: Plan) -> int:
    """Return the memory that the planner expects."""
    return max(memory.total for memory in memory_of_stages(decided))


def measure(job: dict[str, Any], ends_at: float) -> dict[str, Any]:
    """Return the result of a job in a process of its own; "error" if there is none."""
    script = "megatron_core.py" if job["side"] == "megatron-core" else "gpu_side.py"
    return run_json([script, json.dumps(job)], ends_at)


def run_json(words: Sequence[str], ends_at: float) -> dict[str, Any]:
    """Run a script of this folder; return the JSON of its last line, or "error"."""
    left = ends_at - time.monotonic()
    if left <= 0:
        return {"error": "not run: no time left"}
    script, *rest = words
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), *rest],
            capture_output=True,
            text=True,
            timeout=left,
        )
    except subprocess.TimeoutExpired:
        return {"error": "not run to the end: no time left"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"exit code {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(row: dict[str, Any], device: dict[str, Any]) -> str:
    """Return the results of a row as text."""
    texts = [f"{column}: {value}" for column, value in cells(row, device).items()]
    return " | ".join(texts)


if __name__ == "__main__":
    run_tool(main)
