"""Samples of random tokens are a function of seed, role and index."""

import numpy as np
import pytest

from megatron.data.datasets.random_tokens import RandomTokens


def tokens(i, **changes):
    given = {"seq_length": 8, "vocab_size": 11, "seed": 3, "role": "train"} | changes
    return RandomTokens(100, **given)[i]["tokens"]


def test_a_sample_is_the_same_in_each_reading_whatever_was_read_before():
    assert np.array_equal(tokens(5), tokens(5))
    assert tokens(5).shape == (9,)


@pytest.mark.parametrize("changes", [{"seed": 4}, {"role": "valid"}])
def test_seeds_and_roles_have_samples_of_their_own(changes):
    assert not np.array_equal(tokens(5), tokens(5, **changes))
    assert not np.array_equal(tokens(5), tokens(6))


def test_tokens_are_of_the_vocabulary_and_all_occur():
    assert {*np.concatenate([tokens(i) for i in range(50)]).tolist()} == {*range(11)}
