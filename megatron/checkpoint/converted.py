"""The manifest of a checkpoint that comes from another program and not from a run."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

import torch

from megatron.checkpoint.hugging_face.network import parameters_of
from megatron.checkpoint.manifest import Manifest
from megatron.config.config import Config
from megatron.parallel.sharding import shard_of
from megatron.plan.plan import Plan
from megatron.version import VERSION

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
