"""The benchmark of samples of BERT and T5, on a few of them."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "benchmarks" / "sentence_samples.py"


def test_rows_and_samples_are_timed():
    done = subprocess.run(
        [sys.executable, TOOL, *["--rows", "2000", "--samples", "3", "--rounds", "1"]],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("built the ")]
    assert [re.sub(r"[0-9.]+ (million|per)", r"N \1", line) for line in lines] == [
        "mapping, short sequences 0.1: N million rows per CPU-s",
        "mapping, short sequences 0.0: N million rows per CPU-s",
        "samples of bert, 512 tokens: N per CPU-s",
        "samples of bert, 128 tokens: N per CPU-s",
        "samples of t5, 512/128 tokens: N per CPU-s",
    ]
