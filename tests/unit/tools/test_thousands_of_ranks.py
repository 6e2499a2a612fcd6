"""What ranks do at start, save, load, reshape, watch and stop does not grow with the ranks, but on rank 0."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "benchmarks" / "thousands_of_ranks.py"
SMALL, MEDIUM, LARGE = 64, 1024, 16384
PHASES = ("start", "save", "load", "reshape", "watch", "stop")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("ranks_benchmark", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("phase", PHASES)
def test_no_rank_does_more_in_a_larger_world_and_rank_0_at_most_in_proportion(tool, phase):
    counts = {size: tool.counted(phase, size) for size in (SMALL, MEDIUM, LARGE)}
    for before, after in ((SMALL, MEDIUM), (MEDIUM, LARGE)):
        for kind in tool.KINDS:
            first, other = ([counts[size][who][kind] for size in (before, after)] for who in (0, 1))
            # Numbers have more digits.
            assert other[1] <= 1.2 * other[0] + 64 * (kind == "bytes"), (kind, after)
            assert first[1] <= 1.1 * after / before * max(first[0], 1), (kind, after)


def test_the_disk_is_looked_at_no_more_often_by_more_ranks(tool):
    most = 60 * 100 * 2 * 1.3  # looks at two files, and a part of one more
    assert all(size * tool.counted("watch", size)[1]["files"] < most for size in (MEDIUM, 4096))


def test_the_counts_are_of_something(tool):
    files = {phase: tool.counted(phase, SMALL)[1]["files"] for phase in PHASES}
    assert all(files[phase] for phase in PHASES if phase != "start")
    assert tool.counted("start", SMALL)[1]["messages"] > 5


def test_the_table_has_a_line_for_each_phase(tool, capsys):
    tool.main(["--ranks", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {phase}" for phase in PHASES]
