"""Overlap of communication with computation in bf16: gradient reduction, and gathering of weights.

The bf16 optimizer (ZeRO 0 and 1) has all fp32 gradients of a parameter group in one flat tensor, of
which each replica owns a contiguous partition. DeepSpeed all-reduces all of it after the last backward
pass. Here the hooks of the last micro-batch reduce it in buckets, each to the replica that owns it,
while backward goes on. Norm and clipping look at the own partition alone.

All ranks launch the buckets in the same order, that in which backward completes the layers: a bucket
waits for those before it, even if it is complete.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.deepspeed.grad_stats import counted_gradients
from megatron.engine.deepspeed.patches.grad_reduction import (
    reduces_in_fp32_at_once,
    replace_bf16_reduction,
    replace_weight_gather,
)
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import all_reduce_parts


@dataclass(eq=False)
class Bucket:
    """Consecutive elements of a flat tensor that one replica owns.

    Args:
        elements: a view of the flat tensor.
        owner: index of the replica.
        parameters: those with an element in the bucket.
        missing: those of them whose gradient is not complete yet.
    """

    elements: Tensor
    owner: int
    parameters: frozenset[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)


class GradientReduction:
    """Reduce the gradients of the bf16 optimizer to their owners, during the last backward pass of a step.

    Args:
        optimizer: DeepSpeed's.
        parameters: of this stage, in the order of the layers.
        held: shared between pipeline stages, whose sum over the stages comes first.
        bucket_size: elements of a bucket at most.

    Communication: one reduction for each bucket, over the ranks with the same shard; one all-reduce
        of the gradients that tensor-parallel ranks have parts of.
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Groups,
        *,
        parameters: Sequence[nn.Parameter],
        held: frozenset[nn.Parameter],
        bucket_size: int,
    ):
        self._optimizer, self._groups = optimizer, groups
        self._replicas = groups.data_and_sequence
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        flats = zip(optimizer.fp32_groups_gradients_flat, optimizer.bf16_groups, strict=True)
        buckets = [
            bucket
            for flat, inside in flats
            for bucket in _buckets(flat, inside, self._replicas.size(), bucket_size, held)
        ]
        self._buckets = sorted(
            buckets, key=lambda bucket: (bool(bucket.parameters & held), -_first(bucket, numbers))
        )
        self._of: dict[nn.Parameter, list[Bucket]] = {}
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._of.setdefault(parameter, []).append(bucket)
        self._held = held
        self._next, self._is_armed = 0, False
        self._works: list[dist.Work] = []
        self._last_passes: frozenset[int] = frozenset()
        self._passes = 0
        self._own = own_gradients(optimizer)

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
        self._is_armed = self._passes in self._last_passes and self._replicas.size() > 1
        self._passes += 1

    def ready(self, parameter: nn.Parameter) -> None:
        """Launch every bucket that the gradient of `parameter` completes.

        Raises:
            RuntimeError: it came twice in one backward pass, perhaps after its bucket was launched.
        """
        if not self._is_armed:
            return
        for bucket in self._of.get(parameter, ()):
            if parameter not in bucket.missing:
                raise RuntimeError("a gradient came twice in one backward pass")
            bucket.missing.remove(parameter)
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing or bucket.parameters & self._held:
                break
            self._launch(bucket)

    def finish(self) -> None:
        """Launch the rest, such as frozen and shared weights; wait, and average the own partition."""
        if self._replicas.size() > 1:
            while self._next < len(self._buckets):
                self._launch(self._buckets[self._next])
            self._wait()
            for partition in self._optimizer.fp32_groups_gradient_flat_partition:
                partition.mul_(1 / self._replicas.size())
        all_reduce_parts(self._own)

    def norm_gradients(self) -> list[Tensor]:
        """Return the gradients that this rank adds to the norm of the full network."""
        device = self._optimizer.fp32_groups_gradients_flat[0].device
        return counted_gradients(self._own, self._groups, device)

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        owner = dist.get_global_rank(self._replicas, bucket.owner)
        work = dist.reduce(bucket.elements, owner, group=self._replicas, async_op=True)
        self._works.append(work)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._next, self._is_armed = [], 0, False


class ParameterGather:
    """Overlap the gathering of the bf16 optimizer's updated weights with the next forward pass, in its order.

    Each replica broadcasts its partition in buckets. A layer waits for its weights before it computes.

    Args:
        parameters: of this stage, in the order of the layers.
        bucket_size: elements of a bucket at most.

    Communication: one broadcast for each bucket, over the ranks with the same shard.
    """

    def __init__(
        self, engine: Any, groups: Groups, *, parameters: Sequence[nn.Parameter], bucket_size: int
    ):
        self._optimizer, self._replicas = engine.optimizer, groups.data_and_sequence
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        flats = zip(self._optimizer.bf16_groups_flat, self._optimizer.bf16_groups, strict=True)
        buckets = [
            bucket
            for flat, inside in flats
            for bucket in _buckets(flat, inside, self._replicas.size(), bucket_size)
        ]
        self._buckets = sorted(buckets, key=lambda bucket: _first(bucket, numbers))
        self._running: dict[Bucket, dist.Work] = {}
        replace_weight_gather(engine.optimizer, self.start)
        self._start_of_step = self._wait_in_layers(engine.module)

    def start(self) -> None:
        """Broadcast the weights of every partition."""
        for bucket in self._buckets:
            owner = dist.get_global_rank(self._replicas, bucket.owner)
            work = dist.broadcast(bucket.elements, owner, group=self._replicas, async_op=True)
            self._running[bucket] = work

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
        None for another optimizer, with experts, and where DeepSpeed's JSON wants sums that this
        does not compute.
    """
    if not reduces_in_fp32_at_once(engine):
        return None
    module = engine.module
    shared = module.get_tied_weights_and_groups() if groups.topology.pipeline > 1 else []
    reduction = GradientReduction(
        engine.optimizer,
        groups,
        parameters=[*module.parameters()],
        held=frozenset(weight for weight, _ in shared),
        bucket_size=engine.zero_reduce_bucket_size(),
    )
    replace_bf16_reduction(
        engine,
        ready=reduction.ready,
        finish=reduction.finish,
        norm_gradients=reduction.norm_gradients,
        backward_begins=reduction.backward_begins,
    )
    return reduction


def gather_beside_forward(engine: Any, groups: Groups) -> ParameterGather | None:
    """Let the bf16 optimizer of DeepSpeed's `engine` gather its weights during the next forward pass.

    Returns:
        None for another optimizer, with experts, and without other replicas.
    """
    if not reduces_in_fp32_at_once(engine) or groups.data_and_sequence.size() == 1:
        return None
    return ParameterGather(
        engine,
        groups,
        parameters=[*engine.module.parameters()],
        bucket_size=engine.zero_allgather_bucket_size(),
    )


def _buckets(
    flat: Tensor,
    parameters: Sequence[nn.Parameter],
    replicas: int,
    bucket_size: int,
    held: frozenset[nn.Parameter] = frozenset(),
) -> Iterator[Bucket]:
    """Cut the flat tensor of a group at the borders of partitions and held parameters, and by size."""
    spans, start = [], 0
    for parameter in parameters:
        spans.append((start, start + parameter.numel(), parameter))
        start += parameter.numel()
    partition = flat.numel() // replicas
    borders = {*range(0, flat.numel() + 1, partition)}
    borders |= {edge for begin, end, p in spans if p in held for edge in (begin, end)}
    for first, last in pairwise(sorted(borders)):
        for begin in range(first, last, bucket_size):
            end = min(begin + bucket_size, last)
            inside = frozenset(p for a, b, p in spans if a < end and begin < b)
            yield Bucket(flat[begin:end], begin // partition, inside)


def _first(bucket: Bucket, numbers: dict[nn.Parameter, int]) -> int:
    """Return the number of the first layer's parameter in `bucket`: forward needs it, backward ends there."""
    return min((numbers[p] for p in bucket.parameters), default=0)


def own_gradients(optimizer: Any) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the slice of every reduced gradient that lies in this rank's partition."""
    found = []
    for group, parameters in enumerate(optimizer.bf16_groups):
        partitions = optimizer.fp32_groups_gradient_flat_partition[group]
        flat = optimizer.fp32_groups_gradients_flat[group]
        first = partitions.storage_offset() - flat.storage_offset()
        start = 0
        for parameter in parameters:
            begin, end = (
                max(start, first),
                min(start + parameter.numel(), first + partitions.numel()),
            )
            if begin < end:
                found.append((parameter, flat[begin:end]))
            start += parameter.numel()
    return found
