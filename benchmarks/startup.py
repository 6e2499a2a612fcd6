#!/usr/bin/env python
"""Seconds from the launch command to the first training step, beside the bare imports.

Starts a small run under the deepspeed launcher, which imports DeepSpeed three times in a row: in
itself, in the node's process starter, and in the ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import MegatronError
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str]) -> None:
    """Measure and print one line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    # Where it is set, each process compiles this package's modules anew.
    os.unsetenv("PYTHONDONTWRITEBYTECODE")
    imports_s = seconds_until(
        "ready", [sys.executable, "-c", "import torch, deepspeed; print('ready')"]
    )
    with tempfile.TemporaryDirectory() as folder:
        launched_s = seconds_until("iteration        1/", command(Path(folder), args.processes))
    print(
        f"{args.processes} processes: first step after {launched_s:.1f} s | importing torch and "
        f"deepspeed once: {imports_s:.1f} s | ratio {launched_s / imports_s:.1f}"
    )


def command(folder: Path, processes: int) -> list[str]:
    """Return the launch of a small run over files in `folder`, after making them."""
    vocab = {chr(33 + i): i for i in range(90)} | {"<|endoftext|>": 90}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with IndexedDatasetWriter(folder / "corpus", "<u2") as writer:
        for seed in range(100):
            writer.append(np.random.default_rng(seed).integers(0, 90, 1000).astype("<u2"))
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--micro-batch-size 2 --lr 1e-3 --train-iters 2 --log-interval 1 --eval-iters 0 "
        f"--data-path {folder}/corpus --vocab-file {folder}/vocab.json "
        f"--merge-file {folder}/merges.txt"
    )
    script = str(REPOSITORY / "pretrain_gpt.py")
    return [launcher, "--num_gpus", str(processes), script, *flags.split()]


def seconds_until(sign: str, words: Sequence[str]) -> float:
    """Return the seconds until the command `words` prints `sign`, after letting it end.

    Raises:
        MegatronError: it never does.
    """
    started_at, seen_s, lines = time.perf_counter(), None, []
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if seen_s is None and sign in line:
                seen_s = time.perf_counter() - started_at
    if seen_s is None:
        raise MegatronError(f"the command failed:\n{''.join(lines[-20:])}")
    return seen_s


if __name__ == "__main__":
    run_tool(main)
