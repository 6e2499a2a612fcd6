"""Beam search finds what trying everything finds, when it keeps enough."""

from itertools import product

import pytest
import torch
from problems import problem
from stages import completed, engine_of, plain_logits, random_model
from tiny import tiny_spec

from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request

VOCAB, STOP, NEW = 5, 4, 3
PROMPT = (1, 2)


@pytest.fixture(scope="module")
def network(group):
    spec = tiny_spec(
        vocab_size=VOCAB, padded_vocab_size=8, max_position_embeddings=9, position_embedding="alibi"
    )
    return random_model(group, spec), spec


def all_texts():
    """Yield every text of at most NEW tokens that ends at its only stop token or at the limit."""
    for length in range(1, NEW + 1):
        for tokens in product(range(VOCAB), repeat=length):
            if STOP not in tokens[:-1] and (tokens[-1] == STOP or length == NEW):
                yield tokens


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_the_best_of_all_texts_are_found(network, length_penalty):
    model, spec = network
    scores = {}
    for tokens in all_texts():
        table = plain_logits(model, spec, [*PROMPT, *tokens]).log_softmax(-1)[len(PROMPT) - 1 : -1]
        total = table.gather(1, torch.tensor(tokens)[:, None]).sum()
        scores[tokens] = float(total) / len(tokens) ** length_penalty
    best = sorted(scores, key=lambda tokens: -scores[tokens])
    engine = engine_of(model, spec, rows=len(best))
    found = engine.run_alone(
        BeamSearchRequest(
            prompt=PROMPT,
            width=len(best),
            max_new_tokens=NEW,
            stop_tokens=frozenset({STOP}),
            length_penalty=length_penalty,
        )
    )
    assert [beam.tokens for beam in found] == best
    torch.testing.assert_close(
        torch.tensor([beam.score for beam in found]),
        torch.tensor([scores[tokens] for tokens in best]),
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_beam_of_one_is_greedy_and_a_wider_one_is_no_worse(network):
    model, spec = network
    engine = engine_of(model, spec, rows=3)
    greedy = Request(prompt=PROMPT, max_new_tokens=6, sampling=SamplingParams(greedy=True))
    (expected,) = completed(engine, greedy)
    (narrow,) = engine.run_alone(BeamSearchRequest(prompt=PROMPT, width=1, max_new_tokens=6))
    assert narrow.tokens == expected.tokens
    wide = engine.run_alone(BeamSearchRequest(prompt=PROMPT, width=3, max_new_tokens=6))
    assert len(wide) == 3 and wide[0].score >= narrow.score
    assert all(len(beam.tokens) == 6 for beam in wide)


def test_a_cancelled_search_is_left_between_tokens(network):
    model, spec = network
    engine = engine_of(model, spec, rows=3)
    busy = []

    def goes_on():
        busy.append(engine.is_busy)
        return len(busy) < 3

    search = BeamSearchRequest(prompt=PROMPT, width=3, max_new_tokens=6)
    assert engine.run_alone(search, goes_on) == []
    assert (len(busy), engine.is_busy) == (3, False)
    found = engine.run_alone(search)
    assert found == engine_of(model, spec, rows=3).run_alone(search) != []


def test_a_search_that_cannot_be_done_is_refused(network):
    engine = engine_of(*network, rows=2)
    with problem("width of 3 … 2 rows … --micro-batch-size"):
        engine.run_alone(BeamSearchRequest(prompt=PROMPT, width=3, max_new_tokens=1))
    with problem("9 tokens"):
        engine.run_alone(BeamSearchRequest(prompt=(1,) * 9, width=2, max_new_tokens=1))
    engine.add(Request(prompt=PROMPT, max_new_tokens=1))
    with problem("runs alone"):
        engine.run_alone(BeamSearchRequest(prompt=PROMPT, width=2, max_new_tokens=1))
