"""Norm of the weights and zeros of the gradient: each weight once, in every layout."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from itertools import repeat

import pytest
import torch
from networks import gpt_steps
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_plan

from megatron.engine.deepspeed import distributed
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, GPT, gpt_batch
from megatron.tensor_parallel.broadcast import sequence_shard
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.training.setup import build_engine, build_process_groups

FLAGS = [
    *("--init-method-std", "0.3", "--attention-dropout", "0", "--hidden-dropout", "0"),
    # The bias of keys has no gradient but rounding errors, which may be zero or not.
    "--disable-bias-linear",
    "--log-num-zeros-in-grad",
]
UNSEEN_POSITIONS, WIDTH = 2, 8


def micro_batch():
    """Return samples that are shorter than the table of positions."""
    tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(3))
    return gpt_batch(tokens[:, : 7 - UNSEEN_POSITIONS])


def norm_of_the_whole(plan):
    model = SequentialModel(
        gpt_steps(plan.model, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    )
    spec = plan.model
    initialise(
        model,
        seed=plan.training.seed,
        std=0.3,
        num_layers=spec.num_layers,
        vocab_size=spec.vocabulary.vocab_size,
    )
    given = micro_batch()
    loss = next_token_loss(lone_group(), vocab_size=spec.vocabulary.vocab_size)
    loss(model(given), given).backward()
    zeros = sum(int((p.grad == 0).sum()) for p in model.parameters()) - spec.num_padding_parameters
    # The table's rows that no position took, and nothing else.
    assert zeros == UNSEEN_POSITIONS * WIDTH
    return sum(p.double().square().sum() for p in model.parameters()).sqrt().item()


def measure(*flags):
    distributed.start("gloo")
    plan = tiny_plan(*FLAGS, *flags, world_size=2)
    groups = build_process_groups(plan)
    engine = build_engine(plan, groups, GPT(), REFERENCE)
    assert engine.params_norm() == pytest.approx(norm_of_the_whole(plan), rel=1e-6)
    engine.set_lr(0.0)
    engine.set_seq_length(6 - UNSEEN_POSITIONS)
    part = sequence_shard(micro_batch(), CAUSAL_FIELDS, groups)
    engine.train_batch(repeat(part))
    assert engine.num_zeros == UNSEEN_POSITIONS * WIDTH


def data(rank):
    measure()


def tensor(rank):
    measure("--tensor-model-parallel-size", "2")


def pipeline(rank):
    measure("--pipeline-model-parallel-size", "2")


def zero1(rank):
    measure("--zero-stage", "1")


def zero2(rank):
    measure("--zero-stage", "2")


def tensor_zero2(rank):
    measure("--tensor-model-parallel-size", "2", "--zero-stage", "2")


def sequence(rank):
    measure("--ds-sequence-parallel-size", "2")


def sequence_zero3(rank):
    measure("--ds-sequence-parallel-size", "2", "--zero-stage", "3")


def zero3(rank):
    measure("--zero-stage", "3")


CHECKS = [
    data,
    tensor,
    pipeline,
    zero1,
    zero2,
    tensor_zero2,
    zero3,
    sequence,
    sequence_zero3,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("measures"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_weight_counts_once(check, outcomes):
    require_passed(check, outcomes)
