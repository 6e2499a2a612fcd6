"""BLOOM: ALiBi and a norm after the token embedding; fused QKV in our order of rows."""

from operator import attrgetter

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _needs(spec: ModelSpec) -> Allowed:
    return {
        "position_embedding": ("alibi",),
        "embed_layernorm": (True,),
        "activation": ("gelu_tanh",),
        "ffn_hidden_size": (4 * spec.hidden_size,),
    }


def _values_of(config: HuggingFaceConfig) -> Values:
    return {
        # ALiBi has no longest sequence; BLOOM was trained with 2048 tokens.
        "max_position_embeddings": config.get("seq_length") or 2048,
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
    }


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    keys={
        "n_layer": "num_layers",
        "hidden_size": "hidden_size",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "norm_epsilon",
        "apply_residual_connection_post_layernorm": "residual_after_norm",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "seq_length": attrgetter("positions.max_position_embeddings"),
    },
    values_of=_values_of,
    needs=_needs,
    network={
        "embedding.word_embeddings": "transformer.word_embeddings",
        "embedding.word_embeddings.norm": "transformer.word_embeddings_layernorm",
        "final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    layer={
        name: name
        for name in (
            *("input_layernorm", "post_attention_layernorm"),
            *("self_attention.query_key_value", "self_attention.dense"),
            *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        )
    },
    layers="transformer.h.{}.",
)
