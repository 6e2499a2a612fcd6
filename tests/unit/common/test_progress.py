"""Progress of long work, without a terminal and on one."""

import io
import logging

import pytest

from megatron.common import progress
from megatron.common.progress import Progress, with_progress


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Return the times that the module sees, one after the other."""
    times = []
    monkeypatch.setattr(progress.time, "monotonic", lambda: times.pop(0))
    return times


def test_a_log_has_a_line_every_ten_seconds(monkeypatch, clock, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    clock += [0, 4, 10, 12, 30]
    with caplog.at_level(logging.INFO, "megatron"), Progress("copy", 8_000_000, "B") as shown:
        for _ in range(4):
            shown.add(1_000_000)
    assert caplog.messages == [
        "copy: 2 of 8 MB | done: 25.0% | left: 30 s",
        "copy: 4 of 8 MB | done: 50.0% | left: 30 s",
    ]


def test_items_are_counted_when_they_are_done(monkeypatch, clock, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    clock += [0, 10, 20]
    with caplog.at_level(logging.INFO, "megatron"):
        assert [*with_progress("ab", "copy", 2, "files")] == ["a", "b"]
    assert caplog.messages == [
        "copy: 1 of 2 files | done: 50.0% | left: 10 s",
        "copy: 2 of 2 files | done: 100.0% | left: 0 s",
    ]


@pytest.mark.parametrize("stderr", [Terminal(), None])
def test_without_bars_there_are_lines(monkeypatch, caplog, stderr):
    import tqdm

    class Disabled(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**options, disable=True)

    monkeypatch.setattr(tqdm, "tqdm", Disabled)  # as under TQDM_DISABLE, read at its import
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "megatron"), Progress("copy", 2, "files") as shown:
        shown.add()
    assert caplog.messages == ["copy: 1 of 2 files | done: 50.0% | left: 0 s"]


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch, caplog):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "megatron"), Progress("copy", 2, "files") as shown:
        shown._bar.delay = 0
        shown.add()
        shown._bar.refresh()
    assert "copy:  50%" in stderr.getvalue()
    assert caplog.messages == []
