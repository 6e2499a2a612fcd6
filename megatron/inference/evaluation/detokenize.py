"""Texts that were cut into words, as they were written.

The rules of each corpus are those under which its published perplexities were measured.
"""

import re
from collections.abc import Callable

from megatron.common.errors import WrongDataError

_PARTS_OF_NUMBERS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
_MARKS = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")
_PAIRS = (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ('"', '"'), ("'", "'")
_HEADINGS = tuple((" ".join("=" * level), "=" * level) for level in (4, 3, 2))

_WIKI_FIRST = (("s '", "s'"), *_PARTS_OF_NUMBERS, *_MARKS)
_WIKI_LAST = (
    *_HEADINGS,
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def detokenizer_of(path: str) -> Callable[[str], str]:
    """Return what undoes the cutting of the corpus that `path` names.

    Raises:
        WrongDataError: it names none.
    """
    for name, written in (("ptb", ptb), ("wiki", wiki), ("lambada", str)):
        if name in path:
            return written
    raise WrongDataError(
        f"--valid-data {path}: its name says which corpus it is, and so how its words are put "
        "together; it must hold wiki, ptb, or lambada for a text that was never cut"
    )


def wiki(text: str) -> str:
    """Return a text of WikiText as it was written."""
    text = _replaced(text, _WIKI_FIRST)
    for left, right in _PAIRS:
        text = re.sub(rf"({left})\s*([^{right}]*?)\s*({right})", r"\1\2\3", text)
    return _replaced(text, _WIKI_LAST)


def ptb(text: str) -> str:
    """Return a text of the Penn Treebank as it was written."""
    return _replaced(text, _PTB)


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for found, written in rules:
        text = text.replace(found, written)
    return text
