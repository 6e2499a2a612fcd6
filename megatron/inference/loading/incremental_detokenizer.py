"""The text of a continuation, of which some may not be certain yet."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.inference.engine.request import without_stop
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer

_HALF = "\ufffd"
"""What the bytes of an unfinished character decode to."""

_LONGEST_RUN = 64
"""Tokens without an end of a character after which their text counts as it is."""


def texts_of_each(
    tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    """Return the text of each token where it stands, `before` in front of them all."""
    earlier = [before[-1:], *([token] for token in tokens)]
    return [text_after(tokenizer, *pair) for pair in pairwise(earlier)]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a stop string begins with.

    >>> held_back("for a st", ["stop", "st.", "t"])
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
class Spelling:
    """How the tokens of a continuation are spelled: without what it stopped at.

    Args:
        hidden_tokens: tokens that have no text, such as special ones.
        min_tokens: stop strings among so many first tokens end nothing.
    """

    tokenizer: Tokenizer
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    hidden_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of all tokens that there will be behind the prompt."""
        return self.text_and_cut(prompt, tokens)[0]

    def text_and_cut(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text of all tokens, and whether a stop string has cut it."""
        whole = self._uncut(prompt, tokens)
        start = 0
        if self.min_tokens:
            start = len(self._uncut(prompt, tokens[: self.min_tokens]).rstrip(_HALF))
        text = without_stop(whole, self.stop_strings, start=start)
        return text, len(text) < len(whole)

    def certain(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the beginning of the text that stays, whatever tokens follow."""
        # A character can take several tokens, and a stop string may have begun.
        text = self.text(prompt, tokens).rstrip(_HALF)
        return text[: len(text) - held_back(text, self.stop_strings)]

    def _uncut(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        without = self.stop_tokens | self.hidden_tokens
        return text_after(self.tokenizer, prompt, [t for t in tokens if t not in without])


class Parts:
    """The text of one continuation, token after token."""

    def __init__(self, spelling: Spelling, prompt: Sequence[int]):
        self._spelling, self._prompt = spelling, prompt
        self._tokens: list[int] = []
        self._shown = ""
        self.is_cut = False

    def after(self, token: int | None, *, is_last: bool) -> str:
        """Return what has become certain of the text with one more token."""
        if token is not None:
            self._tokens.append(token)
        if is_last:
            certain, self.is_cut = self._spelling.text_and_cut(self._prompt, self._tokens)
        else:
            certain = self._spelling.certain(self._prompt, self._tokens)
        if not certain.startswith(self._shown):
            return ""
        part, self._shown = certain[len(self._shown) :], certain
        return part


class TokenTexts:
    """The text of each token, and the character of the whole text at which it begins.

    Tokens that share a character begin at the same one.

    Args:
        before: the tokens in front of the first.
        hidden: tokens that have no text in the whole.
        start: the character at which the first token begins.
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
        self._front = self._last  # what stands in front of the run
        self._run: list[int] = []  # tokens since the last end of a character
        self._in_run = 0

    def after(self, token: int) -> tuple[str, int]:
        """Return the text of the next token and where it begins."""
        text, offset = (
            text_after(self._tokenizer, self._last, [token]),
            self._settled + self._in_run,
        )
        self._last = (token,)
        if token in self._hidden:
            return text, offset
        self._run.append(token)
        run = text_after(self._tokenizer, self._front, self._run)
        if run.endswith(_HALF) and len(self._run) < _LONGEST_RUN:
            self._in_run = len(run.rstrip(_HALF))
        else:
            self._settled += len(run)
            self._front, self._run, self._in_run = self._last, [], 0
        return text, offset
