"""BERT over tensor, sequence, pipeline and data parallel ranks against plain PyTorch in one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
from one_process import MICRO_BATCHES, PIPELINE, TENSOR, Layout, Network
from ranks import outcomes_on_ranks, require_passed

from megatron.engine.deepspeed import distributed
from megatron.extensions.bert.objective import BERT, BERT_FIELDS, bert_batch, bert_loss
from megatron.tensor_parallel.linear import is_adapter
from megatron.training.setup import build_engine, build_process_groups, choose

STEPS = 3


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


NETWORK = Network(
    name="bert",
    objective=BERT(),
    fields=BERT_FIELDS,
    flags=("--num-layers", "4"),
    micro_batches=micro_batches,
    loss=bert_loss,
    steps=STEPS,
)


def experts_train_alike_over_replicas_and_tensor_ranks(rank):
    distributed.start("gloo")
    experts = ["--num-experts", "2", "--expert-interval", "1", "--moe-train-capacity-factor", "4"]
    experts += ["--pad-vocab-size-to", "16"]
    steps, _ = NETWORK.trained(*experts)
    others, _ = NETWORK.trained(*experts, TENSOR, "2")
    for (loss, terms, _), (other, other_terms, _) in zip(steps, others, strict=True):
        assert loss == pytest.approx(other, rel=1e-3)
        assert terms == pytest.approx(other_terms, rel=1e-3)
    assert steps[-1][0] != steps[0][0]


def adapters_train_alone_and_alike_over_all_layouts(rank):
    distributed.start("gloo")
    lora = ["--lora-rank", "2", "--lora-target-modules", "all-linear"]
    plan = NETWORK.plan(*lora)
    engine = build_engine(
        plan, build_process_groups(plan), BERT(), choose(plan, torch.device("cpu"))[0]
    )
    begun = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    steps, weights = NETWORK.trained(*lora)
    for name, weight in weights.items():
        assert torch.equal(weight, begun[name]) != is_adapter(name), name
    for layout in ([TENSOR, "2", "--sequence-parallel"], [PIPELINE, "4"]):
        others, _ = NETWORK.trained(*lora, *layout)
        assert [each[0] for each in others] == pytest.approx([each[0] for each in steps], rel=1e-4)


CHUNKS = "--loss-chunk-tokens", "7"
INTERLEAVED = PIPELINE, "2", "--num-virtual-stages-per-pipeline-rank", "2"
RING = "--context-parallel-size", "2"
ZERO_BUBBLE = "--enable-zbh1-pipeline"
CHECKS = [
    Layout(NETWORK, "--zero-stage", "1"),
    Layout(NETWORK, TENSOR, "2", "--sequence-parallel", "--checkpoint-activations"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", "--sequence-parallel", *CHUNKS),
    Layout(NETWORK, PIPELINE, "4", "--checkpoint-activations"),
    Layout(NETWORK, *INTERLEAVED, "--checkpoint-activations"),
    Layout(NETWORK, PIPELINE, "2", "--zero-stage", "1", network=["--bert-no-binary-head"]),
    Layout(NETWORK, "--ds-sequence-parallel-size", "2"),
    Layout(NETWORK, *RING, network=["--seq-length", "8"]),
    Layout(NETWORK, *RING, PIPELINE, "2", "--zero-stage", "1", network=["--seq-length", "8"]),
    Layout(NETWORK, TENSOR, "2", "--zero-stage", "3", *CHUNKS),
    Layout(NETWORK, TENSOR, "2", "--zero-stage", "2"),
    Layout(NETWORK, "--fp16", "--loss-scale", "128", "--zero-stage", "2"),
    Layout(NETWORK, "--fp16", "--initial-loss-scale", "256", PIPELINE, "2", ZERO_BUBBLE),
    experts_train_alike_over_replicas_and_tensor_ranks,
    adapters_train_alone_and_alike_over_all_layouts,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
