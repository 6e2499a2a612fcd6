"""Overlap of communication with computation in bf16: gradient reduction, and gathering of weights.

The bf16 optimizer (ZeRO 0 and 1) has all fp32 gradients of a parameter group in one flat tensor, of
which each replica owns an equal part. DeepSpeed all-reduces all of it after the last backward pass.
Here each bucket is a parameter group of its own (`in_buckets`), and so laid out over all replicas: one
reduce-scatter, launched by the hooks of the last micro-batch while backward goes on, and one
all-gather, at any number of replicas. Norm and clipping look at the own parts alone.

All ranks launch the buckets in the same order, that in which backward completes the layers: a bucket
waits for those before it, even if it is complete.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.parallelism.deepspeed_keys import reduces_in_fp32_at_once
from megatron.engine.deepspeed.grad_stats import counted_gradients
from megatron.engine.deepspeed.patches.grad_reduction import (
    own_gradients,
    replace_bf16_reduction,
    replace_weight_gather,
    replica_groups,
    weight_partitions,
)
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import all_reduce_parts


@dataclass(eq=False)
class Bucket:
    """The flat tensor of a parameter group.

    Args:
        elements: all of it.
        own: this rank's part, a view of it.
        group: the ranks that have the same weights.
        parameters: of the group.
        missing: those of them whose gradient is not complete yet.
    """

    elements: Tensor
    own: Tensor
    group: dist.ProcessGroup
    parameters: frozenset[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)


class GradientReduction:
    """Reduce the gradients of the bf16 optimizer during the last backward pass of a step.

    Args:
        optimizer: DeepSpeed's.
        parameters: of this stage, in the order of the layers.
        shared: weights that pipeline stages share, with the group of these stages.

    Communication: one reduce-scatter for each bucket, over the ranks with the same weights; one
        all-reduce of the gradients that tensor-parallel ranks have parts of, and one of the own part
        of each shared weight, over the stages.
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Groups,
        *,
        parameters: Sequence[nn.Parameter],
        shared: Iterable[tuple[nn.Parameter, dist.ProcessGroup]],
    ):
        self._optimizer, self._groups = optimizer, groups
        self._replicas = groups.data_and_sequence
        own = optimizer.fp32_groups_gradient_flat_partition
        self._buckets = _in_order(optimizer, optimizer.fp32_groups_gradients_flat, own, parameters)[
            ::-1
        ]
        self._reduces = any(bucket.group.size() > 1 for bucket in self._buckets)
        self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next, self._is_armed = 0, False
        self._works: list[dist.Work] = []
        self._last_passes: frozenset[int] = frozenset()
        self._passes = 0
        self._own = own_gradients(optimizer)
        pieces = dict(self._own)
        self._shared = [(pieces[p], stages) for p, stages in shared if p in pieces]

    def expect(self, last_passes: Iterable[int]) -> None:
        """Begin a step.

        Args:
            last_passes: numbers of the passes that complete gradients, among those that add to them:
                the last ones of each model chunk.
        """
        self._wait()  # for what an exception has left
        self._last_passes, self._passes = frozenset(last_passes), 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def backward_begins(self) -> None:
        """Reduce during this pass if it completes gradients."""
        self._is_armed = self._passes in self._last_passes and self._reduces
        self._passes += 1

    def ready(self, parameter: nn.Parameter) -> None:
        """Launch the bucket that the gradient of `parameter` completes, and those that waited for it.

        Raises:
            RuntimeError: it came twice in one backward pass, perhaps after its bucket was launched.
        """
        if not self._is_armed:
            return
        missing = self._of[parameter].missing
        if parameter not in missing:
            raise RuntimeError("a gradient came twice in one backward pass")
        missing.remove(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch()

    def finish(self) -> None:
        """Launch the rest, whose layers may not have run; wait, average, and sum over the stages.

        That sum comes last: all stages with a weight get the same bits.
        """
        if self._reduces:
            while self._next < len(self._buckets):
                self._launch()
            self._wait()
            for bucket in self._buckets:
                bucket.own.mul_(1 / self._replicas.size())
        all_reduce_parts(self._own)
        for piece, stages in self._shared:
            dist.all_reduce(piece, group=stages)

    def norm_gradients(self) -> list[Tensor]:
        """Return the gradients that this rank adds to the norm of the full network."""
        device = self._optimizer.fp32_groups_gradients_flat[0].device
        return counted_gradients(self._own, self._groups, device)

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        work = dist.reduce_scatter_single(
            bucket.own, bucket.elements, group=bucket.group, async_op=True
        )
        self._works.append(work)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._next, self._is_armed = [], 0, False


class ParameterGather:
    """Overlap the gathering of the bf16 optimizer's updated weights with the next forward pass, in its order.

    A layer waits for its weights before it computes.

    Args:
        parameters: of this stage, in the order of the layers.

    Communication: one all-gather for each bucket, over the ranks with the same weights.
    """

    def __init__(self, engine: Any, *, parameters: Sequence[nn.Parameter]):
        optimizer = engine.optimizer
        self._buckets = _in_order(
            optimizer, optimizer.bf16_groups_flat, weight_partitions(optimizer), parameters
        )
        self._running: dict[Bucket, dist.Work] = {}
        replace_weight_gather(engine.optimizer, self.start)
        self._start_of_step = self._wait_in_layers(engine.module)

    def start(self) -> None:
        """Begin to gather the weights of every bucket."""
        for bucket in self._buckets:
            self._running[bucket] = dist.all_gather_single(
                bucket.elements, bucket.own, group=bucket.group, async_op=True
            )

    def begin_forward(self) -> None:
        """Wait for weights that functions outside of their own layer read."""
        self.wait(self._start_of_step)

    def wait(self, parameters: frozenset[nn.Parameter] | None = None) -> None:
        """Wait for these weights; for all with None."""
        if not self._running:
            return
        for bucket in [*self._running]:
            if parameters is None or bucket.parameters & parameters:
                self._running.pop(bucket).wait()

    def _wait_in_layers(self, model: nn.Module) -> frozenset[nn.Parameter]:
        """Let each layer wait for its weights; return those that belong to no layer, or to several."""
        tied = {*model.parameters(recurse=False)}
        for name, layer in model.named_children():
            if name == "tied_modules":
                tied.update(layer.parameters())
                continue
            parameters = frozenset(layer.parameters())
            layer.register_forward_pre_hook(
                lambda _, inputs, parameters=parameters: self.wait(parameters)
            )
        return frozenset(tied)


def reduce_beside_backward(engine: Any, groups: Groups) -> GradientReduction | None:
    """Let the bf16 optimizer of DeepSpeed's `engine` reduce its gradients during backward.

    Returns:
        None for another optimizer, and where DeepSpeed's JSON wants sums that this does not compute.
    """
    if not reduces_in_fp32_at_once(engine.config):
        return None
    module = engine.module
    shared = module.get_tied_weights_and_groups() if groups.topology.pipeline > 1 else []
    reduction = GradientReduction(
        engine.optimizer,
        groups,
        parameters=[*module.parameters()],
        shared=shared,
    )
    replace_bf16_reduction(
        engine,
        ready=reduction.ready,
        finish=reduction.finish,
        norm_gradients=reduction.norm_gradients,
        backward_begins=reduction.backward_begins,
    )
    return reduction


def gather_beside_forward(engine: Any) -> ParameterGather | None:
    """Let the bf16 optimizer of DeepSpeed's `engine` gather its weights during the next forward pass.

    Returns:
        None for another optimizer, and without other replicas.
    """
    if not reduces_in_fp32_at_once(engine.config):
        return None
    if all(group.size() == 1 for group in replica_groups(engine.optimizer)):
        return None
    return ParameterGather(engine, parameters=[*engine.module.parameters()])


def _in_order(
    optimizer: Any,
    flats: Sequence[Tensor],
    own: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> list[Bucket]:
    """Return a bucket for each parameter group, in the order in which forward needs them.

    Backward ends with the first parameter of a bucket, and completes them in the opposite order.
    """
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    buckets = [
        Bucket(flat, part, group, frozenset(inside))
        for flat, part, group, inside in zip(
            flats, own, replica_groups(optimizer), optimizer.bf16_groups, strict=True
        )
    ]
    return sorted(buckets, key=lambda bucket: min(numbers[p] for p in bucket.parameters))
