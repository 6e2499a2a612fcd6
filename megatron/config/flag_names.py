"""Which flag a field of the plan comes from, so that messages name flags."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron.config.config import SECTIONS, all_sections
from megatron.config.parsing.declaration import Flag, flags_of

_NO_FLAG = (
    "model.vocab_size",
    "model.num_experts",
    "training.max_nan_steps",
)
"""Decisions that are more than the flag of their name."""

_IN_TOKENS = {
    "schedule.warmup": "--lr-warmup-tokens",
    "schedule.decay": "--lr-decay-tokens",
}
"""Decisions that another flag has where the learning rate counts tokens."""


_DTYPES = "--bf16, --fp16"


_WRITTEN = {("model.position_embedding", "learned"): "learned_absolute"}
"""Values of flags by field and decision, where a decision has another name than the value."""


def flag_and_value(field: str, value: Any, *, in_tokens: bool = False) -> tuple[str, Any]:
    """Return the flag that a decision comes from, or that would decide so, and its value there.

    Where no single flag has the value, that is the field itself; of the dtype its flags.

    Args:
        field: section and name in a Plan, such as "model.head_dim".
        value: its value, as it comes back from JSON; None where there is none.
        in_tokens: whether the learning-rate schedule counts tokens, not samples.
    """
    flag, is_off = _flag_of(field)
    if flag is None:
        return _DTYPES if field == "precision.dtype" else field, value
    if is_off:
        return flag, None if value is None else _switch_text(not value)
    flag = _IN_TOKENS.get(field, flag) if in_tokens else flag
    if isinstance(value, bool):
        return flag, _switch_text(value)
    return flag, _WRITTEN.get((field, value), value) if isinstance(value, str) else value


def flag_of(field: str) -> str | None:
    """Return the flag that a decision comes from; None if there is no single one."""
    return _flag_of(field)[0]


_SET_BY = {
    "architecture": "the script that trained it",
    "rotary_dim": "--rotary-percent",
    "window": "--window-size",
    "activation": "--gelu, --glu-activation, --relu, --squared-relu",
    "qkv_bias": "--add-qkv-bias, --attention-bias",
    "attention_output_bias": "--attention-bias",
    "attention_bias_apart": "--attention-bias",
    "num_experts": "--num-experts",
    "residual_experts": "--mlp-type",
    "router_normalises": "--moe-router-pre-softmax, --topk",
    "num_token_types": "--bert-no-binary-head",
}
"""What sets the fields of which no flag has the value."""


def flag_setting(name: str) -> str:
    """Return the flag that sets a field of ModelSpec, or the field if there is none."""
    return _SET_BY.get(name) or flag_of(f"model.{name}") or name


def is_in_weights(field: str) -> bool:
    """Return whether weights depend on a decision: they do unless its setting declares otherwise."""
    found = _flag_of_decision(field)
    return found is None or found[0].setting.in_weights


def not_in_weights() -> frozenset[str]:
    """Return the decisions of settings of the core that weights do not depend on, without sections."""
    known = _flags_of(tuple(SECTIONS.values())).items()
    return frozenset(
        name.rpartition(".")[2] for name, (flag, _) in known if not flag.setting.in_weights
    )


def _flag_of(field: str) -> tuple[str | None, bool]:
    """Return the flag of a decision, and whether it turns it off."""
    found = None if field in _NO_FLAG else _flag_of_decision(field)
    return (found[0].options[0], found[1]) if found else (None, False)


def _flag_of_decision(field: str) -> tuple[Flag, bool] | None:
    """Return the flag of a decision, and whether it turns it off; None without one."""
    for known in (lambda: SECTIONS, all_sections):  # imports extensions only where they are needed
        flags = _flags_of(tuple(known().values()))
        if found := flags.get(field) or flags.get(field.partition(".")[2]):
            return found
    return None


@cache
def _flags_of(sections: tuple[type, ...]) -> Mapping[str, tuple[Flag, bool]]:
    """Return the flags of decisions, also of decisions that have the name of their setting."""
    found: dict[str, tuple[Flag, bool]] = {}
    for flag in (each for section in sections for each in flags_of(section)):
        is_on = flag.default is True
        is_off = is_on or flag.setting.plan.startswith("not ")
        found |= dict.fromkeys(flag.setting.decisions, (flag, is_off))
        if not is_on:
            found.setdefault(flag.name, (flag, False))
    return found


def _switch_text(switch: bool) -> str:
    return "given" if switch else "left out"
