"""Penalties, biases and forbidden tokens, against their formulas and those of transformers."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from megatron.inference.engine.logits_processor import process_logits
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import ActiveSequence, Request

SIZE = 12


def sequence(prompt=(1, 2, 2), new=(), **options):
    request = {name: options.pop(name) for name in ("barred", "stop_tokens", "min_new_tokens")
               if name in options}  # fmt: skip
    found = ActiveSequence(
        1, Request(prompt=prompt, max_new_tokens=9, sampling=SamplingParams(**options), **request)
    )
    found.tokens += new
    return found


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(4, SIZE)


def test_rows_without_options_are_left_alone(logits):
    assert process_logits(logits, [sequence()] * 4) is logits


def test_repetition_penalty_is_that_of_transformers(logits):
    rows = [sequence(new=(5, i, 5), repetition_penalty=1.0 + i / 3) for i in range(4)]
    found = process_logits(logits, rows)
    for row, one in enumerate(rows):
        penalty = one.request.sampling.repetition_penalty
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([one.tokens]), logits[row : row + 1].clone()
        )
        torch.testing.assert_close(found[row], theirs[0])


def test_presence_and_frequency_count_generated_tokens_alone(logits):
    rows = [
        sequence(new=(5, 7, 5)),
        sequence(new=(5, 7, 5), presence_penalty=0.5),
        sequence(new=(5, 7, 5), frequency_penalty=-0.3),
        sequence(new=(5, 7, 5), presence_penalty=0.5, frequency_penalty=0.3),
    ]
    lower = torch.zeros(4, SIZE)
    lower[1, [5, 7]] = torch.tensor([0.5, 0.5])
    lower[2, [5, 7]] = torch.tensor([-0.6, -0.3])
    lower[3, [5, 7]] = torch.tensor([1.1, 0.8])
    torch.testing.assert_close(process_logits(logits, rows), logits - lower)


def test_a_bias_is_added_to_a_penalty(logits):
    rows = [sequence(new=(5,), logit_bias=((5, 2.0), (6, -100.0)), presence_penalty=0.5)] * 4
    change = torch.zeros(4, SIZE)
    change[:, 5], change[:, 6] = 1.5, -100.0
    torch.testing.assert_close(process_logits(logits, rows), logits + change)


def test_stop_tokens_and_barred_tokens_are_impossible(logits):
    rows = [
        sequence(new=(5,), stop_tokens=frozenset({0, 3}), min_new_tokens=2),
        sequence(new=(5, 6), stop_tokens=frozenset({0, 3}), min_new_tokens=2),
        sequence(new=(5,), barred=frozenset({(5, 8), (6, 9)}), logit_bias=((8, 50.0),)),
        sequence(),
    ]
    found = process_logits(logits, rows)
    where = (found == -torch.inf).nonzero().tolist()
    assert where == [[0, 0], [0, 3], [2, 8]]
    assert found[3].equal(logits[3])


def test_a_row_does_not_depend_on_the_others(logits):
    rows = [
        sequence(new=(5,), repetition_penalty=1.3),
        sequence(new=(5, 6), presence_penalty=1.0, frequency_penalty=0.1),
        sequence(new=(5,), logit_bias=((8, 50.0),)),
        sequence(new=(1,), stop_tokens=frozenset({0}), min_new_tokens=9),
    ]
    together = process_logits(logits, rows)
    for row in range(4):
        assert process_logits(logits[row : row + 1], rows[row : row + 1])[0].equal(together[row])
