"""Blends and named validation groups in a run, and in one that is resumed."""

import shutil
from pathlib import Path

import pytest
from jobs import Corpus, journal, losses, start_ranks

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "3e-3", "--train-iters", "8", "--log-interval", "1"),
    *("--eval-interval", "3", "--eval-iters", "2", "--save-interval", "4"),
]


def data_flags(corpus: Corpus, order: str) -> list[str]:
    path = corpus.prefix
    return [
        *("--train-weighted-split-paths", f"train: 0.3 0:0.4 {path}, 0.7 0.4:0.8 {path}"),
        *("--valid-weighted-split-paths", f"early: 1 0.8:0.9 {path}", f"late: 1 0.9:1 {path}"),
        *("--test-weighted-split-paths", f"last: 1 0.9:1 {path}"),
        *("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file),
        *("--dataloader-type", order),
    ]


def evaluations(save: Path) -> list[tuple[str, int, float]]:
    return [
        (record["set"], record["iteration"], record["lm_loss"])
        for record in journal(save, "evaluation")
    ]


@pytest.mark.parametrize(("order", "ranks"), [("single", 2), ("cyclic", 1)])
def test_groups_are_evaluated_apart_and_resumed(
    order: str, ranks: int, corpus: Corpus, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [*RUN, *data_flags(corpus, order)]
    output = start_ranks(ranks, *flags, "--save", str(whole)).succeeded().outputs[0]
    for name in ("early", "late"):
        assert f"{name} loss at iteration 3 | lm loss value: " in output
    found = evaluations(whole)
    assert [(name, iteration) for name, iteration, _ in found] == [
        *(("early", 3), ("late", 3), ("early", 6), ("late", 6)),
        *(("early", 8), ("late", 8), ("last", 8)),
    ]

    shutil.copytree(whole / "global_step4", resumed / "global_step4")
    start_ranks(ranks, *flags, "--save", str(resumed), "--load", str(resumed)).succeeded()
    assert losses(resumed) == losses(whole)[4:]
    assert evaluations(resumed) == found[2:]
