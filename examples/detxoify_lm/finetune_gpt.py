#!/usr/bin/env python
"""Finetune a GPT on selected texts of its own: step 5 of detoxification (docs/detoxification.md).

Flags are those of pretrain_gpt.py, and besides --data-path2: token files of pretraining data like
--data-path's, whose last 2% of documents are the validation set; --eval-ppl: as --eval-only.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.errors import ConfigError, raise_if_any
from megatron.config.parsing.flags import finite_or_none
from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank

HELD_OUT = "0.98:1"
"""The documents of --data-path2 to validate with: those of --split 98,2,0."""


def main(argv: Sequence[str]) -> int:
    """Finetune by the command line `argv`; return the exit code."""
    return train_from(training_flags(argv), "gpt", description=__doc__)


def training_flags(argv: Sequence[str]) -> list[str]:
    """Return the command line of pretrain_gpt.py that `argv` stands for.

    Raises:
        ConfigError: --data-path2 stands without --data-path, or a value cannot be written so.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-path", nargs="+")
    parser.add_argument("--data-path2", nargs="+")
    parser.add_argument("--split", default="100,0,0")
    parser.add_argument("--eval-ppl", action="store_true")
    own, others = parser.parse_known_args(argv)
    evaluation = ["--eval-only"] if own.eval_ppl else []
    if own.data_path2 is None:
        return [*(word for word in argv if word != "--eval-ppl"), *evaluation]
    if own.data_path is None:
        raise ConfigError(
            "--data-path2 needs --data-path on the command line: the data to train on"
        )
    train, valid, test = shares(own.split)
    groups = ["--train-weighted-split-paths", group("train", f"0:{train}", own.data_path)]
    groups += ["--valid-weighted-split-paths", group("pretraining", HELD_OUT, own.data_path2)]
    if test:
        range_of_test = f"{train + valid}:1"
        groups += ["--test-weighted-split-paths", group("test", range_of_test, own.data_path)]
    return [*others, *evaluation, *groups]


def shares(split: str) -> list[float]:
    """Return the shares of training, validation and test in --split, which sum to 1.

    Raises:
        ConfigError: it is none.
    """
    weights = [finite_or_none(word) for word in split.replace("/", ",").split(",")]
    known = [weight for weight in weights if weight is not None and weight >= 0]
    if len(known) != len(weights) or not 1 <= len(known) <= 3 or not known[0]:
        raise ConfigError(f"--split {split}: give proportions such as 100,0,0, the first above 0")
    return [weight / sum(known) for weight in (*known, 0.0, 0.0)[:3]]


def group(name: str, documents: str, words: Sequence[str]) -> str:
    """Return the split paths of a prefix, or of alternating weights and prefixes.

    Raises:
        ConfigError: a prefix has a comma or white space, which would end it.
    """
    words = ["1", *words] if len(words) == 1 else words
    if len(words) % 2:
        raise ConfigError(
            f"{' '.join(words)}: give one prefix, or alternating weights and prefixes"
        )
    prefixes = words[1::2]
    raise_if_any(
        f"{prefix}: with --data-path2, paths are without commas and white space"
        for prefix in prefixes
        if "," in prefix or len(prefix.split()) != 1
    )
    parts = (f"{w} {documents} {p}" for w, p in zip(words[::2], prefixes, strict=True))
    return f"{name}: {', '.join(parts)}"


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
