"""Attention by the flash-attn package and by FlexAttention, imported where one of them is chosen."""

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.common.registry import ATTENTIONS
from megatron.fused_kernels.flash_attention import flash_attention
from megatron.fused_kernels.flex_attention import block_mask, flex_attention
from megatron.model.layers.attention_kernels import (
    Mask,
    ScoreOptions,
    in_one_width,
    sdpa_attention,
)
from megatron.model.layers.layer_input import once

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@ATTENTIONS.register("flash")
def flash_or_other_attention(
    query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions
) -> Tensor:
    """Attend by the flash-attn package, or by `sdpa_attention` where it lacks an argument.

    The package has no spans, no bias and no sinks. Its ALiBi falls with the distance in both directions,
    which is the ALiBi of this program when keys after the query are masked.
    """
    if key.size(-1) != value.size(-1):
        return in_one_width(flash_or_other_attention, query, key, value, how)
    has_slopes = how.slopes_a is not None
    limited = any(x is not None for x in (how.mask.spans_bs2, how.bias, how.sinks_a))
    if limited or (has_slopes and not how.mask.causal):
        return sdpa_attention(query, key, value, how)
    return flash_attention(
        query,
        key,
        value,
        causal=how.mask.causal,
        window=how.mask.window,
        slopes_a=how.slopes_a,
        scale=how.scale,
        softcap=how.softcap,
        dropout=how.dropout,
    )


@ATTENTIONS.register("flex")
def block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
    """Attend by FlexAttention: no dense mask or bias, and nothing computed where all is masked.

    Raises:
        ValueError: dropout, which it does not have.
    """
    if how.dropout:
        raise ValueError("FlexAttention has no dropout")
    return flex_attention(
        query,
        key,
        value,
        blocks=blocks_of(how.mask, query, key.size(2)),
        scale=how.scale,
        softcap=how.softcap,
        slopes_a=how.slopes_a,
        bias_ad=how.bias,
        sinks_a=how.sinks_a,
    )


def blocks_of(mask: Mask, query: Tensor, sk: int) -> "BlockMask":
    """Return the block mask of FlexAttention, once for all layers."""
    samples, sq = query.size(0), query.size(2)
    return once(
        mask.derived,
        ("blocks", samples, sq, sk),
        lambda: block_mask(*mask.ranges(sq, sk, query.device), sk, samples=samples),
    )
