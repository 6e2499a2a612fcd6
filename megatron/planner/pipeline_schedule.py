"""Pipeline schedules: 1F1B, and interleaved 1F1B with several model chunks (virtual stages) a rank.

Of p ranks with v chunks each, rank r has the virtual stages r, p + r, 2p + r, ... A schedule follows
from p, v and the micro-batches m alone, so every rank knows what the others send and when.

Source: arXiv:2104.04473, section 2.2.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class Pass(NamedTuple):
    """Forward or backward pass of a chunk for one micro-batch."""

    direction: Direction
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a schedule.

    >>> Grid(ranks=2, chunks=2, micro_batches=4).bubble
    0.1111111111111111
    """

    ranks: int
    chunks: int
    micro_batches: int

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank is idle."""
        idle = (self.ranks - 1) / self.chunks
        return idle / (self.micro_batches + idle)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return the position of a chunk in the network."""
        return chunk * self.ranks + rank

    def is_first(self, rank: int, chunk: int) -> bool:
        """Whether the chunk begins the network."""
        return self.virtual_stage(rank, chunk) == 0

    def is_last(self, rank: int, chunk: int) -> bool:
        """Whether the chunk ends the network, and has the loss."""
        return self.virtual_stage(rank, chunk) == self.ranks * self.chunks - 1

    def forwards(self) -> list[Pass]:
        """Return the forward passes of a rank in order: groups of p micro-batches, chunk by chunk."""
        return [*self._forwards()]

    def _forwards(self) -> Iterator[Pass]:
        p, m = self.ranks, self.micro_batches
        for first in range(0, m, p):
            for chunk in range(self.chunks):
                for number in range(first, min(first + p, m)):
                    yield Pass("forward", chunk, number)

    def backwards(self) -> list[Pass]:
        """Return the backward passes of a rank in order."""
        last = self.chunks - 1
        return [Pass("backward", last - each.chunk, each.micro_batch) for each in self.forwards()]

    def warmup(self, rank: int) -> int:
        """Return the number of forward passes before the first backward pass of `rank`."""
        ahead = self.ranks - rank - 1
        wanted = ahead if self.chunks == 1 else 2 * ahead + (self.chunks - 1) * self.ranks
        return min(self.micro_batches * self.chunks, wanted)

    def iterations(self, rank: int) -> list[tuple[Pass, ...]]:
        """Return the passes of `rank`: forward alone, forward and backward in turn, backward alone."""
        forwards, backwards = self.forwards(), self.backwards()
        cut = self.warmup(rank)
        pairs = zip_longest(forwards[cut:], backwards)
        return [
            *((each,) for each in forwards[:cut]),
            *(tuple(each for each in pair if each) for pair in pairs),
        ]

    def last_backwards(self) -> list[int]:
        """Return the numbers of the backward passes that complete the gradients of a chunk."""
        last = self.micro_batches - 1
        return [n for n, each in enumerate(self.backwards()) if each.micro_batch == last]

    def most_in_flight(self, rank: int) -> list[int]:
        """Return how many micro-batches each chunk of `rank` holds at the fullest moment."""
        # Later each backward pass comes before another forward pass.
        first = Counter(each.chunk for each in islice(self._forwards(), self.warmup(rank) + 1))
        return [first[chunk] for chunk in range(self.chunks)]

    def source(self, rank: int, each: Pass) -> tuple[int, Pass] | None:
        """Return the rank and pass whose output `each` needs; None for a batch or the loss.

        The backward pass of the last virtual stage follows its own forward pass.
        """
        if each.direction == "forward":
            if self.is_first(rank, each.chunk):
                return None
            before = each.chunk - (rank == 0)
            return (rank - 1) % self.ranks, each._replace(chunk=before)
        if self.is_last(rank, each.chunk):
            return None
        behind = each.chunk + (rank == self.ranks - 1)
        return (rank + 1) % self.ranks, each._replace(chunk=behind)


class Transfer(NamedTuple):
    """A message between neighbouring ranks; activations go to the next rank, gradients back.

    Args:
        direction: of the passes that it connects.
        chunk: of the rank that sends or receives.
        buffer: slot of the activations on that rank.
    """

    direction: Direction
    chunk: int
    buffer: int


@dataclass(frozen=True)
class Iteration:
    """One entry of a rank's program: passes with their buffers, then one exchange of messages.

    Args:
        sends: what the passes have produced, activations first.
        receives: what the passes of the next iteration need, activations first.
    """

    passes: tuple[tuple[Pass, int], ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def interleaved_program(grid: Grid, rank: int, *, trains: bool = True) -> list[Iteration]:
    """Return the program of `rank` with more than one chunk; the first exchange has no pass in front.

    All messages of an exchange have to be posted together: as blocking calls they deadlock. Two ranks
    post their messages to each other in the same order.

    Args:
        trains: whether there are backward passes, for which m must be a multiple of p.
    """
    steps: list[tuple[Pass, ...]] = [(), *([(each,) for each in grid.forwards()])]
    if trains:
        steps[1:] = grid.iterations(rank)
    buffers = _Buffers()
    program = []
    for step, following in zip_longest(steps, steps[1:], fillvalue=()):
        passes = tuple((each, buffers.slot(each)) for each in step)
        sends = tuple(
            Transfer(*each[:2], slot) for each, slot in passes if _sends(grid, rank, each)
        )
        receives = tuple(
            Transfer(*each[:2], buffers.slot(each)) for each in following if grid.source(rank, each)
        )
        program.append(Iteration(passes, sends, receives))
        # Only now: what is received must not take the place of what is being sent.
        for each in step:
            if each.direction == "backward" or not trains:
                buffers.free(each)
    return program


def _sends(grid: Grid, rank: int, each: Pass) -> bool:
    ends = grid.is_last if each.direction == "forward" else grid.is_first
    return not ends(rank, each.chunk)


class _Buffers:
    """Slots of activations: the lowest free one is taken next."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._count = 0

    def slot(self, each: Pass) -> int:
        """Return the slot of a chunk's micro-batch."""
        key = each.chunk, each.micro_batch
        if key not in self._taken:
            if not self._free:
                self._free.append(self._count)
                self._count += 1
            self._taken[key] = heapq.heappop(self._free)
        return self._taken[key]

    def free(self, each: Pass) -> None:
        """Give the slot back."""
        heapq.heappush(self._free, self._taken.pop((each.chunk, each.micro_batch)))


def num_buffers(program: Iterable[Iteration]) -> int:
    """Return the number of slots that a program uses."""
    used = (
        slot
        for each in program
        for slot in (*(slot for _, slot in each.passes), *(t.buffer for t in each.receives))
    )
    return 1 + max(used)


Times = dict[Pass, tuple[float, float]]
"""Begin and end of each pass of a rank."""


def simulated_times(
    grid: Grid, *, cost: Mapping[Direction, float], transfer: float = 0.0
) -> list[Times]:
    """Simulate a step: each rank begins a pass when its last one and its input are there.

    Args:
        cost: time of the pass of a full rank, of which each chunk has an equal part.
        transfer: time of a message, beside which the ranks compute.
    """
    times: list[Times] = [{} for _ in range(grid.ranks)]
    waiting = [
        [each for step in grid.iterations(rank) for each in step][::-1]
        for rank in range(grid.ranks)
    ]
    while any(waiting):
        begun = False
        for rank, passes in enumerate(waiting):
            while passes and (start := _start(grid, times, rank, passes[-1], transfer)) is not None:
                each = passes.pop()
                times[rank][each] = start, start + cost[each.direction] / grid.chunks
                begun = True
        if not begun:
            raise ValueError(f"{grid} deadlocks: with chunks, m must be a multiple of p")
    return times


def _start(
    grid: Grid, times: Sequence[Times], rank: int, each: Pass, transfer: float
) -> float | None:
    """Return when a pass can begin; None while that is not known."""
    own = max((end for _, end in times[rank].values()), default=0.0)
    needed = grid.source(rank, each)
    if needed is None:
        return own
    other, source = needed
    return max(own, times[other][source][1] + transfer) if source in times[other] else None


def step_time(times: Iterable[Times]) -> float:
    """Return when the last rank has ended its last pass."""
    return max(end for each in times for _, end in each.values())


def idle_share(times: Sequence[Times]) -> float:
    """Return the mean share of a step in which a rank computes nothing."""
    busy = sum(end - start for each in times for start, end in each.values())
    return 1 - busy / (len(times) * step_time(times))
