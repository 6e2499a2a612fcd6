"""The run's record."""

import pytest

from megatron.errors import CheckpointError
from megatron.training.journal import Journal, read_journal


def test_what_was_done_again_is_told_once(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", {"iteration": 0})
    for iteration in (1, 2, 3):
        journal.write("train", {"iteration": iteration, "lm_loss": 1.0})
    journal.write("start", {"iteration": 2})
    journal.write("train", {"iteration": 3, "lm_loss": 2.0})
    told = [r for r in read_journal(tmp_path) if r["event"] == "train"]
    assert [(r["iteration"], r["lm_loss"]) for r in told] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--save .*file/run: "):
        Journal(tmp_path / "file" / "run")
