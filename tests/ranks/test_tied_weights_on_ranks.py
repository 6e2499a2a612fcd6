"""Tied embeddings of pipeline stages have the same bits after every step, with three replicas or more.

Two replicas do not show it: a sum of two terms has one order.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from deepspeed.accelerator import get_accelerator
from engines import batches_of, engine_of
from ranks import outcomes_on_ranks, require_passed

from megatron.checkpointing.train_state import TrainState
from megatron.training.guards.replica_check import ReplicaCheck

STEPS = 4
NETWORK = (
    *("--pipeline-model-parallel-size", "2", "--lr", "0.01", "--micro-batch-size", "1"),
    *("--hidden-size", "10", "--make-vocab-size-divisible-by", "1"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
FP16 = "--fp16", "--loss-scale", "64"
RING = "--context-parallel-size"
SMALL = "--zero-reduce-bucket-size", "100", "--enable-zbh1-pipeline"
EXPERTS = "--num-experts", "2", "--disable-moe-token-dropping"


class SameBits:
    """A check that `flags` train two stages without a difference between ranks."""

    def __init__(self, *flags):
        self.__name__ = " ".join(flags)
        self._flags = flags

    def __call__(self, rank):
        get_accelerator().is_fp16_supported = lambda: True
        engine, plan, groups = engine_of(*NETWORK, *self._flags, vocab_size=97)
        batches = batches_of(plan, groups)
        check = ReplicaCheck(engine, groups, interval=1, streams_per_tensor_rank=False)
        for number in range(STEPS):
            engine.train_batch(batches)
            check.after_step(TrainState(iteration=number), step=None)
        assert engine.skipped_steps == 0


CHECKS = [
    (6, SameBits("--zero-stage", zero, "--global-batch-size", "6", *precision))
    for zero in "01"
    for precision in ([], ["--bf16"], FP16)
]
CHECKS += [
    (6, SameBits("--zero-stage", "0", "--global-batch-size", "2", RING, "3")),
    (6, SameBits("--zero-stage", "1", "--global-batch-size", "2", RING, "3", "--bf16")),
    (8, SameBits("--zero-stage", "0", "--global-batch-size", "8")),
    (8, SameBits("--zero-stage", "1", "--global-batch-size", "8", "--bf16")),
    (8, SameBits("--zero-stage", "1", "--global-batch-size", "4", RING, "2")),
    (6, SameBits("--zero-stage", "1", "--global-batch-size", "6", "--bf16", *SMALL)),
    (6, SameBits("--zero-stage", "1", "--global-batch-size", "6", *EXPERTS)),
    (6, SameBits("--zero-stage", "0", "--global-batch-size", "6", *EXPERTS, "--bf16")),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return {
        ranks: outcomes_on_ranks(
            ranks,
            [check for size, check in CHECKS if size == ranks],
            tmp_path_factory.mktemp(f"ranks{ranks}"),
        )
        for ranks in (6, 8)
    }


@pytest.mark.parametrize(
    "ranks, check", CHECKS, ids=[f"{ranks} ranks {check.__name__}" for ranks, check in CHECKS]
)
def test_copies_keep_the_same_bits(ranks, check, outcomes):
    require_passed(check, outcomes[ranks])
