"""Nemotron: LayerNorm around 1, squared ReLU, rotary positions of a share of each head."""

from operator import attrgetter

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    PLAIN_ACTIVATIONS,
    Family,
    HuggingFaceConfig,
    activation_values,
    bias_values,
)
from megatron.checkpointing.hugging_face.families.llama import (
    ATTENTION,
    KEYS,
    NAMES,
    common_needs,
    group_values,
)
from megatron.checkpointing.hugging_face.families.rotary import rotary_values
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _needs(spec: ModelSpec) -> Allowed:
    return {
        **common_needs(spec),
        "normalization": ("LayerNorm",),
        "layernorm_1p": (True,),
        "activation": PLAIN_ACTIVATIONS,
        "hidden_size": None,
        "rotary_dim": None,
        "linear_bias": None,
    }


def _values_of(config: HuggingFaceConfig) -> Values:
    return {
        **group_values(config),
        **rotary_values(config),
        **{"apply_layernorm_1p": True, "hidden_dropout": 0},
        **activation_values(config["hidden_act"], gated=False),
        **bias_values(attention=config["attention_bias"], mlp=config["mlp_bias"]),
    }


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys={
        **{key: entry for key, entry in KEYS.items() if key != "rms_norm_eps"},
        "norm_eps": "norm_epsilon",
        "partial_rotary_factor": lambda spec: spec.positions.rotary_dim / spec.attention.head_dim,
        "attention_bias": attrgetter("attention_output_bias"),
        "mlp_bias": attrgetter("mlp.linear_bias"),
    },
    values_of=_values_of,
    needs=_needs,
    norms_around_one=True,
    **{
        **NAMES,
        "layer": {
            **ATTENTION,
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
    },
)
