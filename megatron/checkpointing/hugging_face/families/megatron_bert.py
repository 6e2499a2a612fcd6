"""MegatronBert: BERT with norms in front of sublayers, the heads of pretraining and of tasks."""

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


def _needs_of_task(spec: ModelSpec, *, layers: int = 0, outputs: int = 0) -> Allowed:
    """Return the values of a network with the head of a task.

    Args:
        layers: of the head on each token; 0 for a head on the first one.
        outputs: of the head; 0 for any number.
    """
    return {
        "architecture": ("bert",),
        "num_token_types": (2,),
        "num_outputs": (outputs or max(1, spec.num_outputs),),
        "head_layers": (layers,),
        "activation": ("gelu_tanh", "gelu_erf"),
    }


def _needs_of_choices(spec: ModelSpec) -> Allowed:
    """Return the values of a network that chooses among several texts."""
    choices = (max(2, spec.num_choices),)
    return {**_needs_of_task(spec, outputs=1), "num_choices": choices}


def _needs_of_labels(spec: ModelSpec) -> Allowed:
    """Return the values of a network that labels tokens, which has names of the labels."""
    return _needs_of_task(spec, layers=1, outputs=len(spec.labels) or -1)


def _needs_of_answers(spec: ModelSpec) -> Allowed:
    """Return the values of a network that scores starts and ends, which have no labels."""
    return _needs_of_task(spec, layers=1, outputs=-1 if spec.labels else 2)


def _labels(spec: ModelSpec) -> dict[str, str]:
    """Return the names of the outputs by their numbers."""
    names = spec.labels or tuple(f"LABEL_{i}" for i in range(spec.num_outputs))
    return {str(number): name for number, name in enumerate(names)}


def _label_ids(spec: ModelSpec) -> dict[str, int]:
    return {name: int(number) for number, name in _labels(spec).items()}


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

_ENCODER = {
    ours: theirs
    for ours, theirs in MEGATRON_BERT.network.items()
    if not ours.startswith(("lm_head", "binary_head", "output_layer"))
}
_WITHOUT_POOLER = {ours: theirs for ours, theirs in _ENCODER.items() if ours != "pooler.dense"}
_KEYS = {**MEGATRON_BERT.keys, "id2label": _labels, "label2id": _label_ids}

MEGATRON_BERT_TASKS = (
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForTokenClassification",
        keys=_KEYS,
        needs=_needs_of_labels,
        network={**_WITHOUT_POOLER, "classification_head.0": "classifier"},
    ),
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForQuestionAnswering",
        needs=_needs_of_answers,
        network={**_WITHOUT_POOLER, "classification_head.0": "qa_outputs"},
    ),
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForSequenceClassification",
        keys=_KEYS,
        needs=_needs_of_task,
        network={**_ENCODER, "classification_head": "classifier"},
    ),
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForMultipleChoice",
        needs=_needs_of_choices,
        network={**_ENCODER, "classification_head": "classifier"},
    ),
)
"""The networks of downstream tasks."""
