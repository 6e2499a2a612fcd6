"""T5 against plain PyTorch; padding; relative positions."""

from dataclasses import replace

import pytest
import torch
from compiled_networks import graphs_of
from loss_memory import largest_tensor
from plain_t5 import PlainT5
from tiny import tiny_spec, with_changes
from torch.testing import assert_close

from megatron.extensions.t5.layers import t5_layers
from megatron.extensions.t5.objective import T5_FIELDS
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import Layer, SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.positions import RelativePositions, relative_buckets
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.rng import OrdinaryStream

SPEC = tiny_spec(
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
    architecture="t5",
)


def model_of(spec, group, kernels=REFERENCE):
    steps = t5_layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec, kernels),
            batch_fields=T5_FIELDS,
            kernels=kernels,
        ),
    )
    return SequentialModel(steps)


@torch.no_grad()
def with_sines(model):
    """Fill the k-th parameter by name with 0.3 sin(0.37 i + 1.7 k), the scales of norms around 1."""
    for k, (name, parameter) in enumerate(sorted(model.named_parameters())):
        indices = torch.arange(parameter.numel(), dtype=torch.float64)
        values = 0.3 * (0.37 * indices + 1.7 * k).sin().view(parameter.shape)
        is_scale = "norm" in name and name.endswith("weight")
        parameter.copy_(1 + values if is_scale else values)
    return model


def ids(start, step, count, length):
    return [(start + step * j) % 60 + 2 for j in range(count)] + [0] * (length - count)


def padded_batch():
    return {
        "tokens": torch.tensor([ids(3, 5, 12, 12), ids(7, 11, 9, 12)]),
        "lengths": torch.tensor([12, 9]),
        "decoder_tokens": torch.tensor([ids(1, 7, 6, 6), ids(5, 3, 4, 6)]),
    }


@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax", "reference"])
def test_logits_are_those_of_plain_pytorch(attention, group):
    model = with_sines(model_of(SPEC, group, replace(REFERENCE, attention=attention)))
    plain = PlainT5(dict(model.named_parameters()), heads=4, encoder=[3, 4], decoder=[8, 9])
    batch = padded_batch()
    logits = model(batch)
    for row, real in enumerate((6, 4)):
        expected = plain.logits(
            batch["tokens"][row], batch["lengths"][row], batch["decoder_tokens"][row]
        )
        assert_close(logits[row, :real], expected[:real], rtol=0, atol=1e-5)


CORE = {
    "tied_modules.embed.word_embeddings": "embedding.word_embeddings",
    "tied_modules.positions.shared_positions": "embedding.position_embeddings",
    "5.final_layernorm": "encoder.final_layernorm",
    "11": "decoder.final_layernorm",
    "13.output_bias": "lm_head.output_layer.bias",
    **{f"{3 + i}": f"encoder.layers.{i}" for i in range(2)},
    **{f"{8 + i}": f"decoder.layers.{i}" for i in range(2)},
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "inter_attention.query": "cross_attention.linear_q",
    "inter_attention.key_value": "cross_attention.linear_kv",
    "inter_attention.dense": "cross_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
"""Names of Megatron core by the first or the second part of ours."""


def core_name(name):
    ours = next(ours for ours in CORE if name == ours or name.startswith(f"{ours}."))
    core, rest = CORE[ours], name[len(ours) :]
    is_decoder = core.startswith("decoder.layers")
    norms = {
        "post_attention_layernorm": "pre_cross_attn_layernorm"
        if is_decoder
        else "pre_mlp_layernorm",
        "post_inter_attention_layernorm": "pre_mlp_layernorm",
    }
    for inner, other in {**CORE, **norms}.items():
        if rest.startswith(f".{inner}."):
            rest = rest.replace(inner, other, 1)
            break
    return core + rest


@torch.no_grad()
def test_logits_are_those_of_megatron_core(group):
    """Of the same weights by its names; the numbers were computed by its own code."""
    model = model_of(SPEC, group)
    named = sorted((core_name(name), parameter) for name, parameter in model.named_parameters())
    for k, (name, parameter) in enumerate(named):
        indices = torch.arange(parameter.numel(), dtype=torch.float64)
        values = 0.3 * (0.37 * indices + 1.7 * k).sin().view(parameter.shape)
        is_scale = "norm" in name and name.endswith("weight")
        parameter.copy_(1 + 0.3 * values if is_scale else values)
    logits = model(padded_batch())
    first = torch.tensor([-1.442146, -1.334989, -0.555069, 0.544055])
    assert_close(logits[0, 0, :4], first, rtol=0, atol=3e-6)
    last = torch.tensor([-0.987266, -1.792871, -1.694565, -0.701814])
    assert_close(logits[1, 3, :4], last, rtol=0, atol=3e-6)
    real = [(0, j, (9 + 13 * j) % 60 + 2) for j in range(6)]
    real += [(1, j, (4 + 3 * j) % 60 + 2) for j in range(4)]
    losses = [float(-logits[row, j].log_softmax(-1)[label]) for row, j, label in real]
    assert losses == pytest.approx(
        [
            *(5.117645, 3.882166, 5.982300, 3.654241, 5.629041, 4.356840),
            *(2.902794, 5.773371, 4.992823, 3.425863),
        ],
        abs=5e-6,
    )


def test_padding_changes_nothing(group):
    """Tokens behind the lengths have no effect on the logits of real tokens."""
    model, batch = with_sines(model_of(SPEC, group)), padded_batch()
    before = model(batch)
    batch["tokens"][1, 9:] = 33
    batch["decoder_tokens"][1, 4:] = 44
    after = model(batch)
    assert_close(after[0], before[0])
    assert_close(after[1, :4], before[1, :4])


def test_a_decoder_sees_the_encoder_and_no_later_token(group):
    model, batch = with_sines(model_of(SPEC, group)), padded_batch()
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


RELATIVE = with_changes(
    SPEC, position_embedding="relative", relative_buckets=8, relative_max_distance=9
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
    model(padded_batch()).sum().backward()
    for name in names:
        grad = model.get_parameter(name).grad
        assert grad.shape == (8, 4)
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("attention", ["fused-softmax", "reference"])
def test_every_kernel_adds_relative_positions(attention, group):
    expected = relative_model(group)(padded_batch())
    assert_close(relative_model(group, attention=attention)(padded_batch()), expected)


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


def test_the_published_size_has_its_number_of_parameters():
    published = tiny_spec(
        architecture="t5",
        num_layers=12,
        num_decoder_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        head_dim=64,
        ffn_hidden_size=3072,
        max_position_embeddings=512,
        padded_vocab_size=29184,
    )
    assert published.num_parameters == 221_314_560


def test_parameters_are_counted(group):
    for spec in (SPEC, RELATIVE):
        model = model_of(spec, group)
        assert spec.num_parameters == sum(each.numel() for each in model.parameters())


def test_the_first_layer_of_each_tie_is_called_as_a_module(group):
    """DeepSpeed saves no other layer of a tie."""
    steps = t5_layers(
        SPEC,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(SPEC),
            batch_fields=T5_FIELDS,
        ),
    )
    first = {}
    for step in steps:
        if isinstance(step, Layer) and step.tie:
            first.setdefault(step.tie.key, step.tie.forward)
    assert first == {"embed": None, "positions": None}


@pytest.mark.parametrize("spec", [SPEC, RELATIVE], ids=["learned", "relative"])
def test_a_text_to_text_task_is_learned(spec, group):
    """The decoder writes each of three different tokens of the encoder, plus 20."""
    model = model_of(spec, group)
    initialise(model, seed=1, std=0.1, num_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def draw(count):
        tokens = torch.rand(count, 10).argsort(1)[:, :3] + 2
        return tokens, tokens + 20, torch.full((count,), 3)

    for _ in range(400):
        tokens, labels, lengths = draw(32)
        shifted = torch.cat([torch.ones(32, 1, dtype=torch.int64), labels[:, :-1]], 1)
        logits = model({"tokens": tokens, "lengths": lengths, "decoder_tokens": shifted})
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens, labels, lengths = draw(20)
    written = torch.ones(20, 1, dtype=torch.int64)
    for _ in range(3):
        batch = {"tokens": tokens, "lengths": lengths, "decoder_tokens": written}
        following = model(batch)[:, -1].argmax(-1, keepdim=True)
        written = torch.cat([written, following], 1)
    assert torch.equal(written[:, 1:], labels)


def test_layers_of_both_stacks_are_compiled(group):
    spec = tiny_spec(architecture="t5", num_decoder_layers=2, decoder_seq_length=6)
    assert graphs_of(spec, T5_FIELDS, group) == 2


def test_no_tensor_is_as_large_as_the_logits(group):
    own = {"architecture": "t5", "num_decoder_layers": 1}
    full, chunks = (
        largest_tensor(group, next_token_loss(group), chunk, T5_FIELDS, **own) for chunk in (0, 8)
    )
    # Weights and activations are smaller than a quarter of the logits.
    assert full >= 4 * 16 * 512 and chunks <= 8 * 512
