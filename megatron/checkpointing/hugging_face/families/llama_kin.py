"""Networks that differ from Llama in one or two options: Seed-OSS, ERNIE 4.5, Phi-3.

Seed-OSS has a bias of attention's output apart from the one of queries, keys and values. ERNIE 4.5 turns
neighbouring features of a head. Phi-3 and Phi-4 have queries, keys and values in one matrix, and gates and
features in another; positions may turn a part of each head.
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


def _phi_needs(spec: ModelSpec) -> Allowed:
    needs: Allowed = {"attention_output_bias": (False,), "window": None, "rotary_dim": None}
    head_dim = spec.hidden_size // spec.attention.num_attention_heads
    unstretched: Allowed = {"rope_scaling": (1.0,), "rotary_interpolation": (1.0,)}
    return {
        **common_needs(spec),
        **needs,
        **unstretched,
        "full_attention_layers": ((),),
        "head_dim": (head_dim,),
    }


def _phi_values(config: HuggingFaceConfig) -> Values:
    window = window_values(config.get("sliding_window"), ["sliding_attention"])
    return {**common_values(config), "disable_bias_linear": True, **window}


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
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys={
        **KEYS,
        "partial_rotary_factor": lambda spec: spec.positions.rotary_dim / spec.attention.head_dim,
        "sliding_window": window_or_none,
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
