"""Perplexity per token and per word, with the detokenizers of WikiText and the Penn Treebank."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import DataError, WrongDataError, reason
from megatron.inference.evaluation.scoring import Score
from megatron.tokenizer.types.tokenizer import Tokenizer

_MOST = 20.0
"""Largest loss in nats whose exponential is computed; perplexities above are cut off."""


@dataclass(frozen=True)
class Text:
    """A tokenized text, and its number of words as published."""

    tokens: list[int]
    words: int


@dataclass(frozen=True)
class Perplexity:
    """Loss and perplexity of a text.

    Args:
        loss: mean over tokens, in nats.
        token_ratio: tokens per word; the first token and the first word do not count.
    """

    loss: float
    token_ratio: float

    @property
    def by_token(self) -> float:
        """Perplexity of a token, which depends on the tokenizer."""
        return math.exp(min(_MOST, self.loss))

    @property
    def by_word(self) -> float:
        """Perplexity of a word, which compares models of any tokenizer."""
        return math.exp(min(_MOST, self.loss * self.token_ratio))


def read_text(file: Path, tokenizer: Tokenizer) -> Text:
    """Read and tokenize the text in `file`.

    Raises:
        DataError: it cannot be read, its corpus is unknown, or it is too short.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {file}: {reason(error, file)}") from error
    # Words are separated by single spaces, as for the published figures.
    words = len(text.strip().split(" "))
    tokens = tokenizer.encode(detokenizer_of(str(file))(text))
    if words < 2 or len(tokens) < 2:
        raise DataError(f"--valid-data {file} has {words} words: at least 2 are needed")
    return Text(tokens, words)


def perplexity(text: Text, scores: Iterable[Score]) -> Perplexity:
    """Return the perplexity of `text`, given the scores of all its windows."""
    targets = len(text.tokens) - 1
    # Exact for any number of windows.
    total = math.fsum(score.log_probability for score in scores)
    return Perplexity(-total / targets, targets / (text.words - 1))


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
