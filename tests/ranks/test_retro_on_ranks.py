"""Retro over tensor, pipeline and data parallel ranks against one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_plan
from torch.testing import assert_close

from megatron.engine.deepspeed import distributed
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.retro import RETRO_FIELDS, Retro, retro_batch
from megatron.optimizer.param_groups import param_groups
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.training.setup import build_engine, build_process_groups, choose

STEPS, MICRO_BATCHES = 2, 4
FLAGS = (
    *("--num-layers", "11", "--retro-chunk-length", "2", "--retro-encoder-layers", "2"),
    *("--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0"),
    *("--global-batch-size", "8", "--init-method-std", "0.3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "0.1", "--lr", "0.1"),
)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def plan_of(*flags):
    device = "cuda" if "--fp16" in flags else "cpu"
    ranks = dist.get_world_size()
    return tiny_plan(*FLAGS, *flags, world_size=ranks, objective="retro", device=device)


def micro_batches():
    """Yield samples with neighbors of all lengths."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS * MICRO_BATCHES):
        yield retro_batch(
            tokens=draw(1, 11, (2, 7)),
            neighbor_tokens=draw(1, 11, (2, 3, 2, 4)),
            neighbor_lengths=draw(0, 5, (2, 3, 2)),
        )


def plainly_trained():
    """Return losses, norms and weights of the run in this process alone."""
    spec = plan_of().model
    model = SequentialModel(
        Retro().layers(
            spec,
            group=lone_group(),
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec),
            batch_fields=tuple(RETRO_FIELDS),
        )
    )
    initialise(model, seed=1234, std=0.3, num_layers=11, vocab_size=11)
    optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=0.1, momentum=0.9)
    loss_of, batches = next_token_loss(lone_group(), vocab_size=11), micro_batches()
    steps = []
    for _ in range(STEPS):
        found = [loss_of(model(batch), batch) for batch in (next(batches) for _ in range(4))]
        loss = torch.stack(found).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        steps.append((float(loss), float(norm)))
    return steps, dict(model.named_parameters())


def trained(*flags):
    """Train over all ranks; return what `plainly_trained` returns, of weights this rank's."""
    plan = plan_of(*flags)
    groups = build_process_groups(plan)
    kernels, _ = choose(plan, torch.device("cpu"))
    engine = build_engine(plan, groups, Retro(), kernels)

    def own():
        for number, batch in enumerate(micro_batches()):
            if number % groups.topology.data == groups.data_rank:
                yield batch

    batches = own()
    steps = [(float(engine.train_batch(batches)), engine.grad_norm) for _ in range(STEPS)]
    return steps, dict(engine.module.named_parameters())


class Layout:
    def __init__(self, *flags):
        self.flags, self.__name__ = flags, " ".join(flags)

    def __call__(self, rank):
        distributed.start("gloo")
        get_accelerator().is_fp16_supported = lambda: True
        rel = 3e-2 if "--fp16" in self.flags else 1e-3
        (want, weights), (got, own) = plainly_trained(), trained(*self.flags)
        for (loss, norm), (found, found_norm) in zip(want, got, strict=True):
            assert found == pytest.approx(loss, rel=rel / 10)
            assert found_norm == pytest.approx(norm, rel=rel)
        assert {*own} <= {*weights}
        for name, parameter in own.items():
            if parameter.shape == weights[name].shape:
                assert_close(parameter.float(), weights[name], rtol=rel, atol=rel / 100)


CHECKS = [
    Layout("--zero-stage", "1", "--checkpoint-activations"),
    Layout(TENSOR, "2", "--zero-stage", "3", "--recompute-granularity", "selective"),
    Layout(TENSOR, "2", PIPELINE, "2", "--attention-impl", "fused-softmax"),
    # The encoder is on the second stage, and no layer of the last attends to neighbors.
    Layout(PIPELINE, "4", "--checkpoint-activations", "--zero-stage", "1"),
    Layout(PIPELINE, "4", "--zero-stage", "0", "--pp-partition-method", "uniform"),
    Layout("--fp16", "--initial-loss-scale", "256", PIPELINE, "2"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
