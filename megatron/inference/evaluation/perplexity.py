"""Perplexity per token and per word: WikiText-103, Penn Treebank."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import DataError, reason
from megatron.inference.evaluation.detokenize import detokenizer_of
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
