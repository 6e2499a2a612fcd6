"""How well a network foretells a text, by its words: WikiText and the like."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import DataError, reason
from megatron.inference.evaluation.detokenize import detokenizer_of
from megatron.inference.evaluation.scoring import Score
from megatron.tokenizer.types.tokenizer import Tokenizer

_MOST = 20.0
"""Nats of which a perplexity is shown at most."""


@dataclass(frozen=True)
class Text:
    """A text in tokens, and how many words it has as it was published."""

    tokens: list[int]
    words: int


@dataclass(frozen=True)
class Perplexity:
    """What was found.

    Args:
        loss: mean over tokens, in nats.
        token_ratio: tokens for each word; the first of both is not foretold.
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
    """Return the text in `file`.

    Raises:
        DataError: it cannot be read, is of no corpus that is known, or is too short.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {file}: {reason(error, file)}") from error
    # Single spaces alone divide words here, as where the published figures were measured.
    words = len(text.strip().split(" "))
    tokens = tokenizer.encode(detokenizer_of(str(file))(text))
    if words < 2 or len(tokens) < 2:
        raise DataError(f"--valid-data {file} has {words} words: at least 2 are needed")
    return Text(tokens, words)


def perplexity(text: Text, scores: Iterable[Score]) -> Perplexity:
    """Return the perplexity of `text`, given the scores of all its windows."""
    foretold = len(text.tokens) - 1
    # Exact however many parts there are.
    total = math.fsum(score.log_probability for score in scores)
    return Perplexity(-total / foretold, foretold / (text.words - 1))
