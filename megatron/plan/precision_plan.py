"""Number formats, decided."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.config.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """What weights and activations are stored in."""

    dtype: Literal["fp32", "fp16", "bf16"]

    @property
    def is_mixed(self) -> bool:
        """Whether 32-bit master weights stand behind 16-bit ones."""
        return self.dtype != "fp32"


def plan_precision(precision: PrecisionConfig) -> PrecisionPlan:
    """Return the decided number format."""
    return PrecisionPlan(dtype="fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32")


def precision_problems(precision: PrecisionConfig, *, device: str) -> Iterator[str]:
    """Yield every reason why `device` cannot compute as asked."""
    if precision.fp16 and precision.bf16:
        yield "--fp16 and --bf16 exclude each other: give one of them"
    elif precision.fp16 and device == "cpu":
        yield "--fp16 needs a GPU and this run is on CPUs: write --bf16, or neither for fp32"
