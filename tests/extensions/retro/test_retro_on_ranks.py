"""Retro over tensor, pipeline and data parallel ranks against one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace
from functools import partial

import pytest
import torch
from one_process import MICRO_BATCHES, PIPELINE, TENSOR, Layout, Network
from ranks import outcomes_on_ranks, require_passed

from megatron.extensions.retro.objective import RETRO_FIELDS, Retro, retro_batch
from megatron.extensions.retro.objective_instruct import PROMPT_FIELDS, InstructRetro
from megatron.model.loss import next_token_loss

STEPS = 2


def micro_batches():
    """Yield samples with neighbors of all lengths."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS * MICRO_BATCHES):
        yield retro_batch(
            tokens=draw(1, 11, (2, 7)),
            neighbor_tokens=draw(1, 11, (2, 3, 2, 4)),
            neighbor_lengths=draw(0, 5, (2, 3, 2)),
        )


def prompts():
    """Yield samples with prompts of all lengths, which have neighbors in place of chunks."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(1))
    for batch in micro_batches():
        own = {name: x[:, :1] for name, x in batch.items() if name.startswith("neighbor")}
        yield {**batch, **own, "prompt_lengths": draw(1, 7, (2,))}


NETWORK = Network(
    name="retro",
    objective=Retro(),
    fields=RETRO_FIELDS,
    flags=(
        *("--num-layers", "11", "--retro-chunk-length", "2", "--retro-encoder-layers", "2"),
        *("--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0"),
    ),
    micro_batches=micro_batches,
    loss=next_token_loss,
    steps=STEPS,
)
INSTRUCT = replace(
    NETWORK,
    name="instruct-retro",
    objective=InstructRetro(),
    fields=PROMPT_FIELDS,
    flags=(*NETWORK.flags, "--data-folder", "questions"),
    micro_batches=prompts,
)
LORA = "--lora-rank", "2", "--lora-target-modules", "all-linear"
DIVIDED = "--checkpoint-activations", "--distribute-saved-activations"
CHECKS = [
    Layout(NETWORK, "--zero-stage", "1", "--checkpoint-activations"),
    Layout(NETWORK, TENSOR, "2", "--zero-stage", "3", "--recompute-granularity", "selective"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", "--attention-impl", "fused-softmax"),
    # The encoder is on the second stage, and no layer of the last attends to neighbors.
    Layout(NETWORK, PIPELINE, "4", "--checkpoint-activations", "--zero-stage", "1"),
    Layout(NETWORK, PIPELINE, "4", "--zero-stage", "0", "--pp-partition-method", "uniform"),
    Layout(NETWORK, PIPELINE, "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    Layout(NETWORK, "--fp16", "--initial-loss-scale", "256", PIPELINE, "2"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", "--sequence-parallel", "--checkpoint-activations"),
    Layout(NETWORK, TENSOR, "2", *DIVIDED, "--contiguous-checkpointing"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", *DIVIDED, "--checkpoint-in-cpu"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", "--checkpoint-activations", network=LORA),
    Layout(INSTRUCT, PIPELINE, "4", "--checkpoint-activations", "--enable-zbh1-pipeline"),
    Layout(INSTRUCT, TENSOR, "2", PIPELINE, "2"),
    Layout(INSTRUCT, TENSOR, "2", "--sequence-parallel"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
