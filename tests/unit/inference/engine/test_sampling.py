"""Sampling: temperature, top-k, top-p, min-p, greedy."""

import random

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron.inference.engine.sampling import SamplingParams, limit_logits, sample_tokens


def sampled(*arguments, **options):
    return [int(token) for (token,) in sample_tokens(*arguments, **options)]


LOGITS = torch.log(torch.tensor([[0.3, 0.5, 0.05, 0.15]]))


def drawn(sampling, times=2000, length=0, **options):
    stream = random.Random(0)
    rows = LOGITS.expand(times, -1)
    draws = [stream.random() for _ in range(times)]
    found = sampled(rows, [sampling] * times, draws, [length] * times, **options)
    return torch.bincount(torch.tensor(found), minlength=4) / times


def test_frequencies_are_the_probabilities():
    torch.testing.assert_close(
        drawn(SamplingParams()), torch.tensor([0.3, 0.5, 0.05, 0.15]), atol=0.04, rtol=0
    )
    torch.testing.assert_close(
        drawn(SamplingParams(top_k=2)), torch.tensor([3 / 8, 5 / 8, 0, 0]), atol=0.04, rtol=0
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(greedy=True),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1e-40, top_k=3),
    ],
)
def test_the_most_likely_is_taken_where_nothing_is_drawn(sampling):
    assert drawn(sampling).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=4), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.4), [1]),
        (SamplingParams(top_p=0.6), [0, 1]),
        (SamplingParams(top_p=0.81), [0, 1, 3]),
        (SamplingParams(top_p=1.0), [0, 1, 2, 3]),
        (SamplingParams(top_k=3, top_p=0.6), [0, 1]),
        (SamplingParams(top_k=2, top_p=0.6), [1]),
        (SamplingParams(min_p=0.5), [0, 1]),
        (SamplingParams(min_p=0.25), [0, 1, 3]),
        (SamplingParams(min_p=0.05), [0, 1, 2, 3]),
        (SamplingParams(min_p=1.0), [1]),
        (SamplingParams(min_p=0.05, top_k=2), [0, 1]),
    ],
)
@pytest.mark.parametrize("candidates", [1, 128])
def test_only_the_most_likely_are_drawn(sampling, kept, candidates):
    assert drawn(sampling, candidates=candidates).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("candidates", [1, 128])
def test_limits_together_equal_those_of_transformers(candidates):
    torch.manual_seed(0)
    limits = [(3, 0.7, 0.0), (8, 0.5, 0.2), (8, 0.95, 0.0), (50, 0.9, 0.01), (0, 0.8, 0.1)]
    limits += [(20, 0.0, 0.0), (20, 0.0, 0.3), (0, 0.0, 0.05)]
    samplings = [SamplingParams(top_k=k, top_p=p, min_p=m) for k, p, m in limits]
    logits = torch.randn(len(limits), 50)
    enough = False
    while not enough:
        kept, _, is_final = limit_logits(logits, samplings, [0] * 8, candidates=candidates)
        enough, candidates = bool(is_final.all()), candidates * 8
    expected = []
    for row, (k, p, m) in zip(logits, limits, strict=True):
        scores = TopKLogitsWarper(k)(None, row[None]) if k else row[None]
        scores = TopPLogitsWarper(p)(None, scores) if p else scores
        scores = MinPLogitsWarper(m)(None, scores) if m else scores
        expected.append(int(scores.isfinite().sum()))
    assert kept.isfinite().sum(1).tolist() == expected


def test_temperature_sharpens():
    assert drawn(SamplingParams(temperature=0.2))[1] > 0.9 > drawn(SamplingParams())[1]


def test_top_p_decays_to_its_bound():
    decaying = SamplingParams(top_p=1.0, top_p_decay=0.8, top_p_bound=0.6)
    assert [decaying.top_p_after(n) for n in range(4)] == [1.0, 0.8, 0.8**2, 0.6]
    assert drawn(decaying, length=3).nonzero().flatten().tolist() == [0, 1]


def test_each_row_has_its_own_parameters():
    torch.manual_seed(0)
    logits = torch.randn(5, 1000)
    samplings = [
        SamplingParams(greedy=True),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9, temperature=2.0),
        SamplingParams(),
    ]
    draws = [0.1, 0.3, 0.5, 0.7, 0.9]
    together = sampled(logits, samplings, draws, [0] * 5)
    for row in range(5):
        assert sampled(logits[row : row + 1], [samplings[row]], [draws[row]], [0]) == [
            together[row]
        ]


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_are_tokens_that_can_be(draw):
    impossible = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for sampling in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=1.0)):
        assert sampled(impossible, [sampling], [draw], [0])[0] in (1, 2)
