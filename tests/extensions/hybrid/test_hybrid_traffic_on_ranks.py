"""Bytes that tensor-parallel ranks of a hybrid network send in a step, against the planner's."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from ranks import outcomes_on_ranks, require_passed
from step_traffic import SEQUENCE, TENSOR, step_of
from test_hybrid_memory_on_ranks import SIZES

KINDS = (*SIZES, "--hybrid-layer-pattern", "MG*-", "--bf16", "--zero-stage", "1")


def is_planned(*flags: str) -> None:
    step = step_of(*KINDS, *flags)
    assert step.sent() == pytest.approx(step.planned(), rel=1e-3, abs=100)


def tensor(rank: int) -> None:
    is_planned(*TENSOR)


def sequence(rank: int) -> None:
    is_planned(*SEQUENCE)


def recomputed(rank: int) -> None:
    is_planned(*SEQUENCE, "--checkpoint-activations")


CHECKS = [tensor, sequence, recomputed]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("traffic"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_step_sends_what_is_planned(check, outcomes):
    require_passed(check, outcomes)
