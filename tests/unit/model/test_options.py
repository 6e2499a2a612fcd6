"""Every option of the network against the same network spelled out in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from networks import gpt_steps
from plain_gpt import plain_logits
from tiny import GEMMA_2, GEMMA_3, LLAMA, ROTARY, batch_of, tiny_spec

from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.norms import RMSNorm
from megatron.model.layers.positions import PositionEmbedding
from megatron.tensor_parallel.rng import OrdinaryStream

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "head_dim": 6,
    "seq_length": 10,
    "max_position_embeddings": 10,
}
YARN = {
    "rope_scaling": 4.0,
    "rope_rule": "yarn",
    "rope_high_freq_factor": 32.0,
    "rope_original_length": 1000,
    "rope_attention_factor": 1.3,
}
ACROSS = {
    "qk_layernorm": True,
    "qk_norm_across_heads": True,
    "normalization": "RMSNorm",
    "num_query_groups": 2,
}
LONGROPE = {
    "rope_scaling": 4.0,
    "rope_rule": "longrope",
    "rope_short_factors": (1.0, 1.5, 2.0),
    "rope_long_factors": (2.0, 5.0, 9.0),
    "rope_attention_factor": 1.2,
}
OPTIONS = {
    "plain": {},
    "rotary": ROTARY,
    "rotary, part of a head": ROTARY | {"rotary_dim": 4},
    "rotary, another base": ROTARY | {"rotary_base": 100.0},
    "rotary, interpolated": ROTARY | {"rotary_interpolation": 2.5},
    "rotary, stretched": ROTARY | {"rotary_base": 1e9, "rope_scaling": 8.0},
    "rotary, stretched by other constants": ROTARY
    | {
        "rotary_base": 1e9,
        "rope_scaling": 8.0,
        "rope_low_freq_factor": 0.5,
        "rope_high_freq_factor": 9.0,
        "rope_original_length": 50,
    },
    "yarn": ROTARY | {"rotary_base": 1e4, **YARN},
    "longrope, short": ROTARY | LONGROPE | {"rope_original_length": 10},
    "longrope, long": ROTARY | LONGROPE | {"rope_original_length": 9},
    "yarn, no truncation": ROTARY | {"rotary_base": 1e4, **YARN, "rope_truncation": False},
    "yarn, a step": ROTARY | YARN | {"rope_high_freq_factor": 1.01, "rope_original_length": 6},
    "alibi": {"position_embedding": "alibi"},
    "alibi, six heads": {"position_embedding": "alibi", "num_attention_heads": 6},
    "no positions": {"position_embedding": "none"},
    "RMSNorm": {"normalization": "RMSNorm"},
    "norm weights around 1": {"layernorm_1p": True},
    "RMSNorm around 1": {"normalization": "RMSNorm", "layernorm_1p": True},
    "epsilon": {"norm_epsilon": 0.1},
    "normed embedding": {"embed_layernorm": True},
    "residual behind the norms": {"residual_after_norm": True},
    "parallel residual": {"parallel_residual": True},
    "gelu, erf": {"activation": "gelu_erf"},
    "squared relu": {"activation": "squared_relu"},
    "relu": {"activation": "relu"},
    "geglu": {"activation": "geglu"},
    "geglu, tanh": {"activation": "geglu_tanh"},
    "scaled embedding": {"scaled_embedding": True},
    "scaled and normed embedding": {"scaled_embedding": True, "embed_layernorm": True},
    "liglu": {"activation": "liglu"},
    "reglu": {"activation": "reglu"},
    "swiglu": {"activation": "swiglu"},
    "two groups": {"num_query_groups": 2},
    "one group": {"num_query_groups": 1},
    "norms of queries and keys": {"qk_layernorm": True, **ROTARY},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window, all but the first layer": {"window": 3, "full_attention_layers": (1,)},
    "window and alibi": {"window": 4, "position_embedding": "alibi"},
    "no layer scaling": {"query_key_layer_scaling": False},
    "own head": {"tied_embeddings": False},
    "no biases": {"linear_bias": False, "qkv_bias": False},
    "bias of q, k, v alone": {"linear_bias": False},
    "biases of attention alone": {"linear_bias": False, "attention_bias_apart": True},
    "biases of the MLP alone": {"qkv_bias": False, "attention_bias_apart": True},
    "scores divided by another number": {"query_scalar": 50.0},
    "capped scores": {"attention_softcap": 0.5},
    "capped scores and alibi": {"attention_softcap": 0.5, "position_embedding": "alibi"},
    "sinks": {"softmax_type": "learnable"},
    "sinks of zero": {"softmax_type": "off-by-one"},
    "sinks beside capped scores, alibi and windows": {
        **{"softmax_type": "learnable", "attention_softcap": 0.5, "num_query_groups": 2},
        **{"position_embedding": "alibi", "window": 4, "full_attention_layers": (2,)},
    },
    "quick gelu": {"activation": "quick_geglu"},
    "clamped gates": {"activation": "swiglu", "glu_clamp": 0.2},
    "shifted pairs": {"activation": "quick_geglu", "glu_offset": 1.0, "glu_clamp": 0.3},
    "capped logits": {"logit_softcap": 2.0},
    "capped logits of an own head": {"logit_softcap": 2.0, "tied_embeddings": False},
    "sandwich norms": {"sandwich_norm": True},
    "sandwich norms side by side": {"sandwich_norm": True, "parallel_residual": True},
    "sandwich norms, residual behind the others": {
        "sandwich_norm": True,
        "residual_after_norm": True,
    },
    "another base in the window": ROTARY
    | {"window": 4, "full_attention_layers": (2,), "rotary_local_base": 50.0},
    "stretched but in the window": ROTARY
    | {"rotary_interpolation": 3.0, "window": 4, "full_attention_layers": (1,)}
    | {"rotary_local_base": 10000.0},
    "yarn but in the window": ROTARY
    | {"rotary_base": 1e4, **YARN, "window": 4, "full_attention_layers": (1,)}
    | {"rotary_local_base": 10000.0},
    "layers without rotary positions": ROTARY | {"unrotated_layers": (2,)},
    "multiplied embedding": {"embedding_multiplier": 3.0},
    "multiplied outputs": {"residual_multiplier": 0.3},
    "multiplied outputs side by side": {"residual_multiplier": 0.3, "parallel_residual": True},
    "divided logits": {"logit_divisor": 4.0, "logit_softcap": 2.0},
    "divided logits of an own head": {"logit_divisor": 4.0, "tied_embeddings": False},
    "norms of outputs alone": {"sandwich_norm": True, "input_norm": False},
    "norms of all queries and keys": ACROSS | ROTARY,
    "norms of all queries and keys around 1": ACROSS | {"layernorm_1p": True, "linear_bias": False},
    "gemma 2": GEMMA_2,
    "gemma 3": GEMMA_3,
    "llama": LLAMA,
    "all at once": LLAMA | {"qk_layernorm": True, "embed_layernorm": True, "window": 3},
}
TOLERANCE = {"atol": 1e-9, "rtol": 1e-7}
ROTARY_TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}  # angles are 32-bit numbers


def network(group, spec):
    """Return ours in float64, with norms and biases that are not all ones and zeros."""
    model = SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=0.3, num_layers=spec.num_layers)
    model.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def documents(spec):
    """Return tokens whose positions start again in the middle, and who sees whom."""
    torch.manual_seed(2)
    s = spec.seq_length
    tokens = torch.randint(spec.vocabulary.vocab_size, (2, s))
    positions = torch.arange(s).expand(2, s).clone()
    starts = torch.zeros_like(positions)
    starts[0, 4:], starts[1, 7:] = 4, 7
    stops = positions + 1
    spans = torch.stack([starts, stops], -1)
    keys = torch.arange(s)
    seen = (starts[..., None] <= keys) & (keys < stops[..., None])
    return tokens, positions - starts, spans, seen


def require_equal(group, spec, inputs, seen):
    model = network(group, spec)
    tokens, positions = inputs["tokens"], inputs["positions"]
    names, parameters = zip(*model.named_parameters(), strict=True)
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    tolerance = ROTARY_TOLERANCE if spec.positions.rotary_dim else TOLERANCE
    logits = model(inputs)
    expected = plain_logits(dict(zip(names, copies, strict=True)), spec, tokens, positions, seen)
    torch.testing.assert_close(logits, expected, **tolerance)
    labels = tokens.flatten()
    ours = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels), parameters)
    theirs = torch.autograd.grad(F.cross_entropy(expected.flatten(0, 1), labels), copies)
    for name, own, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(own, other, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 0, f"{name} has no effect: the test could not fail"


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_logits_and_gradients_are_those_of_the_network_spelled_out(group, changes):
    spec = tiny_spec(**(SIZES | changes))
    tokens, positions, spans, seen = documents(spec)
    require_equal(group, spec, batch_of(tokens, positions, spans), seen)
    causal = torch.ones(10, 10, dtype=torch.bool).tril().expand(2, 10, 10)
    # Without spans documents see each other; positions that start again count nevertheless.
    require_equal(group, spec, batch_of(tokens, positions), causal)


def test_every_option_changes_the_network(group):
    """Except what only says how numbers are kept: else an option could do nothing."""
    tokens, positions, spans, _ = documents(tiny_spec(**SIZES))
    seen = {}
    for name, changes in OPTIONS.items():
        logits = network(group, tiny_spec(**(SIZES | changes)))(batch_of(tokens, positions, spans))
        seen.setdefault(tuple(logits.flatten().tolist()), []).append(name)
    assert [names for names in seen.values() if len(names) > 1] == [
        ["plain", "norm weights around 1", "no layer scaling"],
        ["RMSNorm", "RMSNorm around 1"],
    ]


@pytest.mark.parametrize(
    ("base", "arguments"),
    [
        (PositionEmbedding, {"spec": tiny_spec(), "number": 0}),
        (RMSNorm, {"width": 4, "eps": 1e-5}),
    ],
)
def test_a_part_of_a_plugin_gets_its_flags_without_a_constructor_of_its_own(base, arguments):
    part = type("Part", (base,), {})(**arguments, flags="steep")
    assert part.flags == "steep"
