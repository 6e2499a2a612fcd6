"""Every token is scored once, with as much text before it as the window's length allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.extensions.tasks.zeroshot import passage_windows
from megatron.inference.evaluation.scoring import full_windows, last_window, sliding_windows


def judged_with_context(windows):
    """Return {token: how many tokens before it were read}; tokens are their own places."""
    found = {}
    for window in windows:
        for index in range(len(window.tokens) - window.num_targets, len(window.tokens)):
            assert window.tokens[index] not in found
            found[window.tokens[index]] = index
    return found


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_sliding_windows_judge_every_token_once(count, length, data):
    stride = data.draw(st.integers(1, length))
    found = judged_with_context(sliding_windows(range(count), length=length, stride=stride))
    assert found == {
        # The first window that reaches token i begins at the least multiple of the stride.
        i: i - max(0, -(-(i - length) // stride) * stride)
        for i in range(1, count)
    }


@given(st.integers(1, 60), st.integers(1, 20))
def test_full_windows_judge_every_token_once(count, length):
    windows = [*full_windows(range(count), length=length)]
    assert sorted(judged_with_context(windows)) == [*range(1, count)]
    assert all(len(window.tokens) == min(length + 1, count) for window in windows)


@pytest.mark.parametrize(
    ("length", "tokens"), [(9, (1, 2, 3, 8, 9)), (3, (2, 3, 8, 9)), (2, (3, 8, 9))]
)
def test_the_beginning_of_a_long_context_is_left_out(length, tokens):
    window = last_window([1, 2, 3], [8, 9], length=length)
    assert (window.tokens, window.num_targets) == (tokens, 2)


class Beginning:
    """A tokenizer of numbers that puts 0 in front of every text."""

    eod = 1

    def encode(self, text):
        return [0, *map(int, text.split())]


def test_a_last_word_is_judged_without_what_begins_a_text():
    texts = ["5 6 7", "8"]
    windows = [*passage_windows(texts, Beginning(), length=9, strict=True)]
    assert [(window.tokens, window.num_targets) for window in windows] == [
        ((0, 5, 6, 7), 1),
        ((0, 8), 1),
    ]
