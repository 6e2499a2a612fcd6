#!/usr/bin/env python
"""List the rank and contents of each checkpoint file, and the shards of ranks in another layout."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import Manifest, read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.architecture.architecture import FIRST_LAYER
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.checkpoint_tools import FilesConfig

_MODEL_RANK = re.compile(r"mp_rank_(\d+)_")
_REPLICA = re.compile(r"zero_pp_rank_(\d+)_")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-")
_STREAMS = re.compile(r"rng_rank_(\d+)")


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    parsed = parse_sections(argv, {"files": FilesConfig}, description=__doc__ or "").sections
    config: FilesConfig = parsed["files"]
    folder = checkpoint_of(Path(config.folder))
    manifest = read_manifest(folder)
    parallel, layers = manifest.parallel, manifest.spec.num_layers
    tensor = parallel.tensor if config.target_tp is None else config.target_tp
    pipeline = parallel.pipeline if config.target_pp is None else config.target_pp
    if tensor < 1 or not 1 <= pipeline <= layers:
        raise ConfigError(f"--target_tp must be at least 1, --target_pp 1 to {layers}")
    for record in manifest.files:
        print(f"{record.name}: {record.size} bytes, {_owner(record.name, parallel.tensor)}")
    for line in _shapes(folder, manifest, tensor, pipeline):
        print(line)


def _owner(name: str, tensor: int) -> str:
    """Describe the rank and contents of the file `name`."""
    if match := _LAYER.match(name):
        return f"weights of layer {int(match[1])}, tensor rank {int(match[2])}"
    if match := _STREAMS.match(name):
        return f"RNG states of rank {int(match[1])}"
    if not (match := _MODEL_RANK.search(name)):
        return "of all ranks"
    stage, rank = divmod(int(match[1]), tensor)
    what = "optimizer" if "optim_states" in name else "network"
    replica = f", replica {int(zero[1])}" if (zero := _REPLICA.search(name)) else ""
    return f"{what} of stage {stage}, tensor rank {rank}{replica}"


def _shapes(folder: Path, manifest: Manifest, tensor: int, pipeline: int) -> Iterator[str]:
    """Yield the shape of each parameter on a tensor rank, with the stage of an even cut."""
    from megatron.checkpointing.resharding.universal import read_checkpoint

    layers = manifest.spec.num_layers
    for name, parameter in read_checkpoint(folder, manifest).parameters.items():
        shape, dim = list(parameter.weight.shape), manifest.partition_dims.get(name)
        if dim is not None:
            if shape[dim] % tensor:
                raise ConfigError(f"--target_tp {tensor} does not divide {name} {shape}")
            shape[dim] //= tensor
        number = name.partition(".")[0]
        layer = int(number) - FIRST_LAYER if number.isdigit() else 0
        stage = min(max(layer, 0) * pipeline // layers, pipeline - 1)
        yield f"{name}: {shape} on each of {tensor}, stage {stage} of {pipeline}"


if __name__ == "__main__":
    run_tool(main)
