"""Heads of downstream tasks in MegatronBert's form: the same outputs, and pipelines that answer."""

import pytest
from architectures import tool
from checkpoints import random_weights, write_checkpoint
from tiny import tiny_config
from transformers import AutoConfig

from megatron.common.errors import CheckpointError
from megatron.config.data.downstream import objective_of
from megatron.config.plan import plan
from megatron.tokenizer.build import build_tokenizer

WORDS = [f"w{i}" for i in range(55)]
VOCAB = 62  # with [BOS] and [EOS]
SIZES = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "64", "--seq-length", "24", "--max-position-embeddings", "24"),
    *("--max-query-length", "4"),
]
HEADS = {
    "MNLI": "MegatronBertForSequenceClassification",
    "STS-B": "MegatronBertForSequenceClassification",
    "text-classification": "MegatronBertForSequenceClassification",
    "RACE": "MegatronBertForMultipleChoice",
    "token-classification": "MegatronBertForTokenClassification",
    "question-answering": "MegatronBertForQuestionAnswering",
}
LABELS = {
    "token-classification": ("O", "B-PER", "I-PER"),
    "text-classification": ("bad", "good"),
}


@pytest.fixture
def tokenizer(tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    return build_tokenizer(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt")
    )


def finetuned(tmp_path, task, *flags):
    """Write a checkpoint of a random network with the head of a task; return its plan."""
    labels = ["--labels", *LABELS[task]] if task in LABELS else []
    layers = ["--head-layers", "1"] if task == "token-classification" else []
    sizes = SIZES if task == "question-answering" else SIZES[:-2]
    words = [*sizes, "--task", task, "--train-data", "none", *labels, *layers, *flags]
    words += ["--tokenizer-type", "BertWordPieceLowerCase"]
    words += ["--vocab-file", str(tmp_path / "vocab.txt")]
    config = tiny_config(*words, without=("--data-path",))
    objective = objective_of(task)
    found = plan(config, world_size=4, vocab_size=VOCAB, device="cpu", objective=objective)
    weights = random_weights(found.model)
    write_checkpoint(
        tmp_path / "own",
        weights,
        *words,
        vocab_size=VOCAB,
        objective=objective,
        without=("--data-path",),
    )
    return found


def exported(tmp_path):
    tool("to_hf", "--load", str(tmp_path / "own"), "--save", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.mark.parametrize("task", HEADS)
def test_a_finetuned_network_becomes_that_of_transformers(task, tmp_path, tokenizer):
    finetuned(tmp_path, task)
    folder = exported(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [HEADS[task]]
    if task in LABELS:
        assert tuple(config.id2label.values()) == LABELS[task]
    assert "logits differ by" in (folder / "README.md").read_text()


def test_a_head_of_two_layers_is_refused(tmp_path, tokenizer):
    finetuned(tmp_path, "token-classification", "--head-layers", "2")
    with pytest.raises(CheckpointError, match=r"head_layers is 2, and it has 1 \(--head-layers\)"):
        exported(tmp_path)
