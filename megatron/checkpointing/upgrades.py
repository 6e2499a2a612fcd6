"""Upgrade the content of older manifests to this version, with the meaning for their run."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from megatron.common.registry import OBJECTIVES
from megatron.config.data.corpora import DataPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.config.data.tokenizer import with_sentencepiece_form
from megatron.config.objectives import declaration_of


def _with_sentencepiece_form(content: dict[str, Any]) -> dict[str, Any]:
    """Add the form of SentencePiece tokens, which older manifests do not have."""
    config = content["config"]
    if "tokenizer" not in config:
        return content
    tokenizer = with_sentencepiece_form(config["tokenizer"], is_legacy=True)
    return {**content, "config": {**config, "tokenizer": tokenizer}}


def _without_no_sentinels(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out a number of sentinels of 0, which older runs recorded for an extension's default."""
    config, objective = content["config"], content["plan"].get("objective", {}).get("name", "gpt")
    has_default = OBJECTIVES.extension_with(objective) and declaration_of(objective).extra_ids
    if not has_default or config.get("tokenizer", {}).get("vocab_extra_ids") != 0:
        return content
    tokenizer = {**config["tokenizer"], "vocab_extra_ids": None}
    return {**content, "config": {**config, "tokenizer": tokenizer}}


def _with_softmax(content: dict[str, Any]) -> dict[str, Any]:
    """Add whether padded columns take part in the softmax, as they did in older runs."""
    plan = content["plan"]
    model = plan.get("model", {})
    if not {"vocab_size", "padded_vocab_size"} <= {*model}:
        return content
    has_padding = model["padded_vocab_size"] > model["vocab_size"]
    model = {"padded_vocab_in_softmax": has_padding, **model}
    return {**content, "plan": {**plan, "model": model}}


def _with_sample_order(content: dict[str, Any]) -> dict[str, Any]:
    """Add the sample order, and the surplus of blends, that runs had before there were flags."""
    plan = content["plan"]
    if "data" not in plan:
        return content
    data = {"sample_order": "bigscience", "blend_surplus": 0.005, **plan["data"]}
    return {**content, "plan": {**plan, "data": data}}


def _with_plans_of_extensions(content: dict[str, Any]) -> dict[str, Any]:
    """Move plans of extensions, which up to version 1.0 stood among the parts of every run."""
    plan = content["plan"]
    objective = plan.get("objective", {})
    if "name" not in objective or "own" in objective:
        return content
    plan = {**declaration_of(objective["name"]).upgrade_1_0(plan)}
    for name, part in (("objective", ObjectivePlan), ("data", DataPlan)):
        known = {each.name for each in fields(part)}
        plan[name] = {key: value for key, value in plan.get(name, {}).items() if key in known}
    return {**content, "plan": plan}


UPGRADES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    _with_sentencepiece_form,
    _without_no_sentinels,
    _with_softmax,
    _with_sample_order,
    _with_plans_of_extensions,
)
"""In their order."""
