"""Which implementation computes what."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Kernels, as the user asked for them. The start of a run tells which are used, and why."""

    kernels: Literal["auto", "triton", "apex", "reference"] = "auto"
    """Fused kernels on GPUs: triton's, or those with apex's norms (apex); auto: triton's where it
    is installed; reference: plain PyTorch everywhere."""

    attention_impl: Literal["auto", "sdpa", "flash", "fused-softmax", "reference"] = "auto"
    """Attention by PyTorch's scaled_dot_product_attention (sdpa), by the flash-attn package, by
    written-out scores and the fused softmax, or by plain PyTorch in 32 bits. auto takes sdpa, and
    fused-softmax with --attn-logit-softcapping."""

    use_flash_attn: Annotated[
        bool,
        Spelling(
            "--use-flash-attn",
            ("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton"),
        ),
    ] = False
    """Megatron's spelling of --attention-impl flash."""

    attention_softmax_in_fp32: bool = False
    """Raise 16-bit scores to 32 bits before the softmax of --attention-impl fused-softmax, as
    Triton's kernel and query-key layer scaling always do."""

    masked_softmax_fusion: bool = True
    """One kernel that scales, masks and normalises scores."""

    bias_gelu_fusion: bool = True
    """One kernel for the MLP's bias and its GELU or gate."""

    bias_dropout_fusion: bool = True
    """One kernel for bias, dropout and residual."""

    layer_norm_fusion: bool = True
    """One kernel for each norm."""

    rope_fusion: bool = True
    """One kernel that turns queries and keys by their positions."""

    cross_entropy_fusion: bool = True
    """Kernels that take the loss and its gradient without a copy of the logits."""

    abort_on_unmet_fused_kernel_constraints: bool = False
    """Refuse to run, with the reasons, where plain PyTorch would stand in for a fused kernel."""
