"""What the memory tool counts."""

import re
import subprocess
import sys
from pathlib import Path

from problems import require_problem

TOOL = Path(__file__).resolve().parents[3] / "benchmarks" / "memory.py"
FLAGS = [
    "--num-layers",
    "4",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--lr",
    "0.1",
    "--micro-batch-size",
    "2",
    "--train-iters",
    "10",
    "--attention-dropout",
    "0.1",
]


def run(*flags):
    command = [sys.executable, str(TOOL), *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_every_way_keeps_as_much_as_it_should():
    done = run()
    assert done.returncode == 0, done.stderr
    first, *ways = [line for line in done.stdout.splitlines() if line.endswith("bytes")]
    weights, state = (int(n) for n in re.findall(r"(\d+) bytes", first))
    # AdamW in 32 bits: two moments of each weight.
    assert state >= 2 * weights > 0
    counted = {
        line.split(": ")[0]: [int(n) for n in re.findall(r"(\d+) bytes", line)] for line in ways
    }
    kept = {name: numbers[0] for name, numbers in counted.items()}
    layer_input = 32 * 2 * 32 * 4
    assert kept["uniform, in pairs"] < kept["uniform, one by one"] < kept["block, 2 of 4"]
    assert kept["uniform, one by one"] < kept["selective"] < kept["nothing"]
    # Two layers instead of four whose input is kept.
    assert kept["uniform, one by one"] - kept["uniform, in pairs"] == 2 * layer_input
    # Half of what four layers keep goes, but for two inputs.
    full = kept["nothing"] - kept["uniform, one by one"]
    assert 2 * (kept["nothing"] - kept["block, 2 of 4"]) == full
    peaks = {name: numbers[1] for name, numbers in counted.items()}
    assert peaks["uniform, one by one"] < peaks["selective"] < peaks["nothing"]
    assert all(peaks[name] > kept[name] for name in kept)


def test_more_processes_are_refused():
    done = run("--tensor-model-parallel-size", "2")
    assert done.returncode == 2
    require_problem("multiple of 2 processes … 1", [done.stderr])
