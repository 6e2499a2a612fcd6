"""A flag looked up before the command line is parsed."""

import pytest

from megatron.config.parsing.parser import peek


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
    assert peek(line.split()).get("load") == value
