"""Messages name the flags that a decision comes from."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
from tiny import tiny_plan

from megatron.checkpointing.compare import _COMPARED_SECTIONS
from megatron.common.registry import OBJECTIVES
from megatron.config.config import all_sections
from megatron.config.flag_names import flag_and_value
from megatron.config.objectives import declaration_of
from megatron.config.parsing.declaration import flags_of

PLAN = tiny_plan().to_dict()
FIELDS = [
    f"{part}.{name}" for part in ("model", "parallel", *_COMPARED_SECTIONS) for name in PLAN[part]
]


def decisions(plan, path=""):
    for name, value in plan.items():
        yield f"{path}{name}"
        if isinstance(value, dict):
            yield from decisions(value, f"{path}{name}.")


def decisions_of(kind, path):
    """Yield the decisions in a part of a plan, a dataclass, and in its own parts."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{path}.{field.name}"
        if is_dataclass(hints[field.name]):
            yield from decisions_of(hints[field.name], f"{path}.{field.name}")


def decisions_of_objectives():
    """Yield the decisions in the parts of plans that are objectives' own."""
    for name in OBJECTIVES.with_extensions():
        own = get_type_hints(declaration_of(name).plan)["return"]
        if is_dataclass(own):
            yield from decisions_of(own, "objective.own")


def test_settings_name_decisions_that_exist():
    settings = (flag.setting for each in all_sections().values() for flag in flags_of(each))
    known = {*decisions(PLAN), *decisions_of_objectives()}
    assert {each for setting in settings for each in setting.decisions} <= known


def test_the_network_is_told_by_its_flags():
    fields = [field for field in FIELDS if field.startswith("model.")]
    assert [field for field in fields if not flag_and_value(field, 1)[0].startswith("--")] == [
        "model.vocab_size",
        "model.rotary_dim",
        "model.window",
        "model.num_experts",
        "model.residual_experts",
        "model.router_normalises",
        "model.qkv_layout",
        "model.own_flags",
        "model.mlp_layout",
        "model.num_token_types",
        "model.head_activation",
    ]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model.num_layers", 3, ("--num-layers", 3)),
        ("model.linear_bias", True, ("--disable-bias-linear", "left out")),
        ("model.linear_bias", False, ("--disable-bias-linear", "given")),
        ("model.linear_bias", None, ("--disable-bias-linear", None)),
        ("model.qkv_bias", True, ("--add-qkv-bias", "given")),
        ("model.position_embedding", "learned", ("--position-embedding-type", "learned_absolute")),
        ("precision.dtype", "bf16", ("--bf16, --fp16", "bf16")),
        ("schedule.peak", 0.1, ("--lr", 0.1)),
    ],
)
def test_a_decision_is_told_by_its_flag_or_by_its_name(field, value, expected):
    assert flag_and_value(field, value) == expected
