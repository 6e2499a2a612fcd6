"""The whole model's weights, from the files of any layout, in one process."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.manifest import Manifest
from megatron.errors import CheckpointError

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def read_whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return {parameter name: whole tensor} of the checkpoint in `folder`.

    Shards of tensor-parallel ranks are laid side by side, pipeline stages put together, and
    ZeRO-3's pieces joined.

    Raises:
        CheckpointError: files are missing or are no DeepSpeed checkpoint.
    """
    parallel = manifest.plan["parallel"]
    try:
        if parallel["zero_stage"] == 3:
            shards = [_zero3_shard(folder, rank) for rank in range(parallel["tensor"])]
        elif parallel["pipeline"] > 1:
            shards = _pipeline_shards(folder, parallel["tensor"])
        else:
            shards = [_plain_shard(folder, rank) for rank in range(parallel["tensor"])]
    except (OSError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be read: {error}") from error
    return {
        name: _join([shard[name] for shard in shards], manifest.partition_dims.get(name))
        for name in shards[0]
    }


def _join(pieces: list[Tensor], dim: int | None) -> Tensor:
    return pieces[0] if dim is None or len(pieces) == 1 else torch.cat(pieces, dim)


def _plain_shard(folder: Path, tensor_rank: int) -> dict[str, Tensor]:
    return _read(folder / f"mp_rank_{tensor_rank:02d}_model_states.pt")["module"]


def _pipeline_shards(folder: Path, tensor: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{} for _ in range(tensor)]
    for file in sorted(folder.iterdir()):
        if match := _LAYER_FILE.fullmatch(file.name):
            number, rank = int(match.group(1)), int(match.group(2))
            # The file of a tied layer carries its number; its parameters, the shared name.
            for name, weight in _read(file).items():
                tied = name.startswith(("word_embeddings.", "position_embeddings."))
                shards[rank][f"{'tied_modules.embed' if tied else number}.{name}"] = weight
    return shards


def _zero3_shard(folder: Path, tensor_rank: int) -> dict[str, Tensor]:
    """Join the pieces of the 32-bit weights that the data-parallel ranks hold.

    Every rank's piece of a parameter has ceil(numel / ranks) elements, padded at the end, and the
    pieces follow each other in the order of `param_shapes`.
    """
    suffix = f"mp_rank_{tensor_rank:02d}"
    files = sorted(
        folder.glob(f"*zero_pp_rank_*_{suffix}_optim_states.pt"),
        key=lambda file: int(re.findall(r"pp_rank_(\d+)", file.name)[0]),
    )
    states = [_read(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
    shapes = _read(folder / f"zero_pp_rank_0_{suffix}_model_states.pt")["param_shapes"]
    flat = [torch.cat([group.view(-1) for group in groups]) for groups in states]
    weights, start = {}, 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        length = -(-shape.numel() // len(flat))
        pieces = torch.cat([piece[start : start + length] for piece in flat])
        weights[name] = pieces[: shape.numel()].view(shape)
        start += length
    return weights


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
