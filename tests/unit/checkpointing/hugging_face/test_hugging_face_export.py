"""Export to transformers: dtypes, file sizes, model cards, verification and refusals."""

import json

import pytest
import torch
from architectures import LLAMA, THEIRS, UNTIED, logits_of, their_logits, tokens, tool
from families import their_model
from problems import problem
from safetensors.torch import load_file

from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.hugging_face.families.tensor_mapping import GateUp, QueriesKeysValues
from megatron.checkpointing.hugging_face.model_card import model_card
from megatron.checkpointing.manifest import read_manifest
from megatron.common.errors import CheckpointError, DataError


def test_a_conversion_with_other_logits_writes_nothing(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(
        GateUp, "to_hugging_face", lambda self, tensor: (tensor[1::2], tensor[0::2])
    )
    with problem("nothing was written … logits … bound", CheckpointError):
        exported(f"{LLAMA} --swiglu {UNTIED}")
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    monkeypatch.undo()
    monkeypatch.setattr(
        QueriesKeysValues, "from_hugging_face", lambda self, tensors: torch.cat(tensors)
    )
    their_model(THEIRS["llama"]).save_pretrained(tmp_path / "hf")
    with problem("nothing was written … logits … bound", CheckpointError):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_weights_in_files_of_bounded_size(exported, tmp_path, dtype):
    words = ["--target-dtype", dtype, "--max-shard-size", "4KB"]
    _, model, _ = exported(f"{LLAMA} --swiglu {UNTIED} --norm-epsilon 1e-5", *words)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert len(files) > 5
    assert (
        sum(p.numel() for p in model.parameters()) * 2 - 2 * 24 * 2
        == index["metadata"]["total_size"]
    )
    for file in files:
        held = load_file(tmp_path / "hf" / file)
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file}
        assert len(held) == 1 or sum(w.nbytes for w in held.values()) <= 4000
    found = their_logits(tmp_path / "hf", tokens())
    assert not torch.equal(found, logits_of(model, tokens()))
    torch.testing.assert_close(found, logits_of(model, tokens()), atol=0.05, rtol=0.05)
    card = (tmp_path / "hf/README.md").read_text()
    assert f"transformers in fp32, ours in fp32 with weights in {dtype}: logits differ by" in card
    assert f"transformers in {dtype}, ours in fp32 with weights in fp32: logits differ" in card
    assert "| optimizer steps | 3 |" in card


def test_the_card_describes_prefix_attention(exported, tmp_path):
    spec, _, saved = exported("")
    manifest = read_manifest(saved)
    manifest.plan["objective"]["name"] = "prefix-lm"
    parts = {"dtype": "fp32", "measured": [], "tokenizer": "", "chat_template": ""}
    parts["for_release"] = False
    assert "here attention is causal |" in model_card(manifest, spec, family_of(spec), **parts)
    assert "attention is causal" not in (tmp_path / "hf/README.md").read_text()


def test_norms_around_one_become_ordinary_ones(exported, tmp_path):
    _, model, _ = exported("--apply-layernorm-1p")
    found = load_file(tmp_path / "hf/model.safetensors")["transformer.h.0.ln_1.weight"]
    assert torch.equal(found, model.state_dict()["3.input_layernorm.weight"] + 1)


def test_nothing_is_replaced_and_wrong_arguments_write_nothing(exported, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/file").touch()
    with problem("--save … /hf … empty", CheckpointError):
        exported("")
    with problem("--save … /saved … checkpoints", CheckpointError):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "saved")
    words = ["--load", tmp_path / "saved", "--save", tmp_path / "new"]
    with problem("NullTokenizer … 5 tokens … 11 … training tokenizer", DataError):
        tool("to_hf", *words, "--vocab-size", 4)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    with problem("--chat-template … tokenizer … NullTokenizer", DataError):
        tool("to_hf", *words, "--chat-template", tmp_path / "chat.jinja")
    assert not (tmp_path / "new").exists()
    with problem("--max-shard-size 5XB … 5GB"):
        tool("to_hf", *words, "--max-shard-size", "5XB")


@pytest.mark.parametrize("name", ["from_hf", "to_hf"])
def test_a_missing_folder_is_an_error(name, tmp_path):
    with problem("/none … not exist", CheckpointError):
        tool(name, "--load", tmp_path / "none", "--save", tmp_path / "new")


def test_flags_of_older_scripts(exported, tmp_path):
    _, _, saved = exported("")
    words = ["--input_folder", saved, "--output_folder", tmp_path / "old"]
    with problem("--target_tp 2 … leave it out"):
        tool("deepspeed_to_transformers", *words, "--target_tp", 2)
    tool("deepspeed_to_transformers", *words, "--for_release")
    file = "model.safetensors"
    assert (tmp_path / "old" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert "optimizer steps" not in (tmp_path / "old/README.md").read_text()
