"""Labels of heads of downstream tasks in config.json, and decoders with a classification head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpointing.hugging_face.families.family import Family, HuggingFaceConfig
from megatron.config.network.model_spec import ModelSpec

LABEL_KEYS: Mapping[str, Callable[[ModelSpec], Any]] = {
    "id2label": lambda spec: dict(enumerate(label_names(spec))),
    "label2id": lambda spec: {name: i for i, name in enumerate(label_names(spec))},
}
"""Entries of config.json about labels."""

CLASS_KEYS: Mapping[str, Callable[[ModelSpec], Any]] = {
    **LABEL_KEYS,
    "problem_type": lambda spec: (
        "regression" if spec.num_outputs == 1 else "single_label_classification"
    ),
}
"""Entries of config.json about classes of texts, or about a regression."""


def label_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the outputs of a head; by default those of transformers."""
    return spec.labels or tuple(f"LABEL_{i}" for i in range(spec.num_outputs))


def label_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of the labels in config.json, in the order of their ids."""
    names = {int(i): str(name) for i, name in config["id2label"].items()}
    return ["--labels", *(names[i] for i in sorted(names))]


def class_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of a classification of texts, or of a regression."""
    if len(config["id2label"]) == 1:
        return ["--task", "STS-B"]
    return ["--task", "text-classification", *label_flags(config)]


def decoder_classifier(family: Family) -> Family:
    """Return the architecture with a head on the last token instead of logits of tokens."""
    decoder = {ours: theirs for ours, theirs in family.network.items() if ours != "output_layer"}
    stem = family.architecture.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    return replace(
        family,
        architecture=f"{stem}ForSequenceClassification",
        auto_class="AutoModelForSequenceClassification",
        keys={**family.keys, **CLASS_KEYS},
        flags_of=lambda config: [*family.flags_of(config), *class_flags(config)],
        needs=lambda spec: {
            **family.needs(spec),
            "num_outputs": (spec.num_outputs or 1,),
            "labels": None,
        },
        network={**decoder, "classification_head": "score"},
        objective="gpt-classification",
    )
