"""LoRA adapters of a checkpoint: merged into its weights, and left out of its network."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.linear import DOWN, UP, is_adapter


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the network without LoRA adapters."""
    return replace(spec, lora=None)


def merge_adapters(spec: ModelSpec, checkpoint: FullCheckpoint) -> FullCheckpoint:
    """Replace each weight W that has an adapter by W + alpha / rank B A, computed in fp32 when read."""
    if spec.lora is None:
        return checkpoint
    makers: dict[str, Callable[[], ParameterState]] = {
        name: partial(_merge_adapter, checkpoint, name, spec.lora.scale)
        for name in checkpoint.parameters
        if not is_adapter(name)
    }
    return replace(checkpoint, parameters=LazyParameters(makers))


def _merge_adapter(checkpoint: FullCheckpoint, name: str, scale: float) -> ParameterState:
    stem = name.removesuffix("weight")
    if f"{stem}{DOWN}" not in checkpoint.parameters:
        return checkpoint.parameters[name]
    weight, down, up = (
        checkpoint.parameters[stem + part].weight.all().float() for part in ("weight", DOWN, UP)
    )
    return ParameterState(weight=wrap_full_tensor(weight + scale * (up @ down)))
