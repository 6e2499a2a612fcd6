"""What cannot be generated is reported, all problems at once."""

import pytest

from megatron.config.inference.generation import (
    GenerationConfig,
    generation_problems,
    vocabulary_problems,
)
from megatron.inference.engine.sampling import SamplingParams


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"temperature": -0.1}, "--temperature -0.1 must be at least 0"),
        ({"top_k": -1}, "--top_k -1 must be at least 0"),
        ({"top_p": 1.5}, "--top_p 1.5 must be from 0 to 1"),
        ({"top_k": 2, "top_p": 0.5}, "--top_k and --top_p exclude each other"),
        ({"greedy": True, "top_k": 2}, "--greedy"),
    ],
)
def test_a_contradiction_is_reported(options, reported):
    (problem,) = generation_problems(GenerationConfig(**options))
    assert reported in problem


@pytest.mark.parametrize("options", [{}, {"greedy": True}, {"top_p": 0.5}])
def test_a_temperature_of_zero_takes_the_most_likely_token(options):
    assert [*generation_problems(GenerationConfig(temperature=0.0, **options))] == []
    assert SamplingParams(temperature=0.0).is_greedy


def test_all_problems_are_reported_at_once():
    found = [*generation_problems(GenerationConfig(beam_width=3, top_p=2.0, temperature=-1.0))]
    for reported in (
        "--temperature -1.0 must be at least 0",
        "--top_p 2.0 must be from 0 to 1",
        "--beam-width does not go with --temperature, --top_p",
    ):
        assert sum(reported in problem for problem in found) == 1


def test_tokens_outside_the_vocabulary_are_reported():
    options = GenerationConfig(top_k=5, beam_width=5, stop_tokens=[3, 4, -1])
    assert [*vocabulary_problems(options, vocab_size=4)] == [
        "--top_k 5 is more than the vocabulary's 4 tokens",
        "--beam-width 5 is more than the vocabulary's 4 tokens",
        "--stop-tokens 4 is not in the vocabulary of 4 tokens",
        "--stop-tokens -1 is not in the vocabulary of 4 tokens",
    ]
    assert [*vocabulary_problems(options, vocab_size=5)] == [
        "--stop-tokens -1 is not in the vocabulary of 5 tokens"
    ]
