"""Multi-head latent attention (MLA): its flags and its part of a spec.

Keys and values of all heads are computed from one narrow latent of a token, which is all that generation
caches (arXiv:2405.04434, section 2.1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.config.network.spec_part import AttentionForm, Product, SpecPart
from megatron.config.parsing.declaration import resolve, setting

TRAINED_LENGTH = 4096
"""Tokens of the training before --rotary-scaling-factor, as in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA)."""

    multi_latent_attention: bool = setting(False, megatron_lm=True)
    """Multi-head latent attention (MLA), as in DeepSeek-V2 and V3: keys and values are computed from
    a latent of each token. With --qk-layernorm the latents are normalized."""

    q_lora_rank: int | None = setting(None, at_least=1, matters=False, megatron_lm=True)
    """Features of the latent that queries are computed from (default: none; they are computed from
    the hidden state)."""

    kv_lora_rank: int = setting(32, at_least=1, matters=False, megatron_lm=True)
    """Features of the latent that keys and values are computed from."""

    qk_head_dim: int = setting(128, at_least=1, matters=False, megatron_lm=True)
    """Features of a head's queries and keys without positions."""

    qk_pos_emb_head_dim: int = setting(64, at_least=2, matters=False, megatron_lm=True)
    """Features of a head's queries, and of the key that all heads share, with rotary positions."""

    v_head_dim: int = setting(128, at_least=1, matters=False, megatron_lm=True)
    """Features of a head's values."""

    attention_latent_norm_epsilon: float | None = setting(
        None, above=0, matters=False, plan="model.latent_norm_epsilon"
    )
    """Added to the variance in norms of latents (default: --layernorm-epsilon)."""

    rope_type: Literal["rope", "yarn"] | None = setting(None, megatron_lm=True)
    """Rotary positions of latent attention: plain ones, or YaRN by --rotary-scaling-factor
    (default: yarn, which is plain at a factor of 1)."""

    rotary_scaling_factor: float = setting(1.0, at_least=1, matters=False, megatron_lm=True)
    """Factor by which YaRN stretches wavelengths in latent attention, for networks trained with 4096
    tokens, and with --position-embedding-type yarn: Megatron-LM's spelling of --use-rope-scaling
    --rope-scaling-type yarn --rope-scaling-factor."""

    mscale: float = setting(1.0, at_least=0, matters=False, megatron_lm=True)
    """With --rotary-scaling-factor, multiplies rotated queries and keys by
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""

    mscale_all_dim: float = setting(0.0, at_least=0, matters=False, megatron_lm=True)
    """See --mscale. In latent attention with YaRN, also multiplies attention scores by
    (0.1 mscale_all_dim ln(factor) + 1) squared."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec(SpecPart):
    """Multi-head latent attention.

    A head's queries and keys have head_dim features, of which the first qk_pos_emb_head_dim are turned.
    """

    section: ClassVar[str] = "model"

    kv_lora_rank: int = 0  # features of the latent of keys and values
    q_lora_rank: int = 0  # of the latent of queries; 0: there is none
    qk_pos_emb_head_dim: int = 0  # turned features of queries, and of the key that all heads share
    v_head_dim: int = 0  # of a head's values
    latent_norm_epsilon: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "LatentSpec | None":
        """Return latent attention; None without: see `SpecPart`."""
        return latent_spec(config.model, config.model.norm_epsilon)

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.v_head_dim

    def widths(self, tensor: int) -> Mapping[str, int]:
        """Return the features of latents by flag, which every rank computes."""
        return {
            "--q-lora-rank": self.q_lora_rank,
            "--kv-lora-rank": self.kv_lora_rank,
            "--qk-pos-emb-head-dim": self.qk_pos_emb_head_dim,
        }

    def attention_form(self, spec: Any) -> AttentionForm:
        """Return attention through latents."""
        attention, width = spec.attention, spec.hidden_size
        heads, queries = attention.num_attention_heads, attention.query_features
        rank, of_queries = self.kv_lora_rank, self.q_lora_rank
        turned = self.qk_pos_emb_head_dim
        plain, values = heads * (attention.head_dim - turned), heads * self.v_head_dim
        bias = attention.qkv_bias
        down = (Product(inputs=width, outputs=of_queries, has_bias=bias),) if of_queries else ()
        norms = ((of_queries,) if of_queries else ()) + (rank,)
        return AttentionForm(
            products=(
                *down,
                Product(inputs=of_queries or width, outputs=queries, divided="columns"),
                Product(inputs=width, outputs=rank + turned, has_bias=bias),
                Product(inputs=rank, outputs=plain + values, divided="columns"),
                Product.to_stream(spec),
            ),
            norms=norms if spec.norm.qk_layernorm else (),
            value_features=values,
            received=(of_queries or width) + rank + turned,
            latents=of_queries + rank + turned,
            expanded=plain,
            cached=self.cached_features,
        )

    @property
    def cached_features(self) -> int:
        """Features of a token that generation caches, for all heads."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


def latent_spec(latent: LatentConfig, norm_epsilon: float) -> LatentSpec | None:
    """Return latent attention; None without."""
    if not latent.multi_latent_attention:
        return None
    epsilon = latent.attention_latent_norm_epsilon or norm_epsilon
    return resolve(LatentSpec, "model", latent, latent_norm_epsilon=epsilon)


def yarn_scale(factor: float, share: float) -> float:
    """Return YaRN's scale of a `factor`, weighed by `share`: 0.1 share ln(factor) + 1.

    Source: arXiv:2309.00071, equation 22, with DeepSeek's weights.
    """
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0
