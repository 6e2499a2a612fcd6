"""Straggler detection: finds ranks whose work before they wait for other ranks is slow.

All ranks take as long for a full step as the slowest rank. Ranks differ in the time in which they
read their data and compute their forward passes. Ranks that share layers or divide samples wait for
each other within it, and so are slow together; replicas do not.

Source: MegaScale (arXiv:2402.15627), section 5.2, which compares machines likewise.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from socket import gethostname

from megatron.checkpointing.train_state import TrainState
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.loop.collectives import from_rank_0, post
from megatron.training.loop.journal import Journal

log = logging.getLogger(__name__)

SLOWEST, SLOWNESS = "slowest rank", "times the median"

_IN_A_ROW = 3
"""Consecutive log lines at which a rank must be slow before a warning: one alone is noise."""


class SlowRanks:
    """Logs the slowest rank (straggler) at each log line, and warns of one that stays slow.

    Args:
        factor: how many times as long as the median of the others of its stage a rank may take.
        interval: iterations between log lines.
        take: returns this rank's seconds of each part since it was last called.
        journal: rank 0's, None elsewhere.

    Communication: the hosts' names to rank 0 at the start; at each log line two numbers of each rank
        to rank 0, and the slowest from there.
    """

    def __init__(
        self,
        factor: float,
        *,
        interval: int,
        take: Callable[[], Mapping[str, float]],
        groups: Groups,
        journal: Journal | None,
    ):
        self._factor, self._interval, self._take = factor, interval, take
        self._groups, self._journal = groups, journal
        hosts = post(gethostname())
        self._hosts = hosts.all() if groups.rank == 0 else []
        self._lines_slow = [0] * len(self._hosts)
        self._seconds: list[float] = []
        self._steps = 0

    def __call__(self, state: TrainState) -> Mapping[str, float]:
        """Return the slowest rank and how slow it is, when a log line is due."""
        taken = list(self._take().values())
        self._seconds = [a + b for a, b in zip(self._seconds or [0.0, 0.0], taken, strict=True)]
        self._steps += 1
        if state.iteration % self._interval:
            return {}
        posted = post([1000 * s / self._steps for s in self._seconds])
        self._seconds, self._steps = [], 0
        slowest, slowness = from_rank_0(lambda: self._compare(posted.all(), state.iteration))
        return {SLOWEST: slowest, SLOWNESS: slowness}

    def _compare(
        self, everyones_ms: Sequence[Sequence[float]], iteration: int
    ) -> tuple[int, float]:
        """Return the slowest rank and how slow it is; log and record that, on rank 0."""
        data_ms, forward_ms = zip(*everyones_ms, strict=True)
        busy_ms = [data + forward for data, forward in everyones_ms]
        slowness = slowness_of(busy_ms, self._groups.topology.stage_of)
        slowest = max(range(len(slowness)), key=slowness.__getitem__)
        if self._journal:
            record = {
                "iteration": iteration,
                "slowest": slowest,
                "host": self._hosts[slowest],
                "slowness": slowness[slowest],
                "data_ms": _round(data_ms),
                "forward_ms": _round(forward_ms),
                "hosts": _ranks_by(self._hosts),
            }
            self._journal.write("ranks", record)
        self._warn(iteration, slowness, busy_ms, data_ms)
        return slowest, slowness[slowest]

    def _warn(
        self,
        iteration: int,
        slowness: Sequence[float],
        busy_ms: Sequence[float],
        data_ms: Sequence[float],
    ) -> None:
        """Warn of ranks that stay slow, and log ranks that have recovered."""
        for rank, times in enumerate(slowness):
            before, is_slow = self._lines_slow[rank], times > self._factor
            self._lines_slow[rank] = before + 1 if is_slow else 0
            if is_slow and before + 1 == _IN_A_ROW:
                log.warning(
                    "rank %d on %s is slow: %.1f ms a step for data (%.1f) and forward passes, "
                    "%.2f times the median of the other ranks of its stage, and more than %g times "
                    "at %d log lines in a row",
                    *(rank, self._hosts[rank], busy_ms[rank], data_ms[rank], times),
                    *(self._factor, _IN_A_ROW),
                )
                self._note("slow rank", iteration, rank, times)
            elif not is_slow and before >= _IN_A_ROW:
                log.info(
                    "rank %d on %s keeps up again: %.2f times the median",
                    *(rank, self._hosts[rank], times),
                )
                self._note("rank keeps up", iteration, rank, times)

    def _note(self, event: str, iteration: int, rank: int, times: float) -> None:
        if self._journal:
            where = {"rank": rank, "host": self._hosts[rank]}
            self._journal.write(event, {"iteration": iteration, **where, "slowness": times})


def slowness_of(busy: Sequence[float], stage_of: Callable[[int], int]) -> list[float]:
    """Return each rank's time over the median of the other ranks of its stage; 1 if it is alone.

    Args:
        busy: time of each rank.
        stage_of: the pipeline stage of a rank; stages have different work.
    """
    stages: dict[int, list[int]] = {}
    for rank in range(len(busy)):
        stages.setdefault(stage_of(rank), []).append(rank)
    slowness = [1.0] * len(busy)
    for ranks in stages.values():
        ranks.sort(key=busy.__getitem__)
        times = [busy[rank] for rank in ranks]
        for index, rank in enumerate(ranks):
            usual = _median_without(times, index)
            slowness[rank] = busy[rank] / usual if usual > 0 else 1.0
    return slowness


def _median_without(times: Sequence[float], index: int) -> float:
    """Return the median of sorted `times` but the one at `index`; 0 if there is no other."""
    count = len(times) - 1
    if not count:
        return 0.0
    middle = (times[k if k < index else k + 1] for k in ((count - 1) // 2, count // 2))
    return sum(middle) / 2


def _ranks_by(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return {host: its ranks}."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def _round(values: Sequence[float]) -> list[float]:
    return [round(value, 2) for value in values]
