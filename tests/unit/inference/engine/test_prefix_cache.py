"""Prefix caching and chunked prefill: the same tokens, without computing cached ones again."""

import random

import pytest
import torch
from stages import completed, engine_of, random_model
from test_continuous_batching import NETWORKS, SIZES, request_of
from test_decode_graphs import SAMPLINGS
from test_extend import FROM_FLAGS
from tiny import tiny_plan, tiny_spec

from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.prefix_cache import PrefixCache, common_prefix

LONGEST = 40
LENGTHS = {"seq_length": LONGEST, "max_position_embeddings": LONGEST}
NAMES = ["learned positions", "llama", "window and alibi", "all at once", *FROM_FLAGS]


def long_spec(name):
    if name in NETWORKS:
        return tiny_spec(**(SIZES | NETWORKS[name] | LENGTHS))
    positions = ("--max-position-embeddings", str(LONGEST), "--seq-length", str(LONGEST))
    return tiny_plan(*FROM_FLAGS[name], *positions, vocab_size=29).model


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    """Reuse prefixes of three tokens and more."""
    monkeypatch.setattr(PrefixCache, "least_tokens", 3)


def requests_of(draw, count=12):
    """Return requests of every sampling method, most of which begin as another one of them."""
    prompts = []
    for _ in range(count):
        before = draw.choice(prompts)[: draw.randint(1, 20)] if prompts else ()
        rest = tuple(draw.randrange(29) for _ in range(draw.randint(0 if before else 1, 12)))
        prompts.append((*before, *rest))
    return [
        request_of(
            prompt,
            draw.randint(0, 7),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            seed=number,
            logprobs=number % 3 == 0,
            prompt_logprobs=number % 5 == 4,
        )
        for number, prompt in enumerate(prompts)
    ]


def require_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        for new, old in zip(
            (*one.prompt_tokens, *one.new_tokens),
            (*other.prompt_tokens, *other.new_tokens),
            strict=True,
        ):
            assert new.logprob == pytest.approx(old.logprob, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_without_prefix_caching_and_chunks(group, name):
    """Sequences of all kinds join, end and move; three generations of them share prefixes."""
    spec, draw = long_spec(name), random.Random(7)
    model = random_model(group, spec)
    plain = engine_of(model, spec, rows=3, prefix_caching=False, batched_tokens=10**6)
    engines = [
        engine_of(model, spec, rows=rows, **options)
        for rows, options in (
            (3, {}),
            (5, {"batched_tokens": draw.randint(1, 9)}),
            (4, {"batched_tokens": draw.randint(1, 9), "prefix_caching": False}),
            (4, {"batched_tokens": draw.randint(5, 20), "key_rounding": 8}),
            (1, {"batched_tokens": 7}),
        )
    ]
    for _ in range(3):
        requests = requests_of(draw)
        expected = completed(plain, *requests)
        for engine in engines:
            require_equal(completed(engine, *requests), expected)
    reused = [engine.counters.reused_prompt_tokens for engine in engines]
    assert all(reused[:2]) and all(reused[3:]) and not reused[2]


def computed_tokens(engine):
    """Record the number of tokens that each pass computes from now on, padding included."""
    sizes = []
    engine.runner.model.get_submodule("3").register_forward_hook(
        lambda layer, inputs, output: sizes.append(output.hidden.shape[:2].numel())
    )
    return sizes


@pytest.fixture
def network(group):
    spec = long_spec("llama")
    return random_model(group, spec), spec


PROMPT = tuple(range(1, 21))


def test_equal_prompts_are_computed_once(network):
    engine = engine_of(*network, rows=4)
    sizes = computed_tokens(engine)
    requests = [request_of(PROMPT, 3, seed=seed) for seed in range(4)]
    found = completed(engine, *requests)
    assert len({one.tokens for one in found}) == 1
    assert sizes == [20, 3, 4, 4]  # one prompt; the last token of the others; decode steps
    assert engine.counters.reused_prompt_tokens == 3 * 19
    sizes.clear()
    completed(engine, request_of((*PROMPT, *found[0].tokens, 5, 6), 1))
    assert sizes == [3]  # the last generated token has never been in a pass


def test_prompts_whose_logprobs_are_requested_are_computed_in_full(network):
    engine = engine_of(*network, rows=4, batched_tokens=5)
    completed(engine, request_of(PROMPT, 1))
    sizes = computed_tokens(engine)
    [done] = completed(engine, request_of(PROMPT, 1, prompt_logprobs=True))
    assert sizes == [20] and len(done.prompt_logprobs) == 19


def test_the_least_recently_used_row_is_replaced(network):
    engine = engine_of(*network, rows=3)
    prompts = [tuple(range(first, first + 10)) for first in (0, 5, 10)]
    for prompt in (*prompts, prompts[0]):
        completed(engine, request_of(prompt, 1))
    # All three rows are kept, and the second one's is the oldest.
    completed(engine, request_of((20, 21, 22, 23), 1))
    sizes = computed_tokens(engine)
    for prompt in (prompts[0], prompts[2], prompts[1]):
        completed(engine, request_of(prompt, 0))
    assert sizes == [1, 1, 10]


def test_running_sequences_do_not_stall_while_a_long_prompt_is_computed(network):
    model, spec = network
    engine = engine_of(model, spec, rows=2, batched_tokens=6, prefix_caching=False)
    first = engine.add(request_of((1, 2, 3), 8))
    engine.step()
    second = engine.add(request_of(PROMPT, 2))
    order = []
    while engine.is_busy:
        order.append([event.request_id for event in engine.step()])
    # Chunks of 6, 6, 6 and 2 tokens, and a decode step after each.
    assert order == [
        [],
        [first],
        [],
        [first],
        [],
        [first],
        [second],
        *[[first, second]],
        *[[first]] * 3,
    ]


def test_running_sequences_do_not_stall_while_short_prompts_arrive(network):
    engine = engine_of(*network, rows=3)
    first = engine.add(request_of((1, 2, 3), 20))
    engine.step()
    order = []
    for number in range(12):
        engine.add(request_of((4, number), 1))
        order.append([event.request_id for event in engine.step()])
    assert order[1::2] == [[first]] * 6
    assert not any(first in ids for ids in order[::2]) and order[0] == [2]


@pytest.mark.parametrize("cancelled", ["first", "second"])
def test_sequences_can_be_cancelled_while_a_prompt_is_computed(network, cancelled):
    model, spec = network
    requests = {"first": request_of((1, 2, 3), 8), "second": request_of(PROMPT, 6)}
    engine = engine_of(model, spec, rows=3, batched_tokens=6)
    numbers = {name: engine.add(request) for name, request in requests.items()}
    tokens = {number: [] for number in numbers.values()}
    for step in range(30):
        if step == 3:
            engine.cancel(numbers[cancelled])
        for event in engine.step():
            tokens[event.request_id] += [event.new_token.token] if event.new_token else []
    assert not engine.is_busy
    [(name, request)] = [item for item in requests.items() if item[0] != cancelled]
    [expected] = completed(engine_of(model, spec), request)
    assert tuple(tokens[numbers[name]]) == expected.tokens
    require_equal(
        completed(engine, *requests.values()),
        completed(engine_of(model, spec), *requests.values()),
    )


def test_a_beam_search_takes_all_rows(network):
    engine = engine_of(*network, rows=3)
    expected = completed(engine, request_of(PROMPT, 3))
    engine.run_alone(BeamSearchRequest(prompt=(3, 1, 4), width=3, max_new_tokens=6))
    assert completed(engine, request_of(PROMPT, 3)) == expected
    assert engine.counters.reused_prompt_tokens == 0


def test_a_row_with_nan_is_not_reused(network):
    model, spec = network
    with torch.no_grad():
        dict(model.named_parameters())["1.word_embeddings.weight"][25] = torch.nan
    engine = engine_of(model, spec, rows=2)
    number = engine.add(request_of((*PROMPT, 25), 3))
    assert [(one.request_id, one.finish_reason) for one in engine.step()] == [(number, "failed")]
    sizes = computed_tokens(engine)
    completed(engine, request_of(PROMPT, 1))
    assert sizes == [20]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_nan_of_a_cancelled_prompt_does_not_stay(network, prefix_caching, moves):
    """The first of its chunks has NaN; it may have moved to the row of a sequence that has ended."""
    model, spec = network
    others = [request_of((1, 2), 6), request_of((3, 1, 4), 6), request_of((2, 7, 1), 6)]
    expected = completed(engine_of(model, spec), *others)
    broken = min({*range(21, 29)}.difference(*(one.tokens for one in expected)))
    with torch.no_grad():
        dict(model.named_parameters())["1.word_embeddings.weight"][broken] = torch.nan
    engine = engine_of(
        model, spec, rows=3, batched_tokens=6, key_rounding=8, prefix_caching=prefix_caching
    )
    if moves:
        engine.add(request_of((5, 6), 2))
        engine.step()
    number = engine.add(request_of((1, broken, *PROMPT), 3))
    for _ in range(2):
        engine.step()
    engine.cancel(number)
    assert [one.finish_reason for one in engine.step()] == ["cancelled"] and not engine.is_busy
    require_equal(completed(engine, *others), expected)
    require_equal(completed(engine, *others), expected)
    sizes = computed_tokens(engine)
    engine.add(request_of((1, broken, *PROMPT), 0))
    engine.step()
    assert sizes == [6]  # nothing is reused


def test_a_prefix_language_model_reuses_nothing(network):
    engine = engine_of(*network, rows=2, sees_prefix=True, batched_tokens=4)
    sizes = computed_tokens(engine)
    for _ in range(2):
        completed(engine, request_of(PROMPT, 1))
    assert sizes == [20, 20]
    assert "attend to later ones" in engine.runner.no_extension


def test_common_prefixes():
    draw = random.Random(1)
    for _ in range(300):
        one, other = ([draw.randrange(2) for _ in range(draw.randint(0, 9))] for _ in "ab")
        equal = [a == b for a, b in zip(one, other, strict=False)]
        assert common_prefix(one, other) == [*equal, False].index(False)
