"""Build a network from a checkpoint's spec: parameter shapes, loaded weights, and new manifests."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron.checkpointing.manifest import CONVERTED_FROM, Manifest
from megatron.checkpointing.parameter_names import is_buffer
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.common.version import VERSION
from megatron.config.architecture.architecture import network_of
from megatron.config.config import Config
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan.plan import Plan
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.sharding import shard_of


def parameters_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the parameters of a network and the biases of routers by name, on the meta device."""
    with torch.device("meta"):
        return weights_of(_model(spec))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a network and the biases of its routers by name."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if is_buffer(name)}
    return {**dict(model.named_parameters()), **buffers}


@torch.no_grad()
def load_network(
    spec: ModelSpec, checkpoint: FullCheckpoint, *, rounded_to: torch.dtype = torch.float32
) -> SequentialModel:
    """Build the network in fp32 with the weights of a checkpoint, in eval mode.

    Args:
        rounded_to: dtype that weights are rounded to first.

    Raises:
        CheckpointError: the weights do not fit `spec`.
    """
    require_parameters(parameters_of(spec), checkpoint)
    model = _model(spec, predicts=False)
    for name, tensor in weights_of(model).items():
        weight = checkpoint.parameters[name].weight.all()
        tensor.copy_(weight if is_buffer(name) else weight.to(rounded_to))
    return model.eval()


def initial_weight(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Return initial weights of a head: a matrix with normal values, a bias of 0, a norm of 1.

    Randomness: seeded by the name.
    """
    if len(shape) == 1:
        return (
            torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
        )
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return std * torch.randn(shape, generator=generator)


def require_parameters(wanted: Mapping[str, Tensor], checkpoint: FullCheckpoint) -> None:
    """Refuse a checkpoint whose parameters differ in name or shape.

    Raises:
        CheckpointError: names the first that differ.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    found = {name: parameter.weight.shape for name, parameter in checkpoint.parameters.items()}
    other = sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
    if other:
        differing = [
            f"{name} {found.get(name)} instead of {shapes.get(name)}" for name in other[:5]
        ]
        raise CheckpointError(f"the weights do not fit the network: {', '.join(differing)}")


def _model(spec: ModelSpec, *, predicts: bool = True) -> SequentialModel:
    parts = LayerParts(
        group=lone_group(), core_attention=core_attention_of(spec), predicts=predicts
    )
    return SequentialModel(network_of(spec).layers(spec, parts))


def manifest_of_import(
    source: Path, config: Config, plan: Plan, state: TrainState | None = None
) -> Manifest:
    """Return the manifest of an imported checkpoint, without files.

    Args:
        source: the checkpoint of another program.
        config: of a run that would have saved it.
        plan: of that run; only its network and dtype come from `source`.
        state: progress of the run so far; default: none.
    """
    return Manifest(
        state=state or TrainState(),
        plan=plan.to_dict(),
        config=asdict(config),
        versions={
            "megatron": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            CONVERTED_FROM: str(source),
        },
        partition_dims=partition_dims_of(plan.model),
        files=(),
    )


def partition_dims_of(spec: ModelSpec) -> dict[str, int]:
    """Return by name the dimensions that tensor-parallel ranks divide; see `Manifest`."""
    shards = {
        name: shard_of(p) for name, p in parameters_of(spec).items() if isinstance(p, nn.Parameter)
    }
    return {name: shard.dim for name, shard in shards.items() if shard}
