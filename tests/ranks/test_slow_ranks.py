"""Slow ranks and the fullest memory, reported over ranks."""

import logging
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from ranks import outcomes_on_ranks, require_passed

from megatron.checkpointing.train_state import TrainState
from megatron.tensor_parallel.topology import Topology
from megatron.training.loop.journal import Journal, read_journal
from megatron.training.telemetry import memory
from megatron.training.telemetry.slow_ranks import SLOWEST, SLOWNESS, SlowRanks, slowness_of

RANKS = 3
SLOW_UNTIL = 30
"""Up to this iteration rank 1 takes 5 s for its forward passes, then 1; the others take 2."""


def keep_messages():
    output = []
    handler = logging.Handler()
    handler.emit = lambda record: output.append(record.getMessage())
    logger = logging.getLogger("megatron.training.telemetry.slow_ranks")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    return output


def a_rank_that_stays_slow_is_told_and_then_that_it_keeps_up(rank):
    now = {"forward": 0.0}

    def take():
        return {"data": 0.5, "forward": now["forward"]}

    with TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder) if rank == 0 else None
        groups = SimpleNamespace(rank=rank, topology=Topology(pipeline=1, data=RANKS, tensor=1))
        meter = SlowRanks(1.5, interval=10, take=take, groups=groups, journal=journal)
        output, measured = keep_messages(), {}
        for iteration in range(1, 61):
            now["forward"] = (5.0 if iteration <= SLOW_UNTIL else 1.0) if rank == 1 else 2.0
            if found := meter(TrainState(iteration=iteration)):
                measured[iteration] = found
        assert sorted(measured) == [10, 20, 30, 40, 50, 60]
        assert measured[10] == {SLOWEST: 1, SLOWNESS: 5.5 / 2.5}
        assert measured[60][SLOWEST] in (0, 2)
        if rank:
            assert output == []
            return
        slow, again = output
        assert slow.startswith("rank 1 on ")
        assert "5500.0 ms a step for data (500.0) and forward passes, 2.20 times" in slow
        assert again.startswith("rank 1 on ") and "keeps up again: 0.60 times" in again
        records = list(read_journal(folder))
        by_event = [(r["event"], r["iteration"]) for r in records if r["event"] != "ranks"]
        assert by_event == [("slow rank", 30), ("rank keeps up", 40)]
        first = records[0]
        assert (first["data_ms"], first["forward_ms"]) == ([500.0] * 3, [2000.0, 5000.0, 2000.0])
        assert list(first["hosts"].values()) == [[0, 1, 2]]
        assert (first["slowest"], first["slowness"]) == (1, 2.2)


def memory_is_that_of_the_fullest_rank(rank):
    sizes = {"_device_bytes": (0, 0), "_resident_bytes": (rank + 1) * 2**30}
    sizes["available_bytes"] = (5 - rank) * 2**30
    real = {name: getattr(memory, name) for name in sizes}
    own = memory.worst_memory()
    assert 0.05 < own[memory.RESIDENT] < 50 and own[memory.AVAILABLE] > 0.1
    assert memory.ALLOCATED not in own  # there is no GPU, and nothing is made up
    for name, size in sizes.items():
        setattr(memory, name, lambda size=size: size)
    assert memory.worst_memory() == {memory.RESIDENT: RANKS, memory.AVAILABLE: 6 - RANKS}
    for name, function in real.items():
        setattr(memory, name, function)


CHECKS = [
    a_rank_that_stays_slow_is_told_and_then_that_it_keeps_up,
    memory_is_that_of_the_fullest_rank,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(RANKS, CHECKS, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_ranks(check, outcomes):
    require_passed(check, outcomes)


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_a_rank_is_compared_with_the_others_of_its_stage(pipeline):
    times = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0, 6.0]
    topology = Topology(pipeline=pipeline, data=8 // pipeline, tensor=1)
    expected = []
    for rank, own in enumerate(times):
        others = [
            times[r]
            for r in range(8)
            if r != rank and topology.stage_of(r) == topology.stage_of(rank)
        ]
        expected.append(own / median(others) if others else 1.0)
    assert slowness_of(times, topology.stage_of) == pytest.approx(expected)
