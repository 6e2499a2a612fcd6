"""Incremental detokenizer: text of generated tokens, stop strings cut off, for streaming."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.inference.engine.sequence import cut_at_stop_string
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""Decoded text of the first bytes of an unfinished character."""

_LONGEST_RUN = 64
"""Tokens after which the text of an unfinished character is taken as it is."""


def texts_of_each(
    tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    """Decode each token in its context; the tokens `before` precede them all."""
    context = [before[-1:], *([token] for token in tokens)]
    return [text_after(tokenizer, *pair) for pair in pairwise(context)]


def stop_prefix_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of a stop string.

    >>> stop_prefix_length("for a st", ["stop", "st.", "t"])
    2
    """
    return max(
        (
            length
            for stop in stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        ),
        default=0,
    )


@dataclass(frozen=True, kw_only=True)
class Detokenizer:
    """Decodes the tokens of a continuation, without stop tokens, stop strings and hidden tokens.

    Args:
        hidden_tokens: tokens that are left out of the text, such as special ones.
        min_tokens: stop strings within this many first tokens are ignored.
    """

    tokenizer: Tokenizer
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    hidden_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of a finished continuation."""
        return self.text_and_cut(prompt, tokens)[0]

    def text_and_cut(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text of a finished continuation, and whether a stop string was cut off."""
        full = self._uncut(prompt, tokens)
        start = 0
        if self.min_tokens:
            start = len(self._uncut(prompt, tokens[: self.min_tokens]).rstrip(_INCOMPLETE))
        text = cut_at_stop_string(full, self.stop_strings, start=start)
        return text, len(text) < len(full)

    def stable_text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the part of the text that no following token can change."""
        # A character can take several tokens, and the end may be the beginning of a stop string.
        text = self.text(prompt, tokens).rstrip(_INCOMPLETE)
        return text[: len(text) - stop_prefix_length(text, self.stop_strings)]

    def _uncut(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        without = self.stop_tokens | self.hidden_tokens
        return text_after(self.tokenizer, prompt, [t for t in tokens if t not in without])


class IncrementalDetokenizer:
    """Streams the text of one continuation, token by token.

    `is_cut` is whether a stop string was cut off the finished text.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int]):
        self._detokenizer, self._prompt = detokenizer, prompt
        self._tokens: list[int] = []
        self._emitted = ""
        self.is_cut = False

    def add(self, token: int | None, *, is_last: bool) -> str:
        """Add a token; return the text that has become stable."""
        if token is not None:
            self._tokens.append(token)
        if is_last:
            text, self.is_cut = self._detokenizer.text_and_cut(self._prompt, self._tokens)
        else:
            text = self._detokenizer.stable_text(self._prompt, self._tokens)
        if not text.startswith(self._emitted):
            return ""
        delta, self._emitted = text[len(self._emitted) :], text
        return delta


class TokenOffsets:
    """Text of each token, and its offset in characters in the full text.

    Tokens that share a character have the same offset.

    Args:
        before: the tokens before the first.
        hidden: tokens that are left out of the full text.
        start: offset of the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int] = (),
        *,
        hidden: Container[int] = (),
        start: int = 0,
    ):
        self._tokenizer, self._hidden = tokenizer, hidden
        self._last, self._settled = tuple(before[-1:]), start
        self._context = self._last  # the token before the run
        self._run: list[int] = []  # tokens since the last complete character
        self._in_run = 0

    def add(self, token: int) -> tuple[str, int]:
        """Return the text of the next token and its offset."""
        text = text_after(self._tokenizer, self._last, [token])
        offset = self._settled + self._in_run
        self._last = (token,)
        if token in self._hidden:
            return text, offset
        self._run.append(token)
        run = text_after(self._tokenizer, self._context, self._run)
        if run.endswith(_INCOMPLETE) and len(self._run) < _LONGEST_RUN:
            self._in_run = len(run.rstrip(_INCOMPLETE))
        else:
            self._settled += len(run)
            self._context, self._run, self._in_run = self._last, [], 0
        return text, offset
