"""Runs of entry scripts that are resumed from their middle."""

import random
import shutil
from pathlib import Path

import pytest
from jobs import REPOSITORY, journal, losses, start_ranks
from sentence_corpora import write_sentences, write_vocabulary

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--lr", "3e-3", "--train-iters", "4", "--log-interval", "1", "--save-interval", "2"),
    *("--eval-interval", "2", "--eval-iters", "1", "--split", "80,20"),
]


def trained_and_resumed(script: str, ranks: int, flags: list[str], folder: Path) -> Path:
    """Train, go on from the middle elsewhere, and return where the whole run saved."""
    whole, resumed = folder / "whole", folder / "resumed"
    program = str(REPOSITORY / script)
    start_ranks(ranks, *flags, "--save", str(whole), script=program).succeeded()
    shutil.copytree(whole / "global_step2", resumed / "global_step2")
    start_ranks(
        ranks, *flags, "--save", str(resumed), "--load", str(resumed), script=program
    ).succeeded()
    assert losses(resumed) == losses(whole)[2:]
    evaluations = [record["lm_loss"] for record in journal(whole, "evaluation")]
    assert [record["lm_loss"] for record in journal(resumed, "evaluation")] == evaluations[1:]
    return whole


def sentence_flags(folder: Path) -> list[str]:
    """Write token files of sentences and a vocabulary; return the flags of a run on them."""
    sizes = [random.Random(0).randint(3, 12) for _ in range(400)]
    write_sentences(folder / "sentences", sizes, [*range(0, 401, 4)])
    vocabulary = write_vocabulary(folder / "vocab.txt")
    return [*RUN, "--data-path", str(folder / "sentences"), "--vocab-file", vocabulary]


def require_resharded(script: str, flags: list[str], save: Path, folder: Path) -> None:
    """Go on from the middle of a run in the layout of `flags`; the losses are close to the run's."""
    other = folder / "other"
    shutil.copytree(save / "global_step2", other / "global_step2")
    words = ["--save", str(other), "--load", str(other)]
    start_ranks(2, *flags, *words, script=str(REPOSITORY / script)).succeeded()
    assert losses(other) == pytest.approx(losses(save)[2:], rel=1e-2)
