"""The text of a continuation, of which some may not be certain yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.generation.request import without_stop
from megatron.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How the tokens of a continuation are spelled: without what it stopped at."""

    tokenizer: Tokenizer
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens there will be."""
        shown = [token for token in tokens if token not in self.stop_tokens]
        return without_stop(self.tokenizer.decode(shown), self.stop_strings)

    def certain(self, tokens: Sequence[int]) -> str:
        """Return the beginning of the text that stays, whatever tokens follow."""
        whole = self.text(tokens)
        # A character can take several tokens, and a stop string may be on its way.
        held = max((len(stop) for stop in self.stop_strings), default=0)
        return whole[: max(0, len(whole) - held)].rstrip("\ufffd")


class Parts:
    """The text of one continuation, token after token."""

    def __init__(self, spelling: Spelling):
        self._spelling = spelling
        self._tokens: list[int] = []
        self._shown = ""

    def after(self, token: int | None, *, is_last: bool) -> str:
        """Return what has become certain of the text with one more token."""
        if token is not None:
            self._tokens.append(token)
        spell = self._spelling.text if is_last else self._spelling.certain
        certain = spell(self._tokens)
        if not certain.startswith(self._shown):
            return ""
        part, self._shown = certain[len(self._shown) :], certain
        return part
