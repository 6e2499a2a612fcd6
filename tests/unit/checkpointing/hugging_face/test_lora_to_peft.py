"""Adapters for PEFT, and merged into weights: the same network, by three ways to its logits."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from architectures import (
    GROUPS,
    LLAMA,
    PIPELINE,
    ROTARY,
    SIZES,
    TENSOR,
    logits_of,
    their_logits,
    tokens,
    tool,
)
from checkpoints import spread_network, write_checkpoint
from problems import problem
from safetensors.torch import load_file
from tiny import tiny_plan
from transformers import AutoModelForCausalLM

from megatron.common.errors import CheckpointError
from megatron.tensor_parallel.linear import is_adapter

ALL = "--lora-rank 3 --lora-alpha 7 --lora-target-modules"
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
    """Our network, and folders of it: its base, its adapters, and both as one model."""
    network, lora = FAMILIES[request.param]
    flags = [*SIZES.split(), *network.split()]
    spec = tiny_plan(*flags, *lora.split(), world_size=4).model
    model = spread_network(spec, group)
    generator = torch.Generator().manual_seed(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name in filter(is_adapter, weights):
        weights[name].copy_(0.3 * torch.randn(weights[name].shape, generator=generator))
    tuned = write_checkpoint(tmp_path / "tuned", weights, *flags, *lora.split())
    own = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    base = write_checkpoint(tmp_path / "base", own, *flags)
    words = ("--model-type", request.param)
    tool("to_hf", "--load", base, "--save", tmp_path / "hf", *words)
    tool("to_hf", "--load", tuned, "--save", tmp_path / "merged", *words)
    at = ("--base-model", tmp_path / "hf")
    tool("lora_to_peft", "--load", tuned, "--save", tmp_path / "peft", *at, *words)
    return spec, model, tmp_path


def test_the_logits_are_those_of_the_run(written):
    spec, model, folder = written
    expected = logits_of(model, tokens())
    torch.testing.assert_close(their_logits(folder / "merged", tokens()), expected)
    assert (their_logits(folder / "hf", tokens()) - expected).abs().max() > 0.01
    adapters = load_file(folder / "peft" / "adapter_model.safetensors")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    network = AutoModelForCausalLM.from_pretrained(folder / "hf")
    scale = config["lora_alpha"] / config["r"]
    for name in (name for name in adapters if ".lora_A." in name):
        product = scale * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.endswith(tuple(config["target_modules"]))
        weight = network.get_parameter(f"{module}.weight")
        weight.data += product.T if config["fan_in_fan_out"] else product
    with torch.no_grad():
        torch.testing.assert_close(network(tokens()).logits, expected)


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
