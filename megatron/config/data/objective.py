"""What is learned of a sample, where the script leaves a choice."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens count in the loss, and how much."""

    loss_on_targets_only: bool = False
    """Leave the tokens of the prefix out of the loss (pretrain_prefix_lm.py)."""

    reweight_loss_based_on_position_frequency: bool = False
    """Let early positions, which are seldom behind the prefix, count more and late ones less:
    position i of s by 2 (s - i) / (s + 1) (pretrain_prefix_lm.py)."""

    norm_target_loss: bool = False
    """Let all targets count the same, however long they are (finetune_t0_non_causal_decoder.py), or
    all conversations (finetune_sft.py)."""

    prefixlm: bool = False
    """Let the tokens of an input see each other, rather than only those before them
    (finetune_t0_non_causal_decoder.py)."""
