"""FlexAttention, computed uncompiled on the CPU, against written-out sums and the reference."""

from dataclasses import replace

import pytest
import torch
from test_attention_kernels import SINKS, SLOPES, equals_the_sum_written_out
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.fused_kernels.flex_attention import BLOCK
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.layers.attention import ParallelAttention, ParallelCrossAttention
from megatron.model.layers.attention_kernels import (
    Mask,
    ScoreOptions,
    attention_of,
    reference_attention,
)
from megatron.model.layers.fused_attention import block_sparse_attention, blocks_of
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.positions import RelativePositions
from megatron.tensor_parallel.rng import OrdinaryStream

FLEX = replace(REFERENCE, attention="flex")


@pytest.fixture(autouse=True)
def backward_on_cpus(monkeypatch):
    """Let FlexAttention take tensors with a gradient on CPUs: uncompiled it can, but refuses."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("case", "slopes_a", "groups", "softcap"),
    [
        ("fewer queries than keys", SLOPES, 2, 0.7),
        ("everything", None, 4, 0.0),
        ("window in both directions", None, 1, 0.7),
        ("documents and window", SLOPES, 2, 0.0),
        ("padding", None, 2, 0.0),
        ("nothing", None, 4, 0.0),
    ],
)
def test_flex_attention_is_the_sum_written_out(case, slopes_a, groups, softcap):
    equals_the_sum_written_out("flex", case, slopes_a, groups, softcap)
    equals_the_sum_written_out("flex", case, slopes_a, groups, softcap, SINKS)


def packed(samples, length, seed):
    """Return spans of documents of random lengths, some of which see themselves in full."""
    torch.manual_seed(seed)
    starts = (torch.rand(samples, length) < 0.02) | (torch.arange(length) == 0)
    number = starts.cumsum(1)
    first = torch.where(starts, torch.arange(length), 0).cummax(1).values
    stop = first + (number[:, :, None] == number[:, None]).sum(2)
    causal = torch.arange(length) + 1
    return torch.stack([first, torch.where(number % 3 == 0, stop, causal)], -1)


def inputs_of(length, groups=2, keys=None):
    torch.manual_seed(1)
    shapes = [(2, 4, length), (2, groups, keys or length), (2, groups, keys or length)]
    return [torch.randn(*shape, 16, requires_grad=True) for shape in shapes]


def equal(how, inputs, more=()):
    """Compare with the reference, forward and backward; return the mask."""
    weights = torch.randn(inputs[0].shape)
    results = []
    for attend in (block_sparse_attention, reference_attention):
        got = attend(*inputs, how(attend is block_sparse_attention))
        results.append((got, *torch.autograd.grad((got * weights).sum(), [*inputs, *more])))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_documents_over_several_blocks_skip_what_no_query_sees():
    length = 3 * BLOCK - 20
    mask = Mask(spans_bs2=packed(2, length, 0), window=200)
    equal(lambda flex: ScoreOptions(mask=mask, scale=0.3, slopes_a=SLOPES), inputs_of(length))
    blocks = blocks_of(mask, inputs_of(length)[0], length)
    seen = mask.visible(length, length, torch.device("cpu"))
    padded = torch.nn.functional.pad(seen, (0, 20, 0, 20)).unflatten(2, (3, BLOCK))
    visible = padded.unflatten(4, (3, BLOCK)).any(5).any(3)
    assert torch.equal(blocks.to_dense().bool(), visible)
    assert not visible.all()


def test_causal_blocks_that_are_seen_in_full_are_not_masked():
    query, key, _ = inputs_of(4 * BLOCK)
    blocks = blocks_of(Mask(), query, key.size(2))
    assert blocks.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert blocks.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_positions_by_distance_are_those_of_the_reference(bidirectional):
    length = BLOCK + 10
    torch.manual_seed(2)
    table = torch.randn(8, 4, requires_grad=True)
    relative = RelativePositions(table, max_distance=20, bidirectional=bidirectional)
    lengths = torch.tensor([[[0, length]], [[0, 50]]])
    mask = Mask(spans_bs2=lengths if bidirectional else None)

    def how(flex):
        bias = relative.by_distance if flex else relative.bias
        return ScoreOptions(mask=mask, scale=0.3, bias=bias(length, length))

    equal(how, inputs_of(length, groups=4), [table])


@pytest.mark.parametrize("cross", [False, True])
def test_layers_with_flex_attention_equal_those_with_sdpa(group, cross):
    """Relative positions in self-attention, a padded encoder in cross-attention."""
    spec = tiny_spec(hidden_size=8, num_attention_heads=2, head_dim=4, relative_buckets=4)
    torch.manual_seed(0)
    x_sbh, encoder_tbh = torch.randn(5, 2, 8), torch.randn(7, 2, 8)
    table = torch.randn(4, 2, requires_grad=True)
    spans = torch.tensor([[[0, 7]], [[0, 3]]])
    results = []
    for kernels in (REFERENCE, FLEX):
        cls = ParallelCrossAttention if cross else ParallelAttention
        layer = cls(
            spec,
            LayerParts(
                group=group,
                rng=OrdinaryStream(),
                kernels=kernels,
                core_attention=lambda number, kernels=kernels: attention_of(spec, kernels),
            ),
        )
        torch.manual_seed(1)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        relative = RelativePositions(table, max_distance=4, bidirectional=False)
        out = layer(x_sbh, encoder_tbh, spans) if cross else layer(x_sbh, None, None, relative)
        used = [*layer.parameters(), *([] if cross else [table])]
        results.append(
            (out[0], *torch.autograd.grad((out[0] * x_sbh).sum(), used, allow_unused=True))
        )
    for got, want in zip(*results, strict=True):
        if want is not None:
            assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_another_micro_batch_compiles_nothing_again():
    """Also inside compiled layers, where masks are built too, without a graph break."""
    length = 2 * BLOCK
    inputs = inputs_of(length)

    def attend(query, key, value, spans_bs2, slopes_a):
        mask = Mask(spans_bs2=spans_bs2)
        how = ScoreOptions(mask=mask, scale=0.3, softcap=5.0, slopes_a=slopes_a, kernels=REFERENCE)
        return block_sparse_attention(query, key, value, how)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        spans = packed(2, length, seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = compiled(*inputs, spans, SLOPES)
        how = ScoreOptions(mask=Mask(spans_bs2=spans), scale=0.3, softcap=5.0, slopes_a=SLOPES)
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            again = block_sparse_attention(*inputs, how)
        want = reference_attention(*inputs, how)
        assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert_close(again, want, atol=1e-5, rtol=1e-5)
