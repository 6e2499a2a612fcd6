"""What the planner expects in memory of a T5, against the tensors that a step has."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from memory_checks import BOTH, agrees
from ranks import outcomes_on_ranks, require_passed

from megatron.config.plan.plan import Plan
from megatron.extensions.t5.objective import t5_batch
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups

SIZES = ("--decoder-seq-length", "32", "--decoder-num-layers", "3")


def batches(plan: Plan, groups: Groups) -> Iterator[Batch]:
    """Yield micro-batches of full samples."""
    spec, samples = plan.model, plan.batch.micro_batch_size
    ones = partial(torch.ones, dtype=torch.int64)
    row, width = ones(samples, spec.seq_length), spec.own.decoder_seq_length
    lengths = {"enc_length": spec.seq_length * row[:, 0], "dec_length": width * row[:, 0]}
    own = dict.fromkeys(("text_dec", "labels", "loss_mask"), ones(samples, width))
    return iter(lambda: t5_batch(text_enc=row, truncated=row[:, 0], **own, **lengths), None)


def replicas(rank: int) -> None:
    agrees(*SIZES, "--zero-stage", "1", objective="t5", batches_for=batches)


def tensor_parallel(rank: int) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", *BOTH)
    agrees(*SIZES, *flags, objective="t5", batches_for=batches)


def stages(rank: int) -> None:
    flags = ("--pipeline-model-parallel-size", "2")
    agrees(*SIZES, *flags, objective="t5", batches_for=batches)


CHECKS = [replicas, tensor_parallel, stages]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner_expects_what_is_there(check, outcomes):
    require_passed(check, outcomes)
