"""What the end of a document means inside a sample."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Documents packed into one sample, as the user asked for them to be treated."""

    reset_position_ids: bool = False
    """Count positions from 0 again after every end-of-document token."""

    reset_attention_mask: bool = False
    """Let no token see the documents before its own."""

    eod_mask_loss: bool = False
    """Leave out of the loss what is predicted from an end-of-document token."""
