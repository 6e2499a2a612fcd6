"""The manifest of a checkpoint that comes from another program and not from a run."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

import torch

from megatron.checkpointing.hugging_face.network import parameters_of
from megatron.checkpointing.manifest import Manifest
from megatron.common.version import VERSION
from megatron.config.config import Config
from megatron.config.plan import Plan
from megatron.tensor_parallel.sharding import shard_of

_BEGINNING = MappingProxyType(
    dict.fromkeys(("iteration", "samples", "tokens", "valid_samples", "skipped"), 0)
)


def manifest_of_converted(
    wishes: Config, decided: Plan, state: Mapping[str, int] = _BEGINNING
) -> Manifest:
    """Return it without its files.

    Args:
        wishes: what a run would be asked for that had saved it.
        decided: what that run would have decided.
        state: fields of TrainState; those that are not said are 0.
    """
    shards = {name: shard_of(p) for name, p in parameters_of(decided.model).items()}
    return Manifest(
        state={**_BEGINNING, **state},
        plan=asdict(decided),
        config=asdict(wishes),
        versions={
            "megatron": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        partition_dims={name: shard.dim for name, shard in shards.items() if shard},
        files=(),
    )
