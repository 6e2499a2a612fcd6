"""Sequence parallelism, Ulysses, ring attention, losses in chunks of tokens: equal to runs without."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from communication import hidden_share, record_communication
from deepspeed.accelerator import get_accelerator
from engines import DOCUMENTS, batches_of, engine_of, trained
from ranks import outcomes_on_ranks, require_passed
from tiny import GEMMA, LATENT
from torch.testing import assert_close

from megatron.model.layers import sequence_attention
from megatron.model.layers.attention_kernels import Mask, ScoreOptions, reference_attention
from megatron.model.layers.positions import alibi_slopes
from megatron.model.layers.sequence_attention import RingAttention
from megatron.tensor_parallel.collectives import all_to_all, scatter_sequence

TENSOR = ("--tensor-model-parallel-size", "2")
BOTH = (*TENSOR, "--sequence-parallel")
ULYSSES = ("--ds-sequence-parallel-size", "2")
RING = ("--context-parallel-size", "2")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
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
        (*LATENT, "--zero-stage", "3", "--checkpoint-activations"),
        ("--group-query-attention", "--zero-stage", "1"),  # of one group
    ):
        require_close(
            trained(*SGD, *BOTH, *flags), trained(*SGD, *TENSOR, *flags), rtol=1e-4, atol=1e-5
        )


def ranks_that_share_keys_and_values_train_as_one_does(rank):
    for flags in ((), ("--position-embedding-type", "rotary", "--qk-layernorm")):
        grouped = (*SGD, "--group-query-attention", *flags, "--micro-batch-size", "1")
        expected = trained(*grouped)
        for layout in (TENSOR, BOTH):
            found = trained(*grouped, *layout)
            assert_close(found["losses"], expected["losses"], rtol=3e-7, atol=0)
            assert_close(found["norms"], expected["norms"], rtol=1e-6, atol=0)


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
        (*LATENT, "--zero-stage", "1", "--recompute-activations"),
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
    for layout in ((), TENSOR, ("--pipeline-model-parallel-size", "2")):
        found = trained(*SGD, *heads, *layout, *ULYSSES)
        expected = trained(*SGD, *heads, *layout, "--micro-batch-size", "1" if not layout else "2")
        require_close(found, expected, rtol=1e-4, atol=1e-5)


def documents_of(length):
    """Return spans of packed documents of two samples; one token of each sees nothing."""
    starts = torch.stack([torch.arange(length) // 5 * 5, torch.arange(length) // 7 * 7])
    spans = torch.stack([starts, torch.arange(1, length + 1).expand(2, -1)], -1)
    spans[:, 3] = 0
    return spans


def prefixes_of(length):
    seen = torch.arange(1, length + 1).expand(2, -1).clamp(min=length // 3)
    return torch.stack([torch.zeros_like(seen), seen], -1)


def ring_attention_is_that_of_one_process(rank):
    group = dist.group.WORLD
    ranks, length = group.size(), 24
    for tile, dtype, mask, how in (
        (1024, torch.float64, {}, {}),
        (1024, torch.float32, {}, {"slopes_a": alibi_slopes(4, torch.device("cpu"))}),
        (2, torch.float64, {"window": 5}, {"softcap": 2.0}),
        (4, torch.float64, {"spans_bs2": documents_of(length)}, {}),
        (1024, torch.float64, {"spans_bs2": documents_of(length), "window": 3}, {}),
        (5, torch.float64, {"spans_bs2": prefixes_of(length)}, {"layer_scaling": 3.0}),
        (1024, torch.float64, {"causal": False, "spans_bs2": torch.tensor([[[1, 20]]])}, {}),
        (1024, torch.float64, {}, {"sinks_a": SINKS}),
        (4, torch.float64, {"spans_bs2": documents_of(length), "window": 3}, {"sinks_a": SINKS}),
        (1024, torch.bfloat16, {}, {}),
    ):
        generator = torch.Generator().manual_seed(1)
        full = [
            torch.randn(2, heads, length, 8, dtype=torch.float64, generator=generator).to(dtype)
            for heads in (4, 2, 2, 4)  # query, key, value, gradient
        ]
        learned = {name: x.clone().requires_grad_() for name, x in how.items() if x is SINKS}
        weighing = ScoreOptions(mask=Mask(**mask), scale=0.6, **(how | learned))
        whole = [x.clone().requires_grad_() for x in full[:3]]
        expected = reference_attention(*whole, weighing)
        expected.backward(full[3])
        chunks = sequence_attention.zigzag_chunks(rank, ranks)
        own = lambda x, n=chunks: torch.cat([x.chunk(2 * ranks, 2)[i] for i in n], 2)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sequence_attention, "TILE", tile)
            parts = [own(x).requires_grad_() for x in full[:3]]
            ring = RingAttention(group, flash=True)
            sinks = {name: x.clone().requires_grad_() for name, x in how.items() if x is SINKS}
            weighing = ScoreOptions(mask=Mask(**mask), scale=0.6, **(how | sinks))
            found = ring(*parts, weighing)
        found.backward(own(full[3]))
        for name, x in sinks.items():
            dist.all_reduce(x.grad)
            assert_close(x.grad, learned[name].grad)
        tolerance = {} if dtype != torch.bfloat16 else {"rtol": 5e-2, "atol": 5e-2}
        assert_close(found, own(expected), **tolerance)
        for part, x in zip(parts, whole, strict=True):
            assert_close(part.grad, own(x.grad), **tolerance)


def ring_attention_trains_as_whole_sequences(rank):
    even = ("--seq-length", "8", "--max-position-embeddings", "8")
    grouped = ("--num-attention-heads", "2", "--group-query-attention", "--num-query-groups", "1")
    for flags in (
        # 6 positions, padded to 8
        ("--zero-stage", "0", "--position-embedding-type", "alibi", *DOCUMENTS),
        (*even, "--zero-stage", "1", "--recompute-activations"),
        ("--zero-stage", "2", *grouped, "--position-embedding-type", "rotary", *DOCUMENTS),
        (*even, "--zero-stage", "3", "--checkpoint-activations", "--window-size", "3", *DOCUMENTS),
        (*GEMMA, "--zero-stage", "1"),
        (*LATENT, "--zero-stage", "1"),
    ):
        found = trained(*SGD, *RING, *flags)
        require_close(found, trained(*SGD, *flags), rtol=1e-4, atol=1e-5)
    same = trained(*SGD, *RING, "--cp-comm-type", "a2a", "--zero-stage", "1")
    require_close(same, trained(*SGD, *ULYSSES, "--zero-stage", "1"), rtol=0, atol=0)


def ring_attention_drops_the_same_weights_again(rank):
    dropping = (*SGD[4:], "--attention-dropout", "0.3", "--hidden-dropout", "0", *RING)
    again = ("--checkpoint-activations",)
    for seed in ("1", "2"):
        flags = (*dropping, "--seed", seed, "--zero-stage", "1")
        require_close(trained(*flags, *again), trained(*flags), rtol=1e-5, atol=1e-6)
    group = dist.group.WORLD
    tensors = torch.randn(4, 2, 4, 12, 8, dtype=torch.float64)
    x = tensors[:3].clone().requires_grad_()
    ring = RingAttention(group, flash=True)

    def loss(x):
        torch.manual_seed(rank)
        found = ring(*x, ScoreOptions(mask=Mask(), scale=0.5, dropout=0.5))
        return (found * tensors[3]).sum()

    value = loss(x)
    before = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(
        loss(x), ring(*x, ScoreOptions(mask=Mask(), scale=0.5)).mul(tensors[3]).sum()
    )
    step = torch.randn(x.shape, dtype=torch.float64) * 1e-5
    difference = loss(x.detach() + step) - loss(x.detach() - step)
    both = torch.stack([difference, 2 * (x.grad * step).sum()])
    dist.all_reduce(both)
    assert_close(both[0], both[1], rtol=1e-4, atol=1e-9)


def transfers_of_the_ring_are_hidden_behind_attention(rank):
    x = torch.randn(3, 2, 4, 12, 8, requires_grad=True)
    ring = RingAttention(dist.group.WORLD, flash=True)
    ranks, size = dist.get_world_size(), x[1:].nbytes
    with record_communication() as record:
        found = ring(*x, ScoreOptions(mask=Mask(), scale=0.5))
        forward = len(record.collectives)
        found.sum().backward()
    kinds = Counter(each.kind for each in record.collectives[:forward])
    assert kinds == {"send": ranks - 1, "receive": ranks - 1}
    kinds = Counter(each.kind for each in record.collectives[forward:])
    assert kinds == {"send": 2 * ranks - 2, "receive": 2 * ranks - 2}
    assert {each.num_bytes for each in record.collectives} == {size}
    assert hidden_share(record.collectives) == 1.0


def ranks_of_the_ring_keep_their_part_alone(rank):
    x = torch.randn(3, 1, 2, 64, 8, requires_grad=True)
    ring = RingAttention(dist.group.WORLD, flash=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each) or each, lambda each: each
    ):
        ring(*x, ScoreOptions(mask=Mask(), scale=0.5))
    sizes = Counter(each.numel() for each in kept if each.is_floating_point())
    assert sizes[x[0].numel()] == 4  # query, key, value and result
    assert sum(size * count for size, count in sizes.items()) == 4 * x[0].numel() + 64 * 2


def ring_attention_trains_with_other_layouts(rank):
    stages = ("--pipeline-model-parallel-size", "2", "--zero-stage", "1")
    even = ("--seq-length", "8", "--max-position-embeddings", "8")
    single = ("--micro-batch-size", "1")
    get_accelerator().is_fp16_supported = lambda: True
    for layout in (
        (),
        (*single, "--bf16"),
        (*single, "--fp16", "--loss-scale", "128", "--zero-stage", "2"),
        (*TENSOR, "--zero-stage", "1", *DOCUMENTS),
        (*BOTH, "--zero-stage", "1", *even),
        (*stages, *DOCUMENTS),
        (*stages, "--enable-zbh1-pipeline", *single),
        (*stages, *("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"), *single),
    ):
        found = trained(*SGD, *layout, *RING)
        # Without the ring, its ranks are replicas.
        expected = trained(*SGD, *layout, *(() if layout else ("--micro-batch-size", "1")))
        tolerance = 3e-2 if {"--bf16", "--fp16"} & {*layout} else 1e-4
        require_close(found, expected, rtol=tolerance, atol=tolerance / 10)
    found = trained(*SGD, *RING[:1], "4", *single, *DOCUMENTS)  # 6 positions, padded to 8
    require_close(found, trained(*SGD, *single, *DOCUMENTS), rtol=1e-4, atol=1e-5)


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
    ring_attention_is_that_of_one_process,
    transfers_of_the_ring_are_hidden_behind_attention,
    ranks_of_the_ring_keep_their_part_alone,
    ring_attention_drops_the_same_weights_again,
    ring_attention_trains_as_whole_sequences,
    divided_sequences_train_as_whole_ones,
    ranks_that_share_keys_and_values_train_as_one_does,
    divided_sequences_train_in_16_bits,
    exchanged_heads_train_as_whole_sequences,
    evaluation_of_divided_sequences_is_that_of_whole_ones,
    losses_in_chunks_train_as_those_of_all_logits,
    losses_in_chunks_train_in_16_bits,
    ranks_that_share_a_sample_drop_other_features_and_weights,
]
ON_FOUR = [
    ring_attention_is_that_of_one_process,
    transfers_of_the_ring_are_hidden_behind_attention,
    ring_attention_trains_with_other_layouts,
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
