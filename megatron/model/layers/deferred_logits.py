"""Fused linear cross-entropy: logits and their loss in chunks of tokens, never all logits at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fused_kernels.wide_products import add_product
from megatron.model.layers.attention_kernels import soft_capped

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""Called with logits_nv [n, V/t] and target_n [n]; returns the loss [n] float32 of each token."""


class DeferredLogits(NamedTuple):
    """Logits that the loss computes in chunks of tokens: features, and the weights of the head.

    Args:
        hidden: what the head reads, [b, s, h].
        weight: token table, [V/t, h].
        bias: of the logits, [V/t]; None for none.
        softcap: bound of the logits, which are 32-bit numbers then; 0 for none.
        chunk_tokens: most tokens whose logits exist at once.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float
    chunk_tokens: int

    def with_bias(self, bias_v: Tensor) -> "DeferredLogits":
        """Add a bias to the logits, after the soft cap."""
        hidden_bsh, bias_v = _pair(self.hidden, bias_v)
        return self._replace(hidden=hidden_bsh, bias=bias_v)

    def weighted_loss(self, target_bs: Tensor, weights_bs: Tensor, token_loss: TokenLoss) -> Tensor:
        """Return the sum of the losses of all tokens, each times its weight.

        Shapes: target_bs [b, s] int64, weights_bs [b, s] -> scalar float32.
        Communication: as `token_loss`, for each chunk.
        """
        target_n, weights_n = target_bs.flatten(), weights_bs.flatten()
        hidden_nh, weight_vh, bias_v = self.hidden.flatten(0, 1), self.weight, self.bias
        chunks = self._chunks(len(target_n))

        def loss_of(logits_nv: Tensor, bias_v: Tensor | None, chunk: slice) -> Tensor:
            return token_loss(_finish(logits_nv, bias_v, self.softcap), target_n[chunk])

        trained = [x for x in (hidden_nh, weight_vh, bias_v) if x is not None and x.requires_grad]
        if torch.is_grad_enabled() and trained:
            total: Tensor = ChunkedCrossEntropy.apply(
                hidden_nh, weight_vh, bias_v, weights_n, chunks, loss_of
            )
            return total
        losses = [loss_of(F.linear(hidden_nh[i], weight_vh), bias_v, i) for i in chunks]
        return (torch.cat(losses) * weights_n).sum()

    def _chunks(self, tokens: int) -> list[slice]:
        """Divide the tokens evenly into as few chunks as `chunk_tokens` permits."""
        size = -(-tokens // -(-tokens // self.chunk_tokens))
        return [slice(start, start + size) for start in range(0, tokens, size)]


def defer_logits(
    hidden_bsh: Tensor, weight_vh: Tensor, *, softcap: float, chunk_tokens: int
) -> DeferredLogits:
    """Return the logits hidden_bsh W^T as the loss computes them, in chunks."""
    hidden_bsh, weight_vh = _pair(hidden_bsh, weight_vh)
    return DeferredLogits(hidden_bsh, weight_vh, None, softcap, chunk_tokens)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum of the cross-entropies of linear logits, with gradients computed in forward.

    Of each chunk forward computes logits, losses and all gradients for a sum whose gradient is 1;
    backward multiplies these by the gradient of the sum. That costs no more products of matrices
    than logits that are kept. The gradient of the token table is summed over chunks in 32 bits.

    Shapes: hidden_nh [n, h], weight_vh [V/t, h], bias_v [V/t], weights_n [n] -> scalar.
    Communication: as `loss_of` for each chunk in forward, none in backward.
    Source: arXiv:2410.10989, section 3.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        weights_n: Tensor,
        chunks: Sequence[slice],
        loss_of: Callable[[Tensor, Tensor | None, slice], Tensor],
    ) -> Tensor:
        """Return the sum of the losses times their weights."""
        trains_hidden, trains_weight, trains_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden_nh) if trains_hidden else None
        weight_grad = _zeros_to_sum(weight_vh) if trains_weight else None
        bias_grad = _zeros_to_sum(bias_v) if trains_bias and bias_v is not None else None
        losses = []
        for chunk in chunks:
            x_nh = hidden_nh[chunk]
            logits_nv = F.linear(x_nh, weight_vh).requires_grad_()
            own_bias_v = None if bias_v is None else bias_v.detach().requires_grad_(trains_bias)
            with torch.enable_grad():
                loss_n = loss_of(logits_nv, own_bias_v, chunk)
            inputs = (
                [logits_nv, own_bias_v] if own_bias_v is not None and trains_bias else [logits_nv]
            )
            grad_nv, *grad_v = torch.autograd.grad(loss_n, inputs, weights_n[chunk])
            losses.append(loss_n.detach())
            if hidden_grad is not None:
                torch.mm(grad_nv, weight_vh, out=hidden_grad[chunk])
            if weight_grad is not None:
                add_product(weight_grad, grad_nv.mT, x_nh)
            if bias_grad is not None:
                bias_grad += grad_v[0]
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = hidden_nh.dtype, weight_vh.dtype, None if bias_v is None else bias_v.dtype
        return (torch.cat(losses) * weights_n).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the features, the table and the bias."""
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # In place, because the table's is large; autograd refuses a second backward pass.
        scaled = [None if x is None else x.mul_(grads[0]).to(dtype) for x, dtype in saved]
        return (*scaled, None, None, None)


def _finish(logits_nv: Tensor, bias_v: Tensor | None, softcap: float) -> Tensor:
    """Return the logits after soft cap and bias."""
    if softcap:
        wide = torch.promote_types(logits_nv.dtype, torch.float32)
        logits_nv = soft_capped(logits_nv.to(wide), softcap)
    return logits_nv if bias_v is None else logits_nv + bias_v


def _zeros_to_sum(x: Tensor) -> Tensor:
    """Return zeros of the shape of `x`, of 32 bits at least."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class _Joined(torch.autograd.Function):
    """Identity whose backward pass waits for the gradients of all of its tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _pair(hidden_bsh: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as outputs of one step of the network.

    The loss reads the weight, outside of the module that owns it. DeepSpeed prepares a backward pass
    when it reaches an output of the network, and that has to happen before this weight's gradient
    is ready; ZeRO-3 gathers a weight until its module returns.
    """
    if not weight.requires_grad:
        return hidden_bsh, weight.detach()
    hidden_bsh, weight = _Joined.apply(hidden_bsh, weight)
    return hidden_bsh, weight
