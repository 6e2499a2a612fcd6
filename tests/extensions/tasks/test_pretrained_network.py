"""Networks that tasks begin with: --pretrained-checkpoint of another program."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
from labelled_files import write_vocabulary
from problems import problem
from transformers import (
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import WrongCheckpointError
from megatron.config.config import parse_config
from megatron.extensions.tasks.flags import DownstreamConfig

MAIN = Path(__file__).resolve().parents[3] / "tasks" / "main.py"
TASK = [
    "--task",
    "RTE",
    "--train-data",
    "none",
    "--micro-batch-size",
    "2",
    "--lr",
    "1",
    "--train-iters",
    "1",
]


@pytest.fixture
def bert(tmp_path):
    """Write a BERT of transformers with its tokenizer; return its folder and the model."""
    folder = tmp_path / "hf"
    folder.mkdir()
    write_vocabulary(folder / "vocab.txt")
    tokenizer = BertTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MegatronBertForPreTraining(
        MegatronBertConfig(
            vocab_size=len(tokenizer),
            intermediate_size=48,
            max_position_embeddings=24,
            hidden_act="gelu",
            **sizes,
        )
    )
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def finetune(monkeypatch):
    """Return a function that runs tasks/main.py up to training; it returns the config."""
    spec = importlib.util.spec_from_file_location("main", MAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    objectives = []

    def train_from(words, objective, **_):
        objectives.append(objective)
        return parse_config(words)[0]

    monkeypatch.setattr(module, "train_from", train_from)
    run = partial(_run, module)
    run.objectives = objectives
    return run


def _run(module, *words):
    return module.main([*TASK, *map(str, words)])


def test_a_task_begins_with_a_bert_of_transformers(bert, finetune, group, tmp_path):
    folder, model = bert
    words = ("--pretrained-checkpoint", folder, "--save", tmp_path / "run", "--seq-length", "12")
    config = finetune(*words)
    assert finetune.objectives == ["classification"]
    found = config.model
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (1, 16, 48)
    assert (found.seq_length, found.max_position_embeddings) == (12, 24)
    assert config.tokenizer.tokenizer_name_or_path == str(folder)
    assert config.section(DownstreamConfig).pretrained_checkpoint == str(
        tmp_path / "run" / "pretrained"
    )
    checkpoint = checkpoint_of(tmp_path / "run" / "pretrained")
    weights = read_checkpoint(checkpoint, read_manifest(checkpoint), optimizer=False).parameters
    (pooler,) = (state for name, state in weights.items() if name.endswith("pooler.weight"))
    assert torch.equal(pooler.weight.all(), model.bert.pooler.dense.weight)

    # A further run needs no second import; its command line may name another tokenizer.
    (folder / "model.safetensors").unlink()
    assert finetune(*words) == config
    other = ("--tokenizer-type", "BertWordPieceCase", "--vocab-file", folder / "vocab.txt")
    tokenizer = finetune(*words, *other).tokenizer
    assert tokenizer.tokenizer_type == "BertWordPieceCase"
    assert tokenizer.tokenizer_name_or_path is None


def test_a_bert_of_transformers_needs_a_folder_for_its_import(bert, finetune):
    with problem("--save … missing"):
        finetune("--pretrained-checkpoint", bert[0])


def test_a_task_begins_with_a_gpt_of_transformers(finetune, group, tmp_path):
    write_vocabulary(tmp_path / "vocab.txt")
    BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "hf")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    GPT2LMHeadModel(GPT2Config(vocab_size=49, **sizes)).save_pretrained(tmp_path / "hf")
    words = ("--pretrained-checkpoint", tmp_path / "hf", "--save", tmp_path / "run")
    assert finetune(*words).model.hidden_size == 16
    # The flags of the last --task count.
    finetune(*words, "--task", "RACE")
    assert finetune.objectives == ["gpt-classification", "gpt-multiple-choice"]
    with problem("GPT … --task question-answering", WrongCheckpointError):
        finetune(*words, "--task", "question-answering")
