"""Zero-shot tasks of a GPT: perplexity of a text by token and by word, and last words (LAMBADA).

Source: arXiv:1606.06031 (LAMBADA).
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import DataError, WrongDataError, reason
from megatron.inference.evaluation.scoring import Score, Window, last_window
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

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


def read_passages(file: Path) -> list[str]:
    """Return the text of each line of a file of JSON objects.

    Raises:
        DataError: the file cannot be read or is empty, or a line has no text.
    """
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {file}: {reason(error, file)}") from error
    texts = [_text(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise DataError(f"--valid-data {file} is empty")
    return texts


def _text(line: str, source: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{source}: not a JSON object: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f'{source}: needs a "text" with words in it')
    return text


def passage_windows(
    texts: list[str], tokenizer: Tokenizer, *, length: int, strict: bool
) -> Iterator[Window]:
    """Yield the window of each passage that scores its last word.

    Args:
        length: most input tokens; a longer passage is cut at its beginning.
        strict: score all tokens of the last word instead of the text's last token.

    Raises:
        DataError: a last word has more than `length` tokens.
    """
    cut = 0
    for number, text in enumerate(texts, 1):
        context, target = _last_word(text, tokenizer) if strict else _last_token(text, tokenizer)
        if not 0 < len(target) <= length:
            raise DataError(
                f"passage {number}: its last word has {len(target)} tokens, more than --seq-length "
                f"{length}"
            )
        # A prediction needs a context: a passage of a single word follows EOD.
        context = context or [tokenizer.eod]
        cut += len(context) + len(target) > length + 1
        yield last_window(context, target, length=length)
    if cut:
        log.warning(
            "%d of %d passages are longer than --seq-length %d and were cut at their beginning",
            *(cut, len(texts), length),
        )


def _last_word(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    word = text.split()[-1]
    context = text[: text.rfind(word)].strip()
    before = tokenizer.encode(context)
    # The word is encoded with its context: alone, some tokenizers would add BOS to it.
    return before, tokenizer.encode(f"{context} {word}")[len(before) :]


def _last_token(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    tokens = tokenizer.encode(text)
    return tokens[:-1], tokens[-1:]
