"""Ranks that share a Retro write what one process writes."""

from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks
from retro_engines import answers_of, retro_engine

from megatron.tensor_parallel.process_groups import build_groups
from megatron.tensor_parallel.topology import Topology


def write_together(rank: int, expected: list[Any]) -> None:
    groups = build_groups(Topology(pipeline=1, data=1, tensor=2))
    retro = retro_engine(groups=groups)
    if rank:
        retro.follow()
        return
    for own, alone in zip(answers_of(retro), expected, strict=True):
        assert own == (alone[0], pytest.approx(alone[1], abs=1e-4))
    retro.close()


def test_tensor_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    run_on_ranks(2, write_together, tmp_path, answers_of(retro_engine()))
