"""The whole model's weights, from the files of any layout, in one process."""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.manifest import Manifest, damage
from megatron.errors import CheckpointError

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def read_whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return {parameter name: whole tensor} of the checkpoint in `folder`.

    Shards of tensor-parallel ranks are laid side by side, pipeline stages put together, and
    ZeRO-3's pieces joined.

    Raises:
        CheckpointError: files are missing, damaged, or are no DeepSpeed checkpoint.
    """
    parallel = manifest.plan["parallel"]
    files = _Files(folder, manifest)
    ranks = range(parallel["tensor"])
    try:
        if parallel["zero_stage"] == 3:
            shards = [_zero3_shard(files, rank) for rank in ranks]
        elif parallel["pipeline"] > 1:
            tied = manifest.plan["model"]["tied_embeddings"]
            shards = _pipeline_shards(files, parallel["tensor"], tied=tied)
        else:
            shards = [files.read(f"mp_rank_{rank:02d}_model_states.pt")["module"] for rank in ranks]
    except (OSError, KeyError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be read: {error}") from error
    return {
        name: _join([shard[name] for shard in shards], manifest.partition_dims.get(name))
        for name in shards[0]
    }


class _Files:
    """The files of a checkpoint; each is compared with the manifest before it is read."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.records = {record.name: record for record in manifest.files}

    def read(self, name: str) -> Any:
        """Return what the file `name` holds."""
        if name not in self.records:
            raise CheckpointError(f"{self.folder} has no file {name}")
        if problems := damage(self.folder, [self.records[name]]):
            raise CheckpointError("; ".join(problems))
        return torch.load(self.folder / name, map_location="cpu", weights_only=False, mmap=True)


def _join(pieces: list[Tensor], dim: int | None) -> Tensor:
    return pieces[0] if dim is None or len(pieces) == 1 else torch.cat(pieces, dim)


def _pipeline_shards(files: _Files, tensor: int, *, tied: bool) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{} for _ in range(tensor)]
    for match in filter(None, map(_LAYER_FILE.fullmatch, sorted(files.records))):
        number, rank = int(match.group(1)), int(match.group(2))
        # The file of a tied layer carries its number; its parameters, the shared name.
        for name, weight in files.read(match.group()).items():
            shared = tied and name.startswith(("word_embeddings.", "position_embeddings."))
            shards[rank][f"{'tied_modules.embed' if shared else number}.{name}"] = weight
    return shards


def _zero3_shard(files: _Files, tensor_rank: int) -> dict[str, Tensor]:
    """Join the pieces of the weights that the data-parallel ranks hold, 32-bit where trained.

    Every rank's piece of a parameter has ceil(numel / ranks) elements, padded at the end, and the
    pieces follow each other in the order of `param_shapes`.
    """
    suffix = f"mp_rank_{tensor_rank:02d}"
    pieces = re.compile(rf"(bf16_)?zero_pp_rank_(\d+)_{suffix}_optim_states\.pt")
    found = sorted(filter(None, map(pieces.fullmatch, files.records)), key=lambda m: int(m[2]))
    states = [files.read(m.group())["optimizer_state_dict"]["fp32_flat_groups"] for m in found]
    models = [files.read(f"zero_pp_rank_{m[2]}_{suffix}_model_states.pt") for m in found]
    weights, start = {}, 0
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        joined = torch.cat([model["frozen_param_fragments"][name] for model in models])
        weights[name] = joined[: shape.numel()].view(shape)
    flat = [torch.cat([group.view(-1) for group in groups]) for groups in states]
    shapes = models[0]["param_shapes"]
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        length = -(-shape.numel() // len(flat))
        joined = torch.cat([piece[start : start + length] for piece in flat])
        weights[name] = joined[: shape.numel()].view(shape)
        start += length
    return weights
