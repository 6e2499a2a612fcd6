"""Processes that evaluate together: the first is given work, and all share it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch.distributed as dist

from megatron.inference.engine.continuous_batching import Engine
from megatron.inference.engine.model_runner import Stage
from megatron.inference.engine.request import Completion, Request
from megatron.inference.evaluation.scoring import Score, judge
from megatron.inference.evaluation.windows import Window
from megatron.tokenizer.types.tokenizer import Tokenizer

_BATCHES = 32
"""Batches of each replica between two shares of work: their windows are sorted by length."""

_Work = Sequence[Window] | Sequence[Request]


class Team:
    """This process's part of a model, or of several replicas of it, that are evaluated.

    The first process asks and closes in the end; the others `follow()`. What is found does not
    depend on how many there are, but for the last digits of floating-point sums.

    Args:
        stage: this rank's layers.
        rows: most sequences of a replica at once.
        tokenizer: spells tokens, for requests that end with a text.
    """

    def __init__(self, stage: Stage, *, rows: int, tokenizer: Tokenizer | None = None):
        self.stage, self.rows, self.tokenizer = stage, rows, tokenizer
        self.replicas = stage.groups.topology.data
        self._is_alone = dist.get_world_size() == 1

    def scores(self, windows: Iterable[Window]) -> Iterator[Score]:
        """Yield the score of each window, in their order; of many, a share at a time."""
        source = iter(windows)
        while share := [*islice(source, self.rows * self.replicas * _BATCHES)]:
            self._shared(share)
            yield from self._judge(share)

    def completions(self, requests: Sequence[Request]) -> list[Completion]:
        """Return what becomes of each request, in their order.

        Raises:
            ConfigError: one cannot be taken; see `Engine.problems`. Nothing has been done then.
        """
        if not requests:
            return []
        self._shared(requests)
        return self._complete(requests)

    def follow(self) -> None:
        """Do this rank's part of what the first is asked, until that one closes."""
        while work := self._shared(()):
            windows = [item for item in work if isinstance(item, Window)]
            if windows:
                self._judge(windows)
            else:
                self._complete([item for item in work if isinstance(item, Request)])

    def close(self) -> None:
        """Let the other ranks go."""
        self._shared(())

    def _shared(self, work: _Work) -> _Work:
        """Return the first rank's work on every rank.

        Communication: one broadcast to all ranks when there are several.
        """
        box = [work]
        if not self._is_alone:
            dist.broadcast_object_list(box, src=0, device=self.stage.device)
        return box[0]

    def _judge(self, windows: Sequence[Window]) -> list[Score]:
        """Return the scores of all windows on every rank.

        Communication: one all-reduce of [n, 2] over all ranks; of each window, one has the score
        and the others zeros, so that the sum is the score.
        """
        order = sorted(range(len(windows)), key=lambda place: -len(windows[place].tokens))
        batches = [order[i : i + self.rows] for i in range(0, len(order), self.rows)]
        found_n2 = judge(self.stage, windows, batches[self.stage.groups.data_rank :: self.replicas])
        if not self._is_alone:
            dist.all_reduce(found_n2)
        return [
            Score(total, likeliest == window.judged)
            for window, (total, likeliest) in zip(windows, found_n2.tolist(), strict=True)
        ]

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return what becomes of the requests on every rank.

        Communication: one gathering of objects over all ranks.
        """
        groups = self.stage.groups
        engine = Engine(self.stage, rows=self.rows, tokenizer=self.tokenizer)
        own: list[Completion] = []
        if groups.stage == groups.tensor_rank == 0:
            own = [*engine.complete(requests[groups.data_rank :: self.replicas])]
            engine.close()
        else:
            engine.follow()
        if self._is_alone:
            return own
        told: list[list[Completion]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, own)
        by_replica = {
            rank: groups.topology.rank(pipeline=0, data=rank, tensor=0)
            for rank in range(self.replicas)
        }
        return [
            told[by_replica[place % self.replicas]][place // self.replicas]
            for place in range(len(requests))
        ]
