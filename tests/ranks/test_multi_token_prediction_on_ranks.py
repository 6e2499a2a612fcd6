"""Multi-token prediction over ranks of any layout against plain PyTorch in one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from one_process import MICRO_BATCHES, PIPELINE, TENSOR, Layout, Network
from ranks import outcomes_on_ranks, require_passed

from megatron.config.data.masks import MaskPlan
from megatron.config.network.prediction import PredictionSpec
from megatron.model.loss import next_token_loss
from megatron.model.prediction_loss import loss_with_predictions
from megatron.objectives.gpt import GPT, SPAN_FIELDS, gpt_batch

STEPS = 3
EOD = 2
ISOLATED = MaskPlan(reset_positions=True, isolate_documents=True, mask_loss=False)


class Documents(GPT):
    """GPT with batches of several documents, whatever the flags."""

    fields = SPAN_FIELDS

    def batch_fields(self, masks):
        return self.fields


def micro_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS * MICRO_BATCHES):
        yield gpt_batch(torch.randint(11, (2, 7), generator=generator), ISOLATED, EOD)


def loss(group, **kwargs):
    """Return the loss whose value is without the depths and whose gradient is with them."""
    prediction = PredictionSpec(prediction_depths=2, prediction_loss_scale=0.5)
    return loss_with_predictions(next_token_loss(group, **kwargs), prediction)


NETWORK = Network(
    name="gpt",
    objective=Documents(),
    fields=SPAN_FIELDS,
    flags=(
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.5"),
        *("--num-layers", "4"),
    ),
    micro_batches=micro_batches,
    loss=loss,
    steps=STEPS,
)
UNTIED = ("--untie-embeddings-and-output-weights",)
CHUNKS = "--loss-chunk-tokens", "7"
SEQUENCE = "--sequence-parallel"
CHECKS = [
    Layout(NETWORK, TENSOR, "2", SEQUENCE, "--zero-stage", "1", network=UNTIED),
    Layout(NETWORK, TENSOR, "2", PIPELINE, "2", SEQUENCE, *CHUNKS, network=UNTIED),
    Layout(NETWORK, PIPELINE, "2", "--zero-stage", "1", "--checkpoint-activations"),
    Layout(
        *(NETWORK, PIPELINE, "2", "--pipeline-model-parallel-layout", "Et|t|t|tmmL"),
        network=("--mtp-use-repeated-layer", *UNTIED),
    ),
    Layout(NETWORK, PIPELINE, "4", "--pipeline-model-parallel-layout", "Ett|t|t|mmL"),
    Layout(NETWORK, "--zero-stage", "3", *CHUNKS),
    Layout(NETWORK, "--zero-stage", "2", "--recompute-granularity", "selective", network=UNTIED),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_layout_takes_the_steps_of_one_process(check, outcomes):
    require_passed(check, outcomes)
