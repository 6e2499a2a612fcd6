"""Detokenizers of WikiText and the Penn Treebank, with the rules of the published perplexities."""

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
    """Return the detokenizer of the corpus named in `path`.

    Raises:
        WrongDataError: no known corpus is named.
    """
    for name, detokenizer in (("ptb", ptb), ("wiki", wiki), ("lambada", str)):
        if name in path:
            return detokenizer
    raise WrongDataError(
        f"--valid-data {path}: the name must contain the corpus, which selects the detokenizer: "
        "wiki, ptb, or lambada for a text that needs none"
    )


def wiki(text: str) -> str:
    """Detokenize a text of WikiText."""
    text = _replace(text, _WIKI_FIRST)
    for left, right in _PAIRS:
        text = re.sub(rf"({left})\s*([^{right}]*?)\s*({right})", r"\1\2\3", text)
    return _replace(text, _WIKI_LAST)


def ptb(text: str) -> str:
    """Detokenize a text of the Penn Treebank."""
    return _replace(text, _PTB)


def _replace(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for found, written in rules:
        text = text.replace(found, written)
    return text
