"""MegatronBert of transformers: weights and logits, in both directions."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from architectures import tool
from checkpoints import random_weights, whole_weights, write_checkpoint
from problems import problem
from tiny import tiny_config
from transformers import (
    BertConfig,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForPreTraining,
    MegatronBertModel,
    T5Config,
    pipeline,
)

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.parameter_names import is_of_vocabulary
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError
from megatron.config.inference.generation import GenerationConfig
from megatron.config.plan.plan import plan
from megatron.extensions.bert.inference import load_masked_lm
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.inference.loading import loaded_model
from megatron.inference.loading.model_source import read_model_source

SIZES = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "64", "--seq-length", "12", "--max-position-embeddings", "16"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "61"),
]
VOCAB = 62


def tiny_bert(directory, *flags):
    """Write a checkpoint of a random BERT; return its folder and its weights."""
    flags = [*SIZES, *flags]
    model = plan(
        tiny_config(*flags), world_size=4, vocab_size=VOCAB, device="cpu", objective="bert"
    ).model
    weights = random_weights(model)
    return write_checkpoint(directory, weights, *flags, vocab_size=VOCAB, objective="bert"), weights


@torch.no_grad()
def our_output(folder, tokens, types, lengths):
    manifest = read_manifest(folder)
    model = load_network(manifest.spec, read_checkpoint(folder, manifest, optimizer=False))
    span = torch.stack([torch.zeros_like(lengths), lengths], -1)[:, None]
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    names = ("tokens", "token_types", "positions", "attention_span")
    return model(dict(zip(names, (tokens, types, positions, span), strict=True)))


def two_samples():
    rows = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    types = (torch.arange(12) > 4).long().expand(2, 12)
    return rows, types, torch.tensor([12, 9])


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ("--gelu erf --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "gelu"),
        ("--openai-gelu --layernorm-epsilon 1e-6", "gelu_new"),
    ],
)
def test_bert_is_the_same_in_transformers_and_back(flags, activation, group, tmp_path, capsys):
    saved, _ = tiny_bert(tmp_path / "saved", *flags.split())
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["hidden_act"] == activation
    assert config["layer_norm_eps"] == (1e-6 if "1e-6" in flags else 1e-5)
    card = (tmp_path / "hf/README.md").read_text()
    assert "logits differ by" in card and "One error remains" not in card

    tokens, types, lengths = two_samples()
    real = torch.arange(12) < lengths[:, None]
    ours = our_output(saved, tokens, types, lengths)
    theirs = MegatronBertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        output = theirs(tokens, attention_mask=real.long(), token_type_ids=types)
    close = {"rtol": 2e-6, "atol": 2e-6}
    logits = ours.logits[..., :VOCAB]
    torch.testing.assert_close(output.prediction_logits[real], logits[real], **close)
    torch.testing.assert_close(output.seq_relationship_logits, ours.order_logits, **close)

    capsys.readouterr()
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "back")
    printed = capsys.readouterr().out
    assert "flags of pretrain_bert.py:" in printed and "logits differ by" in printed
    back = tmp_path / "back" / "global_step0"
    found = whole_weights(back, read_manifest(back))
    for name, weight in whole_weights(saved, read_manifest(saved)).items():
        rows = VOCAB if is_of_vocabulary(name) else len(weight)
        assert torch.equal(found[name], weight[:rows]), name
    tool("to_hf", "--load", tmp_path / "back", "--save", tmp_path / "twice", "--no-verify")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_the_export_fills_masks_by_transformers_alone(kind, group, tmp_path, monkeypatch):
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "river",
        "River",
        "##s",
        "fall",
        "é",
        ".",
    ]
    (tmp_path / "vocab").write_text("\n".join([*words, *map(chr, range(97, 123))]) + "\n")
    tokenizer = ["--tokenizer-type", kind, "--vocab-file", str(tmp_path / "vocab")]
    flags = [*SIZES[:-4], "--openai-gelu", *tokenizer]
    size = len(words) + 26 + 2
    weights = random_weights(
        plan(
            tiny_config(*flags), world_size=1, vocab_size=size, device="cpu", objective="bert"
        ).model
    )
    write_checkpoint(tmp_path / "saved", weights, *flags, vocab_size=size, objective="bert")
    tool("to_hf", "--load", tmp_path / "saved", "--save", tmp_path / "hf")
    names = {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {file.name for file in (tmp_path / "hf").iterdir()}
    fill = pipeline("fill-mask", model=str(tmp_path / "hf"))
    load = ["--load", str(tmp_path / "saved")]
    with problem("--micro-batch-size -1 … 1"):
        load_masked_lm(read_model_source([*load, "--micro-batch-size", "-1"], {}, description=""))
    source = read_model_source(load, {}, description="")
    with problem("--top_k 99 … vocabulary"):
        load_masked_lm(source, GenerationConfig(top_k=99))
    ours, _ = load_masked_lm(source)
    for text in ("Rivers [MASK].", "zE é [MASK] fall"):
        (candidates,) = ours.fill(text, 3)
        found = fill(text, top_k=3)
        assert [one["score"] for one in found] == pytest.approx(
            [one.probability for one in candidates], rel=1e-4
        )
        assert [ours.tokenizer.decode([one["token"]]) for one in found] == [
            one.token for one in candidates
        ]
    norm = Mock(side_effect=REFERENCE.layer_norm)
    kernels = Mock(return_value=replace(REFERENCE, layer_norm=norm))
    monkeypatch.setattr(loaded_model, "choose_inference_kernels", kernels)
    again, _ = load_masked_lm(source)
    assert again.fill("Rivers [MASK].", 3) == ours.fill("Rivers [MASK].", 3)
    assert norm.called


def test_the_card_names_the_error_of_an_activation_that_differs_from_the_heads(group, tmp_path):
    saved, _ = tiny_bert(tmp_path / "saved")
    tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    exact, remains = card.split("One error remains")
    assert "gelu_tanh in the MLP and gelu_erf before" in remains
    errors = [float(part.split("differ by ")[1].split()[0]) for part in (exact, remains)]
    assert errors[0] < 1e-5 < errors[1]


def test_a_bert_of_transformers_is_imported(group, tmp_path, capsys):
    """With the epsilon of its config.json, which is 1e-12 by default, and files of older versions."""
    torch.manual_seed(3)
    config = MegatronBertConfig(
        vocab_size=VOCAB + 2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_act="gelu",
        max_position_embeddings=16,
    )
    model = MegatronBertForPreTraining(config).eval()
    weights = model.state_dict()
    weights["bert.embeddings.position_ids"] = torch.arange(16)[None]
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    (tmp_path / "hf").mkdir()
    config.architectures = ["MegatronBertForPreTraining"]
    config.save_pretrained(tmp_path / "hf")
    torch.save(weights, tmp_path / "hf/pytorch_model.bin")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    folder = tmp_path / "ours/global_step0"
    tokens, types, lengths = two_samples()
    ours = our_output(folder, tokens, types, lengths)
    real = torch.arange(12) < lengths[:, None]
    with torch.no_grad():
        output = model(tokens, attention_mask=real.long(), token_type_ids=types)
    torch.testing.assert_close(output.prediction_logits[real], ours.logits[real])
    assert read_manifest(folder).spec.norm.norm_epsilon == 1e-12


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (MegatronBertForMaskedLM, "binary_head, pooler.dense"),
        (MegatronBertModel, "binary_head, lm_head, lm_head.dense, lm_head.layernorm"),
    ],
)
def test_a_bert_with_a_part_of_the_heads_is_imported(group, tmp_path, capsys, kind, absent):
    torch.manual_seed(3)
    config = MegatronBertConfig(
        vocab_size=VOCAB + 2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_act="gelu",
        max_position_embeddings=16,
    )
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert f"not in the files, so with initial weights: {absent}\n" in capsys.readouterr().out
    folder = tmp_path / "ours/global_step0"
    tokens, types, lengths = two_samples()
    ours = our_output(folder, tokens, types, lengths)
    real = torch.arange(12) < lengths[:, None]
    with torch.no_grad():
        output = model(tokens, attention_mask=real.long(), token_type_ids=types)
    if kind is MegatronBertForMaskedLM:
        torch.testing.assert_close(output.logits[real], ours.logits[real])
    weights = whole_weights(folder, read_manifest(folder))
    pooled = weights["7.pooler.weight"]
    if kind is MegatronBertModel:
        assert torch.equal(pooled, model.pooler.dense.weight)
    else:
        assert 0.01 < pooled.std() < 0.03
    assert 0.01 < weights["7.binary_head.weight"].std() < 0.03
    assert weights["7.layernorm.weight"].all() and not weights["7.binary_head.bias"].any()


def test_networks_without_an_architecture_are_refused_with_the_reason(group, tmp_path):
    saved, _ = tiny_bert(tmp_path / "saved", "--bert-no-binary-head")
    with problem("binary_head … False … --bert-no-binary-head", CheckpointError):
        tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf")
    for config, reason in ((BertConfig(), "post-LN"), (T5Config(), "LayerNorm")):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        with problem(reason, CheckpointError):
            tool("from_hf", "--load", folder, "--save", tmp_path / "ours")
