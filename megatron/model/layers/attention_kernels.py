"""Attention itself: which keys a query sees, and how the values it sees are mixed.

Every implementation computes the same function of the same arguments (`Attend`).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import ATTENTIONS
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.layer_input import Shared, once
from megatron.model.layers.positions import RelativePositions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees. Queries are the last positions of the keys, usually all of them.

    Args:
        causal: whether keys after the query are masked; ignored where spans are given.
        spans_bs2: [b, sq, 2], for every query the first key that it sees and the one after the
            last, as in `LayerInput`; [b, 1, 2] where all queries see the same.
        window: a query sees no key that is this far from it, or farther; 0 for no limit.
        derived: memo of tensors that follow from the mask. Layers share masks, so that each is
            computed once per micro-batch and kept once, however many layers save it for backward.
    """

    causal: bool = True
    spans_bs2: Tensor | None = None
    window: int = 0
    derived: Shared = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether `causal` says it all."""
        return self.spans_bs2 is None and not self.window

    def visible(self, sq: int, sk: int, device: torch.device) -> Tensor | None:
        """Return [b or 1, 1, sq, sk] bool; None when every query sees every key."""
        return once(self.derived, ("visible", sq, sk), lambda: self._visible(sq, sk, device))

    def additive(self, sq: int, sk: int, query: Tensor, slopes_a: Tensor | None) -> Tensor | None:
        """Compute an additive attention mask: 0 or ALiBi's bias where visible, -inf elsewhere.

        Shapes: [b or 1, a or 1, sq, sk] in the dtype of `query`; None for no effect.
        """

        def build() -> Tensor | None:
            seen = self._visible(sq, sk, query.device)
            if slopes_a is None and seen is None:
                return None
            bias = torch.zeros((), dtype=query.dtype, device=query.device)
            if slopes_a is not None:
                bias = alibi_bias(slopes_a, sq, sk).to(query.dtype)
            return bias if seen is None else torch.where(seen, bias, -torch.inf)

        return self._cached_for_slopes(("additive", sq, sk, query.dtype), slopes_a, build)

    def alibi(self, slopes_a: Tensor, sq: int, sk: int) -> Tensor:
        """Compute ALiBi's bias of the scores once for all layers; see `alibi_bias`."""
        return self._cached_for_slopes(
            ("alibi", sq, sk), slopes_a, lambda: alibi_bias(slopes_a, sq, sk)
        )

    def _cached_for_slopes(
        self, key: Hashable, slopes_a: Tensor | None, build: Callable[[], T]
    ) -> T:
        """Return the memo's value of `key` if it was built for these slopes, which layers share."""
        kept_a, value = once(self.derived, key, lambda: (slopes_a, build()))
        return value if kept_a is slopes_a else build()

    def _visible(self, sq: int, sk: int, device: torch.device) -> Tensor | None:
        if not (self.causal or self.window or self.spans_bs2 is not None):
            return None
        first_bq, stop_bq = self.ranges(sq, sk, device)
        keys_k = torch.arange(sk, device=device)
        return ((first_bq[..., None] <= keys_k) & (keys_k < stop_bq[..., None]))[:, None]

    def ranges(self, sq: int, sk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return for every query the first key that it sees and the one after the last: [b or 1, sq]."""
        queries_q = torch.arange(sk - sq, sk, device=device)[None]
        if self.spans_bs2 is not None:
            first_bq, stop_bq = self.spans_bs2.expand(-1, sq, -1).unbind(-1)
        else:
            first_bq = torch.zeros_like(queries_q)
            stop_bq = queries_q + 1 if self.causal else first_bq + sk
        if self.window:
            first_bq = torch.maximum(first_bq, queries_q - self.window + 1)
            stop_bq = torch.minimum(stop_bq, queries_q + self.window)
        return first_bq, stop_bq


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How the values that a query sees are weighed: softmax(cap(scale * query key^T) + bias).

    Args:
        scale: of the products.
        softcap: cap(x) = softcap * tanh(x / softcap), before biases; 0 for x itself.
        slopes_a: ALiBi (arXiv:2108.12409, section 3): slope of each head; the bias of a score is
            slope * (position of the key - position of the query).
        sinks_a: attention sinks: a further score of each head, after caps and biases, whose weight no
            value gets: weights of the keys add up to less than 1. The Megatron-LM flag is
            --softmax-type (arXiv:2309.17453; Miller 2023, "Attention is off by one", for zeros).
        bias: [1, a, sq, sk], added to the scores of every sample; for FlexAttention by distance,
            [a, sq + sk - 1], as `RelativePositions.by_distance` returns it.
        relative: relative positions that `bias` is computed from; with a KV cache, `bias` is None and
            attention to cached keys computes it.
        layer_scaling: scores are kept divided by this, and softmax multiplies it back, so that
            scores of deep layers stay inside the range of 16 bits. No other effect.
        dropout: probability that a weight is dropped.
        kernels: what computes softmax where scores are written out.
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    slopes_a: Tensor | None = None
    sinks_a: Tensor | None = None
    bias: Tensor | None = None
    relative: RelativePositions | None = None
    layer_scaling: float = 1.0
    dropout: float = 0.0
    kernels: Kernels = REFERENCE


class Attend(Protocol):
    """The mixed values of the keys that each query sees; a query that sees none gets zeros."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Return the mixed values.

        Shapes: query [b, a, sq, d], key [b, g, sk, d], value [b, g, sk, v], where g divides a:
        queries come in g groups that share a key -> [b, a, sq, v].
        Randomness: draws from the stream that is current, when values are dropped.
        """
        ...


@ATTENTIONS.register("sdpa")
def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
    """Attend by torch's scaled_dot_product_attention, which picks its kernel by itself.

    It has no argument for soft caps and sinks: with one of them, scores are written out.
    """
    if how.softcap or how.sinks_a is not None:
        return explicit_attention(query, key, value, how)
    if key.size(-1) != value.size(-1) and key.device.type == "cpu":
        # Its kernel has one width; PyTorch would write all scores down.
        return in_one_width(sdpa_attention, query, key, value, how)
    sq, sk = query.size(2), key.size(2)
    unbiased = how.bias is None and how.slopes_a is None
    causal = how.mask.causal and how.mask.is_plain and sq == sk and unbiased
    if causal:
        given = None
    elif how.bias is None:
        given = how.mask.additive(sq, sk, query, how.slopes_a)
    else:
        seen, given = how.mask.visible(sq, sk, query.device), how.bias.to(query.dtype)
        given = given if seen is None else given.masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=given,
        dropout_p=how.dropout,
        is_causal=causal,
        scale=how.scale,
        enable_gqa=query.size(1) != key.size(1),
    )


def in_one_width(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions
) -> Tensor:
    """Attend by a kernel whose keys and values have as many features, padded with zeros."""
    width, features = max(key.size(-1), value.size(-1)), value.size(-1)
    query, key, value = (
        F.pad(x, (0, width - x.size(-1))) if x.size(-1) < width else x for x in (query, key, value)
    )
    return attend(query, key, value, how)[..., :features]


@ATTENTIONS.register("fused-softmax")
def explicit_attention(query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
    """Attend by writing all scores down; kernels turn them into weights."""
    sq, sk = query.size(2), key.size(2)
    group = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    scores = (query * (how.scale / how.layer_scaling)) @ key.mT
    scores = soft_capped(scores, how.softcap / how.layer_scaling)
    bias = how.bias
    if how.slopes_a is not None:
        bias = how.mask.alibi(how.slopes_a, sq, sk)
    if bias is not None:
        scores = scores + (bias / how.layer_scaling).to(scores.dtype)
    if how.mask.causal and how.mask.is_plain and how.sinks_a is None:
        weights = how.kernels.scaled_causal_softmax(scores, how.layer_scaling)
    else:
        seen = how.mask.visible(sq, sk, query.device)
        if how.sinks_a is not None:
            # A last key that all queries see.
            scores = append_sinks(scores, how.sinks_a / how.layer_scaling)
            seen = seen if seen is None else F.pad(seen, (0, 1), value=True)
        weights = how.kernels.scaled_masked_softmax(scores, seen, how.layer_scaling)[..., :sk]
    return F.dropout(weights, how.dropout) @ value


@ATTENTIONS.register("reference")
def reference_attention(query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
    """Attend in at least 32 bits, by plain torch operations."""
    wide = torch.promote_types(query.dtype, torch.float32)
    mixed = explicit_attention(
        query.to(wide),
        key.to(wide),
        value.to(wide),
        replace(how, layer_scaling=1.0, kernels=REFERENCE),
    )
    return mixed.to(query.dtype)


def alibi_bias(slopes_a: Tensor, sq: int, sk: int) -> Tensor:
    """Compute ALiBi's bias [1, a, sq, sk]: position of the key less the query's, times the slope.

    Keys count from the query, not from the first one as in BLOOM: softmax sees no difference,
    and in 16 bits the biases of near keys keep their digits.
    """
    keys_k = torch.arange(sk, device=slopes_a.device)
    queries_q1 = torch.arange(sk - sq, sk, device=slopes_a.device)[:, None]
    return (slopes_a[:, None, None] * (keys_k - queries_q1))[None]


def append_sinks(scores: Tensor, sinks_a: Tensor) -> Tensor:
    """Append the sink of each head to its scores: [b, a, sq, sk] -> [b, a, sq, sk + 1]."""
    b, _, sq, _ = scores.shape
    sinks = sinks_a.to(scores.dtype)[:, None, None].expand(b, -1, sq, 1)
    return torch.cat([scores, sinks], -1)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which is almost x near 0 and never beyond +-cap; x for a cap of 0.

    Source: arXiv:2408.00118, section 2.
    """
    return cap * (x / cap).tanh() if cap else x


CoreAttention = Callable[[int], Attend]
"""Function from a layer number, from 1 on, to the attention kernel of that layer."""


def attention_of(spec: ModelSpec, kernels: Kernels) -> Attend:
    """Return the core attention of a network: a plugin's, or the one that `kernels` name."""
    attend: Attend = ATTENTIONS.get(spec.attention.attention or kernels.attention, spec.own_flags)
    return attend


def core_attention_of(spec: ModelSpec, kernels: Kernels = REFERENCE) -> CoreAttention:
    """Return the implementation that `kernels` name, for every layer."""
    attend = attention_of(spec, kernels)
    return lambda number: attend
