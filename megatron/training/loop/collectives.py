"""Collectives of Python objects outside the training step; errors are raised on all ranks."""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from megatron.common.codeless import UnsendableError, decode, encode_or_refuse
from megatron.common.errors import MegatronError
from megatron.engine.deepspeed import distributed
from megatron.tensor_parallel.object_collectives import all_gather_objects, broadcast_object

T = TypeVar("T")

_MOST_FOUND = 100
"""Items that `gather_findings` returns: every rank gets them, and there may be as many as ranks."""


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0; return its result, or raise its MegatronError, on every rank.

    Communication: one broadcast of the result; none for a single rank.
    """
    if dist.get_world_size() == 1:
        return make()
    result: tuple[Any, MegatronError | None] = None, None
    if dist.get_rank() == 0:
        try:
            result = make(), None
        except MegatronError as error:
            result = None, error
    made, failure = broadcast_object(result, source=0)
    if failure is not None:
        raise failure
    return made


def rank_0_first(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 first, then on the other ranks; return this rank's result.

    An error on one rank is raised on all, so that none fails with a lost connection.

    Communication: one broadcast, then one all-reduce of a byte.
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
    for met in gather_findings(errors):
        raise met
    return made[0]


def any_rank(conditions: Sequence[bool]) -> list[bool]:
    """Return for each index whether any rank has True there (logical or).

    Communication: one all-reduce of a byte per index, and none for a single rank.
    """
    if dist.get_world_size() == 1:
        return [*map(bool, conditions)]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(conditions, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(yes) for yes in flags.tolist()]


@dataclass(frozen=True)
class Posted(Generic[T]):
    """Objects that all ranks have put into the rendezvous store, one each; gone with the next post.

    An all-gather would give every rank what all ranks have: ranks x ranks objects in all.
    """

    own: T
    _prefix: str

    def of(self, rank: int) -> T:
        """Return the object of `rank`. Communication: one request to the store."""
        return self.own if rank == dist.get_rank() else self._fetch([rank])[0]

    def all(self) -> list[T]:
        """Return the objects of all ranks. Communication: one request to the store; for one rank."""
        count = dist.get_world_size()
        return [self.own] if count == 1 else self._fetch(range(count))

    def _fetch(self, ranks: Sequence[int]) -> list[T]:
        keys = [f"{self._prefix}/{rank}" for rank in ranks]
        return [decode(content) for content in distributed.store().multi_get(keys)]


def post(item: T) -> Posted[T]:
    """Put an object of each rank into the rendezvous store, for one rank or few to read.

    Communication: two requests to the store, then one all-reduce of a byte.

    Raises:
        UnsendableError: on all ranks, one of them cannot send its object.
    """
    if dist.get_world_size() == 1:
        return Posted(item, "")
    prefix = _next_prefix("posted")
    content, refusal = encode_or_refuse(item)
    distributed.store().set(f"{prefix}/{dist.get_rank()}", content)
    if any_rank([refusal is not None])[0]:
        raise refusal or UnsendableError("another rank has an object that cannot be sent")
    return Posted(item, prefix)


def scatter(items: Sequence[T] | None) -> list[T]:
    """Give each rank its share of the items that rank 0 has: every world-size-th, from its rank on.

    Args:
        items: None on other ranks.

    Communication: one request of rank 0 to the rendezvous store, one all-reduce of a byte, and two
        requests of each rank.

    Raises:
        UnsendableError: on all ranks, one of the items cannot be sent.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return [*(items or ())]
    prefix = _next_prefix("scattered")
    if items is not None:
        keys = [f"{prefix}/{of}" for of in range(count)]
        messages = [encode_or_refuse(list(items[of::count])) for of in range(count)]
        refused = next((content for content, refusal in messages if refusal), None)
        distributed.store().multi_set(keys, [refused or content for content, _ in messages])
    any_rank([False])
    found: list[T] = decode(distributed.store().get(f"{prefix}/{rank}"))
    return found


def gather_findings(findings: list[T]) -> list[T]:
    """Return the findings of all ranks, rank 0's first, at most 100 items: usually there are none.

    Communication: one all-reduce of a byte; when there are some, a post and a broadcast too.
    """
    if not any_rank([bool(findings)])[0]:
        return []
    posted = post(findings[:_MOST_FOUND])
    return from_rank_0(
        lambda: [*islice((item for items in posted.all() for item in items), _MOST_FOUND)]
    )


def _next_prefix(kind: str) -> str:
    """Return where the next objects are kept: in turns, so that none is replaced before it is read.

    A rank comes to the next but one after all have come to the next, which follows the use of these.
    """
    number = distributed.store().add(f"{kind}/{dist.get_rank()}", 1)
    return f"{kind}/{number % 2}"


def all_gather_items(own_items: list[Any]) -> Iterator[Any]:
    """All-gather lists of objects: yield every rank's items, rank 0's first.

    Communication: one all-gather of ranks x ranks objects, for results that every rank needs.
    """
    for items in all_gather_objects(own_items):
        yield from items
