"""BERT against numbers of Megatron core, and against MegatronBert of transformers."""

from dataclasses import replace

import pytest
import torch
from compiled_networks import graphs_of
from loss_memory import largest_tensor
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.extensions.bert.layers import bert_layers
from megatron.extensions.bert.objective import BERT_FIELDS, bert_batch, bert_loss
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
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


def bert(group, attention="sdpa", **changes):
    spec = bert_spec(**changes)
    steps = bert_layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=lambda number: attention_of(
                spec, replace(REFERENCE, attention=attention)
            ),
            batch_fields=tuple(BERT_FIELDS),
        ),
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


HF_NAMES = {
    "6.": "bert.encoder.ln.",
    "7.pooler.": "bert.pooler.dense.",
    "7.dense.": "cls.predictions.transform.dense.",
    "7.layernorm.": "cls.predictions.transform.LayerNorm.",
    "7.binary_head.": "cls.seq_relationship.",
    "9.output_bias": "cls.predictions.bias",
    "tied_modules.embed.word_embeddings": "bert.embeddings.word_embeddings",
    "tied_modules.embed.position_embeddings": "bert.embeddings.position_embeddings",
    "tied_modules.embed.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
}
HF_LAYER = {
    "input_layernorm": "attention.ln",
    "self_attention.dense": "attention.output.dense",
    "post_attention_layernorm": "ln",
    "mlp.dense_h_to_4h": "intermediate.dense",
    "mlp.dense_4h_to_h": "output.dense",
}


def hugging_face_weights(model):
    """Return {name in transformers: tensor}; rows of the fused weight are heads x (q, k, v)."""
    weights = {}
    for name, tensor in model.state_dict().items():
        prefix = next((ours for ours in HF_NAMES if name.startswith(ours)), None)
        if prefix:
            weights[HF_NAMES[prefix] + name.removeprefix(prefix)] = tensor
            continue
        number, _, rest = name.partition(".")
        layer, leaf = f"bert.encoder.layer.{int(number) - 3}.", rest.rpartition(".")[2]
        if "query_key_value" in rest:
            parts = tensor.unflatten(0, (4, 3, 8)).unbind(1)
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                weights[f"{layer}attention.self.{part}.{leaf}"] = rows.flatten(0, 1)
        else:
            weights[layer + HF_LAYER[rest.rpartition(".")[0]] + "." + leaf] = tensor
    return weights


def test_logits_are_those_of_megatron_bert_in_transformers(group):
    transformers = pytest.importorskip("transformers")
    model = bert(group).double()
    fill_with_sines(model)
    config = transformers.MegatronBertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_act="gelu",
        max_position_embeddings=16,
        type_vocab_size=2,
        layer_norm_eps=1e-5,
    )
    other = transformers.MegatronBertForPreTraining(config).eval().double()
    missing, unexpected = other.load_state_dict(hugging_face_weights(model), strict=False)
    assert (set(missing), unexpected) == (
        {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} & {*missing},
        [],
    )
    other.tie_weights()
    batch = two_samples()
    real = torch.arange(12) < batch["attention_span"][:, :, 1]
    want = other(
        input_ids=batch["tokens"], token_type_ids=batch["token_types"], attention_mask=real.long()
    )
    got = model(batch)
    assert_close(got.logits[real], want.prediction_logits[real], rtol=0, atol=1e-12)
    assert_close(got.order_logits, want.seq_relationship_logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("binary_head", [True, False])
def test_the_count_of_parameters_is_that_of_the_module(group, binary_head):
    changes = {"binary_head": binary_head, "num_token_types": 2 * binary_head}
    counts = {name: p.numel() for name, p in bert(group, **changes).named_parameters()}
    spec = bert_spec(**changes)
    assert spec.num_parameters == sum(counts.values())
    without = sum(count for name, count in counts.items() if "embed" not in name)
    assert spec.num_parameters_without_embeddings == without


@pytest.mark.parametrize(("rows", "count"), [(30592, 336_297_858), (29056, 334_723_458)])
def test_bert_345m_has_as_many_parameters_as_published(rows, count):
    spec = bert_spec(
        **{"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64},
        **{"ffn_hidden_size": 4096, "max_position_embeddings": 512, "padded_vocab_size": rows},
    )
    assert spec.num_parameters == count


@pytest.mark.parametrize("name", ["sdpa", "fused-softmax", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_changes_nothing_with_any_kernel(group, name, dtype):
    """Logits of a short sample are the same alone and padded beside a longer one."""
    model = bert(group, attention=name).to(dtype)
    fill_with_sines(model)
    batch = two_samples()
    alone = {key: value[1:] for key, value in batch.items()}
    alone = {k: v[:, :9] if v.dim() == 2 else v for k, v in alone.items()}
    close = {"rtol": 0, "atol": 4e-6 if dtype == torch.float32 else 0.06}
    padded, short = model(batch), model(alone)
    assert_close(padded.logits[1, :9], short.logits[0], **close)
    assert_close(padded.order_logits[1], short.order_logits[0], **close)


def test_layers_are_compiled(group):
    spec = tiny_spec(architecture="bert", num_token_types=2, binary_head=True)
    assert graphs_of(spec, BERT_FIELDS, group) == 1


def test_no_tensor_is_as_large_as_the_logits(group):
    own = {"architecture": "bert", "num_token_types": 2, "binary_head": True}
    full, chunks = (
        largest_tensor(group, bert_loss(group), chunk, BERT_FIELDS, **own) for chunk in (0, 8)
    )
    # Weights and activations are smaller than a quarter of the logits.
    assert full >= 4 * 16 * 512 and chunks <= 8 * 512
