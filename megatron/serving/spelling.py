"""The text of a continuation, of which some may not be certain yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.generation.request import without_stop
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.tokenizer import Tokenizer


def texts_of_each(
    tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    """Return the text of each token where it stands, `before` in front of them all."""
    earlier = [before[-1:], *([token] for token in tokens)]
    return [text_after(tokenizer, *pair) for pair in pairwise(earlier)]


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How the tokens of a continuation are spelled: without what it stopped at."""

    tokenizer: Tokenizer
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of all tokens that there will be behind the prompt."""
        shown = [token for token in tokens if token not in self.stop_tokens]
        return without_stop(text_after(self.tokenizer, prompt, shown), self.stop_strings)

    def certain(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the beginning of the text that stays, whatever tokens follow."""
        whole = self.text(prompt, tokens)
        # A character can take several tokens, and a stop string may be on its way.
        held = max((len(stop) for stop in self.stop_strings), default=0)
        return whole[: max(0, len(whole) - held)].rstrip("\ufffd")


class Parts:
    """The text of one continuation, token after token."""

    def __init__(self, spelling: Spelling, prompt: Sequence[int]):
        self._spelling, self._prompt = spelling, prompt
        self._tokens: list[int] = []
        self._shown = ""

    def after(self, token: int | None, *, is_last: bool) -> str:
        """Return what has become certain of the text with one more token."""
        if token is not None:
            self._tokens.append(token)
        spell = self._spelling.text if is_last else self._spelling.certain
        certain = spell(self._prompt, self._tokens)
        if not certain.startswith(self._shown):
            return ""
        part, self._shown = certain[len(self._shown) :], certain
        return part
