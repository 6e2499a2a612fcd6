"""A network of ours without its weights, and with those of a checkpoint."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.common.errors import CheckpointError
from megatron.common.version import VERSION
from megatron.config.config import Config
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan import Plan
from megatron.model.gpt import gpt_layers
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import shard_of

_TUPLES = ("num_experts", "lora_target_modules", "full_attention_layers")  # lists in JSON


def spec_of(model: Mapping[str, Any]) -> ModelSpec:
    """Return the network of a manifest's plan.

    Raises:
        CheckpointError: another version wrote it, whose networks have other fields.
    """
    try:
        lists = {name: tuple(model.get(name, ())) for name in _TUPLES}
        return ModelSpec(**{**model, **lists})
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's network is not understood: {error}") from error


def parameters_of(spec: ModelSpec) -> dict[str, nn.Parameter]:
    """Return the parameters of a network by name: shapes and marks, without memory."""
    with torch.device("meta"):
        return dict(_model(spec).named_parameters())


@torch.no_grad()
def load_network(
    spec: ModelSpec, whole: FullCheckpoint, *, rounded_to: torch.dtype = torch.float32
) -> nn.Module:
    """Return the network in 32 bits with the weights of a checkpoint, ready for inference.

    Args:
        rounded_to: the number format that weights pass through.

    Raises:
        CheckpointError: the weights are not those of `spec`.
    """
    model = _model(spec)
    require_parameters(dict(model.named_parameters()), whole)
    for name, parameter in model.named_parameters():
        parameter.copy_(whole.parameters[name].weight.all().to(rounded_to))
    return model.eval()


def require_parameters(wanted: Mapping[str, nn.Parameter], whole: FullCheckpoint) -> None:
    """Refuse a checkpoint that has not the parameters `wanted`, in their shapes.

    Raises:
        CheckpointError: names what is missing, superfluous or of another shape.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    found = {name: parameter.weight.shape for name, parameter in whole.parameters.items()}
    other = sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
    if other:
        told = [f"{name} {found.get(name)} instead of {shapes.get(name)}" for name in other[:5]]
        raise CheckpointError(f"the weights do not fit the network: {', '.join(told)}")


def _model(spec: ModelSpec) -> SequentialModel:
    steps = gpt_layers(spec, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    return SequentialModel(steps)


_BEGINNING = MappingProxyType(
    dict.fromkeys(("iteration", "samples", "tokens", "valid_samples", "skipped"), 0)
)


def manifest_of_import(
    wishes: Config, decided: Plan, state: Mapping[str, int] = _BEGINNING
) -> Manifest:
    """Return it without its files.

    Args:
        wishes: what a run would be asked for that had saved it.
        decided: what that run would have decided.
        state: fields of TrainState; those that are not said are 0.
    """
    shards = {name: shard_of(p) for name, p in parameters_of(decided.model).items()}
    return Manifest(
        state={**_BEGINNING, **state},
        plan=asdict(decided),
        config=asdict(wishes),
        versions={
            "megatron": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        partition_dims={name: shard.dim for name, shard in shards.items() if shard},
        files=(),
    )
