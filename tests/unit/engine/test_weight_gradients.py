"""Deferred weight gradients: the same as at once, bit for bit, with the hooks of the weight run once each."""

import torch

from megatron.engine.pipeline_module import WeightGradients
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def layers_of(group):
    torch.manual_seed(1)
    layers = ColumnParallelLinear(6, 5, group=group), RowParallelLinear(5, 6, group=group)
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
    return layers


def passed(layers, seed):
    """Return the input of a forward pass, and run its backward pass."""
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 6, requires_grad=True)
    up, down = layers
    down(up(x).tanh()).square().sum().backward()
    return x


def test_gradients_come_later_and_are_the_same(group):
    plain, split = layers_of(group), layers_of(group)
    gradients, calls = WeightGradients(), []
    for layer in split:
        layer.defer_gradient = gradients.defer
        layer.weight.register_post_accumulate_grad_hook(calls.append)
    for seed in (2, 3, 4):
        x, own = passed(plain, seed), passed(split, seed)
        assert torch.equal(own.grad, x.grad)
        gradients.end_pass()
        assert calls == []
        assert split[0].weight.grad is None
    assert torch.equal(split[0].bias.grad, plain[0].bias.grad)
    for number in (1, 2, 3):
        gradients.compute()
        assert len(calls) == 2 * number
        assert len(gradients) == 3 - number
    # From the last layer to the first, as in a backward pass.
    assert calls[0] is split[1].weight
    for mine, others in zip(split, plain, strict=True):
        assert torch.equal(mine.weight.grad, others.weight.grad)


def test_what_backward_does_not_reach_is_computed_at_once(group):
    up, _ = layers_of(group)
    gradients = WeightGradients()
    up.defer_gradient = gradients.defer
    up(torch.ones(2, 6)).sum().backward()
    assert up.weight.grad is not None
    up.weight.requires_grad_(False)
    up(torch.ones(2, 6, requires_grad=True)).sum().backward()
    gradients.end_pass()
    before = up.weight.grad.clone()
    gradients.compute()
    assert torch.equal(up.weight.grad, before)
