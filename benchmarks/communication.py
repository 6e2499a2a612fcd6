"""Record the collectives of this rank: kind, bytes, group, and the products computed while they run.

Collectives are seen where torch's process groups start them, and where `Work.wait` waits, so those
of DeepSpeed as well. A collective is hidden when a matrix product is computed between both.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allreduce": "all-reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv": "receive",
}
"""The methods of torch's process groups, and what the field calls them."""

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"}


@dataclass(eq=False)
class Collective:
    """One collective that this rank took part in.

    Args:
        kind: one of the values of `KINDS`.
        num_bytes: of its largest tensor.
        ranks: its group.
        started: matrix products that this rank had computed before.
        waited: the same when it had to be over; None while it runs.
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    started: int
    waited: int | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether a product was computed while it ran."""
        return self.waited is not None and self.waited > self.started


class Record(TorchDispatchMode):
    """Count matrix products and list the collectives among them.

    Args:
        seconds_per_byte: of a network that each group has for itself. Waiting takes until rings over
            it would have moved the bytes of all collectives of the group; 0 adds no time.
    """

    def __init__(self, seconds_per_byte: float = 0.0):
        super().__init__()
        self.collectives: list[Collective] = []
        self.num_products = 0
        self._seconds_per_byte = seconds_per_byte
        self._running: dict[int, tuple[Any, Collective, float]] = {}
        self._busy_until: dict[tuple[int, ...], float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.num_products += 1
        return func(*args, **(kwargs or {}))

    def start(self, kind: str, ranks: tuple[int, ...], tensors: list[Tensor], work: Any) -> None:
        """Note a collective that a process group has started."""
        size = max((tensor.nbytes for tensor in tensors), default=0)
        found = Collective(kind, size, ranks, self.num_products)
        self.collectives.append(found)
        begin = max(time.monotonic(), self._busy_until.get(ranks, 0.0))
        moved = size * ring_passes(kind, len(ranks))
        self._busy_until[ranks] = until = begin + moved * self._seconds_per_byte
        # Holds `work`, whose address is the key.
        self._running[id(work)] = work, found, until

    def wait(self, work: Any) -> None:
        """Note that this rank has waited for `work`."""
        _, found, until = self._running.pop(id(work), (None, None, 0.0))
        if found:
            found.waited = self.num_products
            time.sleep(max(0.0, until - time.monotonic()))


def ring_passes(kind: str, ranks: int) -> float:
    """Return how many times the bytes of a collective pass each link of a ring."""
    if kind == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


@contextmanager
def record_communication(seconds_per_byte: float = 0.0) -> Iterator[Record]:
    """Record the collectives of this rank inside the `with` block; see Record."""
    record = Record(seconds_per_byte)
    # As the classes hold them: bound methods of pybind would not take `self` when they are put back.
    methods = {name: vars(dist.ProcessGroup)[name] for name in KINDS}
    usual_wait = vars(dist.Work)["wait"]
    wait = dist.Work.wait

    def noted_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        done = wait(work, *args, **kwargs)
        record.wait(work)
        return done

    try:
        for name in KINDS:
            noted = _noted(record, KINDS[name], getattr(dist.ProcessGroup, name))
            setattr(dist.ProcessGroup, name, noted)
        dist.Work.wait = noted_wait  # type: ignore
        with record:
            yield record
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)
        dist.Work.wait = usual_wait  # type: ignore


def _noted(record: Record, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        work = method(group, *args, **kwargs)
        ranks = tuple(dist.get_process_group_ranks(group))
        record.start(kind, ranks, [*_tensors(args)], work)
        return work

    return start


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def hidden_share(collectives: list[Collective]) -> float:
    """Return the share of the bytes of `collectives` that are hidden; 1 of none."""
    total = sum(each.num_bytes for each in collectives)
    hidden = sum(each.num_bytes for each in collectives if each.is_hidden)
    return hidden / total if total else 1.0
