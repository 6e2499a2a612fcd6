"""Norms and counts over the whole model, each weight once, wherever its pieces are."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad
from torch import Tensor

from megatron.engine.deepspeed.replicated_weights import counts_here
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import replicas_that_differ


@torch.no_grad()
def params_norm(parameters: Iterable[Any], groups: Groups) -> float:
    """Return the L2 norm of all weights of the model.

    Communication: one all-reduce of a scalar over all ranks.
    """
    counted = [p for p in parameters if counts_here(p, groups)]
    pieces = [
        _own_part(p, p.ds_tensor) if _is_partitioned(p) else p.detach()
        for p in counted
        if _is_partitioned(p) or _is_first_copy(p, groups)
    ]
    squares = (piece.float().square().sum(dtype=torch.float64) for piece in pieces)
    return float(_over_all_ranks(squares, groups)) ** 0.5


class ZeroCounter:
    """Counts the zeros of each step's gradient, just before the optimizer takes it.

    Args:
        engine: DeepSpeed's; its optimizer's step is wrapped.
        num_padding: weights of the whole model whose gradient is always zero, which do not count.
    """

    def __init__(self, engine: Any, groups: Groups, num_padding: int):
        self.count = 0.0  # of the last step
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._groups = groups
        step = engine.optimizer.step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            self.count = self._count() - num_padding
            return step(*args, **kwargs)

        engine.optimizer.step = counted_step

    @torch.no_grad()
    def _count(self) -> float:
        """Return the number of zeros. Communication: one all-reduce over all ranks."""
        counted = [p for p in self._parameters if counts_here(p, self._groups)]
        pieces = (self._gradient(p) for p in counted)
        zeros = ((g.numel() - g.count_nonzero()).double() for g in pieces if g is not None)
        return float(_over_all_ranks(zeros, self._groups))

    def _gradient(self, parameter: Any) -> Tensor | None:
        """Return the piece of the reduced gradient that this rank alone answers for."""
        if _is_partitioned(parameter):
            return _own_part(parameter, safe_get_local_grad(parameter))
        if not hasattr(parameter, "_hp_mapping"):
            return parameter.grad if _is_first_copy(parameter, self._groups) else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        piece = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
        own = mapping.lp_fragment_address
        return piece if piece.numel() == own.numel else piece[own.start : own.start + own.numel]


def _is_first_copy(parameter: Any, groups: Groups) -> bool:
    """Whether this rank answers for a weight that others hold as well."""
    return groups.sequence_rank == 0 and groups.data_rank < replicas_that_differ(parameter)


def _is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has divided this weight over the replicas."""
    return hasattr(parameter, "ds_tensor")


def _own_part(parameter: Any, piece: Tensor) -> Tensor:
    """Return this rank's piece of a weight that ZeRO-3 divided, without the padding at the end."""
    size = parameter.ds_tensor.ds_numel
    start = size * dist.get_rank(parameter.ds_process_group)
    return piece.flatten()[: max(0, min(size, parameter.ds_numel - start))]


def _over_all_ranks(terms: Iterable[Tensor], groups: Groups) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for term in terms:
        total += term
    dist.all_reduce(total)
    return total
