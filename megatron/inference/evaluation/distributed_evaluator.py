"""Distributed evaluation: scores windows and generates completions on several model replicas."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import torch.distributed as dist

from megatron.common.progress import Progress, with_progress
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.evaluation.scoring import Score, Window, score_windows
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.object_collectives import all_gather_objects, broadcast_object
from megatron.tokenizer.types.tokenizer import Tokenizer

_BATCHES = 32
"""Batches of each replica in one chunk of work, in which windows are sorted."""

_Work = Sequence[Window] | Sequence[Request]


class DistributedEvaluator:
    """Evaluates a model on the processes of all its replicas.

    The first rank submits work, and closes in the end; the other ranks `follow()`. Results do not
    depend on the number of ranks, except for the rounding of sums.

    Args:
        runner: runs this rank's part of the model.
        rows: most sequences of a replica at once.
        tokenizer: decodes tokens, for requests with stop strings.
    """

    def __init__(self, runner: ModelRunner, *, rows: int, tokenizer: Tokenizer | None = None):
        self.runner, self.rows, self.tokenizer = runner, rows, tokenizer
        self.replicas = runner.groups.topology.data
        self._is_alone = dist.get_world_size() == 1

    def scores(self, windows: Iterable[Window], *, num_targets: int) -> Iterator[Score]:
        """Yield the score of each window, in their order, computed a chunk at a time.

        Args:
            num_targets: tokens that all windows score, for the progress that is shown.
        """
        source = iter(windows)
        with Progress("evaluation", num_targets, "tokens") as progress:
            while chunk := [*islice(source, self.rows * self.replicas * _BATCHES)]:
                self._broadcast(chunk)
                yield from self._score(chunk, progress)

    def completions(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completion of each request, in their order.

        Raises:
            ConfigError: a request is refused; see `InferenceEngine.problems`. Nothing is generated.
        """
        if not requests:
            return []
        self._broadcast(requests)
        return self._complete(requests)

    def follow(self) -> None:
        """Take part in the work of the first rank, until that is closed."""
        while work := self._broadcast(()):
            windows = [item for item in work if isinstance(item, Window)]
            if windows:
                self._score(windows)
            else:
                self._complete([item for item in work if isinstance(item, Request)])

    def close(self) -> None:
        """End `follow` on the other ranks."""
        self._broadcast(())

    def _broadcast(self, work: _Work) -> _Work:
        """Return the first rank's work on every rank.

        Communication: one broadcast to all ranks when there are several.
        """
        return work if self._is_alone else broadcast_object(work, source=0)

    def _score(self, windows: Sequence[Window], progress: Progress | None = None) -> list[Score]:
        """Return the scores of all windows on every rank.

        Args:
            progress: counts the tokens that all replicas have scored.

        Communication: one all-reduce of [n, 2] over all ranks: for each window, one rank has the
        score and the other ranks zeros.
        """
        order = _by_context(windows)
        batches = [order[i : i + self.rows] for i in range(0, len(order), self.rows)]

        def of_this_replica() -> Iterator[Sequence[int]]:
            for first in range(0, len(batches), self.replicas):
                turn = batches[first : first + self.replicas]
                yield from turn[self.runner.groups.data_rank :][:1]
                if progress:
                    progress.add(sum(windows[index].num_targets for index in chain(*turn)))

        found_n2 = score_windows(self.runner, windows, of_this_replica())
        if not self._is_alone:
            dist.all_reduce(found_n2)
        return [
            Score(total, num_greedy == window.num_targets)
            for window, (total, num_greedy) in zip(windows, found_n2.tolist(), strict=True)
        ]

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions on every rank.

        Communication: one all-gather of objects over all ranks.
        """
        groups = self.runner.groups
        engine = InferenceEngine(self.runner, rows=self.rows, tokenizer=self.tokenizer)
        completed: list[Completion] = []
        if groups.stage == groups.tensor_rank == 0:
            own = requests[groups.data_rank :: self.replicas]
            completions = engine.generate(own)
            if groups.data_rank == 0:
                completions = with_progress(completions, "generation", len(own), "requests")
            completed = [*completions]
            engine.close()
        else:
            engine.follow()
        if self._is_alone:
            return completed
        by_rank = all_gather_objects(completed)
        by_replica = [
            by_rank[groups.topology.rank(pipeline=0, data=replica, tensor=0)]
            for replica in range(self.replicas)
        ]
        return [
            by_replica[index % self.replicas][index // self.replicas]
            for index in range(len(requests))
        ]


def _by_context(windows: Sequence[Window]) -> list[int]:
    """Return the indices of windows by falling length, those with one context side by side."""
    contexts = [window.tokens[: -window.num_targets] for window in windows]
    longest: dict[tuple[int, ...], int] = {}
    for context, window in zip(contexts, windows, strict=True):
        longest[context] = max(longest.get(context, 0), len(window.tokens))

    def key(index: int) -> tuple[int, tuple[int, ...], int]:
        context = contexts[index]
        return -longest[context], context, -len(windows[index].tokens)

    return sorted(range(len(windows)), key=key)
