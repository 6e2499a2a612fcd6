"""What ranks tell each other outside the training step. Errors included: all ranks raise alike."""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.common.errors import MegatronError

T = TypeVar("T")


def from_rank_0(make: Callable[[], T]) -> T:
    """Return what `make` returns on rank 0, on every rank; raise what it raises there.

    Communication: one broadcast of the result.
    """
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except MegatronError as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]


def rank_0_first(make: Callable[[], T]) -> T:
    """Return what `make` returns on this rank; rank 0 begins when all have come, the others after.

    What it raises on one rank all raise, so that none meets a lost connection.

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
    for met in gathered(errors):
        raise met
    return made[0]


def agreed(own: Sequence[bool]) -> list[bool]:
    """Return for each place whether any rank says yes there.

    Communication: one all-reduce of a byte per place.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    said = torch.tensor(own, dtype=torch.uint8, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return [bool(yes) for yes in said.tolist()]


def gathered(own: list[Any]) -> Iterator[Any]:
    """Yield every rank's items, rank 0's first.

    Communication: one all-gather.
    """
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    for items in everyones:
        yield from items


def share_of(items: list[T]) -> list[T]:
    """Return this rank's share of what all ranks do together."""
    return items[dist.get_rank() :: dist.get_world_size()]
