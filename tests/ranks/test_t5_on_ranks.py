"""T5 over tensor, sequence, pipeline and data parallel ranks against plain PyTorch in one process."""

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
from megatron.objectives.t5 import T5, T5_FIELDS, t5_batch
from megatron.optimizer.param_groups import param_groups
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.training.setup import build_engine, build_process_groups, choose

STEPS, MICRO_BATCHES = 3, 4
FLAGS = (
    *("--num-layers", "2", "--decoder-num-layers", "2", "--decoder-seq-length", "4"),
    *("--global-batch-size", "8", "--init-method-std", "0.3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "0.1", "--lr", "0.1"),
)
RELATIVE = (
    *("--position-embedding-type", "relative"),
    *("--relative-attention-num-buckets", "4", "--relative-attention-max-distance", "5"),
)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SPLIT = "--pipeline-model-parallel-split-rank"


def plan_of(*flags):
    device = "cuda" if "--fp16" in flags else "cpu"
    ranks = dist.get_world_size()
    return tiny_plan(*FLAGS, *flags, world_size=ranks, objective="t5", device=device)


def micro_batches():
    """Yield samples of all lengths."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=generator)
    for _ in range(STEPS * MICRO_BATCHES):
        lengths, targets = draw(1, 7, (2,)), draw(1, 5, (2,))
        real = (torch.arange(6) < lengths[:, None]).long()
        target = (torch.arange(4) < targets[:, None]).long()
        yield t5_batch(
            text_enc=draw(1, 11, (2, 6)) * real,
            text_dec=draw(1, 11, (2, 4)) * target,
            labels=draw(1, 11, (2, 4)) * target - (1 - target),
            loss_mask=target,
            truncated=torch.zeros(2, dtype=torch.int64),
            enc_length=lengths,
            dec_length=targets,
        )


def plainly_trained(*flags):
    """Return losses, norms and weights of the run in this process alone."""
    spec = plan_of(*flags).model
    model = SequentialModel(
        T5().layers(
            spec,
            group=lone_group(),
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec),
            batch_fields=tuple(T5_FIELDS),
        )
    )
    initialise(model, seed=1234, std=0.3, num_layers=2, vocab_size=11)
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
    engine = build_engine(plan, groups, T5(), kernels)

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
        network = RELATIVE if set(RELATIVE) <= set(self.flags) else ()
        rel = 3e-2 if "--fp16" in self.flags else 1e-3
        (want, weights), (got, own) = plainly_trained(*network), trained(*self.flags)
        for (loss, norm), (found, found_norm) in zip(want, got, strict=True):
            assert found == pytest.approx(loss, rel=rel / 10)
            assert found_norm == pytest.approx(norm, rel=rel)
        assert {*own} <= {*weights}
        for name, parameter in own.items():
            if parameter.shape == weights[name].shape:
                assert_close(parameter.float(), weights[name], rtol=rel, atol=rel / 100)


CHUNKS = "--loss-chunk-tokens", "7"
CHECKS = [
    Layout("--zero-stage", "1"),
    Layout(TENSOR, "2", "--sequence-parallel", "--checkpoint-activations"),
    Layout(TENSOR, "2", PIPELINE, "2", "--sequence-parallel", *RELATIVE),
    Layout(PIPELINE, "4", "--checkpoint-activations", "--zero-stage", "0", *RELATIVE),
    Layout(PIPELINE, "4", "--zero-stage", "1", SPLIT, "2", *CHUNKS),
    Layout(PIPELINE, "2", "--recompute-granularity", "selective", SPLIT, "1", *RELATIVE),
    Layout(TENSOR, "2", "--zero-stage", "3", *RELATIVE, *CHUNKS),
    Layout(TENSOR, "2", "--zero-stage", "2", *RELATIVE),
    Layout("--fp16", "--loss-scale", "128", "--zero-stage", "2"),
    Layout("--fp16", "--initial-loss-scale", "256", PIPELINE, "2"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
