"""A checkpoint without the layers of multi-token prediction, for formats that have none."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
)
from megatron.config.network.model_spec import ModelSpec


def without_predictions(spec: ModelSpec) -> ModelSpec:
    """Return the network alone, which computes the same logits of the next token."""
    return replace(spec, prediction=None)


def drop_predictions(spec: ModelSpec, full: FullCheckpoint) -> FullCheckpoint:
    """Return the weights of `without_predictions(spec)` by its names, each read on access."""
    alone = without_predictions(spec)
    names, of_alone = ParameterNames.of(spec), ParameterNames.of(alone)

    def read(name: str) -> ParameterState:
        parameters: Mapping[str, ParameterState] = full.parameters
        return parameters[names.parameter(of_alone.module(name))]

    return replace(
        full,
        parameters=LazyParameters({name: partial(read, name) for name in parameters_of(alone)}),
    )
