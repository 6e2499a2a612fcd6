"""T5 over tensor, sequence, pipeline and data parallel ranks against plain PyTorch in one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
from one_process import MICRO_BATCHES, PIPELINE, TENSOR, Layout, Network
from ranks import outcomes_on_ranks, require_passed

from megatron.extensions.t5.objective import T5, T5_FIELDS, t5_batch
from megatron.model.loss import next_token_loss

STEPS = 3
RELATIVE = (
    *("--position-embedding-type", "relative"),
    *("--relative-attention-num-buckets", "4", "--relative-attention-max-distance", "5"),
)
SPLIT = "--pipeline-model-parallel-split-rank"


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


NETWORK = Network(
    name="t5",
    objective=T5(),
    fields=T5_FIELDS,
    flags=("--num-layers", "2", "--decoder-num-layers", "2", "--decoder-seq-length", "4"),
    micro_batches=micro_batches,
    loss=next_token_loss,
    steps=STEPS,
)
CHUNKS = "--loss-chunk-tokens", "7"
ZERO_BUBBLE = "--enable-zbh1-pipeline"
DIVIDED = "--checkpoint-activations", "--distribute-saved-activations"
CHECKS = [
    Layout(NETWORK, "--zero-stage", "1"),
    Layout(NETWORK, TENSOR, "2", "--sequence-parallel", "--checkpoint-activations"),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", *DIVIDED, network=RELATIVE),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", "--sequence-parallel", network=RELATIVE),
    Layout(
        NETWORK, PIPELINE, "4", "--checkpoint-activations", "--zero-stage", "0", network=RELATIVE
    ),
    Layout(NETWORK, PIPELINE, "4", "--zero-stage", "1", SPLIT, "2", *CHUNKS, ZERO_BUBBLE),
    Layout(
        NETWORK, PIPELINE, "2", "--recompute-granularity", "selective", SPLIT, "1", network=RELATIVE
    ),
    Layout(NETWORK, TENSOR, "2", "--zero-stage", "3", *CHUNKS, network=RELATIVE),
    Layout(NETWORK, TENSOR, "2", "--zero-stage", "2", network=RELATIVE),
    Layout(NETWORK, "--fp16", "--loss-scale", "128", "--zero-stage", "2"),
    Layout(NETWORK, "--fp16", "--initial-loss-scale", "256", PIPELINE, "2"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
