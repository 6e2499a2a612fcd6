"""What the planner expects in memory of a BERT, against the tensors that a step has."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator

import pytest
import torch
from memory_checks import BOTH, agrees
from ranks import outcomes_on_ranks, require_passed

from megatron.config.plan.plan import Plan
from megatron.extensions.bert.objective import bert_batch
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups


def batches(plan: Plan, groups: Groups) -> Iterator[Batch]:
    """Yield micro-batches of full samples."""
    samples, length = plan.batch.micro_batch_size, plan.model.seq_length
    row = torch.ones(samples, length, dtype=torch.int64)
    parts = {"text": row, "types": row, "labels": row, "loss_mask": row, "padding_mask": row}
    flags = dict.fromkeys(("is_random", "truncated"), row[:, 0])
    return iter(lambda: bert_batch(**parts, **flags), None)


def replicas(rank: int) -> None:
    agrees("--zero-stage", "1", objective="bert", batches_for=batches)


def tensor_parallel(rank: int) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", *BOTH)
    agrees(*flags, objective="bert", batches_for=batches)


def stages(rank: int) -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--checkpoint-activations")
    agrees(*flags, objective="bert", batches_for=batches)


CHECKS = [replicas, tensor_parallel, stages]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner_expects_what_is_there(check, outcomes):
    require_passed(check, outcomes)
