"""Expert parallelism: all-to-alls of tokens to the ranks of their experts, and back."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.tensor_parallel.collectives import (
    all_gather,
    exchange_rows,
    gather_sequence,
    scatter_sequence,
)
from megatron.tensor_parallel.grouped_linear import Segments


class TokenExchange:
    """Sends rows to the ranks of their experts, and brings the outputs back.

    The host waits once for the device, for the numbers of rows that all ranks send.

    Args:
        counts: of this rank's rows for each expert of all ranks, on the device.
        group: the ranks that divide the experts.
        tensor_group: ranks with different tokens, each with a part of an expert's features; None for
            one rank.

    Communication: over `group` one all-to-all of a number per expert, and two of rows forward and
        backward; over `tensor_group` one all-gather of these numbers, and of the rows that arrive
        an all-gather and a reduce-scatter forward and backward, as many as on the rank with most.
    """

    def __init__(
        self,
        counts: Tensor,
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None = None,
    ):
        self._group, self._tensor_group = group, tensor_group
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        everyones = arriving[None]
        if tensor_group:
            everyones = all_gather(everyones, 0, tensor_group)
        # Of each rank of `tensor_group`, from each of the ranks that divide the experts: [t, ranks, local].
        self._counts = everyones.view(len(everyones), group.size(), -1)
        sent, *received = (
            torch.cat([counts[None], everyones]).view(-1, *self._counts.shape[1:]).tolist()
        )
        own = received[tensor_group.rank() if tensor_group else 0]
        self._sent, self._received = [*map(sum, sent)], [*map(sum, own)]
        self._most = max(sum(map(sum, each)) for each in received)
        self._sizes = [sum(column) for column in zip(*chain(*received), strict=True)]

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends."""
        return sum(self._sent)

    def compute(self, experts: Callable[[Tensor, Segments], Tensor], rows: Tensor) -> Tensor:
        """Return the outputs for rows [num_sent, h] that are sorted by expert."""
        arrived = exchange_rows(rows, self._sent, self._received, self._group)
        number = len(arrived)
        if self._tensor_group:
            arrived = F.pad(arrived, (0, 0, 0, self._most - number))
            arrived = gather_sequence(arrived, 0, self._tensor_group)
        order = self._order(len(arrived))
        segments = Segments(self._counts.sum((0, 1)), len(order), self._sizes)
        outputs = experts(TakeTokens.apply(arrived, order, 1), segments)
        back = outputs.new_zeros(arrived.shape).index_copy(0, order, outputs)
        if self._tensor_group:
            back = scatter_sequence(back, 0, self._tensor_group)[:number]
        return exchange_rows(back, self._received, self._sent, self._group)

    def _order(self, rows: int) -> Tensor:
        """Return where the rows of each expert are.

        From each rank come its rows sorted by expert; behind those of a rank of the tensor group is
        padding, which is left out.
        """
        experts = self._counts.size(2)
        numbers = torch.arange(experts + 1, device=self._counts.device)
        numbers = torch.cat([numbers[:-1].repeat(self._counts.size(1)), numbers[-1:]])
        lengths = self._counts.flatten(1)
        lengths = torch.cat([lengths, self._most - lengths.sum(1, keepdim=True)], 1)
        of_rows = numbers.repeat(len(lengths)).repeat_interleave(
            lengths.flatten(), output_size=rows
        )
        return of_rows.argsort(stable=True)[: sum(self._sizes)]


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
