"""What marks a parameter as an expert's: other replicas have other experts in its place."""

import re
from dataclasses import dataclass

from torch import nn

_NUMBER = re.compile(r"(?<=\.deepspeed_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class ExpertShare:
    """Which expert a parameter belongs to, and how many replicas share the experts of its layer.

    Neighbouring replicas share them, from the first one on; then the experts begin anew.
    """

    number: int
    replicas: int


def mark_expert(parameter: nn.Parameter, share: ExpertShare) -> None:
    """Mark `parameter` as one of an expert's."""
    parameter.expert_share = share  # type: ignore[attr-defined]


def replicas_that_differ(parameter: nn.Parameter) -> int:
    """Return how many replicas in a row hold different values of `parameter`: 1 but for experts."""
    share: ExpertShare | None = getattr(parameter, "expert_share", None)
    return share.replicas if share else 1


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is one of an expert's."""
    return hasattr(parameter, "expert_share")


def whole_name(name: str, parameter: nn.Parameter) -> str:
    """Return the name that `parameter` has where one rank holds all experts of a layer."""
    share: ExpertShare | None = getattr(parameter, "expert_share", None)
    return _NUMBER.sub(str(share.number), name) if share else name
