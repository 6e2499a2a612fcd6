"""BERT against numbers of Megatron core, and against MegatronBert of transformers."""

import pytest
import torch
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.bert import bert_layers
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.objectives.bert import BERT_FIELDS, bert_batch
from megatron.tensor_parallel.rng import OrdinaryStream

CORE_NAMES = {
    "tied_modules.embed.": "embedding.",
    "6.": "encoder.final_layernorm.",
    "7.dense.": "lm_head.dense.",
    "7.layernorm.": "lm_head.layer_norm.",
    "7.pooler.": "pooler.dense.",
    "7.binary_head.": "binary_head.",
    "9.output_bias": "output_layer.bias",
}
"""Prefixes of our names of a network of two layers, and those of Megatron core."""

CORE_LAYER = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def bert_spec(**changes):
    return tiny_spec(
        **{
            "hidden_size": 32,
            "num_attention_heads": 4,
            "head_dim": 8,
            "ffn_hidden_size": 64,
            "padded_vocab_size": 64,
            "vocab_size": 64,
            "seq_length": 12,
            "max_position_embeddings": 16,
            "activation": "gelu_erf",
            "architecture": "bert",
            "num_token_types": 2,
            "binary_head": True,
        }
        | changes
    )


def bert(group, **changes):
    spec = bert_spec(**changes)
    steps = bert_layers(
        spec,
        group=group,
        rng=OrdinaryStream(),
        mixed=False,
        core_attention=lambda number: attention_of(REFERENCE),
        batch_fields=tuple(BERT_FIELDS),
    )
    return SequentialModel(steps).eval()


def core_name(name):
    for ours, theirs in CORE_NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    number, _, rest = name.partition(".")
    for ours, theirs in CORE_LAYER.items():
        rest = rest.replace(ours, theirs)
    return f"encoder.layers.{int(number) - 3}.{rest}"


def fill_with_sines(model):
    """Fill each parameter with 0.3 sin(0.37 i + 1.7 k), k its place among core's names."""
    parameters = {core_name(name): p for name, p in model.named_parameters()}
    for k, name in enumerate(sorted(parameters)):
        p = parameters[name]
        values = 0.3 * torch.sin(0.37 * torch.arange(p.numel(), dtype=torch.float64) + 1.7 * k)
        if "norm" in name and name.endswith("weight"):
            values = 1 + 0.3 * values
        with torch.no_grad():
            p.copy_(values.view_as(p))


def two_samples():
    rows = [[(3 + 5 * j) % 60 + 2 for j in range(12)], [(7 + 11 * j) % 60 + 2 for j in range(9)]]
    text = torch.tensor([rows[0], rows[1] + [0] * 3])
    types = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 5 + [7] * 3])
    nothing = torch.zeros_like(text)
    return bert_batch(
        text=text,
        types=types,
        labels=nothing - 1,
        is_random=torch.tensor([0, 1]),
        loss_mask=nothing,
        padding_mask=(text != 0).long(),
        truncated=torch.tensor([0, 0]),
    )


@pytest.mark.parametrize(
    ("activation", "first", "last"),
    [
        (
            "gelu_erf",
            [0.577976, 0.534457, 0.201318, -0.291362],
            [0.331183, 0.083795, -0.225710, -0.479183],
        ),
        ("gelu_tanh", [0.577962, 0.534441, 0.201309, -0.291360], None),
    ],
)
def test_logits_are_those_of_megatron_core(group, activation, first, last):
    model = bert(group, activation=activation)
    fill_with_sines(model)
    output = model(two_samples())
    close = {"rtol": 0, "atol": 2e-6}
    assert_close(output.logits[0, 0, :4], torch.tensor(first), **close)
    if last:
        assert_close(output.logits[1, 8, :4], torch.tensor(last), **close)
        order = torch.tensor([[-0.853558, -0.369504], [-1.455530, -0.982556]])
        assert_close(output.order_logits, order, **close)
