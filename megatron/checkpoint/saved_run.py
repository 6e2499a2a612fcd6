"""The run that wrote checkpoints: what it was asked for, so that a tool need not be told again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.names import published_tags
from megatron.config.config import ANY_NETWORK
from megatron.plan.objective_plan import ObjectiveName


@dataclass(frozen=True)
class Run:
    """The run that saved a checkpoint, or, without one, values for the flags that do not matter."""

    config: Mapping[str, Mapping[str, Any]]
    world_size: int | None
    objective: ObjectiveName


def run_behind(directory: str | None) -> Run:
    """Return the run that saved to `directory`.

    Raises:
        CheckpointError: the manifest of the newest checkpoint is damaged.
    """
    tags = published_tags(Path(directory)) if directory else []
    if not directory or not tags:
        return Run(ANY_NETWORK, None, "gpt")
    manifest = read_manifest(Path(directory) / tags[0])
    parallel = manifest.plan["parallel"]
    return Run(
        manifest.config,
        parallel["tensor"] * parallel["pipeline"] * parallel["data"],
        manifest.plan.get("objective", {}).get("name", "gpt"),
    )
