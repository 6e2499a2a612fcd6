"""Precision (dtypes and loss scale): flags, resolution and checks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.parallelism.deepspeed_json import OwnedKey, given_keys
from megatron.config.parsing.declaration import setting
from megatron.config.parsing.json_tree import value_at


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtype and loss scale; fp32 without --fp16 and --bf16."""

    fp16: bool = False
    """Compute in 16-bit floats and scale the loss, so that small gradients survive (GPUs only)."""

    bf16: bool = False
    """Compute in bfloat16; gradients are accumulated and reduced in 32-bit floats."""

    loss_scale: float | None = None
    """Constant loss scale in fp16 (default: 0, a dynamic loss scale)."""

    initial_loss_scale: float | None = None
    """Start of the dynamic loss scale, a power of two (default: the JSON's, or 2**32)."""

    min_loss_scale: float | None = setting(None, ds_key="fp16.min_loss_scale")
    """Least dynamic loss scale (default: the JSON's, or 1)."""

    loss_scale_window: float | None = setting(None, ds_key="fp16.loss_scale_window")
    """Steps without overflow after which the loss scale doubles (default: the JSON's, or 1000)."""

    hysteresis: int | None = setting(None, ds_key="fp16.hysteresis")
    """Overflows after which the loss scale is halved (default: the JSON's, or 2)."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Add up and reduce gradients in 32-bit floats in fp16 too; bf16 and fp32 always do."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the matrix products of attention and MLP in fp8, with --bf16: e4m3, or hybrid with e5m2
    for gradients. Needs torchao and a GPU of compute capability 8.9 or newer."""

    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scales of fp8 tensors: one for each tensor, or for each row and column (e4m3 alone)."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Dtypes of weights, activations and sums of gradients."""

    dtype: Literal["fp32", "fp16", "bf16"]
    fp32_gradients: bool  # whether gradients are added up and reduced in 32 bits

    @property
    def is_mixed(self) -> bool:
        """Whether there are 32-bit master weights of 16-bit weights."""
        return self.dtype != "fp32"


def plan_precision(precision: PrecisionConfig) -> PrecisionPlan:
    """Return the dtypes of weights and of gradient sums."""
    return PrecisionPlan(
        dtype="fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32",
        fp32_gradients=precision.accumulate_allreduce_grads_in_fp32 or not precision.fp16,
    )


def fp8_problems(
    precision: PrecisionConfig, *, device: str, zero_stage: int, has_experts: bool
) -> Iterator[str]:
    """Yield every reason why linear layers cannot compute in fp8."""
    if precision.fp8_format is None:
        if precision.fp8_recipe != "tensorwise":
            yield f"--fp8-recipe {precision.fp8_recipe} is for fp8: write --fp8-format too"
        return
    flag = f"--fp8-format {precision.fp8_format}"
    if device == "cpu":
        yield f"{flag} needs a GPU and this run is on CPUs: leave the flag out"
    if not precision.bf16:
        yield f"{flag} goes with bfloat16 weights: write --bf16"
    if precision.fp8_recipe == "rowwise" and precision.fp8_format != "e4m3":
        yield f"--fp8-recipe rowwise has gradients in e4m3 too: write --fp8-format e4m3, not {flag}"
    if zero_stage == 3:
        yield f"{flag} would keep the weights that ZeRO stage 3 gathers: write --zero-stage 2 or less"
    if has_experts:
        yield f"{flag} is not for experts, whose products have few rows: leave it out"


def precision_keys(precision: PrecisionConfig, user: Mapping[str, Any]) -> list[OwnedKey]:
    """Return the keys of DeepSpeed's JSON that the flags of precision own.

    Flags that are not given own nothing.
    """
    keys = [
        OwnedKey("fp16.enabled", "--fp16", precision.fp16),
        OwnedKey("bf16.enabled", "--bf16", precision.bf16),
    ]
    if precision.accumulate_allreduce_grads_in_fp32 and (precision.fp16 or precision.bf16):
        flag = "--accumulate-allreduce-grads-in-fp32"
        keys += [
            OwnedKey("data_types.grad_accum_dtype", flag, "fp32"),
            OwnedKey("communication_data_type", flag, "fp32"),
        ]
    if not precision.fp16:
        return keys
    if precision.loss_scale is not None and not _is_first_power(precision, user):
        keys.append(OwnedKey("fp16.loss_scale", "--loss-scale", precision.loss_scale))
    if precision.initial_loss_scale is not None:
        # One below 1 is refused by precision_problems.
        power = round(math.log2(max(precision.initial_loss_scale, 1)))
        keys.append(
            OwnedKey("fp16.initial_scale_power", "the power of --initial-loss-scale", power)
        )
    return [*keys, *given_keys(precision)]


def _is_first_power(precision: PrecisionConfig, user: Mapping[str, Any]) -> bool:
    """Whether --loss-scale repeats the power of two at which the JSON's moving scale starts.

    Scripts in use have --loss-scale 12 with {"loss_scale": 0, "initial_scale_power": 12}. A
    constant scale of 12 would be of no use, and is not what they have ever run with.
    """
    return (
        value_at(user, "fp16.loss_scale") == 0
        and value_at(user, "fp16.initial_scale_power") == precision.loss_scale
    )


def precision_notices(
    precision: PrecisionConfig, user: Mapping[str, Any], *, compiles: bool
) -> Iterator[str]:
    """Yield notices about the interpretation of the flags.

    Args:
        compiles: whether torch.compile generates the code of layers.
    """
    if precision.fp8_format and not compiles:
        yield (
            f"--fp8-format {precision.fp8_format} without --compile: the largest value, the scale and "
            "the cast of each operand are kernels of their own, which usually makes steps slower than "
            "in bf16; add --compile, which joins them"
        )
    if precision.fp16:
        if precision.loss_scale is not None and _is_first_power(precision, user):
            yield (
                f"--loss-scale {precision.loss_scale:g} is read as fp16.initial_scale_power of the "
                f"JSON: the loss scale is dynamic and starts at {2**precision.loss_scale:g}"
            )
        return
    for flag, value in (
        ("--loss-scale", precision.loss_scale),
        ("--initial-loss-scale", precision.initial_loss_scale),
        ("--min-loss-scale", precision.min_loss_scale),
        ("--loss-scale-window", precision.loss_scale_window),
        ("--hysteresis", precision.hysteresis),
    ):
        if value is not None:
            yield f"{flag} {value:g} has no effect: only --fp16 scales its loss"


def precision_problems(precision: PrecisionConfig, *, device: str) -> Iterator[str]:
    """Yield every reason why `device` cannot compute in this dtype."""
    if precision.fp16 and precision.bf16:
        yield "--fp16 and --bf16 exclude each other: give one of them"
    elif precision.fp16 and device == "cpu":
        yield "--fp16 needs a GPU and this run is on CPUs: write --bf16, or neither for fp32"
    if precision.loss_scale is not None and precision.loss_scale < 0:
        yield f"--loss-scale {precision.loss_scale:g} must be at least 0"
    initial = precision.initial_loss_scale
    if initial is not None and (initial < 1 or not math.log2(initial).is_integer()):
        yield f"--initial-loss-scale {initial:g} must be a power of two, such as 65536"
    for flag, value in (
        ("--min-loss-scale", precision.min_loss_scale),
        ("--loss-scale-window", precision.loss_scale_window),
        ("--hysteresis", precision.hysteresis),
    ):
        if value is not None and (value < 1 or value != int(value)):
            yield f"{flag} {value:g} must be an integer of at least 1"
