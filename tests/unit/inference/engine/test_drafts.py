"""Speculative decoding by prompt lookup: fewer steps, and the output without it."""

import random

import pytest
import torch
from problems import problem
from stages import completed, engine_of, random_model
from test_continuous_batching import Numbers, request_of
from test_decode_graphs import SAMPLINGS
from test_prefix_cache import NAMES, computed_tokens, long_spec, require_equal
from test_prefix_cache import requests_of as sharing_requests

from megatron.inference.engine.drafts import NgramIndex, accepted_tokens
from megatron.inference.engine.prefix_cache import PrefixCache
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.runner.logprobs import TokenLogprob


def repetitive(draw, length):
    """Return tokens that repeat earlier ones of them."""
    tokens = [draw.randrange(29) for _ in range(4)]
    while len(tokens) < length:
        start = draw.randrange(len(tokens) - 2)
        tokens += tokens[start : start + draw.randint(2, 4)]
        tokens += [draw.randrange(29)] * draw.randint(0, 1)
    return tuple(tokens[:length])


def requests_of(draw, count=10):
    """Return requests of every sampling method, with stop conditions."""
    return [
        request_of(
            repetitive(draw, draw.randint(2, 28)),
            draw.randint(0, 20),
            sampling=SAMPLINGS[number % len(SAMPLINGS)]
            if number % 2
            else SamplingParams(greedy=True, repetition_penalty=1 + number % 4 / 10),
            seed=number,
            logprobs=number % 3 == 0,
            top_logprobs=number % 3 and 2,
            stop_tokens=frozenset({number, 13}) if number % 4 == 1 else frozenset(),
            stop_strings=("7>",) if number % 4 == 2 else (),
            min_new_tokens=number % 5,
            barred=frozenset({(3, number)}),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_without_drafts(group, name):
    spec, draw = long_spec(name), random.Random(11)
    model = random_model(group, spec)
    plain = engine_of(model, spec, rows=3, tokenizer=Numbers())
    engines = [
        engine_of(model, spec, rows=rows, tokenizer=Numbers(), draft_tokens=count, **options)
        for rows, count, options in (
            (1, 5, {}),
            (3, 3, {"batched_tokens": 7}),
            (4, 9, {"key_rounding": 8, "prefix_caching": False}),
        )
    ]
    for _ in range(2):
        requests = requests_of(draw)
        expected = completed(plain, *requests)
        assert {"stop", "length"} == {one.finish_reason for one in expected}
        for engine in engines:
            require_equal(completed(engine, *requests), expected)
    for engine in engines:
        counters = engine.counters
        assert 0 < counters.accepted_tokens < counters.draft_tokens


def test_a_text_that_repeats_itself_takes_fewer_steps(group, caplog):
    spec = long_spec("llama")
    model = random_model(group, spec)
    # Every token is likely to follow: what a greedy search of this network repeats is in its prompt.
    [first] = completed(engine_of(model, spec), request_of((1, 2, 3), 12))
    assert len({*first.tokens}) > 3
    prompt = (1, 2, 3, *first.tokens, 1, 2)
    [expected] = completed(engine_of(model, spec), request_of(prompt, 12))
    engine = engine_of(model, spec, draft_tokens=4)
    sizes = computed_tokens(engine)
    assert completed(engine, request_of(prompt, 12)) == [expected]
    counters = engine.counters
    assert len(sizes) == 12 - counters.accepted_tokens
    assert sum(sizes[1:]) == len(sizes[1:]) + counters.draft_tokens
    with caplog.at_level("INFO"):
        engine.close()
    accepted, proposed = counters.accepted_tokens, counters.draft_tokens
    assert f"draft tokens: {proposed} | accepted tokens: {accepted}" in caplog.text


def test_a_draft_is_what_followed_the_latest_ngram():
    index = NgramIndex()
    assert index.draft([5, 6, 7], 4) == []
    tokens = [5, 6, 7, 8, 6, 7]
    assert index.draft(tokens, 2) == [8, 6]
    assert index.draft(tokens, 7) == [8, 6, 7, 8, 6, 7, 8]
    # Three tokens decide before two; the latest occurrence before an earlier one.
    assert index.draft([*tokens, 9, 5, 6, 7], 2) == [8, 6]
    assert index.draft([*tokens, 9, 5, 6, 7, 1, 6, 7], 1) == [1]
    assert index.draft([*tokens, 9, 5, 6, 7, 1, 6, 7], 0) == []


def test_sampled_tokens_count_up_to_the_first_that_differs():
    one, two, three = (TokenLogprob(token=token) for token in (1, 2, 3))
    sampled = [one, two, three, one, None, three, two, one, None]
    drafts = [(1, 2), (3,), (3, 3), ()]
    assert [*accepted_tokens(sampled, drafts)] == [[one, two, three], [], [three, two], [None]]


def test_nan_of_a_rejected_draft_does_not_stay(group, monkeypatch):
    """Neither in its pass, whose queries read its keys too, nor in later ones of more positions."""
    spec = long_spec("llama")
    model = random_model(group, spec)
    requests = [request_of((1, 2, 3), 8), request_of((4, 5, 6, 7, 8, 9, 10), 8)]
    expected = completed(engine_of(model, spec), *requests)
    broken = min({*range(11, 29)}.difference(*(one.tokens for one in expected)))
    with torch.no_grad():
        dict(model.named_parameters())["1.word_embeddings.weight"][broken] = torch.nan
    drafts = iter([[broken] * 3, []])
    monkeypatch.setattr(NgramIndex, "draft", lambda *own: next(drafts, []))
    engine = engine_of(model, spec, rows=2, draft_tokens=3)
    require_equal(completed(engine, *requests), expected)
    assert engine.counters.draft_tokens == 3 and not engine.counters.accepted_tokens


def test_drafts_need_a_cache_that_any_prefix_of_can_be_used(group):
    spec = long_spec("learned positions")
    model = random_model(group, spec)
    for options in ({"recompute": True}, {"sees_prefix": True}):
        with problem("--prompt-lookup-num-tokens 2"):
            engine_of(model, spec, draft_tokens=2, **options)


@pytest.mark.parametrize("seed", range(6))
def test_sequences_that_come_and_go_at_random(group, seed, monkeypatch):
    """With all options of the engine: requests are added and cancelled between any steps."""
    monkeypatch.setattr(PrefixCache, "least_tokens", 3)
    draw = random.Random(seed)
    spec = long_spec(draw.choice(NAMES))
    model = random_model(group, spec)
    requests = [*sharing_requests(draw), *requests_of(draw)]
    plain = engine_of(model, spec, tokenizer=Numbers(), prefix_caching=False)
    expected = completed(plain, *requests)
    engine = engine_of(
        model,
        spec,
        rows=draw.randint(1, 6),
        tokenizer=Numbers(),
        batched_tokens=draw.randint(1, 12),
        draft_tokens=draw.choice([0, 2, 5]),
        key_rounding=draw.choice([1, 4, 8]),
    )
    tokens, numbers, cancelled = {}, {}, set()
    left = draw.sample(range(len(requests)), len(requests))
    while left or engine.is_busy:
        while left and draw.random() < 0.4:
            index = left.pop()
            numbers[engine.add(requests[index])] = index
        if numbers and draw.random() < 0.07:
            number = draw.choice([*numbers])
            cancelled.add(number)
            engine.cancel(number)
        for event in engine.step():
            found = tokens.setdefault(event.request_id, [])
            found += [event.new_token.token] if event.new_token else []
    for number, index in numbers.items():
        found, wanted = tokens[number], expected[index].tokens
        assert tuple(found) == wanted[: len(found) if number in cancelled else None]
