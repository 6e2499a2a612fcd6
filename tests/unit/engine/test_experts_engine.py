"""A layer with experts against one in plain torch, in one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace

import pytest
import torch
from deepspeed.utils import groups as deepspeed_groups
from plain_mixture import PlainMixture
from tiny import tiny_plan, tiny_spec
from torch.testing import assert_close

from megatron.engine.experts import mixture_builder
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.moe_aux_loss import AuxiliaryLoss

COEFFICIENT = 0.3
LLAMA = {"activation": "swiglu", "linear_bias": False}


@pytest.fixture
def pair(alone, monkeypatch):
    """Return a function to our layer, the plain one, and the lists of their balance losses."""
    monkeypatch.setattr(deepspeed_groups, "mpu", None)

    def build(*flags, capacity=float("inf"), **changes):
        spec = tiny_spec(num_experts=(4, 4), **changes)
        plan = replace(tiny_plan(*flags).experts, loss_coefficient=COEFFICIENT)
        auxiliary, terms = AuxiliaryLoss(COEFFICIENT), []
        place = {"number": 1, "group": alone.tensor, "kernels": REFERENCE}
        ours = mixture_builder(plan, alone, replicas=1, auxiliary=auxiliary)(spec, **place)
        ours.set_deepspeed_parallelism()
        plain = PlainMixture(spec, **place, terms=terms, capacity=capacity)
        for layer in (ours, plain):
            initialise(layer, seed=3, std=1.0, num_layers=2)
        with torch.no_grad():
            for layer in (ours, plain):
                for name, p in layer.named_parameters():
                    if name.endswith("bias"):
                        p.copy_(torch.linspace(-1, 1, p.numel()))
        return ours, plain.double(), auxiliary, terms

    return build


def tokens():
    return torch.randn(10, 3, 8, generator=torch.Generator().manual_seed(0))


def leaf(x):
    return x.clone().requires_grad_()


ALL_BEST = ["--disable-moe-token-dropping", "--disable-moe-top2-2nd-expert-sampling"]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("changes", [{}, {"residual_experts": True}, LLAMA])
def test_outputs_and_gradients_are_those_of_plain_torch(pair, k, changes):
    ours, plain, auxiliary, terms = pair(*ALL_BEST, experts_per_token=k, **changes)
    x, x_64 = leaf(tokens()), leaf(tokens().double())
    (y, bias), (y_64, _) = ours(x), plain(x_64)
    assert bias is None
    assert_close(y.double(), y_64, rtol=1e-4, atol=1e-5)
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    auxiliary.scale = 0.5
    (0.5 * (y * pull).sum()).backward()
    (0.5 * ((y_64 * pull).sum() + COEFFICIENT * terms[0])).backward()
    assert_close(auxiliary.take().double(), COEFFICIENT * terms[0].detach(), rtol=1e-5, atol=0)
    assert_close(x.grad.double(), x_64.grad, rtol=1e-4, atol=1e-5)
    theirs = dict(plain.named_parameters())
    assert {*theirs} == {name for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        expected = theirs[name].grad
        found = torch.zeros_like(p) if p.grad is None else p.grad
        assert_close(found.double(), expected, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: n + m)
    assert theirs["deepspeed_moe.gate.wg.weight"].grad.abs().max() > 0.01


def test_the_balance_loss_reaches_the_router_through_recomputation(pair):
    gradients = []
    for wrap in (lambda layer, x: layer(x)[0], checkpointed):
        ours, _, auxiliary, _ = pair(*ALL_BEST, experts_per_token=2)
        wrap(ours, leaf(tokens())).sum().backward()
        gradients.append(ours.deepspeed_moe.gate.wg.weight.grad)
        assert float(auxiliary.take()) > COEFFICIENT / 2
    assert_close(gradients[1], gradients[0])
    ours, _, auxiliary, _ = pair(*ALL_BEST, experts_per_token=2)
    auxiliary.coefficient = 0.0
    ours(leaf(tokens()))[0].sum().backward()
    assert (ours.deepspeed_moe.gate.wg.weight.grad - gradients[0]).abs().max() > 1e-3


def checkpointed(layer, x):
    return torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)


@pytest.mark.parametrize(("factor", "least", "capacity"), [(0.5, 1, 8), (0.1, 6, 6)])
def test_of_two_choices_those_that_come_too_late_pass_by(pair, factor, least, capacity):
    # 30 tokens over 4 experts: an even share of the 60 choices is 15.
    flags = ["--moe-eval-capacity-factor", str(factor), "--moe-min-capacity", str(least)]
    ours, plain, _, _ = pair(*flags, experts_per_token=2, capacity=capacity)
    unlimited = pair(*ALL_BEST, experts_per_token=2)[1]
    y, y_64 = ours.eval()(tokens())[0], plain(tokens().double())[0]
    assert_close(y.double(), y_64, rtol=1e-4, atol=1e-5)
    assert (y_64 - unlimited(tokens().double())[0]).abs().max() > 0.1


@pytest.mark.parametrize("trains", [False, True])
def test_of_single_choices_an_expert_takes_as_many_as_it_may(pair, trains):
    flags = ["--moe-expert-capacity-factor", "0.5", "--moe-min-capacity", "1"]
    ours, plain, _, _ = pair(*flags)
    x = tokens()
    y = ours.train(trains)(x)[0].flatten(0, 1).double()
    whole = plain(x.double())[0].flatten(0, 1)
    took = y.abs().sum(-1) > 0
    assert_close(y[took], whole[took], rtol=1e-4, atol=1e-5)
    best = (x.double().flatten(0, 1) @ plain.deepspeed_moe["gate"]["wg"].weight.T).argmax(-1)
    counts, taken = best.bincount(minlength=4), best[took].bincount(minlength=4)
    assert taken.tolist() == counts.clamp(max=4).tolist()
    assert counts.max() > 4


def test_training_draws_the_second_expert_and_evaluation_nothing(pair):
    ours, *_ = pair("--disable-moe-token-dropping", experts_per_token=2)
    before = torch.get_rng_state()
    first = ours.eval()(tokens())[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ours(tokens())[0], first)
    ours.train()
    outputs = [ours(tokens())[0] for _ in range(4)]
    assert any(not torch.allclose(y, outputs[0]) for y in outputs[1:])


def test_copies_of_an_expert_are_new_ones(pair):
    ours, *_ = pair()
    storages = {p.data_ptr() for p in ours.parameters()}
    assert len(storages) == len([*ours.parameters()])
