"""BERT over tensor, sequence, pipeline and data parallel ranks against plain PyTorch in one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from engines import forget_groups
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_plan
from torch.testing import assert_close

from megatron.engine.deepspeed import distributed
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.objectives.bert import BERT, BERT_FIELDS, bert_batch, bert_loss
from megatron.optimizer.param_groups import param_groups
from megatron.tensor_parallel.broadcast import sequence_shard
from megatron.tensor_parallel.linear import is_adapter
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.training.setup import build_engine, build_process_groups, choose

STEPS, MICRO_BATCHES = 3, 4
FLAGS = (
    *("--num-layers", "4", "--global-batch-size", "8", "--init-method-std", "0.3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "0.1", "--lr", "0.1"),
)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def plan_of(*flags):
    device = "cuda" if "--fp16" in flags else "cpu"
    ranks = dist.get_world_size()
    return tiny_plan(*FLAGS, *flags, world_size=ranks, objective="bert", device=device)


def micro_batches():
    """Yield samples of all lengths; one micro-batch has no masked token."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=generator)
    for number in range(STEPS * MICRO_BATCHES):
        lengths = draw(3, 7, (2, 1))
        real = (torch.arange(6) < lengths).long()
        masked = draw(0, 2, (2, 6)) * real if number != 1 else torch.zeros_like(real)
        text = draw(1, 11, (2, 6)) * real
        yield bert_batch(
            text=text,
            types=(torch.arange(6) > 2).long() * real + 9 * (1 - real),
            labels=draw(1, 11, (2, 6)) * masked - (1 - masked),
            is_random=draw(0, 2, (2,)),
            loss_mask=masked,
            padding_mask=real,
            truncated=torch.zeros(2, dtype=torch.int64),
        )


def plainly_trained(*flags):
    """Return losses, terms of losses, norms and weights of the run in this process alone."""
    spec = plan_of(*flags).model
    model = SequentialModel(
        BERT().layers(
            spec,
            group=lone_group(),
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=lambda number: attention_of(spec, REFERENCE),
            batch_fields=tuple(BERT_FIELDS),
        )
    )
    initialise(model, seed=1234, std=0.3, num_layers=4, vocab_size=11)
    optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=0.1, momentum=0.9)
    loss_of, batches = bert_loss(lone_group(), vocab_size=11), micro_batches()
    steps = []
    for _ in range(STEPS):
        found = []
        for _ in range(MICRO_BATCHES):
            batch = next(batches)
            found.append(loss_of(model(batch), batch))
        loss = torch.stack([each.total for each in found]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        terms = {
            name: float(torch.stack([each.terms[name] for each in found]).mean())
            for name in BERT().loss_terms(spec)
        }
        steps.append((float(loss), terms, float(norm)))
    return steps, dict(model.named_parameters())


def trained(*flags):
    """Train over all ranks; return what `plainly_trained` returns, of weights this rank's."""
    plan = plan_of(*flags)
    groups = build_process_groups(plan)
    kernels, _ = choose(plan, torch.device("cpu"))
    engine = build_engine(plan, groups, BERT(), kernels)
    size = groups.topology.data

    def own():
        for number, batch in enumerate(micro_batches()):
            if number % size == groups.data_rank:
                sequence = groups.sequence_rank, groups.topology.sequence
                yield sequence_shard(batch, BERT_FIELDS, *sequence)

    batches, steps = own(), []
    for _ in range(STEPS):
        loss = float(engine.train_batch(batches))
        steps.append((loss, engine.pop_loss_terms(), engine.grad_norm))
    return steps, dict(engine.module.named_parameters())


class Layout:
    def __init__(self, *flags):
        self.flags, self.__name__ = flags, " ".join(flags)

    def __call__(self, rank):
        distributed.start("gloo")
        get_accelerator().is_fp16_supported = lambda: True
        head = [flag for flag in self.flags if flag == "--bert-no-binary-head"]
        rel = 3e-2 if "--fp16" in self.flags else 1e-3
        (want, weights), (got, own) = plainly_trained(*head), trained(*self.flags)
        for (loss, terms, norm), (found, found_terms, found_norm) in zip(want, got, strict=True):
            assert found == pytest.approx(loss, rel=rel / 10)
            assert found_norm == pytest.approx(norm, rel=rel)
            assert found_terms == pytest.approx(terms, rel=rel / 10)
        assert {*own} <= {*weights}
        for name, parameter in own.items():
            if parameter.shape == weights[name].shape:
                assert_close(parameter.float(), weights[name], rtol=rel, atol=rel / 100)


def experts_train_alike_over_replicas_and_tensor_ranks(rank):
    distributed.start("gloo")
    experts = ["--num-experts", "2", "--expert-interval", "1", "--moe-train-capacity-factor", "4"]
    experts += ["--pad-vocab-size-to", "16"]
    steps, _ = trained(*experts)
    forget_groups()
    others, _ = trained(*experts, TENSOR, "2")
    forget_groups()
    for (loss, terms, _), (other, other_terms, _) in zip(steps, others, strict=True):
        assert loss == pytest.approx(other, rel=1e-3)
        assert terms == pytest.approx(other_terms, rel=1e-3)
    assert steps[-1][0] != steps[0][0]


def adapters_train_alone_and_alike_over_all_layouts(rank):
    distributed.start("gloo")
    lora = ["--lora-rank", "2", "--lora-target-modules", "all-linear"]
    plan = plan_of(*lora)
    engine = build_engine(
        plan, build_process_groups(plan), BERT(), choose(plan, torch.device("cpu"))[0]
    )
    begun = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    steps, weights = trained(*lora)
    for name, weight in weights.items():
        assert torch.equal(weight, begun[name]) != is_adapter(name), name
    for layout in ([TENSOR, "2", "--sequence-parallel"], [PIPELINE, "4"]):
        others, _ = trained(*lora, *layout)
        assert [each[0] for each in others] == pytest.approx([each[0] for each in steps], rel=1e-4)


CHUNKS = "--loss-chunk-tokens", "7"
CHECKS = [
    Layout("--zero-stage", "1"),
    Layout(TENSOR, "2", "--sequence-parallel", "--checkpoint-activations"),
    Layout(TENSOR, "2", PIPELINE, "2", "--sequence-parallel", *CHUNKS),
    Layout(PIPELINE, "4", "--checkpoint-activations"),
    Layout(PIPELINE, "2", "--zero-stage", "1", "--bert-no-binary-head"),
    Layout("--ds-sequence-parallel-size", "2"),
    Layout(TENSOR, "2", "--zero-stage", "3", *CHUNKS),
    Layout(TENSOR, "2", "--zero-stage", "2"),
    Layout("--fp16", "--loss-scale", "128", "--zero-stage", "2"),
    Layout("--fp16", "--initial-loss-scale", "256", PIPELINE, "2"),
    experts_train_alike_over_replicas_and_tensor_ranks,
    adapters_train_alone_and_alike_over_all_layouts,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
