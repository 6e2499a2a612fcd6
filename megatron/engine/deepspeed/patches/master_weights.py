"""Patches for master weights (fp32) of 16-bit weights, and the flat weights of ZeRO stage 3."""

from typing import Any

from torch import Tensor


def has_master_weight(parameter: Any) -> bool:
    """Whether ZeRO stages 1 and 2 or the bf16 optimizer keep `parameter` in fp32 (`_hp_mapping`)."""
    return hasattr(parameter, "_hp_mapping")


def master_weight(parameter: Any) -> Any:
    """Return where this rank keeps its fragment of `parameter` in fp32; None if it has none."""
    return parameter._hp_mapping


def master_gradient(parameter: Any) -> Tensor:
    """Return the reduced gradient of this rank's fragment (`_index_in_param_group`)."""
    return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)


def mark_without_gradient(parameter: Any) -> None:
    """Give a frozen weight the attribute `_hp_grad`.

    DeepSpeed's pipeline engine reads it from a weight that stages share, frozen or not.
    """
    parameter._hp_grad = None


def copy_to_weights(zero: Any, group: int) -> None:
    """Copy a group's flat weights to its parameters (`_unflatten_partitioned_parameters`)."""
    zero._unflatten_partitioned_parameters(group)
