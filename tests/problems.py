"""What the message of an error has to name, whatever its sentence is."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from megatron.common.errors import ConfigError


def require_problem(words: str, messages: Iterable[str]) -> None:
    """Require a message that has all parts of `words`, in their order.

    Args:
        words: the flag with its value, and the remedy, with " … " between them.
    """
    pattern = re.compile(".*".join(map(re.escape, words.split(" … "))), re.DOTALL)
    assert any(map(pattern.search, messages)), f"no message has {words!r}: {messages}"


@contextmanager
def problem(
    words: str, error: type[Exception] = ConfigError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error with a message that has all parts of `words`; see `require_problem`."""
    with pytest.raises(error) as caught:
        yield caught
    require_problem(words, getattr(caught.value, "problems", [str(caught.value)]))
