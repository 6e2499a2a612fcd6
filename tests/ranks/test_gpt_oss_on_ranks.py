"""gpt-oss over two processes: every layout trains as one process does."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from engines import DOCUMENTS, trained
from ranks import outcomes_on_ranks, require_passed
from tiny import GPT_OSS
from torch.testing import assert_close

SGD = ("--optimizer", "sgd", "--sgd-momentum", "0.9", "--global-batch-size", "4")
TENSOR = ("--tensor-model-parallel-size", "2")
STAGES = ("--pipeline-model-parallel-size", "2")
RING = ("--context-parallel-size", "2")
EVEN = ("--seq-length", "8", "--max-position-embeddings", "8")
ULYSSES = ("--ds-sequence-parallel-size", "2")
EXPERTS = ("--moe-expert-parallel-size", "2", "--micro-batch-size", "1")


def require_as_one(*flags, alone=()):
    """Compare losses and norms of gradients, and the weights that ranks have in full."""
    found = trained(*GPT_OSS, *SGD, *DOCUMENTS, *flags)
    expected = trained(*GPT_OSS, *SGD, *DOCUMENTS, *alone)
    for name, value in found.items():
        if value.shape == expected.get(name, value[None]).shape:
            assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
    assert any("sinks" in name for name in found)


def tensor_parallel_ranks_train_as_one(rank):
    require_as_one(*TENSOR)


def tensor_parallel_ranks_that_divide_the_sequence_train_as_one(rank):
    require_as_one(*TENSOR, "--sequence-parallel", "--recompute-activations")


def stages_train_as_one(rank):
    require_as_one(*STAGES)


def the_ring_trains_as_one(rank):
    require_as_one(*RING, *EVEN, alone=EVEN)


def exchanged_heads_train_as_one(rank):
    require_as_one(*ULYSSES, "--recompute-activations")


def ranks_that_divide_experts_train_as_one(rank):
    require_as_one(*EXPERTS, alone=("--micro-batch-size", "1"))


def ranks_of_the_ring_divide_experts(rank):
    require_as_one(*RING, *EVEN, "--moe-expert-parallel-size", "2", alone=EVEN)


def partitioned_weights_train_as_whole_ones(rank):
    require_as_one("--zero-stage", "3", "--checkpoint-activations")


ON_TWO = [
    tensor_parallel_ranks_train_as_one,
    tensor_parallel_ranks_that_divide_the_sequence_train_as_one,
    stages_train_as_one,
    the_ring_trains_as_one,
    exchanged_heads_train_as_one,
    ranks_that_divide_experts_train_as_one,
    ranks_of_the_ring_divide_experts,
    partitioned_weights_train_as_whole_ones,
]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return outcomes_on_ranks(2, ON_TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("check", ON_TWO, ids=lambda check: check.__name__)
def test_on_two_ranks(check, on_two):
    require_passed(check, on_two)
