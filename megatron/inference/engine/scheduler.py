"""Scheduler of continuous batching: which sequences compute in a step, and in which rows of the states."""

from collections import deque
from collections.abc import Sequence

from megatron.inference.engine.prefix_cache import Match, PrefixCache, common_prefix
from megatron.inference.engine.sequence import ActiveSequence
from megatron.inference.runner.decode_states import DecodeStates


class Scheduler:
    """Admits waiting sequences to the running batch, and removes finished ones.

    The index of a sequence in `running` is its row in the states of layers. The row behind them is the
    one of `partial`, whose prompt is computed in chunks; prefix caching has the rows after that.

    Args:
        states: the layers' decode states (KV cache); None if sequences are recomputed.
        rows: most running sequences.
        batched_tokens: most tokens of one prefill, padding included, unless one prompt has more.
        chunks: compute longer prompts in chunks of this many tokens (chunked prefill), unless their
            log-probabilities are requested.
        prefix_cache: keeps the tokens of ended sequences; None for no prefix caching.
    """

    def __init__(
        self,
        states: DecodeStates | None,
        *,
        rows: int,
        batched_tokens: int,
        chunks: bool = False,
        prefix_cache: PrefixCache | None = None,
    ):
        self.states, self.rows, self.batched_tokens = states, rows, batched_tokens
        self.chunks, self.prefix_cache = chunks, prefix_cache
        self.waiting: deque[ActiveSequence] = deque()
        self.running: list[ActiveSequence] = []
        self.partial: ActiveSequence | None = None
        self._decodes_next = False

    @property
    def is_busy(self) -> bool:
        """Whether there are sequences."""
        return bool(self.waiting or self.running or self.partial)

    @property
    def tokens_behind(self) -> list[list[int]]:
        """The cached tokens of each row behind the running sequences."""
        start = len(self.running)
        partial = [self.partial.tokens[: self.partial.num_cached]] if self.partial else []
        if self.prefix_cache is None:
            return partial
        return partial + self.prefix_cache.tokens_from(start + len(partial))

    def find(self, request_id: int) -> ActiveSequence | None:
        """Return a waiting or running sequence; None if it has ended."""
        partial = [self.partial] if self.partial else []
        sequences = (*self.running, *partial, *self.waiting)
        return next((one for one in sequences if one.request_id == request_id), None)

    def admit(self) -> list[ActiveSequence]:
        """Return the sequences whose prompts are computed in this step; none for a decode step.

        They have left `waiting`, in rows behind the running sequences, and `join` lets them run. All of
        them have cached prefixes, or none has. One that needs the log-probabilities of its prompt is
        alone. After a prefill that running sequences have waited for, they have a decode step.
        """
        if self._decodes_next and self.running:
            self._decodes_next = False
            return []
        if self.partial:
            return [self.partial]
        admitted: list[ActiveSequence] = []
        while self.waiting and len(self.running) + len(admitted) < self.rows:
            sequence = self.waiting[0]
            match = self._match(sequence)
            if admitted and not self._fits(sequence, match, admitted):
                break
            admitted.append(self.waiting.popleft())
            if self.prefix_cache:
                self.prefix_cache.place(len(self.running) + len(admitted) - 1, match)
            sequence.cache(match.length)
        return admitted

    def next_tokens(self, sequence: ActiveSequence) -> list[int]:
        """Return the tokens of an admitted sequence to compute in this step."""
        tokens = sequence.tokens[sequence.num_cached :]
        is_cut = self.chunks and not sequence.request.prompt_logprobs
        return tokens[: self.batched_tokens] if is_cut else tokens

    def join(self, admitted: Sequence[ActiveSequence]) -> bool:
        """Let admitted sequences run once their prompts are cached; return whether they do."""
        self._decodes_next = bool(self.running)
        first = admitted[0]
        self.partial = first if first.num_cached < len(first.tokens) else None
        if not self.partial:
            self.running += admitted
        return not self.partial

    def remove(self, sequence: ActiveSequence, *, clear_state: bool = False) -> None:
        """Remove a sequence; the last running one moves into its row, and `partial` into that one's.

        Args:
            clear_state: zero its row first, which may have NaN; so may the row of `partial`, which
                has had no logits yet.
        """
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        if sequence is self.partial:
            row, self.partial, clear_state = len(self.running), None, True
        else:
            row = self.running.index(sequence)
        if self.states and clear_state:
            self.states.clear(slice(row, row + 1))
        kept = [] if clear_state else sequence.tokens[: sequence.num_cached]
        if row < len(self.running):
            last = self.running.pop()
            if last is not sequence:
                self.running[row] = last
                row = self._move(len(self.running), row, last, len(kept))
            if self.partial:
                row = self._move(row + 1, row, self.partial, len(kept))
        if self.prefix_cache:
            self.prefix_cache.keep(row, kept)

    def clear_draft(self, sequence: ActiveSequence) -> None:
        """Zero what a draft with NaN has left behind the cached tokens of a running sequence."""
        if self.states:
            row = self.running.index(sequence)
            self.states.clear(slice(row, row + 1), start=sequence.num_cached)

    def _move(self, source: int, target: int, moved: ActiveSequence, kept: int) -> int:
        """Move a sequence to the row of one that has ended; return where its `kept` tokens are then."""
        if self.states and self.states.by_token:
            # Not copied: NaN of `partial` would stay behind in the row that it leaves.
            self.states.swap(source, target, max(moved.num_cached, kept))
        elif self.states:
            self.states.copy(source, target, moved.num_cached)
        return source

    def _match(self, sequence: ActiveSequence) -> Match:
        """Return the cached prefix of a sequence; none if it needs the logits of its prompt."""
        if self.prefix_cache is None or sequence.request.prompt_logprobs:
            return Match()
        running = [(row, one.tokens[: one.num_cached]) for row, one in enumerate(self.running)]
        return self.prefix_cache.find(sequence.tokens, running)

    def _fits(
        self, sequence: ActiveSequence, match: Match, admitted: Sequence[ActiveSequence]
    ) -> bool:
        """Return whether a sequence computes its prompt together with the admitted ones."""
        first, tokens = admitted[0], sequence.tokens
        new_tokens = [len(one.tokens) - one.num_cached for one in admitted]
        longest = max(*new_tokens, len(tokens) - match.length)
        if longest * (len(admitted) + 1) > self.batched_tokens:
            return False
        if sequence.request.prompt_logprobs or first.request.prompt_logprobs:
            return False
        if bool(match.length) is not bool(first.num_cached):
            return False
        # The next step can reuse what this one computes.
        return self.prefix_cache is None or all(
            common_prefix(tokens, one.tokens) < match.length + self.prefix_cache.least_tokens
            for one in admitted
        )
