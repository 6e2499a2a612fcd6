"""Pipeline-parallel engine: one stage of the model on each rank, scheduled by DeepSpeed."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron.engine.deepspeed.patches.pipeline import join_backward_passes, wrap_instructions
from megatron.engine.deepspeed.skip_nonfinite import min_loss_scale_error
from megatron.engine.deepspeed.timers import Timers
from megatron.engine.engine import Engine
from megatron.engine.pipeline_module import timed_instruction
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups


class PipelineEngine(Engine):
    """One stage of the model on each rank; DeepSpeed schedules the micro-batches."""

    def __init__(self, engine: Any, groups: Groups, *, timers: Timers, **watching: Any):
        super().__init__(engine, groups, timers=timers, **watching)
        self._shape = (0, 0)  # samples and tokens of a micro-batch
        join_backward_passes(engine)
        if not self._reduction or groups.data_and_sequence.size() == 1:
            # Otherwise each has a bucket to itself.
            wrap_instructions(engine, self._sharing_tied_weights)
        if timers.is_on:
            wrap_instructions(engine, partial(timed_instruction, timers))

    def _sharing_tied_weights(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Give all stages with a tied weight the same bits after each optimizer step.

        Each has a copy at an offset of its own in the flat tensors of gradients and states. Sums over
        replicas and vectorized operations round by the offset, so copies would drift apart.
        """
        if name != "OptimizerStep":
            return call

        def step(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            self._share_tied_weights()

        return step

    def _share_tied_weights(self) -> None:
        if self._gather:
            self._gather.wait(self._engine.module.tied_weights())
        self._engine.module.share_tied_weights()

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Restore what `save` wrote; stages take tied weights from the first one."""
        super().load(*args, **kwargs)
        self._share_tied_weights()

    def load_full(self, *args: Any, **kwargs: Any) -> None:
        """Restore what a run of another layout saved, in the same way."""
        super().load_full(*args, **kwargs)
        self._share_tied_weights()

    def set_seq_length(self, tokens: int, *, micro_batch_size: int | None = None) -> None:
        """Expect such micro-batches from the next one on."""
        shape = (micro_batch_size or self._engine.train_micro_batch_size_per_gpu(), tokens)
        if shape != self._shape:
            # Stages keep buffers of the shape that they have sent and received.
            self._engine.reset_activation_shape()
            self._shape = shape

    def set_global_batch_size(self, samples: int) -> None:
        """Take steps of so many samples; DeepSpeed counts ranks that divide a sample as replicas."""
        super().set_global_batch_size(samples * self._groups.topology.sequence)

    @min_loss_scale_error()
    def train_batch(self, batches: Iterator[Batch]) -> Tensor:
        """Take one optimizer step on the next global batch; return its mean loss, on all ranks."""
        grid = self._engine.module.grid(self._engine.micro_batches)
        self._begin_step(grid.last_gradients(self._groups.stage))
        batches = self._counted_by_loss(batches, self._engine.micro_batches)
        loss: Tensor = self._engine.train_batch(data_iter=self._as_tuples(batches))
        self._finish_step()
        return loss

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Return the mean loss of the next micro-batches of every replica, on all ranks."""
        self._begin_step([])
        with self._timers.pause():
            read = self._as_tuples(self._counted_by_loss(batches, num_micro_batches))
            return self._engine.eval_batch(read, num_micro_batches=num_micro_batches)

    def _counted_by_loss(self, batches: Iterator[Batch], number: int) -> Iterator[Batch]:
        """Return the batches of a step, whose tokens are counted by the last stage alone."""
        has_loss = self._groups.stage == self._groups.topology.pipeline - 1
        return self._count_tokens(batches, number) if has_loss else batches

    def _as_tuples(self, batches: Iterator[Batch]) -> Iterator[tuple[tuple[Tensor, ...], ...]]:
        """Yield batches as DeepSpeed takes them: for the first stage, and for the last one."""
        for batch in batches:
            tensors = tuple(batch[name] for name in self._engine.module.batch_fields)
            yield tensors, tensors
