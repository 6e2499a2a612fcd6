"""Every implementation of attention against the sum written out in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.common.registry import ATTENTIONS
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.reference.softmax import scaled_causal_softmax
from megatron.model.layers.attention_kernels import Mask, ScoreOptions, attention_of

IMPLEMENTATIONS = ["sdpa", "fused-softmax", "reference", "flash"]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([[[0, 1], [0, 2], [2, 3], [2, 4], [2, 5]], [[0, 1]] + [[1, 5]] * 4])
"""Two documents; one token alone, then a stretch whose tokens all see each other."""

LENGTHS = torch.tensor([[[0, 5]], [[0, 3]]])
"""A full sample and a padded one, whose queries all see its real keys."""


def flash_attn_func(
    q, k, v, *, dropout_p, softmax_scale, causal, window_size, alibi_slopes, softcap=0.0
):
    """Compute what the package documents, in loops: [b, s, a, d], ALiBi by absolute distance."""
    assert dropout_p == 0
    (b, sq, a, _), (_, sk, groups, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    left, right = (sk if reach < 0 else reach for reach in window_size)
    for n in range(b):
        for head in range(a):
            key, value = (x[n, :, head * groups // a] for x in (k, v))
            for i in range(sq):
                place = i + sk - sq
                first, stop = max(0, place - left), min(sk, place + right + 1)
                stop = min(stop, place + 1) if causal else stop
                scores = key[first:stop] @ q[n, i, head] * softmax_scale
                scores = (scores / softcap).tanh() * softcap if softcap else scores
                if alibi_slopes is not None:
                    distance = (torch.arange(first, stop) - place).abs()
                    scores = scores - alibi_slopes[head] * distance
                out[n, i, head] = scores.softmax(0) @ value[first:stop]
    return out


@pytest.fixture(autouse=True)
def flash_package(modules):
    modules("flash_attn", flash_attn_func=flash_attn_func)


def attend(name, *inputs, **keywords):
    how = ScoreOptions(scale=0.6, **keywords)
    return ATTENTIONS.get(name)(*inputs, how)


def written_out(query, key, value, seen, slopes_a=None, softcap=0.0, sinks_a=None):
    """seen(sample, query position, key position) says what is visible."""
    (b, a, sq, _), (_, groups, sk, _) = query.shape, key.shape
    out = torch.zeros_like(query)
    for n in range(b):
        for head in range(a):
            group = head * groups // a
            for i in range(sq):
                place = i + sk - sq
                keys = [j for j in range(sk) if seen(n, place, j)]
                scores = [0.6 * query[n, head, i] @ key[n, group, j] for j in keys]
                if softcap:
                    scores = [softcap * (x / softcap).tanh() for x in scores]
                if slopes_a is not None:
                    biases = [slopes_a[head] * (j - place) for j in keys]
                    scores = [x + bias for x, bias in zip(scores, biases, strict=True)]
                if keys:
                    values = value[n, group, keys]
                    if sinks_a is not None:
                        scores, values = [*scores, sinks_a[head]], F.pad(values, (0, 0, 0, 1))
                    out[n, head, i] = torch.stack(scores).softmax(0) @ values
    return out


CASES = {
    "causal": (Mask(), lambda n, i, j: j <= i, {}),
    "everything": (Mask(causal=False), lambda n, i, j: True, {}),
    "fewer queries than keys": (Mask(), lambda n, i, j: j <= i, {"sq": 2}),
    "one query": (Mask(), lambda n, i, j: True, {"sq": 1}),
    "window": (Mask(window=2), lambda n, i, j: i - 2 < j <= i, {}),
    "window in both directions": (
        Mask(causal=False, window=2),
        lambda n, i, j: abs(i - j) < 2,
        {},
    ),
    "documents": (
        Mask(spans_bs2=DOCUMENTS),
        lambda n, i, j: DOCUMENTS[n, i, 0] <= j < DOCUMENTS[n, i, 1],
        {},
    ),
    "documents and window": (
        Mask(spans_bs2=DOCUMENTS, window=2),
        lambda n, i, j: DOCUMENTS[n, i, 0] <= j < DOCUMENTS[n, i, 1] and abs(i - j) < 2,
        {},
    ),
    "padding": (
        Mask(spans_bs2=LENGTHS),
        lambda n, i, j: j < LENGTHS[n, 0, 1],
        {},
    ),
    "nothing": (
        Mask(spans_bs2=torch.zeros(2, 5, 2, dtype=torch.int64)),
        lambda n, i, j: False,
        {},
    ),
}


@pytest.mark.parametrize("softcap", [0.0, 0.7], ids=["", "capped"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("slopes_a", [None, SLOPES], ids=["plain", "alibi"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attention_is_the_sum_written_out(name, case, slopes_a, groups, softcap):
    equals_the_sum_written_out(name, case, slopes_a, groups, softcap)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sinks_are_a_score_without_a_value(name, case):
    equals_the_sum_written_out(name, case, None, 2, 0.0, SINKS)
    equals_the_sum_written_out(name, case, SLOPES, 4, 0.7, SINKS)


def equals_the_sum_written_out(name, case, slopes_a, groups, softcap, sinks_a=None):
    mask, seen, sizes = CASES[case]
    torch.manual_seed(0)
    query = torch.randn(2, 4, sizes.get("sq", 5), 3)
    key, value = torch.randn(2, 2, groups, 5, 3)
    sinks = [] if sinks_a is None else [sinks_a]
    inputs = [x.clone().requires_grad_() for x in (query, key, value, *sinks)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    how = {"mask": mask, "slopes_a": slopes_a, "softcap": softcap, "layer_scaling": 3.0}
    got = attend(name, *inputs[:3], **how, sinks_a=inputs[3] if sinks else None)
    want = written_out(*wide[:3], seen, slopes_a, softcap, wide[3] if sinks else None)
    assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
    if case != "nothing":
        weights = torch.randn_like(want)
        (got * weights).sum().backward()
        (want * weights).sum().backward()
        for x, w in zip(inputs, wide, strict=True):
            assert_close(x.grad.double(), w.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS[:3])
def test_attention_in_16_bits(name, dtype):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 40, 8).to(dtype)
    mask = Mask(spans_bs2=None, window=30)
    got = attend(name, query, key, value, mask=mask, slopes_a=SLOPES)
    assert got.dtype == dtype
    want = attend(
        "reference", *(x.double() for x in (query, key, value)), mask=mask, slopes_a=SLOPES
    )
    eps = torch.finfo(dtype).eps
    assert_close(got.double(), want, atol=8 * eps, rtol=8 * eps)


def test_layer_scaling_keeps_products_inside_fp16():
    """Products of 80 000 are no fp16 numbers; divided by the layer's number they are."""
    query, key = torch.full((1, 1, 2, 4), 100.0).half(), torch.full((1, 1, 2, 4), 200.0).half()
    value = torch.tensor([[1.0] * 4, [3.0] * 4]).half()[None, None]
    wide = partial(scaled_causal_softmax, in_fp32=True)
    kernels = replace(REFERENCE, attention="fused-softmax", scaled_causal_softmax=wide)
    how = ScoreOptions(mask=Mask(), scale=1.0, layer_scaling=4.0, kernels=kernels)
    mixed = attention_of(tiny_spec(), kernels)(query, key, value, how)
    assert_close(mixed[0, 0, :, 0], torch.tensor([1.0, 2.0]).half())


@pytest.mark.parametrize("name", IMPLEMENTATIONS[:3])
def test_dropout_scales_what_it_leaves(name):
    """With equal values every kept weight counts 1 / (1 - p): the mean stays."""
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 8, 64, 4)
    value = torch.ones(1, 8, 64, 4)
    mask = Mask(causal=False)
    mixed = attend(name, query, key, value, mask=mask, dropout=0.5)
    assert mixed.std() > 0.05
    assert_close(mixed.mean(), torch.tensor(1.0), atol=0.02, rtol=0)


def test_deterministic_mode_reaches_the_flash_attn_package(modules):
    """PyTorch's switch does not: the package has an argument of its own."""
    given = []

    def attend_and_note(*inputs, deterministic=False, **keywords):
        given.append(deterministic)
        return flash_attn_func(*inputs, **keywords)

    modules("flash_attn", flash_attn_func=attend_and_note)
    inputs = torch.randn(3, 1, 2, 3, 4)
    attend("flash", *inputs, mask=Mask())
    torch.use_deterministic_algorithms(True)
    try:
        attend("flash", *inputs, mask=Mask())
    finally:
        torch.use_deterministic_algorithms(False)
    assert given == [False, True]
