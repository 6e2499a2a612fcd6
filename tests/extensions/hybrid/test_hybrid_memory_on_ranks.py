"""What the planner expects in memory of hybrid networks, against the tensors that a step has."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from memory_checks import BOTH, agrees
from ranks import outcomes_on_ranks, require_passed

SIZES = (
    *("--network", "hybrid", "--position-embedding-type", "none", "--seq-length", "128"),
    *("--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
    *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
)
TENSOR = ("--tensor-model-parallel-size", "2")


def mamba(rank: int) -> None:
    agrees(*SIZES, "--hybrid-layer-pattern", "MMMM", *TENSOR, "--sequence-parallel", "--bf16")


def delta_net(rank: int) -> None:
    agrees(*SIZES, "--hybrid-layer-pattern", "GGGG", "--zero-stage", "1")


def all_kinds(rank: int) -> None:
    agrees(*SIZES, "--hybrid-layer-pattern", "M*G-", *TENSOR, *BOTH)


def stages(rank: int) -> None:
    agrees(*SIZES, "--hybrid-layer-pattern", "M-G*", "--pipeline-model-parallel-size", "2")


def gates(rank: int) -> None:
    agrees(*SIZES, "--hybrid-layer-pattern", "*-*-", "--attention-output-gate", *TENSOR)


CHECKS = [mamba, delta_net, all_kinds, stages, gates]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner_expects_what_is_there(check, outcomes):
    require_passed(check, outcomes)
