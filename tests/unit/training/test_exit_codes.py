"""Which mistakes no other attempt mends: code 2, before the first step."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_config
from training_here import train_here

from megatron.common.errors import ExitCode, MegatronError
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.objectives.gpt import GPT
from megatron.training.process.environment import Launch

CPU = torch.device("cpu")
ALONE = Launch(rank=0, world_size=1, local_rank=0, local_size=1)


def ends(folder: Path, *flags: str) -> tuple[ExitCode, str]:
    """Return how a run with these flags ends before its first step."""
    config = tiny_config("--data-path", str(folder / "corpus"), *flags)
    with pytest.raises(MegatronError) as error:
        train_here(config, ALONE, CPU, GPT())
    return error.value.exit_code, str(error.value)


@pytest.fixture
def folder(tmp_path: Path, group: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a corpus of 40 tokens and a tokenizer are; the process group is there already."""
    from megatron.training import setup

    monkeypatch.setattr(setup, "start_processes", lambda *words, **options: None)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        writer.append(np.zeros(40, "u2"))
    return tmp_path


def gpt2(folder: Path) -> list[str]:
    files = {"--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    return [word for flag, name in files.items() for word in (flag, str(folder / name))]


def test_a_tokenizer_that_cannot_be_loaded(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    flags = ("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder))
    code, messages = ends(folder, *flags)
    assert (code, "tokenizer.json is not a tokenizer" in messages) == (ExitCode.MISUSED, True)


def test_a_tokenizer_without_the_special_tokens_of_the_objective(folder: Path) -> None:
    code, messages = ends(folder, *gpt2(folder), "--seq-length", "8", "--fim-rate", "0.5")
    assert (code, "fim_prefix" in messages) == (ExitCode.MISUSED, True)


def test_data_that_are_damaged_or_too_few(folder: Path) -> None:
    code, messages = ends(folder, *gpt2(folder), "--seq-length", "40")
    assert (code, "needs 41" in messages) == (ExitCode.MISUSED, True)
    os.truncate(folder / "corpus.bin", 70)
    code, messages = ends(folder, *gpt2(folder))
    assert (code, "corpus.bin is truncated" in messages) == (ExitCode.MISUSED, True)


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    code, messages = ends(
        folder, *gpt2(folder), "--split", "1", "--data-cache-path", str(folder / "corpus.bin")
    )
    assert (code, "--data-cache-path" in messages) == (ExitCode.MISUSED, True)
