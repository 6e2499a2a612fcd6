"""Routing of a mixture of experts as a frozen dataclass (ExpertPlan). Imports no flags."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """MoE routing in training and evaluation, resolved. The experts themselves are a part of ModelSpec."""

    train_capacity: float  # tokens per expert, relative to an even share
    eval_capacity: float  # likewise
    min_capacity: int  # tokens
    drops_tokens: bool
    drop_policy: str  # probs, position, or random for one expert per token
    samples_second: bool  # of two experts
    samples_first: bool  # of one
    jitter: float  # of the router's input
    balancing: str  # aux_loss, seq_aux_loss, sinkhorn or none
    loss_coefficient: float
    z_loss_coefficient: float
    bias_rate: float  # of the bias by which experts are chosen
