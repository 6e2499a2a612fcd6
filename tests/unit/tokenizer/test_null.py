"""Texts that are numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.tokenizer.types.null import NullTokenizer

TOKENIZER = NullTokenizer(100)


@given(ids=st.lists(st.integers(0, 100)))
def test_numbers_are_ids(ids):
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


def test_the_number_after_the_last_ends_a_document():
    assert (TOKENIZER.vocab_size, TOKENIZER.eod) == (101, 100)
    assert TOKENIZER.encode(" 1\n 007\t") == [1, 7]


@pytest.mark.parametrize("word", ["101", "-1", "x", "1.0", "1_0", "٣", "²", "1e1", "1" * 5000])
def test_what_is_no_id_is_an_error(word):
    with problem("0 to 100", DataError):
        TOKENIZER.encode(f"5 {word}")


def test_there_are_no_other_special_tokens():
    with problem("token for pad … eod", DataError):
        TOKENIZER.special("pad")
