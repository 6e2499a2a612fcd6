"""Document boundaries inside a packed sample (positions, attention mask, loss mask)."""

from dataclasses import dataclass

from megatron.config.parsing.declaration import resolve, setting


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Positions, attention mask and loss mask of documents packed into one sample."""

    reset_position_ids: bool = setting(False, plan="masks.reset_positions")
    """Count positions from 0 again after every end-of-document token."""

    reset_attention_mask: bool = setting(False, plan="masks.isolate_documents")
    """Mask attention to earlier documents in a sample."""

    eod_mask_loss: bool = setting(False, plan="masks.mask_loss")
    """Exclude predictions at end-of-document tokens from the loss."""

    calculate_per_token_loss: bool = setting(False, plan="masks.per_token_loss")
    """Let each token that counts in a global batch weigh the same; otherwise the loss is the mean over
    micro-batches of the means over their tokens, which differs where these count different numbers."""


@dataclass(frozen=True, kw_only=True)
class MaskPlan:
    """Positions, attention mask and loss mask of documents that share a sample."""

    reset_positions: bool
    isolate_documents: bool
    mask_loss: bool
    per_token_loss: bool = False  # one weight for all tokens of a global batch

    @property
    def needs_eod(self) -> bool:
        """Whether EOD tokens must be found in the samples."""
        return self.reset_positions or self.isolate_documents or self.mask_loss


def plan_masks(masks: MaskConfig) -> MaskPlan:
    """Return the masks of packed documents."""
    return resolve(MaskPlan, "masks", masks)
