"""Adapters put into the weights beside which they stand, so that nothing is left of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    unsharded,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.adapters import DOWN, UP, is_adapter


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return the network whose weights `merged` returns."""
    return replace(spec, lora_rank=0, lora_alpha=0.0, lora_dropout=0.0, lora_target_modules=())


def merge_adapters(spec: ModelSpec, whole: FullCheckpoint) -> FullCheckpoint:
    """Return the weights of the network without adapters: W + alpha / rank B A in the place of W.

    The sum is taken in 32 bits; a weight is put together when it is asked for.
    """
    if not spec.lora_rank:
        return whole
    makers: dict[str, Callable[[], ParameterState]] = {
        name: partial(_merged, whole, name, spec.lora_scale)
        for name in whole.parameters
        if not is_adapter(name)
    }
    return replace(whole, parameters=LazyParameters(makers))


def _merged(whole: FullCheckpoint, name: str, scale: float) -> ParameterState:
    stem = name.removesuffix("weight")
    if f"{stem}{DOWN}" not in whole.parameters:
        return whole.parameters[name]
    weight, down, up = (
        whole.parameters[stem + part].weight.all().float() for part in ("weight", DOWN, UP)
    )
    return ParameterState(weight=unsharded(weight + scale * (up @ down)))
