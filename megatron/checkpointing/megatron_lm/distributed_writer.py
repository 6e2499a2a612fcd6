"""Write folders of torch.distributed.checkpoint for megatron.core (torch_dist), one tensor at a time."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.checkpointing.megatron_lm.torch_dist import COMMON, COMMON_OBJECT, KIND
from megatron.checkpointing.writer import write_state
from megatron.common.atomic_files import replace_text
from megatron.common.errors import CheckpointError

_VERSIONS = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
_LINEAR = re.compile(r"(.*layers)\.(\d+)\.(.*\.linear_\w+)\.weight")
_EXPERTS = "mlp.experts.experts."
_OUTPUT_BIAS = "output_layer.bias"
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
    """Write the parameters of a network into `folder`; layers are stacked, a chunk each.

    Memory: one parameter.

    Args:
        common: what is no tensor: arguments, iteration, version.

    Raises:
        CheckpointError: a file cannot be written.
    """
    write_state(dict(common), folder / COMMON)
    try:
        save(
            {},
            storage_writer=FileSystemWriter(folder),
            planner=_Planner(common, [*tensors]),
            no_dist=True,
        )
    except CheckpointException as error:
        cause = next((each for each, _ in error.failures.values()), error)
        raise CheckpointError(f"{folder} cannot be written: {cause}") from error
    replace_text(folder / KIND, json.dumps(_VERSIONS), has_one_writer=True)


class _Planner(DefaultSavePlanner):
    """Plan of chunks whose tensors are loaded when they are written."""

    def __init__(self, common: Mapping[str, Any], tensors: Sequence[Written]):
        super().__init__(flatten_state_dict=False)
        self._common, self._loaders = common, dict[MetadataIndex, Callable[[], Tensor]]()
        layers = _stacked(tensors)
        self._items = [self._item(tensor, layers) for tensor in tensors]
        self._objects = [COMMON_OBJECT, *_scales(tensors, layers)]

    def _item(self, tensor: Written, layers: Mapping[str, int]) -> WriteItem:
        name, shape, load = tensor.name, torch.Size(tensor.shape), tensor.load
        offset, full = torch.Size([0] * len(shape)), shape
        if (match := _LAYER.fullmatch(name)) and match[1] in layers:
            name, offset = f"{match[1]}.{match[3]}", torch.Size((int(match[2]), *offset))
            shape, full = torch.Size((1, *shape)), torch.Size((layers[match[1]], *shape))
        index = MetadataIndex(name, offset)
        self._loaders[index] = lambda: load().view(shape)
        return WriteItem(
            index=index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offset, sizes=shape),
                properties=TensorProperties(dtype=tensor.dtype),
                size=full,
            ),
        )

    def create_local_plan(self) -> SavePlan:
        """Return all chunks, and the object that later versions read in place of common.pt."""
        objects = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._objects
        ]
        self.plan = SavePlan([*self._items, *objects])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Load the tensor of a chunk."""
        if load := self._loaders.get(write_item.index):
            return load()
        content = BytesIO()
        own = dict(self._common) if write_item.index.fqn == COMMON_OBJECT else None
        torch.save([own], cast(Any, content))
        content.seek(0)
        return content


def _stacked(tensors: Sequence[Written]) -> dict[str, int]:
    """Return the number of layers of each stack whose layers have the same parameters.

    Others are not stacked, as megatron.core does where some layers have experts.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for tensor in tensors:
        if match := _LAYER.fullmatch(tensor.name):
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
