"""Folder of an exported model: staging, and safetensors shards with their index, as transformers reads."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpointing.manifest import STAGING
from megatron.checkpointing.resharding.unpickle import read_tensors
from megatron.common.atomic_files import staged_folder
from megatron.common.errors import CheckpointError, WrongCheckpointError, reason
from megatron.common.progress import with_progress


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Create a staging folder next to `output`, renamed to it on success.

    Raises:
        CheckpointError: `output` is not empty, is the current folder or a mount point, or cannot
            be written to; no partial output is left.
    """
    target = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WrongCheckpointError(f"--save {output} is not empty: give a new folder")
    if target == Path.cwd():
        raise WrongCheckpointError(
            f"--save {output} is the current folder of the shell, which the finished one would "
            "replace: give a new folder"
        )
    if os.path.ismount(output):
        raise WrongCheckpointError(
            f"--save {output} is a mount point, which the finished folder cannot replace: "
            f"give a folder in it, such as {output / 'model'}"
        )
    try:
        with staged_folder(target.with_name(f"{STAGING}{target.name}"), target) as staging:
            yield staging
    except OSError as error:
        raise CheckpointError(f"--save {output}: {reason(error, output)}") from error


INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def write_weights(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    max_bytes: int,
    exact: Collection[str] = (),
) -> None:
    """Write a state dict to safetensors files of bounded size, with an index if there are several.

    Memory: one file's tensors, and the tensor that comes.

    Args:
        shapes: of all tensors, by name.
        tensors: all of them, preferably in the order of `shapes`.
        exact: names of tensors that stay in fp32.
        max_bytes: size of a file's tensors; a larger tensor has a separate file.

    Raises:
        ValueError: a tensor is missing, or its name or shape is not in `shapes`.
    """
    dtypes = {name: torch.float32 if name in exact else dtype for name in shapes}
    split = split_torch_state_dict_into_shards(
        {
            name: torch.empty(*shape, dtype=dtypes[name], device="meta")
            for name, shape in shapes.items()
        },
        max_shard_size=max_bytes,
    )
    unwritten: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    title = f"writing of weights to {folder}"
    for name, tensor in with_progress(tensors, title, len(shapes), "tensors"):
        if tensor.shape != shapes.get(name):
            raise ValueError(f"{name} has shape {[*tensor.shape]} instead of {shapes.get(name)}")
        file = split.tensor_to_filename[name]
        unwritten[file][name] = tensor.to(
            dtypes[name], copy=True, memory_format=torch.contiguous_format
        )
        if len(unwritten[file]) == len(split.filename_to_tensors[file]):
            save_file(unwritten.pop(file), folder / file, metadata={"format": "pt"})
    if unwritten:
        raise ValueError(f"tensors are missing for {', '.join(unwritten)}")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class Reader(ExitStack):
    """The tensors of a folder of transformers', in safetensors files or in torch's older ones.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self._tensors: dict[str, Any] = {}
        files = _files(folder)
        try:
            for file in files:
                if file.suffix == ".safetensors":
                    opened = self.enter_context(safe_open(file, framework="pt"))
                    self._tensors.update(dict.fromkeys(opened.keys(), opened))
                else:
                    self._tensors.update(_tensors_in(file))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @property
    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        source = self._tensors[name]
        return tuple(
            source.shape if torch.is_tensor(source) else source.get_slice(name).get_shape()
        )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        source = self._tensors[name]
        return source if torch.is_tensor(source) else source.get_tensor(name)


def _tensors_in(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict in a file of torch's."""
    content = read_tensors(file)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds no state dict, but {type(content).__name__}")
    return {
        name: tensor
        for name, tensor in content.items()
        if isinstance(name, str) and torch.is_tensor(tensor)
    }


def _files(folder: Path) -> list[Path]:
    """Return the files of weights in `folder`."""
    for single, index in (
        (_SINGLE, INDEX),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            return _indexed_files(folder / index)
        if (folder / single).is_file():
            return [folder / single]
    raise CheckpointError(f"{folder} holds no {_SINGLE} and no pytorch_model.bin")


def _indexed_files(index: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        CheckpointError: it is damaged, or names something else than files of its folder.
    """
    try:
        names = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r:.200}") from error
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r:.80}, which is no file of its folder")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, and there is no such file next to it")
    return sorted(index.parent / name for name in names)
