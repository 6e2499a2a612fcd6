"""What ranks must have in common is compared; one that comes apart is named."""

import os
from itertools import chain

from problems import problem

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from engines import batches_of, deepspeed_of, engine_of
from ranks import outcomes_on_ranks, require_passed

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.training.guards.replica_check import ReplicaCheck

ODD = 3
"""The rank that comes apart."""


def trained_check(*flags):
    engine, plan, groups = engine_of(*flags)
    batches = batches_of(plan, groups)
    for _ in range(2):
        engine.train_batch(batches)
    check = ReplicaCheck(
        engine,
        groups,
        interval=2,
        streams_per_tensor_rank=plan.parallel.sequence_parallel,
    )
    check.after_step(TrainState(iteration=2), step=None)
    return engine, check


def require_named(rank, check, what, ranks):
    with problem(f"iteration 4 … {what}: ranks {ranks}", TrainingError):
        check.after_step(TrainState(iteration=4), step=None)


def spoil(rank, engine, check, part, ranks):
    """Change one number of the weight or buffer whose name ends in `part` on the odd rank, and back."""
    tensors = chain(engine.module.named_parameters(), engine.module.named_buffers())
    own = {name: tensor for name, tensor in tensors if name.endswith(part)}
    if rank == ODD:
        weight = next(iter(own.values())).data.view(-1)
        kept = weight[0].item()
        weight[0] = kept + 1
    check.after_step(TrainState(iteration=3), step=None)
    require_named(rank, check, part, ranks)
    if rank == ODD:
        weight[0] = kept
    check.after_step(TrainState(iteration=4), step=None)


def compares_replicas_and_tensor_ranks(rank):
    engine, check = trained_check("--tensor-model-parallel-size", "2", "--hidden-dropout", "0.1")
    spoil(rank, engine, check, "input_layernorm.weight", "0, 1, 2 | 3")
    # Its shard is also on the rank of the other replica.
    spoil(rank, engine, check, "dense_h_to_4h.weight", "1 | 3")
    if rank == ODD:
        torch.rand(1)
    require_named(rank, check, "random stream", "2 | 3")
    steps = next(iter(deepspeed_of(engine).basic_optimizer.state.values()))["step"]
    steps += int(rank == ODD)
    require_named(rank, check, "optimizer", "0, 1, 2 | 3")
    steps -= int(rank == ODD)
    engine.set_lr(0.5 if rank == ODD else 0.25)
    require_named(rank, check, "learning rate", "0, 1, 2 | 3")
    counters = TrainState(iteration=6, samples=12 + (rank == ODD))
    with problem("samples: ranks 0, 1, 2 | 3", TrainingError):
        check.after_step(counters, step=None)


def divides_what_ranks_draw_with_sequence_parallelism(rank):
    sequence = ("--sequence-parallel", "--hidden-dropout", "0.1", "--bf16", "--zero-stage", "2")
    engine, check = trained_check("--tensor-model-parallel-size", "2", *sequence)
    spoil(rank, engine, check, "input_layernorm.weight", "0, 1, 2 | 3")


def compares_the_embeddings_of_stages(rank):
    engine, check = trained_check("--pipeline-model-parallel-size", "2")
    spoil(rank, engine, check, "word_embeddings.weight", "0, 1, 2 | 3")


def compares_no_weight_that_is_held_once(rank):
    bias = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    experts = ("--num-experts", "2", "--disable-moe-token-dropping", *bias)
    engine, check = trained_check("--zero-stage", "3", *experts)
    spoil(rank, engine, check, "expert_bias", "0, 1, 2 | 3")


CHECKS = [
    compares_replicas_and_tensor_ranks,
    divides_what_ranks_draw_with_sequence_parallelism,
    compares_the_embeddings_of_stages,
    compares_no_weight_that_is_held_once,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks_that_come_apart_are_named(outcomes, check):
    require_passed(check, outcomes)
