"""The whole model's weights, from the files of any checkpoint, in one process."""

from pathlib import Path

from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.resharding.digest import read_any
from megatron.checkpointing.resharding.sharded_tensor import WholeCheckpoint


def read_weights(folder: Path, manifest: Manifest) -> WholeCheckpoint:
    """Return the weights of the checkpoint in `folder`, with a layout or without one.

    Shards of tensor-parallel ranks are laid side by side, pipeline stages put together, and
    ZeRO-3's pieces joined. They are in the network's number format, except those of ZeRO-3 and of
    checkpoints without a layout; a tensor is read when it is looked at.

    Raises:
        CheckpointError: files are missing, damaged, or are no DeepSpeed checkpoint.
    """
    return read_any(folder, manifest, optimizer=False)
