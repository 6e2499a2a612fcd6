"""The whole model's weights, from the files of any layout, in one process."""

from pathlib import Path

from torch import Tensor

from megatron.checkpoint.layouts import read_whole
from megatron.checkpoint.manifest import Manifest


def read_whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return {parameter name: whole tensor} of the checkpoint in `folder`.

    Shards of tensor-parallel ranks are laid side by side, pipeline stages put together, and
    ZeRO-3's pieces joined.

    Raises:
        CheckpointError: files are missing, damaged, or are no DeepSpeed checkpoint.
    """
    whole = read_whole(folder, manifest, optimizer=False)
    return {name: parameter.weight.all() for name, parameter in whole.parameters.items()}
