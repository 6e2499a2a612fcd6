"""Pipeline schedules: 1F1B, interleaved 1F1B with model chunks (virtual stages), zero bubble (ZB-H1).

Of p ranks with v chunks each, rank r has the virtual stages r, p + r, 2p + r, ... A schedule follows
from p, v and the micro-batches m alone, so every rank knows what the others send and when.

A zero-bubble schedule splits the backward pass: gradients of activations, which other ranks wait for,
come at once, gradients of weights later, where a rank would be idle.

Source: arXiv:2104.04473, section 2.2; arXiv:2401.10241, section 2, for the split.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Literal, NamedTuple, get_args

Direction = Literal["forward", "backward", "weight"]
"""Kinds of passes; in a split backward pass "backward" computes the gradients of activations alone."""


class Pass(NamedTuple):
    """Pass of a chunk for one micro-batch."""

    direction: Direction
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a schedule.

    >>> Grid(ranks=2, chunks=2, micro_batches=4).bubble
    0.1111111111111111

    Args:
        splits_backward: whether weight gradients are computed in passes of their own.
    """

    ranks: int
    chunks: int
    micro_batches: int
    splits_backward: bool = False

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank is idle."""
        return self.idle / (self.micro_batches + self.idle)

    @property
    def idle(self) -> float:
        """Time for which a rank is idle, in units of all passes of a micro-batch.

        Of the backward pass, which takes two thirds, half are weight gradients. They fill two thirds of
        the bubble, unless there are fewer micro-batches than ranks.
        """
        if not self.splits_backward:
            return (self.ranks - 1) / self.chunks
        missing = max(0, self.ranks - self.micro_batches)
        return (self.ranks - 1 + missing) / (3 * self.chunks)

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

    def passes(self, rank: int) -> Iterator[Pass]:
        """Yield the passes of `rank` in order.

        Weight gradients are computed in the order of their backward passes. Rank r puts r of them off:
        at the end of a step each rank waits so much longer for gradients than the next one.
        """
        waiting: deque[Pass] = deque()
        for step in self.iterations(rank):
            for each in step:
                yield each
                if self.splits_backward and each.direction == "backward":
                    waiting.append(each._replace(direction="weight"))
                    if len(waiting) > self.passes_put_off(rank):
                        yield waiting.popleft()
        yield from waiting

    def passes_put_off(self, rank: int) -> int:
        """Return how many weight passes wait at most while `rank` computes a forward pass."""
        return min(rank, self.micro_batches * self.chunks) if self.splits_backward else 0

    def last_gradients(self, rank: int) -> list[int]:
        """Return the numbers of the passes that complete gradients of a chunk, among those with gradients."""
        last = self.micro_batches - 1
        gradients = (each for each in self.passes(rank) if each.direction != "forward")
        return [number for number, each in enumerate(gradients) if each.micro_batch == last]

    def most_in_flight(self, rank: int) -> list[int]:
        """Return how many micro-batches each chunk of `rank` holds at the fullest moment."""
        # Later each backward pass comes before another forward pass.
        first = Counter(each.chunk for each in islice(self._forwards(), self.warmup(rank) + 1))
        return [first[chunk] for chunk in range(self.chunks)]

    def source(self, rank: int, each: Pass) -> tuple[int, Pass] | None:
        """Return the rank and pass whose output `each` needs; None for a batch or what is on `rank` itself.

        The backward pass of the last virtual stage follows its own forward pass.
        """
        if each.direction == "weight":
            return None
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
        passes: a weight pass has no buffer.
        sends: what the passes have produced, activations first.
        receives: what is posted to be received, activations first. Later passes need it.
    """

    passes: tuple[tuple[Pass, int | None], ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


_Step = tuple[tuple[Pass, ...], tuple[Pass, ...]]
"""Passes, and those of the same rank whose inputs are received in the exchange that follows."""


@lru_cache(maxsize=8)
def program_of(grid: Grid, rank: int, *, trains: bool = True) -> list[Iteration]:
    """Return the program of `rank`.

    All messages of an exchange have to be posted together: as blocking calls they deadlock. Two ranks
    post their messages to each other in the same order. An exchange need not end before a pass needs
    what it brings.

    Args:
        trains: whether there are backward passes. With several chunks m must then be a multiple of p.
    """
    if trains and grid.splits_backward:
        steps = _steps_by_time(grid, rank)
    else:
        steps = _steps_in_turn(grid, rank, trains=trains)
    buffers = _Buffers()
    program = []
    for passes, arriving in steps:
        placed = tuple(
            (each, None if each.direction == "weight" else buffers.slot(each)) for each in passes
        )
        sends = tuple(
            Transfer(*each[:2], slot)
            for each, slot in placed
            if slot is not None and _sends(grid, rank, each)
        )
        receives = tuple(Transfer(*each[:2], buffers.slot(each)) for each in arriving)
        program.append(Iteration(placed, sends, receives))
        # Only now: what is received must not take the place of what is being sent.
        for each in passes:
            if each.direction == "backward" or not trains:
                buffers.free(each)
    return program


def _steps_in_turn(grid: Grid, rank: int, *, trains: bool) -> Iterator[_Step]:
    """Yield forward and backward passes in turn; the first exchange has no pass in front.

    What a pass needs is received in the exchange before it.
    """
    steps: list[tuple[Pass, ...]] = [(), *([(each,) for each in grid.forwards()])]
    if trains:
        steps[1:] = grid.iterations(rank)
    for step, following in zip_longest(steps, steps[1:], fillvalue=()):
        yield step, tuple(each for each in following if grid.source(rank, each))


def _steps_by_time(grid: Grid, rank: int) -> Iterator[_Step]:
    """Yield passes one by one, by their time in a simulation in which all take equally long.

    A message is received at the time when it is sent, so that exchanges of all ranks follow one clock
    and cannot wait for each other in a circle.
    """
    times = _equal_times(grid)
    ending = {end: each for each, (_, end) in times[rank].items()}
    arriving: dict[float, list[Pass]] = defaultdict(list)
    for each in times[rank]:
        if needed := grid.source(rank, each):
            other, source = needed
            arriving[times[other][source][1]].append(each)
    for time in sorted({*ending, *arriving}):
        passes = (ending[time],) if time in ending else ()
        # Forward first: the names are sorted in reverse.
        yield passes, tuple(sorted(arriving[time], reverse=True))


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
        if slot is not None
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
        transfer: time of a message, overlapped with computation.
    """
    times: list[Times] = [{} for _ in range(grid.ranks)]
    waiting = [[*grid.passes(rank)][::-1] for rank in range(grid.ranks)]
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


@lru_cache(maxsize=1)
def _equal_times(grid: Grid) -> list[Times]:
    """Return the times of passes that take one unit each."""
    return simulated_times(grid, cost=dict.fromkeys(get_args(Direction), float(grid.chunks)))


def _start(
    grid: Grid, times: Sequence[Times], rank: int, each: Pass, transfer: float
) -> float | None:
    """Return when a pass can begin; None while that is not known."""
    _, free_at = next(reversed(times[rank].values()), (0.0, 0.0))
    needed = grid.source(rank, each)
    if needed is None:
        return free_at
    other, source = needed
    return max(free_at, times[other][source][1] + transfer) if source in times[other] else None


def step_time(times: Iterable[Times]) -> float:
    """Return when the last rank has ended its last pass."""
    return max(end for each in times for _, end in each.values())


def idle_share(times: Sequence[Times]) -> float:
    """Return the mean share of a step in which a rank computes nothing."""
    busy = sum(end - start for each in times for start, end in each.values())
    return 1 - busy / (len(times) * step_time(times))
