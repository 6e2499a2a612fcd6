"""Which token comes next."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling, choose_tokens, sampling_problems

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05, 9.0]]))  # the last one is padding


def drawn(sampling, times=2000):
    torch.manual_seed(0)
    rows = LOGITS.expand(times, -1)
    return torch.bincount(choose_tokens(rows, sampling, vocab_size=4), minlength=5) / times


def test_padding_is_never_drawn_and_the_rest_as_likely_as_it_is():
    torch.testing.assert_close(
        drawn(Sampling()), torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), atol=0.04, rtol=0
    )


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(top_k=1)])
def test_greedy_takes_the_likeliest(sampling):
    assert drawn(sampling).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=4), [0, 1, 2, 3]),
        (Sampling(top_p=0.4), [0]),
        (Sampling(top_p=0.6), [0, 1]),
        (Sampling(top_p=0.81), [0, 1, 2]),
        (Sampling(top_p=1.0), [0, 1, 2, 3]),
    ],
)
def test_only_the_likeliest_are_drawn(sampling, kept):
    assert drawn(sampling).nonzero().flatten().tolist() == kept


def test_temperature_sharpens():
    assert drawn(Sampling(temperature=0.2))[0] > 0.9 > drawn(Sampling())[0]


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (Sampling(temperature=0), "--temperature 0 must be more than 0"),
        (Sampling(top_k=5), "--top_k 5 must be between 0 and the vocabulary's 4"),
        (Sampling(top_p=1.5), "--top_p 1.5 must be between 0 and 1"),
        (Sampling(top_k=2, top_p=0.5), "--top_k and --top_p exclude each other"),
        (Sampling(greedy=True, top_k=2), "--greedy takes the likeliest token: leave"),
    ],
)
def test_a_contradiction_is_told(sampling, told):
    (problem,) = sampling_problems(sampling, vocab_size=4)
    assert told in problem


def successor(inputs):
    """A model that is sure of one thing: after token t comes t + 1, of 8."""
    return torch.nn.functional.one_hot((inputs[0] + 1) % 8, 8).float()


def continued(prompts, **limits):
    limits = {"max_new_tokens": 10, "max_length": 20} | limits
    return generate(
        successor,
        prompts,
        eod=7,
        vocab_size=8,
        sampling=Sampling(greedy=True),
        device=torch.device("cpu"),
        **limits,
    )


def test_prompts_of_any_length_are_continued_each_on_its_own():
    assert continued([[3], [0, 1, 2]]) == [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_the_limits_hold():
    assert continued([[0], [0, 1]], max_new_tokens=2) == [[0, 1, 2], [0, 1, 2, 3]]
    assert continued([[0]], max_length=3) == [[0, 1, 2]]


def test_a_prompt_may_begin_where_a_document_ended():
    assert continued([[7]], max_new_tokens=3) == [[7, 0, 1, 2]]


@pytest.mark.parametrize("prompt", [[], [0] * 20])
def test_a_prompt_without_tokens_or_room_is_refused(prompt):
    with pytest.raises(ConfigError, match=r"a prompt has (0|20) tokens; it needs at least 1"):
        continued([prompt])
