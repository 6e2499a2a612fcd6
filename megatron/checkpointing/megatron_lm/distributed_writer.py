"""Write folders of torch.distributed.checkpoint for megatron.core (torch_dist), one tensor at a time.

torch's writer keeps the last tensor of every name in memory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from pickle import dumps
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpointing.megatron_lm.distributed_files import METADATA
from megatron.checkpointing.megatron_lm.torch_dist import COMMON, COMMON_OBJECT, KIND
from megatron.checkpointing.writer import write_state, write_states
from megatron.common.atomic_files import replace_text
from megatron.common.progress import with_progress

_FILE = "__0_0.distcp"
_VERSIONS = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
_LINEAR = re.compile(r"(.*layers)\.(\d+)\.(.*\.linear_\w+|eh_proj)\.weight")
_EXPERTS = "mlp.experts.experts."
_OUTPUT_BIAS = "output_layer.bias"
_PREDICTIONS = "mtp.layers"  # which are kept apart
_LAYER = re.compile(r"(.*layers)\.(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A parameter to write.

    Args:
        name: megatron.core's, with the number of the layer.
        load: returns the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


def write_distributed(folder: Path, common: Mapping[str, Any], tensors: Iterable[Written]) -> None:
    """Write the parameters of a network into `folder`; equal layers are stacked, a chunk each.

    Memory: one parameter.

    Args:
        common: content without tensors: arguments, iteration, version.

    Raises:
        CheckpointError: a file cannot be written.
    """
    written = [*tensors]
    layers = _stacked(written)
    content: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    pieces: dict[MetadataIndex, Callable[[], Any]] = {}
    for tensor in written:
        name, chunk, full = _chunk(tensor, layers)
        properties = TensorProperties(dtype=tensor.dtype)
        of_name = content.setdefault(name, TensorStorageMetadata(properties, full, chunks=[]))
        cast(TensorStorageMetadata, of_name).chunks.append(chunk)
        pieces[MetadataIndex(name, chunk.offsets)] = partial(_load, tensor, chunk.sizes)
    # Later versions read the object in place of common.pt.
    objects = {COMMON_OBJECT: dict(common), **dict.fromkeys(_scales(written, layers))}
    for name, value in objects.items():
        content[name] = BytesStorageMetadata()
        pieces[MetadataIndex(name)] = partial(list, (value,))
    loads = with_progress(pieces.values(), "writing of weights", len(pieces), "tensors")
    sizes = write_states((load() for load in loads), folder / _FILE)
    starts = accumulate(sizes, initial=0)
    storage = {
        index: _StorageInfo(_FILE, start, size)
        for index, start, size in zip(pieces, starts, sizes, strict=False)
    }
    metadata = Metadata(content, storage_data=storage, storage_meta=StorageMeta())
    write_state(dict(common), folder / COMMON)
    (folder / METADATA).write_bytes(dumps(metadata))
    replace_text(folder / KIND, json.dumps(_VERSIONS), has_one_writer=True)


def _chunk(
    tensor: Written, layers: Mapping[str, int]
) -> tuple[str, ChunkStorageMetadata, torch.Size]:
    """Return the name that a parameter is stored by, its part of that tensor, and the tensor's shape."""
    name, shape = tensor.name, torch.Size(tensor.shape)
    offset, full = torch.Size([0] * len(shape)), shape
    if (match := _LAYER.fullmatch(name)) and match[1] in layers:
        name, offset = f"{match[1]}.{match[3]}", torch.Size((int(match[2]), *offset))
        shape, full = torch.Size((1, *shape)), torch.Size((layers[match[1]], *shape))
    return name, ChunkStorageMetadata(offsets=offset, sizes=shape), full


def _load(tensor: Written, shape: torch.Size) -> Tensor:
    return tensor.load().view(shape)


def _stacked(tensors: Sequence[Written]) -> dict[str, int]:
    """Return the number of layers of each stack whose layers have the same parameters.

    Other stacks' layers are kept apart, as megatron.core does where some layers have experts.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for tensor in tensors:
        if (match := _LAYER.fullmatch(tensor.name)) and match[1] != _PREDICTIONS:
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    return {
        stack: len(layers)
        for stack, layers in stacks.items()
        if all(names == layers[0] for names in layers.values())
    }


def _scales(tensors: Sequence[Written], layers: Mapping[str, int]) -> Iterator[str]:
    """Yield the names of the FP8 scales of every linear layer: objects without content, but required."""
    for tensor in tensors:
        if tensor.name.endswith(_OUTPUT_BIAS):
            yield f"{tensor.name.removesuffix('.bias')}._extra_state/shard_0_1"
        if not (match := _LINEAR.fullmatch(tensor.name)):
            continue
        stack, number, module = match.groups()
        name, index, sizes = f"{stack}.{number}.{module}", [], []
        if stack in layers:
            name, index, sizes = f"{stack}.{module}", [int(number)], [layers[stack]]
        experts = range(tensor.shape[0]) if module.startswith(_EXPERTS) else ()
        for own in [[*index, expert] for expert in experts] or [index or [0]]:
            of = [*sizes, len(experts)] if experts else sizes or [1]
            yield f"{name}._extra_state/shard_{_dotted(own)}_{_dotted(of)}"


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
