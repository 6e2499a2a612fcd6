"""Which optimizer, and which parameters it decays."""

import pytest
import torch
from tiny import tiny_plan, tiny_spec
from torch import nn

from megatron.model.gpt import gpt_layers
from megatron.model.layers import SequentialModel
from megatron.optim.build import build_optimizer
from megatron.optim.param_groups import param_groups
from megatron.parallel.random import OrdinaryStream


@pytest.fixture
def model(group):
    return SequentialModel(gpt_layers(tiny_spec(), group=group, rng=OrdinaryStream(), mixed=False))


def test_matrices_are_decayed_biases_and_norms_are_not(model):
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = param_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {name_of[p].split(".", 1)[1] for p in decayed["params"]} == {
        "embed.word_embeddings.weight",
        "embed.position_embeddings.weight",
        "self_attention.query_key_value.weight",
        "self_attention.dense.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }
    names = [name_of[p] for p in kept["params"]]
    assert all("layernorm" in n or n.endswith("bias") or n.startswith("6.") for n in names)


def test_every_parameter_is_in_one_group(model):
    grouped = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_frozen_parameters_are_left_out(model):
    model.tied_modules["embed"].requires_grad_(False)
    grouped = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert not {*grouped} & {*model.tied_modules["embed"].parameters()}


def test_adam_is_adam_with_decoupled_decay():
    torch.manual_seed(0)
    ours = nn.Linear(3, 2)
    start = {name: p.detach().clone() for name, p in ours.named_parameters()}
    flags = "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3 --weight-decay 0.2"
    optimizer = build_optimizer(ours, tiny_plan(*flags.split()).optimizer, lr=0.1)
    gradients = [{name: torch.randn_like(p) for name, p in start.items()} for _ in range(3)]
    for step in gradients:
        for name, p in ours.named_parameters():
            p.grad = step[name].clone()
        optimizer.step()
    for name, p in ours.named_parameters():
        decay = 0.2 if name == "weight" else 0.0
        expected = adamw(start[name], [g[name] for g in gradients], decay=decay)
        torch.testing.assert_close(p.detach(), expected)


def adamw(weight, gradients, *, decay, lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3):
    """Algorithm 2 of arXiv:1711.05101."""
    mean = square = torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = (square / (1 - beta2**t)).sqrt() + eps
        weight = weight - lr * decay * weight - lr * mean / (1 - beta1**t) / root
    return weight


def test_sgd_has_the_momentum_asked_for():
    optimizer = build_optimizer(
        nn.Linear(3, 2), tiny_plan("--optimizer", "sgd", "--sgd-momentum", "0.7").optimizer, lr=0.3
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(g["lr"], g["momentum"]) for g in optimizer.param_groups} == {(0.3, 0.7)}
