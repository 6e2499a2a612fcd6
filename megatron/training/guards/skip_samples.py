"""Skip iterations: their samples are consumed without training on them."""

import logging
from collections.abc import Callable, Sequence

from megatron.checkpointing.train_state import TrainState
from megatron.training.loop.batch_stream import Stream
from megatron.training.loop.loop import Hook

log = logging.getLogger(__name__)


class Skip(Hook):
    """Skip ranges of iterations (--skip-train-iteration-range) and recorded loss spikes. For all ranks.

    Args:
        ranges: first and last iteration of each, in order.
        train_iters: the run's last iteration.
        batch_size: the global batch size after a number of samples.
        stream: the training data.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        *,
        train_iters: int,
        batch_size: Callable[[int], int],
        stream: Stream,
    ):
        self._ranges = ranges
        self._train_iters = train_iters
        self._batch_size = batch_size
        self._stream = stream

    def before_step(self, state: TrainState) -> None:
        """Skip the ranges that contain the next iteration."""
        spikes = dict.fromkeys(state.spikes, "--spike-policy")
        given = dict.fromkeys(self._ranges, "--skip-train-iteration-range")
        for (first, last), flag in sorted({**spikes, **given}.items()):
            last = min(last, self._train_iters)
            if not first <= state.iteration + 1 <= last:
                continue
            log.info(
                "Skipped iterations %d to %d due to %s flag.",
                *(state.iteration + 1, last, flag),
            )
            for _ in range(last - state.iteration):
                state.samples += self._batch_size(state.samples)
            state.iteration = last
            self._stream.seek(state.samples)
