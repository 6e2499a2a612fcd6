"""Files of version 0.1 are read: token files, their tokenizer's record, and a checkpoint.

tests/upgrade/version_0.1.tar.xz holds what its programs wrote at commit a19a09c4: the corpus, and
step 2 of a run of 4 steps on one CPU.
"""

import tarfile
from pathlib import Path

import pytest
from jobs import REPOSITORY, journal, start_ranks

FILES = REPOSITORY / "tests" / "upgrade" / "version_0.1.tar.xz"
RUN = [
    *("--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    *("--train-iters", "4", "--lr", "1e-2", "--eval-iters", "0", "--log-interval", "1"),
    *("--save-interval", "2", "--data-path", "corpus_text_document"),
    *("--vocab-file", "vocab.json", "--merge-file", "merges.txt"),
    *("--save", "run", "--load", "run"),
]
LOSSES = [5.753661, 5.686898]
"""Of steps 3 and 4, as version 0.1 logged them."""


def test_a_run_of_version_0_1_continues_with_its_own_steps(tmp_path: Path) -> None:
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    start_ranks(1, *RUN, folders=[tmp_path]).succeeded()
    records = journal(tmp_path / "run", "train")
    assert [record["iteration"] for record in records] == [3, 4]
    assert [record["lm_loss"] for record in records] == pytest.approx(LOSSES, abs=2e-6)
