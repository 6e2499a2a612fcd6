"""Scheduler of continuous batching: waiting and running sequences, and their rows in the KV cache."""

from collections import deque

from megatron.inference.engine.kv_cache import KVCache
from megatron.inference.engine.sequence import ActiveSequence


class Scheduler:
    """Admits waiting sequences to the running batch, and removes finished ones.

    The index of a sequence in `running` is its row in the KV cache.

    Args:
        cache: None without a KV cache.
        rows: most running sequences.
        prompt_tokens: most tokens of one prefill, padding included, unless one prompt has more.
    """

    def __init__(self, cache: KVCache | None, *, rows: int, prompt_tokens: int):
        self.cache, self.rows, self.prompt_tokens = cache, rows, prompt_tokens
        self.waiting: deque[ActiveSequence] = deque()
        self.running: list[ActiveSequence] = []

    def find(self, request_id: int) -> ActiveSequence | None:
        """Return a waiting or running sequence; None if it has ended."""
        sequences = (*self.running, *self.waiting)
        return next((one for one in sequences if one.request_id == request_id), None)

    def admit(self) -> list[ActiveSequence]:
        """Move the sequences of the next prefill from `waiting` to `running`.

        A sequence that needs the log-probabilities of its prompt is prefilled alone.
        """
        admitted: list[ActiveSequence] = []
        longest = 0
        while self.waiting and len(self.running) + len(admitted) < self.rows:
            sequence = self.waiting[0]
            longest = max(longest, len(sequence.tokens))
            if admitted and (
                longest * (len(admitted) + 1) > self.prompt_tokens
                or sequence.request.prompt_logprobs
                or admitted[0].request.prompt_logprobs
            ):
                break
            admitted.append(self.waiting.popleft())
        self.running += admitted
        return admitted

    def remove(self, sequence: ActiveSequence, *, clear_cache: bool = False) -> None:
        """Remove a sequence; the last running one moves into its row.

        Args:
            clear_cache: zero its row first, which may have NaN.
        """
        if sequence not in self.running:
            self.waiting.remove(sequence)
            return
        row = self.running.index(sequence)
        if self.cache and clear_cache:
            self.cache.clear(slice(row, row + 1))
        last = self.running.pop()
        if last is not sequence:
            self.running[row] = last
            if self.cache:
                self.cache.copy(len(self.running), row, len(last.tokens))
