"""Causal attention, and the order of its fused weight's rows."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import tiny_spec

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.reference.softmax import scaled_causal_softmax
from megatron.model.layers.attention import ParallelAttention
from megatron.model.layers.attention_kernels import Mask, attention_of
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream


def attention(group, *, dropout=0.0):
    torch.manual_seed(0)
    spec = tiny_spec(head_dim=3, attention_dropout=dropout)
    layer = ParallelAttention(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            core_attention=lambda number: attention_of(spec, REFERENCE),
        ),
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_rows_are_query_key_and_value_head_by_head(group):
    """Head by head, position by position, with the rows counted out by hand."""
    layer, x_sbh = attention(group), torch.randn(5, 2, 8)
    y_sbh, bias = layer(x_sbh)
    weight, offset = layer.query_key_value.weight, layer.query_key_value.bias
    dense = layer.dense.weight
    for sample in range(2):
        x = x_sbh[:, sample]
        expected = torch.zeros(5, 8)
        for head in range(2):
            first = head * 9
            q, k, v = (
                x @ weight[rows : rows + 3].T + offset[rows : rows + 3]
                for rows in (first, first + 3, first + 6)
            )
            for s in range(5):
                scores = torch.stack([q[s] @ k[j] for j in range(s + 1)]) / math.sqrt(3)
                mixed = scores.softmax(0) @ v[: s + 1]
                expected[s] += dense[:, 3 * head : 3 * head + 3] @ mixed
        torch.testing.assert_close(y_sbh[:, sample], expected)
    assert bias is layer.dense.bias


@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_position_sees_nothing_behind_it(group, position):
    layer, x_sbh = attention(group), torch.randn(5, 1, 8, requires_grad=True)
    layer(x_sbh)[0][position].sum().backward()
    seen = x_sbh.grad.abs().sum((1, 2)) > 0
    assert seen.tolist() == [other <= position for other in range(5)]


def test_dropout_acts_in_training_only(group):
    layer, x_sbh = attention(group, dropout=0.5), torch.randn(5, 2, 8)
    exact = attention(group)(x_sbh)[0]
    assert not torch.equal(layer(x_sbh)[0], exact)
    torch.testing.assert_close(layer.eval()(x_sbh)[0], exact)


class OwnStream:
    """A stream beside the ordinary one, which it leaves as it was."""

    forks = 0

    @contextmanager
    def fork(self):
        self.forks += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.forks)
            yield


def test_dropout_draws_from_the_stream_of_the_tensor_parallel_rank(group):
    layer, x_sbh = attention(group, dropout=0.5), torch.randn(5, 2, 8)
    layer.rng = OwnStream()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    layer(x_sbh)
    assert torch.equal(torch.rand(3), expected)
    assert layer.rng.forks == 1
    layer.eval()(x_sbh)
    assert layer.rng.forks == 1


@pytest.mark.parametrize(("layer_scaling", "is_finite"), [(True, True), (False, False)])
def test_layer_scaling_keeps_written_out_scores_inside_the_range_of_fp16(
    group, layer_scaling, is_finite
):
    """Scores are 4 * 245^2 / sqrt(4), twice the largest fp16 number; equal keys weigh the same."""
    softmax = partial(scaled_causal_softmax, in_fp32=True)
    kernels = replace(REFERENCE, attention="fused-softmax", scaled_causal_softmax=softmax)
    spec = tiny_spec(num_attention_heads=1, head_dim=4, query_key_layer_scaling=layer_scaling)
    layer = ParallelAttention(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            core_attention=lambda number: attention_of(spec, kernels),
            kernels=kernels,
        ),
        number=32,
    )
    query = torch.full((1, 1, 2, 4), 245.0, dtype=torch.float16)
    value = torch.randn(1, 1, 2, 4).half()
    mixed = layer.core(query, query, value, Mask())
    assert bool(mixed.isfinite().all()) == is_finite
    if is_finite:
        expected = torch.stack([value[0, 0, 0], (value[0, 0, 0] + value[0, 0, 1]) / 2])
        torch.testing.assert_close(mixed[0, 0], expected)
