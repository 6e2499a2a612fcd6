"""Batch size, gradient accumulation and batch size ramp-up: resolution and checks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Micro-batches of a global batch, and batch size ramp-up."""

    micro_batch_size: int  # samples per model replica and forward pass
    global_batch_size: int  # samples per optimizer step over all replicas, after the ramp
    data_parallel_size: int
    ramp_start: int  # samples per step at the beginning
    ramp_increment: int
    ramp_samples: int  # the ramp takes so many samples; 0 without one

    def size_at(self, samples: int) -> int:
        """Return the global batch size after `samples` training samples.

        Source: `--rampup-batch-size` of BigScience's Megatron-DeepSpeed and of Megatron-LM: equal
            spans of samples per increment. Both divide in float64, which can round the last
            sample of a span down; exact arithmetic would read other samples from there on.
        """
        if not self.is_ramping(samples):
            return self.global_batch_size
        num_increments = (self.global_batch_size - self.ramp_start) // self.ramp_increment
        increments = int(samples / (self.ramp_samples / num_increments))
        return self.ramp_start + increments * self.ramp_increment

    def sizes_from(self, samples: int) -> range:
        """Return the global batch sizes of a run from its sample `samples` on, in order."""
        return range(self.size_at(samples), self.global_batch_size + 1, self.ramp_increment)

    def is_ramping(self, samples: int) -> bool:
        """Whether the ramp still sets the batch size after `samples` training samples."""
        return self.ramp_samples > 0 and samples <= self.ramp_samples

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Return forward passes per replica for a step of `global_batch_size` samples."""
        return global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def samples_before(self, iterations: int) -> int:
        """Return the samples of the first `iterations` steps of a run."""
        taken, samples = 0, 0
        while taken < iterations and self.is_ramping(samples):
            samples += self.size_at(samples)
            taken += 1
        return samples + (iterations - taken) * self.global_batch_size

    def iterations_for(self, samples: int) -> int:
        """Return the number of full steps in `samples` training samples."""
        iterations, consumed = 0, 0
        while self.is_ramping(consumed) and consumed + self.size_at(consumed) <= samples:
            consumed += self.size_at(consumed)
            iterations += 1
        if self.is_ramping(consumed):
            return iterations
        return iterations + max(0, samples - consumed) // self.global_batch_size


def plan_batch(
    micro_batch_size: int,
    rampup_batch_size: Sequence[int] | None,
    *,
    global_batch_size: int | None,
    data_parallel_size: int,
) -> BatchPlan:
    """Return the batch; without a global size it is one micro-batch per replica."""
    final = global_batch_size or micro_batch_size * data_parallel_size
    start, increment, samples = rampup_batch_size or (final, 1, 0)
    return BatchPlan(
        micro_batch_size=micro_batch_size,
        global_batch_size=final,
        data_parallel_size=data_parallel_size,
        ramp_start=start,
        ramp_increment=increment,
        ramp_samples=samples if start != final else 0,
    )
