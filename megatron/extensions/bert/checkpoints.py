"""MegatronBert: BERT with norms in front of sublayers; heads of pretraining and downstream tasks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    activation_flags,
    activation_name,
)
from megatron.checkpointing.hugging_face.tensor_mapping import QueriesKeysValues
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.tasks.checkpoints import CLASS_KEYS, LABEL_KEYS, class_flags, label_flags


def _flags_of(config: HuggingFaceConfig) -> Iterator[str]:
    yield from ("--position-embedding-type", "learned_absolute")
    flags = activation_flags(config["hidden_act"], gated=False)
    yield from flags
    if flags == ["--gelu", "tanh"]:  # of the head too
        yield "--openai-gelu"


def _needs(_: ModelSpec) -> Allowed:
    return {
        "architecture": ("bert",),
        "num_token_types": None,
        "binary_head": (True,),
        "head_activation": None,  # see `computes`
        "activation": ("gelu_tanh", "gelu_erf"),
    }


def _one_activation(spec: ModelSpec) -> ModelSpec:
    """Return the network with the activation of the MLP in front of the logits too."""
    return replace(
        spec, head_activation="gelu_erf" if spec.activation == "gelu_erf" else "gelu_tanh"
    )


def _qkv(spec: ModelSpec) -> QueriesKeysValues:
    return QueriesKeysValues(groups=spec.num_attention_heads, queries=1, head_dim=spec.head_dim)


_ENCODER = {
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "final_layernorm": "bert.encoder.ln",
}
_POOLER = {"pooler.dense": "bert.pooler.dense"}

MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    auto_class="AutoModelForPreTraining",
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
        **_ENCODER,
        **_POOLER,
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


PRETRAINED_BERTS = (
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForMaskedLM",
        auto_class="AutoModelForMaskedLM",
        absent=("pooler.dense", "binary_head"),
    ),
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertModel",
        auto_class="AutoModel",
        absent=("lm_head.dense", "lm_head.layernorm", "lm_head", "output_layer", "binary_head"),
    ),
)
"""Classes with a part of the heads of pretraining, to be read."""


def _downstream(
    task: str,
    *,
    objective: str,
    flags: Callable[[HuggingFaceConfig], list[str]],
    needs: Callable[[ModelSpec], Allowed],
    network: Mapping[str, str],
    keys: Mapping[str, Callable[[ModelSpec], Any]] = MappingProxyType({}),
) -> Family:
    """Return the architecture with the head of a downstream task.

    Args:
        task: in the names of the classes of transformers.
        flags: of the task, for config.json.
        needs: values of the fields of the head.
        network: modules of the head.
        keys: entries of config.json about the head.
    """
    return replace(
        MEGATRON_BERT,
        architecture=f"MegatronBertFor{task}",
        auto_class=f"AutoModelFor{task}",
        keys={**MEGATRON_BERT.keys, **keys},
        flags_of=lambda config: [*_flags_of(config), *flags(config)],
        needs=lambda spec: {
            **_needs(spec),
            "binary_head": (False,),
            "num_token_types": (2,),
            "num_outputs": (spec.num_outputs or 1,),
            "num_choices": (1,),
            "labels": None,
            "head_dropout": None,
            **needs(spec),
        },
        network={**_ENCODER, **network},
        objective=objective,
        computes=lambda spec: spec,
    )


DOWNSTREAM_BERTS = (
    _downstream(
        "TokenClassification",
        objective="token-classification",
        flags=lambda config: [
            *("--task", "token-classification", "--head-layers", "1"),
            *label_flags(config),
        ],
        needs=lambda spec: {"head_layers": (1,), "labels": (spec.labels or ("O",),)},
        network={"classification_head.0": "classifier"},
        keys=LABEL_KEYS,
    ),
    _downstream(
        "QuestionAnswering",
        objective="question-answering",
        flags=lambda _: ["--task", "question-answering", "--head-layers", "1"],
        needs=lambda _: {"head_layers": (1,), "labels": ((),), "num_outputs": (2,)},
        network={"classification_head.0": "qa_outputs"},
    ),
    _downstream(
        "SequenceClassification",
        objective="classification",
        flags=class_flags,
        needs=lambda _: {"head_layers": (0,)},
        network={**_POOLER, "classification_head": "classifier"},
        keys=CLASS_KEYS,
    ),
    _downstream(
        "MultipleChoice",
        objective="multiple-choice",
        flags=lambda _: ["--task", "RACE"],
        needs=lambda spec: {
            "head_layers": (0,),
            "num_outputs": (1,),
            "num_choices": (max(2, spec.num_choices),),
        },
        network={**_POOLER, "classification_head": "classifier"},
    ),
)
"""Architectures with the head of a downstream task, those with a head on each token in front."""
