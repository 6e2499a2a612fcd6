"""Prefix caching: rows of the KV cache keep the tokens of ended sequences, whose prefixes prompts reuse."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.inference.engine.sequence import Counters
from megatron.inference.runner.decode_states import DecodeStates


@dataclass(frozen=True)
class Match:
    """A prefix of a prompt that is cached: its row, its number of tokens, and whether these are all there."""

    row: int = 0
    length: int = 0
    is_full_row: bool = False


@dataclass(frozen=True)
class _Kept:
    tokens: list[int]
    used_at: int


class PrefixCache:
    """Tokens in rows of the KV cache that no sequence uses, the least recently used replaced first.

    Args:
        states: the layers' states, which keep vectors of each token alone.
        rows: number of rows.
        counters: count the tokens that are reused.
    """

    least_tokens = 16
    """Shorter prefixes are computed again: with a beginning-of-text token all prompts share one."""

    def __init__(self, states: DecodeStates, *, rows: int, counters: Counters):
        self._states, self._rows, self._counters = states, rows, counters
        self._kept: dict[int, _Kept] = {}
        self._uses = 0

    def keep(self, row: int, tokens: list[int]) -> None:
        """Keep the cached `tokens` of a row that its sequence has left."""
        if len(tokens) >= self.least_tokens:
            self._kept = {
                other: one
                for other, one in self._kept.items()
                if one.tokens != tokens[: len(one.tokens)]
            }
            self._uses += 1
            self._kept[row] = _Kept(tokens, self._uses)

    def find(self, prompt: Sequence[int], running: Iterable[tuple[int, Sequence[int]]]) -> Match:
        """Return the longest cached prefix of a prompt, without its last token, which needs logits.

        Args:
            running: rows of sequences, and their cached tokens.
        """
        kept = [(row, one.tokens) for row, one in self._kept.items()]
        best = Match()
        for row, tokens in (*running, *kept):
            length = common_prefix(prompt, tokens)
            if length > best.length:
                best = Match(row, length, is_full_row=length == len(tokens))
        length = min(best.length, len(prompt) - 1)
        return replace(best, length=length) if length >= self.least_tokens else Match()

    def place(self, row: int, match: Match) -> None:
        """Put a cached prefix at the beginning of a row, for a sequence that gets the row.

        Args:
            row: the first one without a sequence.
        """
        self._counters.add_reused(match.length)
        source = self._kept.get(match.row) if match.length else None
        if source and match.is_full_row:
            self._hand_over(row, match)
            return
        if source:
            self._uses += 1
            self._kept[match.row] = replace(source, used_at=self._uses)
        self._vacate(row)
        if match.length and match.row != row:
            self._states.copy(match.row, row, match.length)

    def tokens_from(self, start: int) -> list[list[int]]:
        """Return the tokens that are kept in each row from `start` on."""
        kept = (self._kept.get(row) for row in range(start, self._rows))
        return [one.tokens if one else [] for one in kept]

    def clear(self) -> None:
        """Forget all tokens: something else uses the rows."""
        self._kept.clear()

    def _hand_over(self, row: int, match: Match) -> None:
        """Forget the tokens of a match, which a sequence has in `row` from now on."""
        del self._kept[match.row]
        if match.row != row:
            moved = self._kept.pop(row, None)
            longest = max(match.length, len(moved.tokens) if moved else 0)
            self._states.swap(row, match.row, longest)
            if moved:
                self._kept[match.row] = moved

    def _vacate(self, row: int) -> None:
        """Move the tokens of a row to an empty one, or to the least recently used."""
        moved = self._kept.pop(row, None)
        if moved is None:
            return
        others = range(row + 1, self._rows)
        target = min(others, key=self._last_use, default=row)
        if target != row and self._last_use(target) < moved.used_at:
            self._states.copy(row, target, len(moved.tokens))
            self._kept[target] = moved

    def _last_use(self, row: int) -> int:
        return self._kept[row].used_at if row in self._kept else 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two lists.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 3, 5])
    3
    """
    equal, end = 0, min(len(one), len(other))
    while equal < end:  # a binary search, whose comparisons of slices need no loop in Python
        middle = (equal + end + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            end = middle - 1
    return equal
