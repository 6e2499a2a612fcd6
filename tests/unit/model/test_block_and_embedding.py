"""One transformer layer, the embedding and the head, from their parts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from networks import gpt_steps
from tiny import Shards, batch_of, tiny_spec

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.gpt import (
    take_tokens,
    to_batch_first,
    to_float32,
    to_sequence_first,
)
from megatron.model.layers import attention, positions
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.embedding import EmbeddingPipe, OutputEmbeddingPipe, tied_logits
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block, Layer, Recomputation, SequentialModel, Tie
from megatron.model.layers.mlp import ParallelMLP
from megatron.model.layers.norms import LayerNorm
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.rng import OrdinaryStream


def test_a_printed_network_shows_sizes_and_layout():
    layers = gpt_steps(
        tiny_spec(padded_vocab_size=12, num_query_groups=2),
        group=Shards(0, 2),
        rng=OrdinaryStream(),
        mixed=False,
        sequence_parallel=True,
    )
    text = str(SequentialModel(layers))
    for line in (
        "VocabParallelEmbedding(num_embeddings=12, embedding_dim=8, tensor_parallel=2, "
        "sequence_parallel=True)",
        "(input_layernorm): LayerNorm(8, eps=1e-05)",
        "heads=2, query_groups=2, head_dim=4, tensor_parallel=2",
        "(query_key_value): ColumnParallelLinear(in_features=8, out_features=24, bias=True, "
        "tensor_parallel=2, sequence_parallel=True)",
        "(dense_4h_to_h): RowParallelLinear(in_features=32, out_features=8, bias=True, "
        "tensor_parallel=2, sequence_parallel=True)",
    ):
        assert line in text
    alone = gpt_steps(tiny_spec(), group=Shards(0, 1), rng=OrdinaryStream(), mixed=False)
    assert "sequence_parallel" not in str(SequentialModel(alone))


def filled(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def block(group, kernels=REFERENCE, **changes):
    spec = tiny_spec(**changes)
    return filled(
        ParallelTransformerLayerPipe(
            spec,
            LayerParts(
                group=group,
                rng=OrdinaryStream(),
                core_attention=core_attention_of(spec),
                kernels=kernels,
            ),
        )
    )


class OwnNorm(LayerNorm):
    """A plugin's norm, derived from a built-in one: it takes x alone."""

    def forward(self, x):
        return 2 * super().forward(x)


def sum_and_norm(x, y, y_bias, weight, bias, eps, centred):
    """Do what `Kernels.add_norm` does, by references; record calls in `calls`."""
    sum_and_norm.calls.append((y is not None, centred))
    total = x if y is None else REFERENCE.bias_dropout_add(y * 1, y_bias, x, 0.0, False)
    if centred:
        return total, REFERENCE.layer_norm(total, weight, bias, eps)
    return total, REFERENCE.rms_norm(total, weight, eps)


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, [(False, True), (True, True)]),
        ({"normalization": "RMSNorm", "layernorm_1p": True}, [(False, False), (True, False)]),
        ({"hidden_dropout": 0.5}, [(False, True), (False, True)]),
        ({"parallel_residual": True}, [(False, True)]),
        ({"residual_after_norm": True}, [(False, True), (True, True)]),
        ({"sandwich_norm": True}, [(False, True), (True, True)]),
    ],
    ids=str,
)
def test_a_block_with_the_sum_and_its_norm_fused_is_the_same_block(group, changes, calls):
    fused = replace(REFERENCE, add_norm=sum_and_norm)
    results, sum_and_norm.calls = [], []
    for kernels in (REFERENCE, fused):
        layer = block(group, kernels=kernels, **changes)
        x = torch.randn(6, 2, 8, requires_grad=True)
        torch.manual_seed(1)
        layer(LayerInput(x)).hidden.square().sum().backward()
        results.append({"x": x.grad} | {n: p.grad for n, p in layer.named_parameters()})
    torch.testing.assert_close(*results)
    assert sum_and_norm.calls == calls


def test_a_norm_of_a_plugin_is_called_with_the_input_alone(group):
    layer = block(group, kernels=replace(REFERENCE, add_norm=sum_and_norm))
    plain, x = block(group), torch.randn(6, 2, 8)
    for each in (layer, plain):
        each.input_layernorm.__class__ = each.post_attention_layernorm.__class__ = OwnNorm
    sum_and_norm.calls = []
    assert torch.equal(layer(LayerInput(x)).hidden, plain(LayerInput(x)).hidden)
    assert sum_and_norm.calls == []


def test_rotary_tables_are_made_once_for_the_layers_of_a_micro_batch(group, monkeypatch):
    made = []

    def rotary_tables(positions_bs, spec):
        made.append(spec.rotary_base)
        return positions.rotary_tables(positions_bs, spec)

    monkeypatch.setattr(attention, "rotary_tables", rotary_tables)
    spec = tiny_spec(
        **{"position_embedding": "rotary", "rotary_dim": 4, "num_layers": 4, "window": 4},
        **{"full_attention_layers": (2, 4), "rotary_local_base": 100.0},
    )
    model = filled(SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False)))
    first, second = torch.arange(6).expand(2, 6), torch.arange(6).flip(0).expand(2, 6)
    got = [model(batch_of(first, places)) for places in (first, second)]
    assert sorted(made) == [100.0, 100.0, 10000.0, 10000.0]
    assert not torch.equal(*got)


def embedding(group, dropout=0.0):
    spec = tiny_spec(hidden_dropout=dropout)
    parts = LayerParts(group=group, core_attention=core_attention_of(spec))
    return filled(EmbeddingPipe(spec, parts))


def test_a_block_is_two_residuals_behind_norms(group):
    layer, x = block(group), torch.randn(6, 2, 8)
    attended, bias = layer.self_attention(layer.input_layernorm(x))
    middle = x + attended + bias
    narrowed, bias = layer.mlp(layer.post_attention_layernorm(middle))
    output = layer(LayerInput(x))
    torch.testing.assert_close(output.hidden, middle + narrowed + bias)
    assert [*output.tensors()] == ["hidden"]


def test_a_block_drops_features_in_training_only(group):
    layer, x = block(group, hidden_dropout=0.5), LayerInput(torch.randn(6, 2, 8))
    assert not torch.equal(layer(x).hidden, layer(x).hidden)
    assert torch.equal(layer.eval()(x).hidden, layer(x).hidden)


def test_the_epsilon_of_the_norms_is_the_one_asked_for(group):
    layer = block(group, norm_epsilon=0.25)
    assert (layer.input_layernorm.eps, layer.post_attention_layernorm.eps) == (0.25, 0.25)
    steps = gpt_steps(tiny_spec(norm_epsilon=0.25), group=group, rng=OrdinaryStream(), mixed=False)
    assert steps[6].kwargs["eps"] == 0.25


def test_the_mlp_is_linear_gelu_linear(group):
    spec = tiny_spec(ffn_hidden_size=12)
    parts = LayerParts(group=group, core_attention=core_attention_of(spec))
    mlp, x = filled(ParallelMLP(spec, parts)), torch.randn(3, 8)
    inner = x @ mlp.dense_h_to_4h.weight.T + mlp.dense_h_to_4h.bias
    root = (2 / torch.pi) ** 0.5
    gelu = 0.5 * inner * (1 + torch.tanh(root * (inner + 0.044715 * inner**3)))
    y, bias = mlp(x)
    torch.testing.assert_close(y, gelu @ mlp.dense_4h_to_h.weight.T)
    assert bias is mlp.dense_4h_to_h.bias


def test_the_embedding_is_token_plus_position(group):
    layer, tokens = embedding(group), torch.tensor([[3, 11, 0], [5, 5, 5]])
    positions = torch.tensor([[0, 1, 2], [2, 1, 0]])
    expected = layer.word_embeddings.weight[tokens] + layer.position_embeddings.weight[positions]
    torch.testing.assert_close(layer(batch_of(tokens, positions)).hidden, expected)


def test_the_embedding_drops_features_in_training_only(group):
    layer, inputs = embedding(group, 0.5), batch_of(torch.zeros(1, 3).long(), torch.arange(3)[None])
    assert (layer(inputs).hidden == 0).any()
    assert not (layer.eval()(inputs).hidden == 0).any()


@pytest.mark.parametrize("kind", ["first stage", "last stage"])
def test_logits_are_products_with_the_token_table(group, kind):
    x = torch.randn(2, 3, 8)
    if kind == "first stage":
        layer = embedding(group)
        logits = tied_logits(layer, x)
    else:
        layer = filled(OutputEmbeddingPipe(padded_vocab_size=12, hidden_size=8, group=group))
        logits = layer(x)
    torch.testing.assert_close(logits, F.linear(x, layer.word_embeddings.weight))


def test_the_functions_between_the_layers_change_no_value():
    x, positions = torch.randn(2, 3, 4), torch.zeros(2, 3)
    turned = to_sequence_first(LayerInput(x, positions))
    assert torch.equal(turned.hidden, x.permute(1, 0, 2))
    assert turned.hidden.is_contiguous()
    assert turned.positions is positions
    assert torch.equal(to_batch_first(turned), x)
    assert take_tokens((x, x)) == (x, x)
    assert to_float32(x.bfloat16()).dtype == torch.float32


def test_tied_layers_are_built_once():
    steps = [
        Layer(torch.nn.Embedding, {"num_embeddings": 5, "embedding_dim": 2}, Tie("e", "weight")),
        torch.tanh,
        Layer(
            torch.nn.Embedding,
            {"num_embeddings": 5, "embedding_dim": 2},
            Tie("e", "weight", lambda layer, x: x @ layer.weight.T),
        ),
    ]
    model = SequentialModel(steps)
    assert [*model.state_dict()] == ["tied_modules.e.weight"]
    table = model.tied_modules["e"].weight
    tokens = torch.tensor([4, 0])
    torch.testing.assert_close(model(tokens), table[tokens].tanh() @ table.T)


class Linear(torch.nn.Linear, Block):
    """A layer between transformer layers."""

    def forward(self, inputs):
        return inputs.replace(hidden=super().forward(inputs.hidden))


class Tanh(torch.nn.Module):
    def forward(self, inputs):
        return inputs.replace(hidden=inputs.hidden.tanh())


def test_a_wrapper_goes_around_the_named_classes_only():
    wrapped = []

    def wrap(layers, x, shared):
        assert shared == []
        y = layers(x)
        wrapped.append((x, y))
        return y

    linear = Layer(Linear, {"in_features": 2, "out_features": 2})
    steps = [linear, linear, Layer(Tanh), linear, linear, linear]
    recomputation = Recomputation(lambda count: [range(1, 4), range(4, count)], wrap)
    model = SequentialModel(steps, recomputation=recomputation)
    x = LayerInput(torch.rand(1, 2))
    y = model(x).hidden
    # Layers 1 to 3 of the five are cut by the Tanh between them.
    assert len(wrapped) == 3
    inner = [model.get_submodule(str(i)) for i in (0, 1, 2, 3, 4, 5)]
    expected = [inner[0](x)]
    for layer in inner[1:]:
        expected.append(layer(expected[-1]))
    expected = [output.hidden for output in expected]
    assert torch.equal(y, expected[5])
    ends = [(0, 1), (2, 4), (4, 5)]
    for (kept, made), (before, after) in zip(wrapped, ends, strict=True):
        assert torch.equal(kept, expected[before]) and torch.equal(made, expected[after])
    assert [*model.state_dict()][:2] == ["0.weight", "0.bias"]
