"""Sequence parallelism, Ulysses, and losses in chunks of tokens against the same runs without."""

import pytest
import torch
from engines import DOCUMENTS, batches_of, engine_of, trained
from ranks import outcomes_on_ranks, require_passed
from tiny import GEMMA
from torch.testing import assert_close

from megatron.tensor_parallel.collectives import all_to_all, scatter_sequence

TENSOR = ("--tensor-model-parallel-size", "2")
BOTH = (*TENSOR, "--sequence-parallel")
ULYSSES = ("--ds-sequence-parallel-size", "2")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
SGD = (*NO_DROPOUT, "--optimizer", "sgd", "--sgd-momentum", "0.9", "--global-batch-size", "4")


def require_close(found, expected, **tolerance):
    assert set(found) == set(expected)
    for name in expected:
        assert_close(
            found[name], expected[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )


def divided_sequences_train_as_whole_ones(rank):
    for flags in (
        ("--zero-stage", "0"),
        ("--zero-stage", "1"),
        ("--zero-stage", "2", "--checkpoint-activations"),
        ("--zero-stage", "3", "--recompute-activations"),
        (*GEMMA, "--zero-stage", "1", "--recompute-activations"),
    ):
        require_close(
            trained(*SGD, *BOTH, *flags), trained(*SGD, *TENSOR, *flags), rtol=1e-4, atol=1e-5
        )


def divided_sequences_train_in_16_bits(rank):
    found, expected = (
        trained(*SGD, *flags, "--bf16", "--zero-stage", "1")["losses"] for flags in (BOTH, TENSOR)
    )
    assert_close(found, expected, rtol=2e-2, atol=2e-2)


def exchanged_heads_train_as_whole_sequences(rank):
    # Without them the two ranks are replicas: the same samples in the same micro-batches.
    for flags in (
        ("--zero-stage", "0"),
        ("--zero-stage", "1", "--recompute-activations"),
        ("--zero-stage", "2"),
        ("--zero-stage", "3", "--checkpoint-activations"),
        (*GEMMA, "--zero-stage", "1"),
    ):
        found = trained(*SGD, *ULYSSES, *flags, *DOCUMENTS)
        require_close(found, trained(*SGD, *flags, *DOCUMENTS), rtol=1e-4, atol=1e-5)


def evaluation_of_divided_sequences_is_that_of_whole_ones(rank):
    losses = []
    for flags, micro_batches in ((ULYSSES, 4), ((), 2)):
        engine, plan, groups = engine_of(*SGD, *flags)
        losses.append(engine.evaluate(batches_of(plan, groups), micro_batches))
    assert_close(*losses)


def ranks_that_share_a_sample_drop_other_features_and_weights(rank):
    for flags in (BOTH, ULYSSES):
        engine_of(*flags)
        own = torch.rand(1000)
        both = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(both, own)
        assert (both[0] == both[1]).float().mean() < 0.01


def a_scattered_sequence_is_summed_and_its_gradient_gathered(rank):
    group = torch.distributed.group.WORLD
    whole = torch.arange(24.0, dtype=torch.float64).reshape(2, 4, 3)
    for dim in (0, 1):
        x = (whole + rank).requires_grad_()
        part = scatter_sequence(x, dim, group)
        assert torch.equal(part, (2 * whole + 1).chunk(2, dim)[rank])
        (part * whole.chunk(2, dim)[rank]).sum().backward()
        assert torch.equal(x.grad, whole)


def all_to_all_divides_another_dimension(rank):
    group = torch.distributed.group.WORLD
    whole = torch.arange(48.0).reshape(3, 4, 2, 2)
    own = whole.chunk(2, 2)[rank].clone().requires_grad_()
    exchanged = all_to_all(own, scatter=1, gather=2, group=group)
    assert torch.equal(exchanged, whole.chunk(2, 1)[rank])
    assert torch.equal(all_to_all(exchanged, scatter=2, gather=1, group=group), own)
    (exchanged * whole.chunk(2, 1)[rank]).sum().backward()
    assert torch.equal(own.grad, whole.chunk(2, 2)[rank])


def divided_sequences_train_over_stages_too(rank):
    layout = ("--pipeline-model-parallel-size", "2", *TENSOR, "--zero-stage", "1")
    for flags in ((), ("--checkpoint-activations",)):
        found = trained(*SGD, *layout, "--sequence-parallel", *flags, *DOCUMENTS)
        expected = trained(*SGD, *layout, *DOCUMENTS)
        require_close(found, expected, rtol=1e-4, atol=1e-5)


def exchanged_heads_train_with_replicas_and_with_tensor_ranks(rank):
    heads = ("--num-attention-heads", "4", "--zero-stage", "1")
    for layout in ((), TENSOR):
        found = trained(*SGD, *heads, *layout, *ULYSSES)
        expected = trained(*SGD, *heads, *layout, "--micro-batch-size", "1" if not layout else "2")
        require_close(found, expected, rtol=1e-4, atol=1e-5)


def losses_in_chunks_train_as_those_of_all_logits(rank):
    untied = "--untie-embeddings-and-output-weights"
    pipeline = ("--pipeline-model-parallel-size", "2")
    for flags in (
        (*TENSOR, "--zero-stage", "0"),
        (*BOTH, *GEMMA, "--zero-stage", "1"),
        (*ULYSSES, untied, "--zero-stage", "3"),
        ("--zero-stage", "3", "--padded-vocab-in-softmax"),
        (*pipeline, "--zero-stage", "1"),
        (*pipeline, untied, "--zero-stage", "1"),
    ):
        chunks = trained(*SGD, *flags, "--loss-chunk-tokens", "5")
        require_close(chunks, trained(*SGD, *flags), rtol=1e-5, atol=1e-6)


def losses_in_chunks_train_in_16_bits(rank):
    for flags in (BOTH, ("--pipeline-model-parallel-size", "2", *GEMMA)):
        layout = (*SGD, *flags, "--bf16", "--zero-stage", "1")
        chunks, full = trained(*layout, "--loss-chunk-tokens", "5"), trained(*layout)
        assert torch.equal(chunks["losses"][:1], full["losses"][:1])
        assert_close(chunks["losses"], full["losses"], rtol=2e-2, atol=2e-2)


ON_TWO = [
    a_scattered_sequence_is_summed_and_its_gradient_gathered,
    all_to_all_divides_another_dimension,
    divided_sequences_train_as_whole_ones,
    divided_sequences_train_in_16_bits,
    exchanged_heads_train_as_whole_sequences,
    evaluation_of_divided_sequences_is_that_of_whole_ones,
    losses_in_chunks_train_as_those_of_all_logits,
    losses_in_chunks_train_in_16_bits,
    ranks_that_share_a_sample_drop_other_features_and_weights,
]
ON_FOUR = [
    divided_sequences_train_over_stages_too,
    exchanged_heads_train_with_replicas_and_with_tensor_ranks,
]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return outcomes_on_ranks(2, ON_TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return outcomes_on_ranks(4, ON_FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("check", ON_TWO, ids=lambda check: check.__name__)
def test_on_two_ranks(check, on_two):
    require_passed(check, on_two)


@pytest.mark.parametrize("check", ON_FOUR, ids=lambda check: check.__name__)
def test_on_four_ranks(check, on_four):
    require_passed(check, on_four)
