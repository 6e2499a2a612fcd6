"""Batch size, gradient accumulation and batch size ramp-up: resolution and checks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

SizeSchedule = tuple[tuple[int, int], ...]
"""Batch size schedule: number of the first sample, and samples per optimizer step from there on."""


class Progress(NamedTuple):
    """How far a run has come: iterations, and the training samples and tokens that they took."""

    iterations: int
    samples: int
    tokens: int


NO_PROGRESS = Progress(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Micro-batches of a global batch, and the schedule of its size."""

    micro_batch_size: int  # samples per model replica and forward pass
    global_batch_size: int  # samples per optimizer step over all replicas, at the end of a schedule
    data_parallel_size: int
    ramp_start: int  # samples per step at the beginning
    ramp_increment: int
    ramp_samples: int  # the ramp takes so many samples; 0 without one
    size_schedule: SizeSchedule = ()  # without a ramp; manifests of older versions have none

    @property
    def scheduled_samples(self) -> int:
        """Samples after which the batch size no longer changes; 0 if it never does."""
        return self.size_schedule[-1][0] if self.size_schedule else self.ramp_samples

    def size_at(self, samples: int) -> int:
        """Return the global batch size after `samples` training samples.

        Source: `--rampup-batch-size` of BigScience's Megatron-DeepSpeed and of Megatron-LM: equal
            spans of samples per increment. Both divide in float64, which can round the last
            sample of a span down; exact arithmetic would read other samples from there on.
        """
        if self.size_schedule:
            return next(size for first, size in reversed(self.size_schedule) if first <= samples)
        if not self.is_ramping(samples):
            return self.global_batch_size
        num_increments = (self.global_batch_size - self.ramp_start) // self.ramp_increment
        increments = int(samples / (self.ramp_samples / num_increments))
        return self.ramp_start + increments * self.ramp_increment

    def sizes_from(self, samples: int) -> Sequence[int]:
        """Return the global batch sizes of a run from its sample `samples` on, in order."""
        now = self.size_at(samples)
        if self.size_schedule:
            return [now, *(size for first, size in self.size_schedule if first > samples)]
        return range(now, self.global_batch_size + 1, self.ramp_increment)

    def is_ramping(self, samples: int) -> bool:
        """Whether the batch size can still change after `samples` training samples."""
        if self.size_schedule:
            return samples < self.scheduled_samples
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

    def iterations_for(self, samples: int, done: Progress = NO_PROGRESS) -> int:
        """Return the iterations after which less than a step of `samples` training samples is left.

        Args:
            done: before, which steps of other sizes may have taken.
        """
        iterations, consumed = done.iterations, done.samples
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
    global_batch_size: int,
    data_parallel_size: int,
    size_schedule: SizeSchedule = (),
) -> BatchPlan:
    """Return the batch of steps that take `global_batch_size` samples at the end of a schedule."""
    start, increment, samples = rampup_batch_size or (global_batch_size, 1, 0)
    return BatchPlan(
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        data_parallel_size=data_parallel_size,
        ramp_start=start,
        ramp_increment=increment,
        ramp_samples=samples if start != global_batch_size else 0,
        size_schedule=size_schedule,
    )


_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_quantity(text: str) -> Fraction | None:
    """Return the exact value of a number written as 350M or 1.3B; None if `text` is none."""
    match = _QUANTITY.fullmatch(text)
    return Fraction(match[1]) * _UNITS[match[2].upper()] if match else None


def size_schedule_of(schedule: Sequence[str] | None, seq_length: int) -> SizeSchedule:
    """Return the sizes of `--step-batch-size-schedule`, in order; malformed entries are left out.

    Source: `--step-batch-size-schedule` of Megatron-LM, which rounds a threshold in tokens down to
        complete samples, and takes the size of the last threshold that the samples have reached.
    """
    found = (_parse_entry(entry) for entry in _entries(schedule))
    length = max(1, seq_length)  # another check reports a length of 0
    return tuple(sorted((tokens // length, size) for tokens, size in filter(None, found)))


def last_size(schedule: Sequence[str] | None) -> int | None:
    """Return the last batch size of `--step-batch-size-schedule`; None without one."""
    sizes = size_schedule_of(schedule, seq_length=1)
    return sizes[-1][1] if sizes else None


def size_schedule_problems(schedule: Sequence[str], seq_length: int) -> Iterator[str]:
    """Yield problems of the entries of `--step-batch-size-schedule`."""
    flag = "--step-batch-size-schedule"
    wrong = [entry for entry in _entries(schedule) or [""] if _parse_entry(entry) is None]
    for entry in wrong:
        yield (
            f"{flag} {entry}: write TOKENS:SIZE, the tokens after which a step takes SIZE samples, "
            "an integer of at least 1, such as 0:768 250B:1536"
        )
    if wrong:
        return
    sizes = size_schedule_of(schedule, seq_length)
    if sizes[0][0] != 0:
        yield f"{flag} {' '.join(schedule)}: the first entry must begin at 0 tokens, as 0:{sizes[0][1]}"
    for (first, size), (second, later) in pairwise(sizes):
        if first == second:
            yield (
                f"{flag} {' '.join(schedule)}: sizes {size} and {later} begin at the same sample: "
                f"thresholds must differ by a sample of {seq_length} tokens at least"
            )


def _entries(schedule: Sequence[str] | None) -> list[str]:
    return " ".join(schedule or ()).replace(",", " ").split()


def _parse_entry(entry: str) -> tuple[int, int] | None:
    """Return the tokens and the batch size of an entry; None if it is malformed."""
    tokens, size = (parse_quantity(text) for text in entry.partition(":")[::2])
    if tokens is None or not size or size.denominator > 1:
        return None
    return int(tokens), int(size)
