"""Steps of hybrid networks: bytes sent against the planner's, and adapters in every layout."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from engines import trained
from ranks import outcomes_on_ranks, require_passed
from step_traffic import SEQUENCE, STAGES, TENSOR, step_of
from test_hybrid_memory_on_ranks import SIZES
from test_lora_on_ranks import LORA, part_of
from torch.testing import assert_close

from megatron.tensor_parallel.linear import is_adapter

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


def adapters(rank: int) -> None:
    flags = (
        *SIZES,
        "--hybrid-layer-pattern",
        "MG*-",
        "--num-layers",
        "4",
        "--hidden-size",
        "16",
        *LORA,
    )
    expected = trained(*flags)
    assert sum(map(is_adapter, expected)) == 2 * 2 * 4
    for layout in (SEQUENCE, STAGES, ("--zero-stage", "3")):
        for name, value in trained(*flags, *layout).items():
            whole = part_of(expected[name], rank, value)
            output = f"{layout} {name}: "
            assert_close(value, whole, rtol=1e-4, atol=1e-5, msg=output.__add__)


CHECKS = [tensor, sequence, recomputed, adapters]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("traffic"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
