"""The benchmark of checkpoints, with a state of two megabytes."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "benchmarks" / "checkpoint.py"


def test_every_comparison_has_a_figure(tmp_path):
    words = ["--megabytes", "2", "--rounds", "1", "--directory", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, TOOL, *words], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    figures = dict(re.findall(r"^(.+?): ([\d.]+)", ended.stdout, re.MULTILINE))
    assert {
        "torch.save and fsync / save",
        "torch.load / verify and load",
        "standstill in the background / save",
        "reshape from one rank, --reshape-buffer-mb 64",
        "reshape from two tensor-parallel ranks, --reshape-buffer-mb 1",
    } <= figures.keys()
    assert all(float(figure) > 0 for name, figure in figures.items() if "reshape" not in name)
    assert list(tmp_path.iterdir()) == []
