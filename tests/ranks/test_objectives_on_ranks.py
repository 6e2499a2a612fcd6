"""What tokens see, in two pipeline stages; and samples of more than tokens, on two tensor ranks."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial
from itertools import repeat

import numpy as np
import pytest
import torch
import torch.distributed as dist
from networks import gpt_steps
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_objective, tiny_plan
from torch.testing import assert_close

from megatron.common.registry import OBJECTIVES
from megatron.data.datasets.views import PrefixDataset
from megatron.engine.build import build_engine
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.objectives.gpt import SPAN_FIELDS
from megatron.objectives.prefix_lm import PrefixLM
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.topology import Topology
from megatron.training.loop.batch import read_batches

FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--seq-length", "8"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--checkpoint-activations"),
]
fill = partial(initialise, seed=1, std=0.5, num_layers=2)
PREFIX = {
    "tokens": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
    "prefix_ends": torch.tensor([[4] * 8 + [0]]),
}
PAIRS = {
    "tokens": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 0]]),
    "text_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0]]),
    "target_starts": torch.tensor([[2, 2, 2, 6, 6, 6, 6, 0, 0]]),
}


def micro_batch(name, rows):
    plan = tiny_objective(name, *["--prefixlm"] * (name == "multitask"))
    return OBJECTIVES.get(name)().collate(plan, tiny_plan().masks, None)(**rows)


def tokens_see_what_they_should_in_a_pipeline(rank):
    distributed.start("gloo")
    plan = tiny_plan(*FLAGS, world_size=2)
    groups = build_groups(Topology(pipeline=2, data=1, tensor=1))
    of_prefixes = PrefixLM().loss(tiny_objective("prefix-lm"))(lone_group())
    seen = []

    def loss(logits, target):
        seen.append(logits.detach().clone())
        return of_prefixes(logits, target)

    engine = build_engine(
        gpt_steps(
            plan.model,
            group=groups.tensor,
            rng=start_streams(groups, seed=5, activation_checkpointing={}),
            mixed=False,
            batch_fields=tuple(SPAN_FIELDS),
        ),
        loss=loss,
        groups=groups,
        parallel=plan.parallel,
        recompute=plan.recompute,
        initialise=fill,
        build_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        config=plan.deepspeed,
        batch_fields=tuple(SPAN_FIELDS),
    )
    whole = SequentialModel(
        gpt_steps(plan.model, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    )
    fill(whole)

    def logits_of(name, rows):
        batch = micro_batch(name, rows)
        engine.evaluate(iter([batch]), 1)
        if rank == 1:
            with torch.no_grad():
                assert_close(seen[-1], whole(batch))
        return seen[-1][0] if rank == 1 else None

    def changed(name, rows, place):
        other = rows | {"tokens": rows["tokens"].clone()}
        other["tokens"][0, place] = 10
        pair = [logits_of(name, each) for each in (rows, other)]
        return [i for i in range(8) if rank == 0 or not torch.equal(pair[0][i], pair[1][i])]

    for name, rows, place, expected in (
        ("prefix-lm", PREFIX, 3, [*range(8)]),
        ("prefix-lm", PREFIX, 4, [4, 5, 6, 7]),
        ("multitask", PAIRS, 1, [0, 1, 2]),
        ("multitask", PAIRS, 5, [3, 4, 5, 6]),
        ("multitask", PAIRS, 6, [6]),
    ):
        assert changed(name, rows, place) == (expected if rank == 1 else [*range(8)])

    given = micro_batch("prefix-lm", PREFIX)
    expected = of_prefixes(whole(given), given)
    trained = engine.train_batch(repeat(given))
    assert_close(trained.squeeze(), expected.detach())


class Counting:
    """Sample i is the tokens i, i + 1, …, modulo 11."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return {"tokens": (i + np.arange(7)) % 11}


class Unread(Counting):
    def __getitem__(self, i):
        raise AssertionError("tensor rank 0 alone reads")


def prefixes_are_the_same_on_all_ranks(rank):
    plan = tiny_plan("--micro-batch-size", "3")

    def batches(topology, samples):
        stream = read_batches(
            PrefixDataset(samples, eod=None, seed=4),
            collate=PrefixLM().collate(tiny_objective("prefix-lm"), plan.masks, None),
            fields=PrefixLM().batch_fields(plan.masks),
            consumed_samples=6,
            batch=plan.batch,
            letters={"s": plan.model.seq_length},
            vocab_size=plan.model.vocabulary.vocab_size,
            groups=build_groups(topology),
            device=torch.device("cpu"),
        )
        batch = next(stream)
        return [batch[name].tolist() for name in ("tokens", "attention_span", "loss_mask")]

    stages = batches(Topology(pipeline=2, data=1, tensor=1), Counting())
    tensor_ranks = batches(
        Topology(pipeline=1, data=1, tensor=2), Counting() if rank == 0 else Unread()
    )
    assert stages == tensor_ranks
    found = [None, None]
    dist.all_gather_object(found, stages)
    assert found[0] == found[1]
    assert len({str(spans) for spans in stages[1]}) > 1, "the prefixes differ within the batch"


CHECKS = [tokens_see_what_they_should_in_a_pipeline, prefixes_are_the_same_on_all_ranks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
