"""Collectives of Python objects outside the training step; errors are raised on all ranks."""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.common.errors import MegatronError

T = TypeVar("T")


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0; return its result, or raise its MegatronError, on every rank.

    Communication: one broadcast of the result.
    """
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = make()
        except MegatronError as error:
            result[1] = error
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    return result[0]


def rank_0_first(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 first, then on the other ranks; return this rank's result.

    An error on one rank is raised on all, so that none fails with a lost connection.

    Communication: one broadcast, then one all-gather of errors.
    """
    made: list[T] = []
    from_rank_0(lambda: made.append(make()))
    errors: list[MegatronError] = []
    if not made:
        try:
            made.append(make())
        except MegatronError as error:
            where = f"rank {dist.get_rank()} on {socket.gethostname()}"
            errors.append(type(error)(f"{where}: {error}"))
    for met in all_gather_items(errors):
        raise met
    return made[0]


def any_rank(own: Sequence[bool]) -> list[bool]:
    """Return for each index whether any rank has True there (logical or).

    Communication: one all-reduce of a byte per index, and none for a single rank.
    """
    if dist.get_world_size() == 1:
        return [*map(bool, own)]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(own, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(yes) for yes in flags.tolist()]


def all_gather_items(own: list[Any]) -> Iterator[Any]:
    """All-gather lists of objects: yield every rank's items, rank 0's first.

    Communication: one all-gather.
    """
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, own)
    for items in per_rank:
        yield from items


def share_of(items: list[T]) -> list[T]:
    """Return every world-size-th item, from this rank's index on."""
    return items[dist.get_rank() :: dist.get_world_size()]
