"""How gradients become new weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, as the user asked for it."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is Adam with decoupled weight decay (AdamW)."""

    weight_decay: float = 0.01
    """Decay of weight matrices and embeddings; biases and norms are never decayed."""

    clip_grad: float = 1.0
    """Largest norm of the gradient over the whole network; 0 turns clipping off."""

    adam_beta1: float = 0.9
    """Decay of the running mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of the running mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    sgd_momentum: float = 0.9
    """Momentum of sgd."""
