"""Depthwise causal convolution: each channel sees its last few tokens."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.sharding import exact_quotient, mark_initial, mark_sharded


class CausalConvolution(nn.Module):
    """SiLU of a causal convolution of each channel over time.

    In generation it keeps the last inputs of each sequence.

    Args:
        channels: over all ranks.
        kernel: tokens that a token sees, itself included.
        has_bias: whether there is a bias.
        parts: what the network's layers are built with.

    Shapes: x [s, b, c], first_bs [b, s] or None -> [s, b, c], c channels of this rank.
    """

    bias: nn.Parameter | None

    def __init__(self, channels: int, kernel: int, parts: LayerParts, *, has_bias: bool):
        super().__init__()
        own = exact_quotient(channels, parts.group.size(), "channels of a convolution")
        evenly = partial(_spread, reach=kernel**-0.5)
        weight = mark_initial(nn.Parameter(torch.empty(own, kernel)), evenly)
        self.weight = mark_sharded(weight, 0, parts.group)
        self.register_parameter("bias", None)
        if has_bias:
            bias = mark_initial(nn.Parameter(torch.empty(own)), evenly)
            self.bias = mark_sharded(bias, 0, parts.group)
        self.state = parts.state(kernel - 1, own)

    def forward(self, x_sbc: Tensor, first_bs: Tensor | None = None) -> Tensor:
        """Return the activations of this rank's channels.

        Args:
            first_bs: position of the first token of each token's document.
        """
        reach, length = self.weight.size(1) - 1, len(x_sbc)
        kept = self.state.read() if self.state else None
        history = x_sbc.new_zeros(reach, *x_sbc.shape[1:]) if kept is None else kept.transpose(0, 1)
        padded = torch.cat([history, x_sbc])
        if self.state:
            self.state.write(self._last(padded, length).transpose(0, 1))
        y_sbc = x_sbc * self.weight[:, reach]
        positions = torch.arange(length, device=x_sbc.device)
        for back in range(1, reach + 1):
            earlier = padded[reach - back : reach - back + length]
            if first_bs is not None:
                is_seen = positions - back >= first_bs
                earlier = earlier * is_seen.T[..., None]
            y_sbc = y_sbc + earlier * self.weight[:, reach - back]
        return F.silu(y_sbc if self.bias is None else y_sbc + self.bias)

    def _last(self, padded: Tensor, length: int) -> Tensor:
        """Return the last inputs of each sequence, in which padding may follow its tokens."""
        reach = self.weight.size(1) - 1
        if length == 1 or self.state is None:
            return padded[length:]
        ends = self.state.lengths + torch.arange(reach, device=padded.device)[:, None]
        return padded[ends, torch.arange(padded.size(1), device=padded.device)]


def _spread(drawn: Tensor, *, reach: float) -> Tensor:
    """Return numbers between -reach and reach of numbers between 0 and 1."""
    return (2 * drawn - 1) * reach
