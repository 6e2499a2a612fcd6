"""Pretrained networks of text tasks: flags from checkpoints, conversion of other formats, wrong paths."""

import pytest
from checkpoints import random_weights, write_checkpoint
from problems import problem
from tiny import tiny_config

from megatron.checkpointing.megatron_lm import convert as conversions
from megatron.common.errors import WrongCheckpointError
from megatron.config.parsing.parser import peek
from megatron.config.plan.plan import plan
from megatron.extensions.tasks.entry import train_text_task, with_pretrained_network

VOCAB = 62
SIZES = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "12", "--max-position-embeddings", "16"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "61"),
]


@pytest.fixture
def own(tmp_path):
    """Write a checkpoint of a random BERT."""
    config = tiny_config(*SIZES)
    spec = plan(config, world_size=4, vocab_size=VOCAB, device="cpu", objective="bert").model
    weights = random_weights(spec)
    write_checkpoint(tmp_path / "own", weights, *SIZES, vocab_size=VOCAB, objective="bert")
    return tmp_path / "own"


def test_sizes_and_tokenizer_are_those_of_the_checkpoint(own):
    words = [f"--pretrained-checkpoint={own}", "--lr", "1"]
    found = with_pretrained_network(words, is_first=True)
    assert peek(found).get("hidden_size") == "16"
    assert peek(found).get("tokenizer_type") == "NullTokenizer"
    assert found[-3:] == ["--lr", "1", f"--pretrained-checkpoint={own}"]
    assert with_pretrained_network(["--lr", "1"], is_first=True) == ["--lr", "1"]


def test_options_are_those_of_the_checkpoint_where_its_task_is_the_same(tmp_path):
    task = ["--task", "question-answering", "--train-data", "none", "--max-query-length", "3"]
    words, how = [*SIZES, *task], {"without": ("--data-path",)}
    config, named = tiny_config(*words, **how), {"objective": "question-answering"}
    spec = plan(config, world_size=4, vocab_size=VOCAB, device="cpu", **named).model
    weights = random_weights(spec)
    write_checkpoint(tmp_path / "own", weights, *words, vocab_size=VOCAB, **named, **how)
    flags = [f"--pretrained-checkpoint={tmp_path / 'own'}"]
    found = with_pretrained_network([*flags, "--task=question-answering"], is_first=True)
    assert peek(found).get("max_query_length") == "3"
    found = with_pretrained_network([*flags, "--task=token-classification"], is_first=True)
    assert peek(found).get("max_query_length") is None


def test_another_format_is_converted_once_in_a_process_of_its_own(own, tmp_path, monkeypatch):
    megatron = conversions.Conversion(
        source=own, output=tmp_path / "mlm", saver="megatron", tensor=2, flags=("", ""),
        architecture="bert",
    )  # fmt: skip
    assert [*conversions.convert(megatron, lambda words: tiny_config(*words))]
    # Whose process groups of one rank are none of a run.
    monkeypatch.setattr(conversions, "convert", None)
    words = [f"--pretrained-checkpoint={tmp_path / 'mlm'}", *SIZES]
    with problem("--save … missing"):
        with_pretrained_network(words, is_first=True)
    words += [f"--save={tmp_path / 'run'}"]
    folder = tmp_path / "run" / "pretrained"
    for is_first in (True, False, True):
        found = with_pretrained_network(words, is_first=is_first)
        assert found[-1] == f"--pretrained-checkpoint={folder}"
        assert peek(found).get("num_layers") == "2"
    words[0] = f"--pretrained-checkpoint={tmp_path / 'mlm' / 'iter_0000003'}"
    with problem("weights of … mlm", WrongCheckpointError):
        with_pretrained_network(words, is_first=True)


def test_wrong_paths_are_errors(own, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("on", "no such file or directory … did you mean"),
        ("empty", "empty … no checkpoint"),
    ):
        with problem(message, WrongCheckpointError):
            with_pretrained_network([f"--pretrained-checkpoint={tmp_path / name}"], is_first=True)
    with problem("--load … no such path", WrongCheckpointError):
        train_text_task(
            ["do_training=false", f"pretrained_model={tmp_path / 'on'}"],
            "question-answering",
            description="",
        )
