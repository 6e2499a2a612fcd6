"""T5: published numbers, tables that stacks share, relative positions."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.positions import RelativePositions, relative_buckets
from megatron.model.loss import next_token_loss
from megatron.model.t5 import t5_layers
from megatron.tensor_parallel.rng import OrdinaryStream

PUBLISHED = tiny_spec(
    num_layers=2,
    num_decoder_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    head_dim=8,
    seq_length=12,
    decoder_seq_length=6,
    max_position_embeddings=16,
    vocab_size=64,
    padded_vocab_size=64,
    activation="gelu_erf",
)
"""The network of the numbers below."""

STACKS = (("encoder", 3, 2), ("decoder", 8, 2))
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
ENCODER = LAYER | {"post_attention_layernorm": "pre_mlp_layernorm"}
DECODER = LAYER | {
    "post_attention_layernorm": "pre_cross_attn_layernorm",
    "inter_attention.query": "cross_attention.linear_q",
    "inter_attention.key_value": "cross_attention.linear_kv",
    "inter_attention.dense": "cross_attention.linear_proj",
    "post_inter_attention_layernorm": "pre_mlp_layernorm",
}
TABLES = {
    "tied_modules.embed.word_embeddings": "embedding.word_embeddings",
    "tied_modules.positions.shared_positions": "embedding.position_embeddings",
    "5.final_layernorm": "encoder.final_layernorm",
    "11": "decoder.final_layernorm",
    "13.output_bias": "lm_head.output_layer.bias",
}


def core_modules():
    """Modules of megatron-core by those of the list; the norm behind the decoder is entry 11."""
    names = dict(TABLES)
    for stack, first, count in STACKS:
        for layer in range(count):
            for own, core in (ENCODER if stack == "encoder" else DECODER).items():
                names[f"{first + layer}.{own}"] = f"{stack}.layers.{layer}.{core}"
    return names


def model_of(spec, group, kernels=REFERENCE):
    parts = {"core_attention": core_attention_of(spec, kernels), "kernels": kernels}
    return SequentialModel(t5_layers(spec, group=group, rng=OrdinaryStream(), mixed=False, **parts))


@torch.no_grad()
def with_published_weights(model):
    """Fill the k-th parameter of megatron-core's sorted names with 0.3 sin(0.37 i + 1.7 k)."""
    modules, named = core_modules(), {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        named[modules.get(name) or f"{modules[module]}.{kind}"] = parameter
    for k, name in enumerate(sorted(named)):
        indices = torch.arange(named[name].numel(), dtype=torch.float64)
        values = 0.3 * (0.37 * indices + 1.7 * k).sin()
        if "norm" in name and name.endswith("weight"):
            values = 1 + values
        named[name].copy_(values.view(named[name].shape))
    return model


def ids(start, step, count, length):
    return [(start + step * j) % 60 + 2 for j in range(count)] + [0] * (length - count)


def published_batch():
    return {
        "tokens": torch.tensor([ids(3, 5, 12, 12), ids(7, 11, 9, 12)]),
        "lengths": torch.tensor([12, 9]),
        "decoder_tokens": torch.tensor([ids(1, 7, 6, 6), ids(5, 3, 4, 6)]),
        "labels": torch.tensor([ids(9, 13, 6, 6), ids(4, 3, 4, 6)]),
        "loss_mask": torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2]),
    }


@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax", "reference"])
def test_logits_and_loss_are_those_of_megatron_core(attention, group):
    model = with_published_weights(
        model_of(PUBLISHED, group, replace(REFERENCE, attention=attention))
    )
    batch = published_batch()
    logits = model(batch)
    first = [-1.442146, -1.334989, -0.555069, 0.544055]
    last = [-0.987266, -1.792871, -1.694565, -0.701814]
    close = {"rtol": 0, "atol": 2e-6}
    assert_close(logits[0, 0, :4], torch.tensor(first), **close)
    assert_close(logits[1, 3, :4], torch.tensor(last), **close)
    losses = torch.nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")
    row_0 = [5.117645, 3.882166, 5.982300, 3.654241, 5.629041, 4.356840]
    row_1 = [2.902794, 5.773371, 4.992823, 3.425863]
    assert_close(losses[0], torch.tensor(row_0), **close)
    assert_close(losses[1, :4], torch.tensor(row_1), **close)
    assert_close(next_token_loss(group)(logits, batch), torch.tensor(4.571708), **close)


def test_padding_changes_nothing(group):
    """Tokens behind the lengths have no effect on the logits of real tokens."""
    model, batch = with_published_weights(model_of(PUBLISHED, group)), published_batch()
    before = model(batch)
    batch["tokens"][1, 9:] = 33
    batch["decoder_tokens"][1, 4:] = 44
    after = model(batch)
    assert_close(after[0], before[0])
    assert_close(after[1, :4], before[1, :4])


def test_a_decoder_sees_the_encoder_and_no_later_token(group):
    model, batch = with_published_weights(model_of(PUBLISHED, group)), published_batch()
    before = model(batch)
    batch["decoder_tokens"][0, 3] = 50
    after = model(batch)
    assert torch.equal(after[0, :3], before[0, :3])
    assert not torch.allclose(after[0, 3:], before[0, 3:])
    batch["tokens"][0, 11] = 50
    assert not torch.allclose(model(batch)[0, 0], before[0, 0])


DISTANCES = [-200, -128, -64, -32, -17, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 32, 64, 128, 200]
BOTH = [15, 15, 14, 12, 10, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 26, 28, 30, 31, 31]
BEHIND = [31, 31, 26, 21, 16, 16, 15, 8, 7, 1, *[0] * 10]


@pytest.mark.parametrize(("bidirectional", "buckets"), [(True, BOTH), (False, BEHIND)])
def test_buckets_of_relative_positions(bidirectional, buckets):
    found = relative_buckets(
        torch.tensor(DISTANCES), num_buckets=32, max_distance=128, bidirectional=bidirectional
    )
    assert found.tolist() == buckets


RELATIVE = replace(
    PUBLISHED, position_embedding="relative", relative_buckets=8, relative_max_distance=9
)


def relative_model(group, spec=RELATIVE, attention="sdpa"):
    model = model_of(spec, group, replace(REFERENCE, attention=attention))
    initialise(model, seed=1, std=0.3, num_layers=2)
    return model


def test_each_stack_has_one_table_of_relative_positions(group):
    model = relative_model(group)
    names = [
        name
        for name, _ in model.named_parameters()
        if "positions" in name or name[:2] in ("2.", "7.")
    ]
    assert names == ["2.weight", "7.weight"]
    model(published_batch()).sum().backward()
    for name in names:
        grad = model.get_parameter(name).grad
        assert grad.shape == (8, 4)
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("attention", ["fused-softmax", "reference"])
def test_every_kernel_adds_relative_positions(attention, group):
    expected = relative_model(group)(published_batch())
    assert_close(relative_model(group, attention=attention)(published_batch()), expected)


def test_relative_positions_add_the_bias_of_a_bucket(group):
    """The bias that no key but the token itself gets turns attention into the identity."""
    model = relative_model(group)
    with torch.no_grad():
        model.get_parameter("2.weight").fill_(-1e4)
        model.get_parameter("2.weight")[0] = 0
    layer, x = model.get_submodule("3").self_attention, torch.randn(12, 1, 32)
    table = model.get_parameter("2.weight")
    spans = torch.tensor([[[0, 12]]])
    mixed, _ = layer(x, None, spans, RelativePositions(table, 9, bidirectional=True))
    value = layer.project(x)[2]
    assert_close(mixed, layer.dense(value.permute(2, 0, 1, 3).flatten(2)))
