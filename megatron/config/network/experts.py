"""Layers whose MLP is a choice of several: a mixture of experts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Experts, as the user asked for them."""

    num_experts: list[int] | None = None
    """Experts per layer that has them: one number for all such layers, or one for each. A layer
    with 1 has an ordinary MLP."""

    expert_interval: int | None = None
    """Every so-manieth layer has experts; 2 when neither this nor --moe-layer-freq is said."""

    moe_layer_freq: str | None = None
    """Which layers have experts, in Megatron-LM's words: N for the first layer and every Nth
    after it, or a list with a 1 or 0 for each layer, such as [0]*1+[1]*11."""

    topk: Annotated[int, Spelling("--topk", ("--moe-router-topk",))] = 1
    """Experts that a token passes through."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """With residual, every token passes through an ordinary MLP too, and a learned weight mixes
    the two."""

    moe_expert_parallel_size: Annotated[
        int, Spelling("--moe-expert-parallel-size", ("--expert-model-parallel-size",))
    ] = 1
    """Replicas that share the experts of a layer: each keeps its part of them."""

    moe_train_capacity_factor: float | None = None
    """Tokens that an expert takes in training, relative to an even share (default: 1). What is more
    passes by on the residual stream."""

    moe_eval_capacity_factor: float | None = None
    """The same in evaluation."""

    moe_expert_capacity_factor: float | None = None
    """Both of these at once."""

    moe_min_capacity: int = 4
    """Tokens that an expert takes at least."""

    moe_token_dropping: Annotated[bool, Spelling("--disable-moe-token-dropping")] = True
    """Limit what an expert takes."""

    moe_loss_coeff: Annotated[float, Spelling("--moe-loss-coeff", ("--moe-aux-loss-coeff",))] = 0.1
    """Weight of the loss that keeps the experts evenly busy."""

    moe_top2_2nd_expert_sampling: Annotated[
        bool, Spelling("--disable-moe-top2-2nd-expert-sampling")
    ] = True
    """Draw the second of two experts by its weight in training, instead of taking the best."""

    noisy_gate_policy: Literal["None", "Jitter", "RSample"] = "None"
    """Noise on the choice of experts in training: Jitter multiplies what the router sees by up to 1%,
    RSample draws the one expert by its weight."""
