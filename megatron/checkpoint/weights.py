"""The whole model's weights, from the files of any checkpoint, in one process."""

from pathlib import Path

from torch import Tensor

from megatron.checkpoint.digest import read_any
from megatron.checkpoint.manifest import Manifest
from megatron.parallel.whole import WholeCheckpoint


def read_weights(folder: Path, manifest: Manifest) -> WholeCheckpoint:
    """Return the weights of the checkpoint in `folder`, with a layout or without one.

    Shards of tensor-parallel ranks are laid side by side, pipeline stages put together, and
    ZeRO-3's pieces joined. They are in the network's number format, except those of ZeRO-3 and of
    checkpoints without a layout; a tensor is read when it is looked at.

    Raises:
        CheckpointError: files are missing, damaged, or are no DeepSpeed checkpoint.
    """
    return read_any(folder, manifest, optimizer=False)


def read_whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return {parameter name: whole tensor} of the checkpoint in `folder`; see read_weights."""
    parameters = read_weights(folder, manifest).parameters
    return {name: parameter.weight.all() for name, parameter in parameters.items()}
