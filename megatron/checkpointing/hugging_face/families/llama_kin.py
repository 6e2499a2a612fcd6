"""Networks that differ from Llama in one or two options: Seed-OSS, ERNIE 4.5, Phi-3, SmolLM3, Granite.

Seed-OSS has a bias of attention's output apart from the one of queries, keys and values. ERNIE 4.5 turns
neighbouring features of a head. Phi-3 and Phi-4 have queries, keys and values in one matrix, and gates and
features in another; positions may turn a part of each head. SmolLM3 has layers without positions. Granite
multiplies embeddings, scores, what is added to the residual stream, and logits.
"""

from dataclasses import replace
from operator import attrgetter

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.llama import (
    KEYS,
    NAMES,
    common_needs,
    common_values,
    layer_types,
    qkv_mapping,
    window_or_none,
    window_values,
)
from megatron.checkpointing.hugging_face.families.tensor_mapping import (
    GateUp,
    QueriesKeysValues,
    Stacked,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _seed_needs(spec: ModelSpec) -> Allowed:
    return {**common_needs(spec), "linear_bias": None, "qkv_bias": None}


def _seed_values(config: HuggingFaceConfig) -> Values:
    of_input, of_output = config["attention_bias"], config["attention_out_bias"]
    return {
        **common_values(config),
        "hidden_dropout": config["residual_dropout"],
        **bias_values(attention=of_output, mlp=config["mlp_bias"]),
        **({"add_qkv_bias": True} if of_input and not of_output else {}),
    }


def _ernie_needs(spec: ModelSpec) -> Allowed:
    bias = spec.mlp.linear_bias
    needs: Allowed = {"linear_bias": None, "attention_output_bias": (bias,), "qkv_bias": (bias,)}
    return {**common_needs(spec), **needs, "rotary_dim": (spec.attention.head_dim,)}


def _ernie_values(config: HuggingFaceConfig) -> Values:
    bias = bool(config["use_bias"])
    return {**common_values(config), **bias_values(attention=bias, mlp=bias)}


def _turning_neighbours(spec: ModelSpec) -> QueriesKeysValues:
    return replace(qkv_mapping(spec), turns_neighbours=True)


def _smol_needs(spec: ModelSpec) -> Allowed:
    free = dict.fromkeys(("linear_bias", "window", "unrotated_layers"))
    return {**common_needs(spec), **free}


def _smol_values(config: HuggingFaceConfig) -> Values:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    turned = config["no_rope_layers"][: config["num_hidden_layers"]]
    unrotated = ",".join(str(1 - int(turns)) for turns in turned)
    return {
        **common_values(config),
        **bias_values(attention=config["attention_bias"], mlp=config["mlp_bias"]),
        **window_values(window, config["layer_types"]),
        **({} if all(turned) else {"no_rope_freq": f"[{unrotated}]"}),
    }


def _turned_layers(spec: ModelSpec) -> list[int]:
    numbers = range(1, spec.num_layers + 1)
    return [int(number not in spec.positions.unrotated_layers) for number in numbers]


def _granite_needs(spec: ModelSpec) -> Allowed:
    multipliers = ("embedding_multiplier", "residual_multiplier", "logit_divisor", "query_scalar")
    return {**common_needs(spec), **dict.fromkeys(("linear_bias", *multipliers))}


def _granite_values(config: HuggingFaceConfig) -> Values:
    return {
        **common_values(config),
        **bias_values(attention=config["attention_bias"], mlp=config["mlp_bias"]),
        "query_pre_attn_scalar": config["attention_multiplier"] ** -2,
    }


def _score_multiplier(spec: ModelSpec) -> float:
    """Return the factor of the scores, without the rounding of its square and the root of that."""
    return float(f"{spec.attention.scale:.12g}")


def _phi_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"attention_output_bias": (False,), "window": None, "rotary_dim": None}
    head_dim = spec.hidden_size // spec.attention.num_attention_heads
    is_stretched = spec.positions.rope_scaling != 1
    stretching: Allowed = {
        "rotary_interpolation": (1.0,),
        "rope_rule": ("longrope",) if is_stretched else None,
    }
    return {
        **common_needs(spec),
        **needs,
        **stretching,
        "full_attention_layers": ((),),
        "head_dim": (head_dim,),
    }


def _phi_values(config: HuggingFaceConfig) -> Values:
    window = window_values(config.get("sliding_window"), ["sliding_attention"])
    rope = dict(config["rope_parameters"])
    if "short_factor" in rope:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    values = common_values({**config, "rope_parameters": rope})
    return {**values, "disable_bias_linear": True, **window}


def _stacked_qkv(spec: ModelSpec) -> Stacked:
    keys = spec.attention.key_features
    return Stacked(qkv_mapping(spec), (spec.attention.query_features, keys, keys))


def _stacked_gate_up(spec: ModelSpec) -> Stacked:
    return Stacked(GateUp(), (spec.mlp.ffn_hidden_size,) * 2)


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    keys={
        **KEYS,
        "attention_bias": attrgetter("attention.qkv_bias"),
        "attention_out_bias": attrgetter("attention_output_bias"),
        "mlp_bias": attrgetter("mlp.linear_bias"),
        "residual_dropout": attrgetter("hidden_dropout"),
    },
    values_of=_seed_values,
    needs=_seed_needs,
    **NAMES,
)
ERNIE = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    keys={
        **{key: entry for key, entry in KEYS.items() if key != "attention_dropout"},
        "use_bias": attrgetter("mlp.linear_bias"),
    },
    values_of=_ernie_values,
    needs=_ernie_needs,
    **{
        **NAMES,
        "layer": {
            **NAMES["layer"],
            "self_attention.query_key_value": Modules(
                NAMES["layer"]["self_attention.query_key_value"].names, _turning_neighbours
            ),
        },
    },
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys={
        **KEYS,
        "attention_bias": attrgetter("attention_output_bias"),
        "mlp_bias": attrgetter("mlp.linear_bias"),
        "no_rope_layers": _turned_layers,
        "use_sliding_window": lambda spec: bool(spec.attention.window),
        "sliding_window": window_or_none,
        "layer_types": layer_types,
    },
    values_of=_smol_values,
    needs=_smol_needs,
    **NAMES,
)
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys={
        **KEYS,
        "attention_bias": attrgetter("attention_output_bias"),
        "mlp_bias": attrgetter("mlp.linear_bias"),
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "logits_scaling": "logit_divisor",
        "attention_multiplier": _score_multiplier,
    },
    values_of=_granite_values,
    needs=_granite_needs,
    **NAMES,
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys={
        **KEYS,
        "partial_rotary_factor": lambda spec: spec.positions.rotary_dim / spec.attention.head_dim,
        "sliding_window": window_or_none,
        # Its class reads this one alone, not the entry of rope_scaling.
        "original_max_position_embeddings": lambda spec: (
            spec.positions.rope_original_length
            if spec.positions.rope_short_factors
            else spec.positions.max_position_embeddings
        ),
        "resid_pdrop": attrgetter("hidden_dropout"),
        "embd_pdrop": attrgetter("hidden_dropout"),
    },
    values_of=_phi_values,
    needs=_phi_needs,
    **{
        **NAMES,
        "layer": {
            **NAMES["layer"],
            "self_attention.query_key_value": Modules(("self_attn.qkv_proj",), _stacked_qkv),
            "mlp.dense_h_to_4h": Modules(("mlp.gate_up_proj",), _stacked_gate_up),
        },
    },
)
