"""Expert parallelism: all-to-alls of tokens to the ranks of their experts, and back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.tensor_parallel.collectives import exchange_rows
from megatron.tensor_parallel.grouped_linear import Segments


class TokenExchange:
    """Sends rows to the ranks of their experts, and brings the outputs back.

    The host waits once for the device, for the numbers of rows that all ranks send.

    Args:
        counts: of this rank's rows for each expert of all ranks, on the device.
        group: the ranks that divide the experts.

    Communication: one all-to-all of a number per expert, and two of rows forward and backward.
    """

    def __init__(self, counts: Tensor, group: dist.ProcessGroup):
        self._group = group
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        self._counts = received.view(group.size(), -1)
        sent, arriving = torch.stack([counts, received]).view(2, *self._counts.shape).tolist()
        self._sent, self._received = [*map(sum, sent)], [*map(sum, arriving)]
        self._sizes = [*map(sum, zip(*arriving, strict=True))]

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends."""
        return sum(self._sent)

    def compute(self, experts: Callable[[Tensor, Segments], Tensor], rows: Tensor) -> Tensor:
        """Return the outputs for rows [num_sent, h] that are sorted by expert."""
        arrived = exchange_rows(rows, self._sent, self._received, self._group)
        # From each rank its rows sorted by expert; here all rows of one expert come together.
        local = torch.arange(self._counts.size(1), device=rows.device).repeat(len(self._counts))
        numbers = local.repeat_interleave(self._counts.flatten(), output_size=len(arrived))
        order = numbers.argsort(stable=True)
        segments = Segments(self._counts.sum(0), len(arrived), self._sizes)
        outputs = experts(TakeTokens.apply(arrived, order, 1), segments)
        back = torch.empty_like(outputs).index_copy(0, order, outputs)
        return exchange_rows(back, self._received, self._sent, self._group)


class TakeTokens(torch.autograd.Function):
    """Copy the tokens of the choices in `order`; backward adds up the gradients of a token in order.

    Choices after the last one are padding: rows of zeros, whose gradient is left out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int, is_padded: bool = False) -> Tensor:
        """Return [rows, h] of tokens [tokens, h] with k choices each."""
        ctx.save_for_backward(order)
        ctx.k, ctx.tokens = k, len(x)
        tokens = F.pad(x, (0, 0, 0, 1)) if is_padded else x
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the tokens."""
        (order,) = ctx.saved_tensors
        (grad,) = grads
        choices, width = ctx.tokens * ctx.k, grad.size(1)
        grad_choices = grad.new_zeros(choices + 1, width).index_copy(0, order, grad)[:choices]
        # A rank may have got no token at all.
        return grad_choices.view(ctx.tokens, ctx.k, width).sum(1), None, None, None
