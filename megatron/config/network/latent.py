"""Multi-head latent attention (MLA): its flags, its part of a spec, and checks.

Keys and values of all heads are computed from one narrow latent of a token, which is all that generation
caches (arXiv:2405.04434, section 2.1).
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.config.parsing.declaration import setting

TRAINED_LENGTH = 4096
"""Tokens of the training before --rotary-scaling-factor, as in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA)."""

    multi_latent_attention: bool = setting(False)
    """Multi-head latent attention (MLA), as in DeepSeek-V2 and V3: keys and values are computed from
    a latent of each token. With --qk-layernorm the latents are normalized."""

    q_lora_rank: int | None = setting(None, at_least=1, matters=False)
    """Features of the latent that queries are computed from (default: none; they are computed from
    the hidden state)."""

    kv_lora_rank: int = setting(32, at_least=1, matters=False)
    """Features of the latent that keys and values are computed from."""

    qk_head_dim: int = setting(128, at_least=1, matters=False)
    """Features of a head's queries and keys without positions."""

    qk_pos_emb_head_dim: int = setting(64, at_least=2, matters=False)
    """Features of a head's queries, and of the key that all heads share, with rotary positions."""

    v_head_dim: int = setting(128, at_least=1, matters=False)
    """Features of a head's values."""

    attention_latent_norm_epsilon: float | None = setting(
        None, above=0, matters=False, plan="model.latent_norm_epsilon"
    )
    """Added to the variance in norms of latents (default: --layernorm-epsilon)."""

    rope_type: Literal["rope", "yarn"] | None = setting(None)
    """Rotary positions of latent attention: plain ones, or YaRN by --rotary-scaling-factor
    (default: yarn, which is plain at a factor of 1)."""

    rotary_scaling_factor: float = setting(1.0, at_least=1, matters=False)
    """Factor by which YaRN stretches wavelengths in latent attention: Megatron-LM's spelling of
    --use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor, for networks trained with
    4096 tokens (--rope-original-max-position-embeddings)."""

    mscale: float = setting(1.0, at_least=0, matters=False)
    """Multiplies rotated queries and keys of latent attention with YaRN by
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""

    mscale_all_dim: float = setting(0.0, at_least=0, matters=False)
    """Multiplies attention scores of latent attention with YaRN by
    (0.1 mscale_all_dim ln(factor) + 1) squared."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention. The defaults, on disk, stand for a network without it.

    A head's queries and keys have head_dim features, of which the first qk_pos_emb_head_dim are turned.
    """

    kv_lora_rank: int = 0  # features of the latent of keys and values
    q_lora_rank: int = 0  # of the latent of queries; 0: there is none
    qk_pos_emb_head_dim: int = 0  # turned features of queries, and of the key that all heads share
    v_head_dim: int = 0  # of a head's values
    latent_norm_epsilon: float = 0.0

    @property
    def cached_features(self) -> int:
        """Features of a token that generation caches, for all heads."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


def yarn_scale(factor: float, share: float) -> float:
    """Return YaRN's scale of a `factor`, weighed by `share`: 0.1 share ln(factor) + 1.

    Source: arXiv:2309.00071, equation 22, with DeepSeek's weights.
    """
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0
