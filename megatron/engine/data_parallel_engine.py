"""Data-parallel engine without pipeline stages: all ZeRO stages, tensor and sequence parallel."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.deepspeed.skip_nonfinite import min_loss_scale_error
from megatron.engine.engine import Engine
from megatron.engine.loss_terms import LossTerms
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups


class DataParallelEngine(Engine):
    """The full model in one module, for all ZeRO stages.

    The loss is the mean over all ranks that hold the same shard, those that have parts of the same
    sample included, and so are the gradients.
    """

    def __init__(
        self,
        engine: Any,
        groups: Groups,
        loss: LossTerms,
        **watching: Any,
    ):
        super().__init__(engine, groups, terms=loss, **watching)
        self._loss = loss

    def set_global_batch_size(self, samples: int) -> None:
        """Take so many samples per step, over all replicas, from the next step on."""
        super().set_global_batch_size(samples)
        # DeepSpeed finds a step's end by counting micro-batches since the start of the run; with
        # another number per step the count has to begin anew.
        self._engine.micro_steps = 0

    def set_seq_length(self, tokens: int, *, micro_batch_size: int | None = None) -> None:
        """Expect such micro-batches from the next one on: any shape passes through."""

    @min_loss_scale_error()
    def train_batch(self, batches: Iterator[Batch]) -> Tensor:
        """Take one optimizer step on the next global batch; return its mean loss, on all ranks."""
        self._engine.module.train()
        losses = []
        num_micro_batches = self._engine.gradient_accumulation_steps()
        self._begin_step([num_micro_batches - 1])
        batches = self._count_tokens(batches, num_micro_batches)
        for number in range(num_micro_batches):
            with self._timers.part("batch-generator"):
                batch = next(batches)
            with self._timers.part("forward-compute"):
                loss = self._loss(self._engine(batch), batch)
            if self._reduction:
                self._reduction.backward_begins()
            with self._timers.part("backward-compute"):
                self._engine.backward(loss)
            losses.append(loss.detach())
            if number == num_micro_batches - 1:
                self._scalars.expect(self._mean(losses))
            with self._timers.part("optimizer"):
                self._engine.step()
        self._finish_step()
        (mean,) = self._scalars.take()
        return mean

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Return the mean loss of the next micro-batches of every replica, on all ranks."""
        self._engine.module.eval()
        self._begin_step([])
        batches = self._count_tokens(batches, num_micro_batches)
        losses = []
        for _ in range(num_micro_batches):
            batch = next(batches)
            losses.append(self._loss(self._engine(batch), batch))
        return self._mean(losses)

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        mean = torch.stack(tuple(losses)).mean()
        dist.all_reduce(mean, group=self._groups.data_and_sequence)
        return mean / self._groups.data_and_sequence.size()
