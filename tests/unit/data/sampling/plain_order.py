"""Sample orders of Megatron-DeepSpeed and Megatron Core, written out one token at a time.

Slow on purpose, and without anything of the package: what the fast maps are compared with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Documents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Part:
    """Documents of one corpus that a data set reads, and their weight in a blend."""

    documents: Documents
    first: int  # documents before it are not read, but count
    weight: float

    @property
    def num_tokens(self):
        return sum(map(len, self.documents))


def bigscience_bounds(weights: Sequence[float], size: int) -> list[int]:
    """Round the documents of each share; shift every bound but the first by what is left over."""
    total = weights[0] + weights[1] + weights[2]
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + int(round(weight / total * float(size))))
    left_over = bounds[3] - size
    return [0, *(bound - left_over for bound in bounds[1:])]


def core_bounds(weights: Sequence[float], size: int) -> list[int]:
    """Round the documents before the end of each share."""
    total = weights[0] + weights[1] + weights[2]
    shares = [weight / total for weight in weights]
    ends = [shares[0], shares[0] + shares[1], shares[0] + shares[1] + shares[2]]
    return [0, *(int(round(end * float(size))) for end in ends)]


BOUNDS = {"bigscience": bigscience_bounds, "megatron-core": core_bounds}
PERCENT_OF_LAST = {"bigscience": 95, "megatron-core": 80}


def shares(weights: Sequence[float], program: str) -> list[float]:
    """Return the weights divided by their sum, as each program adds."""
    if program == "megatron-core":
        return (np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))).tolist()
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights]


def samples_of_parts(
    weights: Sequence[float], num_samples: int, program: str, surplus: float = 0.005
) -> list[int]:
    """Return how many samples are built of each part of a blend."""
    if program == "megatron-core":
        targets = [int(math.ceil(num_samples * share)) for share in shares(weights, program)]
        return [int(math.ceil(target * (1 + surplus))) for target in targets]
    return [int(math.ceil(num_samples * share * 1.005)) for share in shares(weights, program)]


def part_samples(
    part: Part, *, num_samples: int, seq_length: int, seed: int, program: str
) -> list[list[int]]:
    """Return all samples of one part, each a list of seq_length + 1 tokens."""
    per_epoch = part.num_tokens
    num_epochs = 1
    while num_epochs * per_epoch < num_samples * seq_length + 1:
        num_epochs += 1
    total = (num_epochs * per_epoch - 1) // seq_length
    is_apart = False
    if num_epochs > 1:
        without_last = ((num_epochs - 1) * per_epoch - 1) // seq_length
        of_one = (per_epoch - 1) // seq_length
        threshold = int(PERCENT_OF_LAST[program] / 100 * of_one)
        is_apart = num_samples - without_last < threshold

    rng = np.random.RandomState(seed)
    order: list[int] = []
    for count in (num_epochs - 1, 1) if is_apart else (num_epochs,):
        numbers = list(range(part.first, part.first + len(part.documents))) * count
        shuffled = np.array(numbers, dtype=np.int32)
        rng.shuffle(shuffled)
        order.extend(int(number) for number in shuffled)
    stream = [token for number in order for token in part.documents[number - part.first]]

    places: list[int] = []
    for first, stop in ((0, without_last), (without_last, total)) if is_apart else ((0, total),):
        shuffled = np.arange(first, stop, dtype=np.uint32)
        rng.shuffle(shuffled)
        places.extend(int(place) for place in shuffled)
    return [stream[place * seq_length : (place + 1) * seq_length + 1] for place in places]


def set_samples(
    parts: Sequence[Part],
    *,
    is_blend: bool,
    num_samples: int,
    seq_length: int,
    seed: int,
    program: str,
    surplus: float = 0.005,
) -> list[list[int]]:
    """Return the first `num_samples` samples of a data set of one or several parts."""
    common = {"seq_length": seq_length, "seed": seed, "program": program}
    if not is_blend:
        return part_samples(parts[0], num_samples=num_samples, **common)[:num_samples]
    weights = [part.weight for part in parts]
    counts = samples_of_parts(weights, num_samples, program, surplus)
    each = [
        part_samples(part, num_samples=count, **common)
        for part, count in zip(parts, counts, strict=True)
    ]
    # Both divide once more by the sum, in numpy.
    again = np.array(shares(weights, program))
    again = again / np.sum(again)
    taken = [0] * len(parts)
    samples = []
    for i in range(num_samples):
        errors = [float(again[d]) * max(float(i), 1.0) - taken[d] for d in range(len(parts))]
        chosen = max(range(len(parts)), key=lambda d: (errors[d], -d))
        samples.append(each[chosen][taken[chosen]])
        taken[chosen] += 1
    return samples
