"""Split of documents into training, validation and test, from proportions."""

from itertools import accumulate

from megatron.common.errors import ConfigError
from megatron.config.data.corpora import SampleOrder
from megatron.data.sampling.blending import shares_of


def split_ranges(
    split: str, size: int, sample_order: SampleOrder = "bigscience"
) -> tuple[range, range, range]:
    """Cut range(size) into training, validation and test by the proportions of `--split`.

    Args:
        split: up to three weights with `,` or `/` between them, or a single one; of any sum.

    Raises:
        ConfigError: a weight is not a number or negative, or their sum is not positive.

    Source: BigScience's Megatron-DeepSpeed rounds each share, and the difference that rounding
        leaves moves every boundary but the first; Megatron Core rounds the cumulative shares.

    >>> split_ranges("969, 30, 1", 1000)
    (range(0, 969), range(969, 999), range(999, 1000))
    >>> split_ranges("949,50,1", 1001)
    (range(0, 950), range(950, 1000), range(1000, 1001))
    >>> split_ranges("969,30,1", 49, "megatron-core")
    (range(0, 47), range(47, 49), range(49, 49))
    """
    shares = _shares(split)
    bounds = _cumulative_bounds if sample_order == "megatron-core" else _shifted_bounds
    train, valid, test = bounds(shares, size)
    return range(train), range(train, valid), range(valid, test)


def _shifted_bounds(shares: list[float], size: int) -> list[int]:
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * size))
    excess = bounds[-1] - size
    # Rounding up twice can push a boundary below zero, where there is no document.
    return [max(bound - excess, 0) for bound in bounds[1:]]


def _cumulative_bounds(shares: list[float], size: int) -> list[int]:
    return [round(bound * size) for bound in accumulate(shares)]


def document_range(start: float, end: float, size: int) -> range:
    """Return the part of range(size) between two fractions of it, each rounded.

    >>> document_range(0.95, 1.0, 1001)
    range(951, 1001)
    """
    return range(round(start * size), round(end * size))


def _shares(split: str) -> list[float]:
    separator = "," if "," in split else "/"
    try:
        weights = [float(word) for word in split.split(separator)]
    except ValueError:
        raise ConfigError(f"--split {split!r} is not numbers such as 969,30,1") from None
    try:
        return shares_of([*weights, 0.0, 0.0][:3])
    except ValueError as error:
        raise ConfigError(
            f"--split {split!r}: weights are 0 or more, and one is above 0"
        ) from error
