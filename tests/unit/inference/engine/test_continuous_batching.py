"""Many sequences at once: each is what the network alone makes of it, token for token."""

import random

import pytest
import torch
from problems import problem
from recorded_graph import record
from stages import (
    completed,
    engine_of,
    plain_logits,
    plainly_continued,
    random_model,
)
from tiny import GEMMA_2, GEMMA_3, LLAMA, ROTARY, tiny_spec

from megatron.common.errors import CheckpointError, MegatronError
from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.evaluation.scoring import Window, score_windows
from megatron.tokenizer.types.tokenizer import Tokenizer

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "head_dim": 6,
    "seq_length": 12,
    "max_position_embeddings": 14,
    "vocab_size": 29,
    "padded_vocab_size": 32,
}
NETWORKS = {
    "learned positions": {},
    "rotary, part of a head": ROTARY | {"rotary_dim": 4, "parallel_residual": True},
    "alibi": {"position_embedding": "alibi"},
    "alibi, one group": {"position_embedding": "alibi", "num_query_groups": 1},
    "no positions": {"position_embedding": "none"},
    "window": {"window": 3},
    "window and alibi": {"window": 4, "position_embedding": "alibi"},
    "llama": LLAMA,
    "window of some layers": ROTARY | {"window": 3, "full_attention_layers": (2,), "num_layers": 3},
    "yarn": LLAMA
    | {
        "rope_scaling": 4.0,
        "rope_rule": "yarn",
        "rope_original_length": 64,
        "rope_attention_factor": 1.2,
    },
    "gemma": LLAMA
    | {
        "activation": "geglu_tanh",
        "scaled_embedding": True,
        "layernorm_1p": True,
        "tied_embeddings": True,
    },
    "gemma 2": GEMMA_2,
    "gemma 2, two groups of one width": GEMMA_2 | {"num_query_groups": 4, "window": 0},
    "gemma 3": GEMMA_3,
    "capped scores and alibi": {"attention_softcap": 0.5, "position_embedding": "alibi"},
    "all at once": LLAMA | {"qk_layernorm": True, "embed_layernorm": True, "window": 3},
}
GREEDY = SamplingParams(greedy=True)


class Numbers(Tokenizer):
    """Spells tokens with blanks between them, and as SentencePiece none in front of a text."""

    special_ids = {}

    def decode(self, ids):
        return " ".join(f"<{i}>" for i in ids)


def prompts(count=7):
    draw = random.Random(3)
    return [
        tuple(draw.randrange(SIZES["vocab_size"]) for _ in range(draw.randint(1, 8)))
        for _ in range(count)
    ]


def request_of(prompt, new=5, **options):
    return Request(prompt=prompt, max_new_tokens=new, **({"sampling": GREEDY} | options))


@pytest.fixture
def network(group):
    spec = tiny_spec(**SIZES)
    return random_model(group, spec), spec


@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS)
def test_greedy_tokens_are_those_without_a_cache(group, changes):
    spec = tiny_spec(**(SIZES | changes))
    model = random_model(group, spec)
    # Fewer rows than prompts, of different lengths, so that they join and leave; no two budgets
    # are equal, so that the rows that move are those of others.
    requests = [request_of(prompt, new) for new, prompt in enumerate(prompts(), start=2)]
    expected = [plainly_continued(model, spec, r.prompt, r.max_new_tokens) for r in requests]
    assert len({token for tokens in expected for token in tokens}) > 5
    for options in ({"rows": 3}, {"rows": 1}, {"rows": 3, "recompute": True}):
        found = completed(engine_of(model, spec, **options), *requests)
        assert [list(done.tokens) for done in found] == expected, options
        assert {done.finish_reason for done in found} == {"length"}


def test_a_prefix_is_seen_as_a_whole(network):
    model, spec = network
    requests = [request_of(prompt) for prompt in prompts()]
    expected = [plainly_continued(model, spec, r.prompt, 5, prefix=len(r.prompt)) for r in requests]
    causal = [plainly_continued(model, spec, r.prompt, 5) for r in requests]
    assert expected != causal
    for recompute in (False, True):
        engine = engine_of(model, spec, rows=3, sees_prefix=True, recompute=recompute)
        assert [list(done.tokens) for done in completed(engine, *requests)] == expected
    with problem("prefix language model"):
        engine.add(request_of((1, 2), prompt_logprobs=True))


def test_draws_of_a_sequence_do_not_depend_on_the_others(network):
    model, spec = network
    options = [
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=9),
        SamplingParams(top_p=0.95),
        SamplingParams(),
    ]
    requests = [
        request_of(prompt, 6, sampling=options[i % 4], seed=f"7:{i}")
        for i, prompt in enumerate(prompts(9))
    ]
    alone = [completed(engine_of(model, spec, rows=1), request)[0].tokens for request in requests]
    together = completed(engine_of(model, spec, rows=5), *requests)
    assert [done.tokens for done in together] == alone
    other = [
        completed(engine_of(model, spec), request_of(r.prompt, 6, seed="8"))[0] for r in requests
    ]
    assert [done.tokens for done in other] != alone


def test_padded_tokens_are_never_drawn(group):
    spec = tiny_spec(**SIZES | {"vocab_size": 3})
    flat = SamplingParams(temperature=1e4)
    done = completed(
        engine_of(random_model(group, spec), spec, rows=9),
        *(request_of((1,), 13, sampling=flat, seed=seed) for seed in range(9)),
    )
    assert {token for one in done for token in one.tokens} == {0, 1, 2}


def test_probabilities_are_those_of_the_network(network):
    model, spec = network
    requests = [
        request_of(prompt, 4, logprobs=True, prompt_logprobs=i % 2 == 0, top_logprobs=2)
        for i, prompt in enumerate(prompts())
    ]
    for request, done in zip(requests, completed(engine_of(model, spec), *requests), strict=True):
        text = [*request.prompt, *done.tokens]
        table = plain_logits(model, spec, text).log_softmax(-1)
        expected = table[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        before = len(request.prompt) - 1
        own = torch.tensor([choice.logprob for choice in done.new_tokens])
        torch.testing.assert_close(own, expected[before:], atol=1e-5, rtol=1e-5)
        if request.prompt_logprobs:
            reported = torch.tensor(done.prompt_logprobs)
            torch.testing.assert_close(reported, expected[:before], atol=1e-5, rtol=1e-5)
            for index, choice in enumerate(done.prompt_tokens):
                assert choice.token == text[index + 1]
                most_likely = table[index].topk(2)
                assert [token for token, _ in choice.top] == most_likely.indices.tolist()
                values = torch.tensor([value for _, value in choice.top])
                torch.testing.assert_close(values, most_likely.values, atol=1e-5, rtol=1e-5)
        else:
            assert done.prompt_logprobs == []
        for index, choice in enumerate(done.new_tokens, start=before):
            assert [token for token, _ in choice.top] == table[index].topk(2).indices.tolist()


def test_a_prompt_can_be_weighed_without_going_on(network):
    model, spec = network
    prompt = prompts()[0] * 2  # as many tokens as there are positions leave room for none
    (done,) = completed(
        engine_of(model, spec), request_of(prompt[:14], new=0, prompt_logprobs=True, logprobs=True)
    )
    assert (done.tokens, done.finish_reason) == ((), "length")
    assert len(done.prompt_logprobs) == len(prompt[:14]) - 1


def test_a_text_ends_at_a_token_a_string_or_where_positions_do(network):
    model, spec = network
    prompt, free = next(
        (prompt, free)
        for prompt in prompts()
        if len({*(free := plainly_continued(model, spec, prompt, 99))[:3]}) == 3
    )
    assert len(free) == spec.positions.max_position_embeddings - len(prompt)
    engine = engine_of(model, spec, tokenizer=Numbers())
    string = f"{free[1]}> <{free[2]}"
    by_length, by_token, by_string, by_first = completed(
        engine,
        request_of(prompt, 99),
        request_of(prompt, 99, stop_tokens=frozenset({free[2]})),
        request_of(prompt, 99, stop_strings=("never", string)),
        request_of(prompt, 99, stop_strings=(f" <{free[0]}>",)),
    )
    assert (list(by_length.tokens), by_length.finish_reason) == (free, "length")
    assert (list(by_token.tokens), by_token.finish_reason) == (
        free[: free.index(free[2]) + 1],
        "stop",
    )
    assert (list(by_string.tokens), by_string.finish_reason) == (free[:3], "stop")
    assert (list(by_first.tokens), by_first.finish_reason) == (free[:1], "stop")


def test_a_barred_token_does_not_come_after_its_forerunner(network):
    model, spec = network
    for prompt in prompts():
        first, second, third = plainly_continued(model, spec, prompt, 3)
        barred = frozenset({(first, second), (29, third)})
        free, held = completed(
            engine_of(model, spec),
            request_of(prompt, 3),
            request_of(prompt, 3, barred=barred, logprobs=True),
        )
        assert free.tokens == (first, second, third)
        table = plain_logits(model, spec, [*prompt, first])[-1]
        probability = table.log_softmax(-1)
        table[second] = -torch.inf
        assert held.tokens[:2] == (first, int(table.argmax()))
        assert held.new_tokens[1].logprob == pytest.approx(
            float(probability[held.tokens[1]]), abs=1e-4
        )


def test_sequences_join_and_leave_between_steps(network):
    model, spec = network
    engine = engine_of(model, spec, rows=2)
    first, second, third = (request_of(prompt, 6) for prompt in prompts(3))
    numbers = [engine.add(first), engine.add(second)]
    seen = {number: [] for number in [*numbers, 3]}

    def step():
        for event in engine.step():
            seen[event.request_id].append(
                (event.new_token and event.new_token.token, event.finish_reason)
            )

    step(), step()
    engine.cancel(numbers[0])
    assert engine.add(third) == 3
    while engine.is_busy:
        step()
    assert seen[1][-1] == (None, "cancelled") and len(seen[1]) == 3
    for number, request in ((2, second), (3, third)):
        expected = plainly_continued(model, spec, request.prompt, 6)
        assert [token for token, _ in seen[number]] == expected
        assert [reason for _, reason in seen[number]] == [None] * 5 + ["length"]
    engine.cancel(2)
    assert engine.step() == []


@pytest.mark.parametrize(
    ("refused", "reported"),
    [
        (request_of(()), "0 tokens … 1 … 13"),
        (request_of((1,) * 14), "14 tokens … 13"),
        (request_of((29,)), "token … vocabulary of 29"),
        (request_of((1,), new=-1), "-1 new tokens"),
    ],
)
def test_a_request_that_cannot_be_taken_is_refused(network, refused, reported):
    with problem(reported):
        engine_of(*network).add(refused)


def test_weights_of_another_network_are_refused(group, network):
    model, spec = network
    for changes, reported in (
        ({"tied_embeddings": False}, "no weight 1.word_embeddings.weight"),
        ({"ffn_hidden_size": 16}, "3.mlp.dense_h_to_4h.weight … checkpoint"),
    ):
        with problem(reported, CheckpointError):
            engine_of(model, tiny_spec(**SIZES | changes))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_nan_logits_are_reported(network, broken):
    model, spec = network
    with torch.no_grad():
        dict(model.named_parameters())["3.mlp.dense_h_to_4h.weight"][0] = broken
    engine = engine_of(model, spec)
    for go_on in (
        lambda: completed(engine, request_of((1, 2))),
        lambda: engine_of(model, spec).run_alone(
            BeamSearchRequest(prompt=(1,), width=2, max_new_tokens=2)
        ),
        lambda: score_windows(engine_of(model, spec).runner, [Window((1, 2, 3), 2)], [[0]]),
    ):
        with problem("NaN … weights", MegatronError):
            go_on()


@pytest.mark.parametrize("static", [{}, {"key_rounding": 8, "capture": record}])
def test_a_sequence_without_numbers_fails_alone(group, static):
    """And leaves nothing behind in its row, which the next sequence takes over."""
    spec = tiny_spec(**SIZES | LLAMA)
    model = random_model(group, spec)
    others = [request_of((1, 2)), request_of((3, 1, 4, 1, 6)), request_of((2, 7, 1))]
    expected = [one.tokens for one in completed(engine_of(model, spec), *others)]
    assert not any(5 in tokens for tokens in expected)
    with torch.no_grad():
        dict(model.named_parameters())["1.word_embeddings.weight"][5] = torch.nan
    engine = engine_of(model, spec, rows=2, **static)
    numbers = [engine.add(one) for one in (request_of((1, 5, 2, 2, 2, 2)), *others)]
    tokens = {number: [] for number in numbers}
    reasons = {}
    while engine.is_busy:
        for event in engine.step():
            tokens[event.request_id] += [event.new_token.token] if event.new_token else []
            reasons[event.request_id] = event.finish_reason
    assert [reasons[number] for number in numbers] == ["failed", "length", "length", "length"]
    assert [tuple(tokens[number]) for number in numbers] == [(), *expected]
    search = BeamSearchRequest(prompt=(1, 5), width=2, max_new_tokens=2)
    with problem("NaN or infinite", MegatronError):
        engine.run_alone(search)
    assert [one.tokens for one in completed(engine, *others)] == expected


def test_more_keys_and_values_than_memory_are_reported(network):
    with problem("lower --micro-batch-size"):
        engine_of(*network, rows=10**12)
