"""A network of ours without its weights, and with those of a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.checkpointing.resharding.sharded_tensor import WholeCheckpoint
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec
from megatron.model.gpt import gpt_layers
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream

_TUPLES = ("num_experts", "lora_target_modules", "full_attention_layers")  # lists in JSON


def saved_spec(model: Mapping[str, Any]) -> ModelSpec:
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
def filled_model(
    spec: ModelSpec, whole: WholeCheckpoint, *, rounded_to: torch.dtype = torch.float32
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


def require_parameters(wanted: Mapping[str, nn.Parameter], whole: WholeCheckpoint) -> None:
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
