"""The last addition of a layer in the norm of the next one: which layers do it, and the same results."""

from dataclasses import replace

import pytest
import torch
from networks import gpt_steps
from tiny import LLAMA, batch_of, tiny_spec

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import Block, Recomputation, SequentialModel, link_blocks
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.rng import OrdinaryStream


def add_norm(x, y, y_bias, weight, bias, eps, centred):
    """The sum and its norm by the references; counts the sums."""
    if y is None:
        total = x
    else:
        add_norm.sums += 1
        total = x + (y if y_bias is None else y + y_bias)
    if centred:
        return total, REFERENCE.layer_norm(total, weight, bias, eps)
    return total, REFERENCE.rms_norm(total, weight, eps)


JOINED = replace(REFERENCE, add_norm=add_norm)


def network(group, kernels, *, recomputation=None, **changes):
    spec = tiny_spec(num_layers=4, **{"head_dim": 6} | changes)
    steps = gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False, kernels=kernels)
    model = SequentialModel(steps, recomputation=recomputation, links=True)
    initialise(model, seed=1, std=0.4, num_layers=4)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0)
    return model


def results(model):
    tokens = torch.arange(10).view(2, 5)
    torch.manual_seed(2)
    output = model(batch_of(tokens, torch.arange(5).expand(2, 5)))
    return output, *torch.autograd.grad(output.square().sum(), [*model.parameters()])


def blocks(model):
    return [module for module in model.modules() if isinstance(module, Block)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        LLAMA,
        {"parallel_residual": True},
        {"sandwich_norm": True},
        {"residual_after_norm": True},
    ],
    ids=str,
)
def test_networks_compute_the_same(group, changes):
    add_norm.sums = 0
    joined = results(network(group, JOINED, **changes))
    # Four between attention and MLP, unless both read one norm; three between layers.
    assert add_norm.sums == (3 if "parallel_residual" in changes else 7)
    for mine, right in zip(joined, results(network(group, REFERENCE, **changes)), strict=True):
        torch.testing.assert_close(mine, right)


def test_with_dropout_layers_add_by_themselves(group):
    add_norm.sums = 0
    model = network(group, JOINED, hidden_dropout=0.5)
    model.train()
    joined = results(model)
    assert add_norm.sums == 0
    for mine, right in zip(
        joined, results(network(group, REFERENCE, hidden_dropout=0.5)), strict=True
    ):
        torch.testing.assert_close(mine, right)


def test_recomputed_layers_add_by_themselves(group):
    def call(run, *tensors, shared):
        return run(*tensors)

    second = Recomputation(groups=lambda count: [range(1, 2)], call=call)
    model = network(group, JOINED, recomputation=second)
    assert [block.hands_over for block in blocks(model)] == [False, False, True, False]
    for mine, right in zip(results(model), results(network(group, REFERENCE)), strict=True):
        torch.testing.assert_close(mine, right)


def test_layers_of_a_plugin_get_complete_activations(group):
    class Other(ParallelTransformerLayerPipe):
        pass

    assert not any(block.hands_over for block in blocks(network(group, REFERENCE)))
    found = blocks(network(group, JOINED))
    assert [block.hands_over for block in found] == [True, True, True, False]
    fresh = blocks(network(group, REFERENCE))
    for block in fresh:
        block.input_layernorm.kernels = JOINED
    fresh[2].__class__ = Other
    link_blocks(fresh)
    assert [block.hands_over for block in fresh] == [True, False, False, False]
