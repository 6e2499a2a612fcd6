"""MegatronBert: BERT with norms in front of sublayers, token types, pooler and both heads."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from megatron.checkpointing.hugging_face.families.family import (
    Allowed,
    Family,
    HuggingFaceConfig,
    Modules,
    activation_flags,
    activation_name,
)
from megatron.checkpointing.hugging_face.tensor_mapping import QueriesKeysValues
from megatron.config.network.model_spec import ModelSpec


def _flags_of(config: HuggingFaceConfig) -> Iterator[str]:
    yield from ("--position-embedding-type", "learned_absolute")
    flags = activation_flags(config["hidden_act"], gated=False)
    yield from flags
    if flags == ["--gelu", "tanh"]:  # of the head too
        yield "--openai-gelu"


def _needs(_: ModelSpec) -> Allowed:
    return {
        "architecture": ("bert",),
        "binary_head": (True,),
        "activation": ("gelu_tanh", "gelu_erf"),
    }


def _one_activation(spec: ModelSpec) -> ModelSpec:
    """Return the network with the activation of the MLP in front of the logits too."""
    return replace(
        spec, head_activation="gelu_erf" if spec.activation == "gelu_erf" else "gelu_tanh"
    )


def _qkv(spec: ModelSpec) -> QueriesKeysValues:
    return QueriesKeysValues(groups=spec.num_attention_heads, queries=1, head_dim=spec.head_dim)


MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "type_vocab_size": attrgetter("num_token_types"),
        "hidden_act": activation_name,
        # The default of transformers is 1e-12.
        "layer_norm_eps": "norm_epsilon",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "position_embedding_type": lambda _: "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    },
    flags_of=_flags_of,
    needs=_needs,
    network={
        "embedding.word_embeddings": "bert.embeddings.word_embeddings",
        "embedding.position_embeddings": "bert.embeddings.position_embeddings",
        "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        "final_layernorm": "bert.encoder.ln",
        "pooler.dense": "bert.pooler.dense",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
        "binary_head": "cls.seq_relationship",
        "output_layer": "cls.predictions.decoder",
        "lm_head": "cls.predictions",
    },
    layer={
        "input_layernorm": "attention.ln",
        "self_attention.query_key_value": Modules(
            ("attention.self.query", "attention.self.key", "attention.self.value"), _qkv
        ),
        "self_attention.dense": "attention.output.dense",
        "post_attention_layernorm": "ln",
        "mlp.dense_h_to_4h": "intermediate.dense",
        "mlp.dense_4h_to_h": "output.dense",
    },
    layers="bert.encoder.layer.{}.",
    objective="bert",
    computes=_one_activation,
)
