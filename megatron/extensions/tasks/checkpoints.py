"""Heads of downstream tasks in config.json: their labels, and BERTs and decoders with such a head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import Family, HuggingFaceConfig
from megatron.checkpointing.hugging_face.families.registry import DECODERS
from megatron.common.registry import FAMILIES
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values
from megatron.extensions.bert.checkpoints import (
    ENCODER,
    MEGATRON_BERT,
    POOLER,
    encoder_needs,
    encoder_values,
)
from megatron.extensions.tasks.flags import HeadSpec

_MOST_QUERY_TOKENS = 64  # default of --max-query-length

_LABEL_KEYS: Mapping[str, Callable[[ModelSpec], Any]] = {
    "id2label": lambda spec: dict(enumerate(_label_names(spec))),
    "label2id": lambda spec: {name: i for i, name in enumerate(_label_names(spec))},
}
"""Entries of config.json about labels."""

_CLASS_KEYS: Mapping[str, Callable[[ModelSpec], Any]] = {
    **_LABEL_KEYS,
    "problem_type": lambda spec: (
        "regression" if spec.part(HeadSpec).num_outputs == 1 else "single_label_classification"
    ),
}
"""Entries of config.json about classes of texts, or about a regression."""


def _label_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the outputs of a head; by default transformers' names."""
    head = spec.part(HeadSpec)
    return head.labels or tuple(f"LABEL_{i}" for i in range(head.num_outputs))


def _labels(config: HuggingFaceConfig) -> list[str]:
    """Return the labels in config.json, in the order of their ids."""
    names = {int(i): str(name) for i, name in config["id2label"].items()}
    return [names[i] for i in sorted(names)]


def _class_values(config: HuggingFaceConfig) -> Values:
    """Return the settings of a classification of texts, or of a regression."""
    if len(config["id2label"]) == 1:
        return {"task": "STS-B"}
    return {"task": "text-classification", "labels": _labels(config)}


def _class_script(config: HuggingFaceConfig) -> str:
    return "" if len(config["id2label"]) == 1 else "tasks/text_classification.py"


def _query_values(length: int) -> Values:
    """Return the setting of the longest question, which has to leave room for a context."""
    return {"max_query_length": max(1, min(_MOST_QUERY_TOKENS, length // 2))}


def _decoder_classifier(family: Family) -> Family:
    """Return the architecture with a head on the last token instead of logits of tokens."""
    decoder = {ours: theirs for ours, theirs in family.network.items() if ours != "output_layer"}
    stem = family.architecture.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    return replace(
        family,
        architecture=f"{stem}ForSequenceClassification",
        auto_class="AutoModelForSequenceClassification",
        keys={**family.keys, **_CLASS_KEYS},
        values_of=lambda config: {**family.values_of(config), **_class_values(config)},
        needs=lambda spec: {
            **family.needs(spec),
            "num_outputs": (spec.part(HeadSpec).num_outputs or 1,),
            "labels": None,
        },
        network={**decoder, "classification_head": "score"},
        objective="gpt-classification",
        script_of=_class_script,
    )


def _downstream(
    task: str,
    *,
    objective: str,
    values: Callable[[HuggingFaceConfig], Values],
    needs: Callable[[ModelSpec], Allowed],
    network: Mapping[str, str],
    keys: Mapping[str, Callable[[ModelSpec], Any]] = MappingProxyType({}),
    **others: Any,
) -> Family:
    """Return the architecture with the head of a downstream task.

    Args:
        task: in the names of the classes of transformers.
        values: settings of the task, for config.json.
        needs: values of the fields of the head.
        network: modules of the head.
        keys: entries of config.json about the head.
        others: fields of the architecture.
    """
    return replace(
        MEGATRON_BERT,
        architecture=f"MegatronBertFor{task}",
        auto_class=f"AutoModelFor{task}",
        keys={**MEGATRON_BERT.keys, **keys},
        values_of=lambda config: {**encoder_values(config), **values(config)},
        needs=lambda spec: {
            **encoder_needs(spec),
            "binary_head": (False,),
            "num_token_types": (2,),
            "num_outputs": (spec.part(HeadSpec).num_outputs or 1,),
            "num_choices": (1,),
            "labels": None,
            "head_dropout": None,
            **needs(spec),
        },
        network={**ENCODER, **network},
        objective=objective,
        computes=lambda spec: spec,
        **others,
    )


_BERTS = (
    _downstream(
        "TokenClassification",
        objective="token-classification",
        values=lambda config: {
            **{"task": "token-classification", "head_layers": 1, "labels": _labels(config)}
        },
        needs=lambda spec: {"head_layers": (1,), "labels": (spec.part(HeadSpec).labels or ("O",),)},
        network={"classification_head.0": "classifier"},
        keys=_LABEL_KEYS,
    ),
    _downstream(
        "QuestionAnswering",
        objective="question-answering",
        values=lambda _: {"task": "question-answering", "head_layers": 1},
        needs=lambda _: {"head_layers": (1,), "labels": ((),), "num_outputs": (2,)},
        network={"classification_head.0": "qa_outputs"},
        values_for=_query_values,
    ),
    _downstream(
        "SequenceClassification",
        objective="classification",
        values=_class_values,
        needs=lambda _: {"head_layers": (0,)},
        network={**POOLER, "classification_head": "classifier"},
        keys=_CLASS_KEYS,
        script_of=_class_script,
    ),
    _downstream(
        "MultipleChoice",
        objective="multiple-choice",
        values=lambda _: {"task": "RACE"},
        needs=lambda spec: {
            "head_layers": (0,),
            "num_outputs": (1,),
            "num_choices": (max(2, spec.part(HeadSpec).num_choices),),
        },
        network={**POOLER, "classification_head": "classifier"},
    ),
)
"""Architectures with the head of a downstream task, those with a head on each token in front."""


@FAMILIES.register("labelled-tasks")
def with_heads() -> tuple[Family, ...]:
    """Return the architectures with the head of a downstream task, of BERTs and of decoders."""
    return (*_BERTS, *map(_decoder_classifier, DECODERS))
