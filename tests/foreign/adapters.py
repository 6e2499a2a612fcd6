"""Networks with adapters as checkpoints, merged models and adapters of PEFT; part of several tests."""

import json

import torch
from architectures import logits_of, their_logits, tokens, tool
from checkpoints import spread_network, write_checkpoint
from families import require_close
from safetensors.torch import load_file
from tiny import tiny_plan
from transformers import AutoModelForCausalLM

from megatron.tensor_parallel.linear import is_adapter

ALL = "--lora-rank 3 --lora-alpha 7 --lora-target-modules"


def exported(group, tmp_path, model_type, flags, lora):
    """Return a network, and folders of it: its base, its adapters, and both as one model."""
    spec = tiny_plan(*flags, *lora.split(), world_size=4).model
    model = spread_network(spec, group)
    generator = torch.Generator().manual_seed(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name in filter(is_adapter, weights):
        weights[name].copy_(0.1 * torch.randn(weights[name].shape, generator=generator))
    tuned = write_checkpoint(tmp_path / "tuned", weights, *flags, *lora.split())
    own = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    base = write_checkpoint(tmp_path / "base", own, *flags)
    words = ("--model-type", model_type)
    tool("to_hf", "--load", base, "--save", tmp_path / "hf", *words)
    tool("to_hf", "--load", tuned, "--save", tmp_path / "merged", *words)
    at = ("--base-model", tmp_path / "hf")
    tool("lora_to_peft", "--load", tuned, "--save", tmp_path / "peft", *at, *words)
    return spec, model, tmp_path


def require_logits_of_the_run(spec, model, folder):
    """Compare the logits of the merged model, and of the base with the adapters' products."""
    expected = logits_of(model, tokens())
    require_close(their_logits(folder / "merged", tokens()), expected)
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
        require_close(network(tokens()).logits, expected)
