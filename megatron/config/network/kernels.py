"""Kernels: flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.common.registry import ATTENTIONS
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_resolution import head_dim_of
from megatron.config.parallelism.kernels_plan import (
    NARROWEST_FLEX_HEAD,
    CompileMode,
    KernelsPlan,
)
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Fused kernels and attention. The start of a run logs which are used, and why."""

    kernels: Literal["auto", "triton", "apex", "reference"] = "auto"
    """Fused kernels on GPUs: triton's, or triton's with apex's norms (apex); auto: triton's where
    it is installed; reference: plain PyTorch everywhere."""

    attention_impl: str = setting(
        "auto", names=ATTENTIONS, plan="model.attention kernels.attention"
    )
    """Attention by PyTorch's scaled_dot_product_attention (sdpa), by the flash-attn package, by
    PyTorch's FlexAttention (flex), by written-out scores and the fused softmax, by plain PyTorch in
    32 bits, or by a plugin. auto takes sdpa, and fused-softmax with --attn-logit-softcapping or
    --softmax-type, which sdpa lacks; on GPUs flex where either would need masks or biases of all
    scores, or write them out for that."""

    use_flash_attn: bool = setting(
        False, older=("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton")
    )
    """Megatron's spelling of --attention-impl flash."""

    attention_softmax_in_fp32: bool = setting(False, plan="kernels.softmax_in_fp32")
    """Raise 16-bit scores to 32 bits before the softmax of --attention-impl fused-softmax, as
    Triton's kernel and query-key layer scaling always do."""

    masked_softmax_fusion: bool = True
    """Do not fuse scaling, masking and softmax of the attention scores into one kernel."""

    bias_gelu_fusion: bool = True
    """Do not fuse the MLP's bias with its GELU or gate."""

    bias_dropout_fusion: bool = True
    """Do not fuse bias, dropout and residual addition."""

    layer_norm_fusion: bool = True
    """Do not use a fused kernel for LayerNorm and RMSNorm."""

    rope_fusion: bool = True
    """Do not use a fused kernel for rotary position embeddings."""

    cross_entropy_fusion: bool = True
    """Do not use fused cross-entropy kernels, which compute loss and gradient without a copy of the
    logits."""

    loss_chunk_tokens: int = setting(0, at_least=0)
    """Compute logits and loss, with their gradients, for this many tokens at a time, so that the
    logits of a micro-batch never exist at once (0: no chunks)."""

    compile: bool = False
    """Compile transformer layers, and the loss on CPUs, by torch.compile (inductor). Refused with the
    flags whose operations it cannot compile."""

    compile_mode: CompileMode | None = None
    """How --compile compiles (default: default). reduce-overhead adds CUDA graphs, for small layers on
    GPUs; max-autotune-no-cudagraphs times several implementations of each product first."""

    abort_on_unmet_fused_kernel_constraints: bool = False
    """Refuse to run, with the reasons, where plain PyTorch would replace a fused kernel."""


_WIDEST_FLASH_HEAD = 256


def plan_kernels(
    kernels: KernelsConfig, model: ModelConfig, precision: PrecisionConfig
) -> KernelsPlan:
    """Return the implementations of the operations."""
    wanted = {
        "softmax": kernels.masked_softmax_fusion,
        "norm": kernels.layer_norm_fusion,
        "activation": kernels.bias_gelu_fusion,
        "bias, dropout, residual": kernels.bias_dropout_fusion,
        "rotary positions": kernels.rope_fusion,
        "cross-entropy": kernels.cross_entropy_fusion,
    }
    return KernelsPlan(
        source=kernels.kernels,
        unfused=tuple(operation for operation, fused in wanted.items() if not fused),
        attention=attention_of(kernels, model),
        # Each compiled layer creates its masks, so block masks would be built in each.
        chooses_attention=_leaves_choice(kernels, model)
        and not kernels.use_flash_attn
        and not kernels.compile,
        softmax_in_fp32=(kernels.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling),
        compile=(kernels.compile_mode or "default") if kernels.compile else "none",
        must_fuse=kernels.abort_on_unmet_fused_kernel_constraints,
        fp8_format=precision.fp8_format or "",
        fp8_recipe=precision.fp8_recipe,
        loss_chunk_tokens=kernels.loss_chunk_tokens,
    )


def kernels_problems(
    kernels: KernelsConfig, model: ModelConfig, precision: PrecisionConfig, *, device: str
) -> Iterator[str]:
    """Yield every reason why the wanted implementations cannot be used."""
    yield from range_problems(kernels)
    if kernels.use_flash_attn and kernels.attention_impl not in ("auto", "flash"):
        yield f"--use-flash-attn contradicts --attention-impl {kernels.attention_impl}"
    if kernels.kernels in ("triton", "apex") and device == "cpu":
        yield f"--kernels {kernels.kernels} needs a GPU and this run is on CPUs: leave the flag out"
    if kernels.attention_impl == "sdpa" and model.attn_logit_softcapping:
        yield (
            "--attention-impl sdpa has no --attn-logit-softcapping: leave it out, or take flash, "
            "flex, fused-softmax or reference"
        )
    if kernels.attention_impl == "flex":
        yield from _flex_problems(model, device)
    if attention_of(kernels, model) == "flash":
        flag = "--use-flash-attn" if kernels.use_flash_attn else "--attention-impl flash"
        if device == "cpu":
            yield f"{flag} needs a GPU and this run is on CPUs: leave the flag out"
        if not (precision.fp16 or precision.bf16):
            yield f"{flag} computes in 16 bits: write --bf16 or --fp16, or leave the flag out"
        width = head_dim_of(model)
        if width > _WIDEST_FLASH_HEAD:
            yield f"{flag} takes heads of {_WIDEST_FLASH_HEAD} features at most, not {width}"


def _flex_problems(model: ModelConfig, device: str) -> Iterator[str]:
    """Yield why FlexAttention cannot be used."""
    flag = "--attention-impl flex"
    if device == "cpu":
        yield f"{flag} needs a GPU and this run is on CPUs: leave the flag out"
    if model.attention_dropout:
        yield (
            f"{flag} has no dropout: write --attention-dropout 0 rather than "
            f"{model.attention_dropout:g}, or take sdpa"
        )
    width = head_dim_of(model)
    if width < NARROWEST_FLEX_HEAD:
        yield f"{flag} takes heads of {NARROWEST_FLEX_HEAD} features at least, not {width}"


def attention_of(kernels: KernelsConfig, model: ModelConfig) -> str:
    """Return the implementation of attention that is wanted."""
    if kernels.use_flash_attn:
        return "flash"
    if not _leaves_choice(kernels, model):
        return kernels.attention_impl
    written_out = model.attn_logit_softcapping or model.softmax_type != "vanilla"
    return "fused-softmax" if written_out else "sdpa"


def _leaves_choice(kernels: KernelsConfig, model: ModelConfig) -> bool:
    """Whether the run chooses; PyTorch's sdpa has no attention sinks."""
    impl = kernels.attention_impl
    return impl == "auto" or (impl == "sdpa" and model.softmax_type != "vanilla")
