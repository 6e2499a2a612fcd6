"""Adapters for PEFT, and merged into weights: the same network, by three ways to its logits."""

import importlib.util
from pathlib import Path

import pytest
import torch
from adapters import ALL, exported, require_logits_of_the_run
from architectures import (
    GROUPS,
    LLAMA,
    PIPELINE,
    ROTARY,
    SIZES,
    TENSOR,
    logits_of,
    tokens,
    tool,
)
from checkpoints import spread_network, write_checkpoint
from problems import problem
from tiny import tiny_plan
from transformers import AutoModelForCausalLM

from megatron.common.errors import CheckpointError

FAMILIES = {
    "gpt2": ("", f"{ALL} c_attn dense dense_h_to_4h"),
    "llama": (
        f"{LLAMA} --swiglu {GROUPS} {TENSOR} {PIPELINE}",
        f"{ALL} q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    ),
    "gpt_neox": (f"{ROTARY} {TENSOR}", "--lora-rank 2"),
}


@pytest.fixture(params=FAMILIES)
def written(request, group, tmp_path):
    network, lora = FAMILIES[request.param]
    return exported(group, tmp_path, request.param, [*SIZES.split(), *network.split()], lora)


def test_the_logits_are_those_of_the_run(written):
    require_logits_of_the_run(*written)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_computes_the_same(written):
    from peft import PeftModel

    _, model, folder = written
    base = AutoModelForCausalLM.from_pretrained(folder / "hf")
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, folder / "peft").eval()(tokens()).logits
    torch.testing.assert_close(found, logits_of(model, tokens()), rtol=1e-5, atol=1e-5)


def test_a_failed_export_leaves_nothing(group, tmp_path, monkeypatch):
    flags = [*SIZES.split(), "--lora-rank", "2"]
    model = spread_network(tiny_plan(*flags).model, group)
    saved = write_checkpoint(tmp_path / "tuned", model.state_dict(), *flags)

    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with problem("--save … peft: No space left", CheckpointError):
        tool("lora_to_peft", "--load", saved, "--save", tmp_path / "peft", "--base-model", "base")
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_a_checkpoint_without_adapters_is_refused(group, tmp_path):
    model = spread_network(tiny_plan(*SIZES.split()).model, group)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    saved = write_checkpoint(tmp_path / "base", weights, *SIZES.split())
    with problem("global_step3 … adapters … --lora-rank", CheckpointError):
        tool("lora_to_peft", "--load", saved, "--save", tmp_path / "peft")
