"""A flag looked up before the command line is parsed."""

import pytest

from megatron.config.parsing.parser import value_in


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", None),
        ("--other a", None),
        ("--load a", "a"),
        ("--load=a", "a"),
        ("--load a --load b", "b"),
        ("--load", None),
        ("--load --save a", None),
    ],
)
def test_the_last_value_counts(line, value):
    assert value_in(line.split(), "--load") == value
