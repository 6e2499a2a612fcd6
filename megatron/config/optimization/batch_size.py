"""Batch size, gradient accumulation and batch size ramp-up: resolution and checks."""

from collections.abc import Iterator, Sequence
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


def batch_problems(
    micro: int,
    rampup_batch_size: Sequence[int] | None,
    *,
    global_batch_size: int | None,
    data_parallel_size: int,
    consumed_samples: int,
) -> Iterator[str]:
    """Yield every reason why micro-batches, global batch and ramp do not fit together.

    Args:
        consumed_samples: those of the checkpoint that the run resumes from; what the ramp was before
            does not matter.
    """
    if micro < 1:
        yield f"--micro-batch-size {micro} must be at least 1"
        return
    if global_batch_size is not None and global_batch_size < 1:
        yield f"--global-batch-size {global_batch_size} must be at least 1"
        return
    unit = micro * data_parallel_size
    if global_batch_size is not None and global_batch_size % unit:
        elastic = (
            "" if global_batch_size % micro else "; --elastic trains on fewer, which divide it"
        )
        yield (
            f"--global-batch-size {global_batch_size} is not a multiple of "
            f"--micro-batch-size {micro} * {data_parallel_size} replicas = {unit}{elastic}"
        )
    if rampup_batch_size is not None:
        batch = plan_batch(
            micro,
            rampup_batch_size if len(rampup_batch_size) == 3 else None,
            global_batch_size=global_batch_size,
            data_parallel_size=data_parallel_size,
        )
        yield from _ramp_problems(rampup_batch_size, batch, unit, consumed_samples)


def _ramp_problems(
    ramp: Sequence[int], batch: BatchPlan, unit: int, consumed_samples: int
) -> Iterator[str]:
    words = "--rampup-batch-size " + " ".join(map(str, ramp))
    if len(ramp) != 3:
        yield f"{words}: three numbers are needed: first batch size, increment, samples"
        return
    start, increment, _ = ramp
    final = batch.global_batch_size
    if min(ramp) < 1:
        yield f"{words}: all three numbers must be at least 1"
    elif start > final or (final - start) % increment:
        yield f"{words}: {start} does not reach --global-batch-size {final} in steps of {increment}"
    else:
        sizes = [size for size in batch.sizes_from(consumed_samples) if size % unit]
        if sizes:
            yield (
                f"{words}: batch size {sizes[0]} on the way is not a multiple of "
                f"micro-batch size * replicas = {unit}"
            )
