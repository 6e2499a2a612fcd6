"""One transformer layer, the embedding and the head, from their parts."""

import pytest
import torch
import torch.nn.functional as F
from networks import gpt_steps
from tiny import Shards, batch_of, tiny_spec

from megatron.model.gpt import (
    take_tokens,
    to_batch_first,
    to_float32,
    to_sequence_first,
)
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.embedding import EmbeddingPipe, OutputEmbeddingPipe, tied_logits
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block, Layer, Recomputation, SequentialModel, Tie
from megatron.model.layers.mlp import ParallelMLP
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


def block(group, **changes):
    spec = tiny_spec(**changes)
    return filled(
        ParallelTransformerLayerPipe(
            spec=spec,
            group=group,
            rng=OrdinaryStream(),
            core_attention=core_attention_of(spec),
        )
    )


def embedding(group, dropout=0.0):
    return filled(EmbeddingPipe(tiny_spec(hidden_dropout=dropout), group=group))


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
    mlp, x = filled(ParallelMLP(tiny_spec(ffn_hidden_size=12), group=group)), torch.randn(3, 8)
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
        return inputs._replace(hidden=super().forward(inputs.hidden))


class Tanh(torch.nn.Module):
    def forward(self, inputs):
        return inputs._replace(hidden=inputs.hidden.tanh())


def test_a_wrapper_goes_around_the_named_classes_only():
    wrapped = []

    def wrap(layers, x):
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
