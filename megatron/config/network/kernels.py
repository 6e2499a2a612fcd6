"""Kernels: flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.common.registry import ATTENTIONS
from megatron.config.network.model import ModelConfig, head_dim_of
from megatron.config.parallelism.kernels_plan import (
    NARROWEST_FLEX_HEAD,
    CompileMode,
    KernelsPlan,
)
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parallelism.recompute import RecomputeConfig
from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Fused kernels and attention. The start of a run logs which are used, and why."""

    kernels: Literal["auto", "triton", "apex", "reference"] = "auto"
    """Fused kernels on GPUs: triton's, or those with apex's norms (apex); auto: triton's where it
    is installed; reference: plain PyTorch everywhere."""

    attention_impl: str = setting(
        "auto", names=ATTENTIONS, plan="model.attention kernels.attention"
    )
    """Attention by PyTorch's scaled_dot_product_attention (sdpa), by the flash-attn package, by
    PyTorch's FlexAttention (flex), by written-out scores and the fused softmax, by plain PyTorch in
    32 bits, or by a plugin. auto takes sdpa, and fused-softmax with --attn-logit-softcapping; on
    GPUs flex where either would need masks or biases of all scores."""

    use_flash_attn: bool = setting(
        False, older=("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton")
    )
    """Megatron's spelling of --attention-impl flash."""

    attention_softmax_in_fp32: bool = setting(False, plan="kernels.softmax_in_fp32")
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

    loss_chunk_tokens: int = setting(0, at_least=0)
    """Compute the head's logits and the loss of so many tokens at a time, with their gradients, so
    that the logits of a micro-batch never exist together (0: all at once)."""

    compile: bool = False
    """Compile transformer layers, and the loss on CPUs, by torch.compile (inductor). Refused with the
    flags whose operations it cannot compile."""

    compile_mode: CompileMode | None = None
    """How --compile compiles (default: default). reduce-overhead adds CUDA graphs, for small layers on
    GPUs; max-autotune-no-cudagraphs times several implementations of each product first."""

    abort_on_unmet_fused_kernel_constraints: bool = False
    """Refuse to run, with the reasons, where plain PyTorch would stand in for a fused kernel."""


_WIDEST_FLASH_HEAD = 256


def plan_kernels(
    kernels: KernelsConfig, model: ModelConfig, precision: PrecisionConfig
) -> KernelsPlan:
    """Return which implementations should compute the operations."""
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
        attention=_attention(kernels, model),
        # A compiled layer has masks of its own, so that block masks would be built in each.
        chooses_attention=kernels.attention_impl == "auto"
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
    if _attention(kernels, model) == "flash":
        flag = "--use-flash-attn" if kernels.use_flash_attn else "--attention-impl flash"
        if device == "cpu":
            yield f"{flag} needs a GPU and this run is on CPUs: leave the flag out"
        if not (precision.fp16 or precision.bf16):
            yield f"{flag} computes in 16 bits: write --bf16 or --fp16, or leave the flag out"
        width = head_dim_of(model)
        if width > _WIDEST_FLASH_HEAD:
            yield f"{flag} takes heads of {_WIDEST_FLASH_HEAD} features at most, not {width}"


def compile_problems(
    kernels: KernelsConfig,
    *,
    model: ModelConfig,
    recompute: RecomputeConfig,
    parallel: ParallelConfig,
    lora_dropout: float,
    zero_stage: int,
    has_experts: bool,
    has_curriculum: bool,
    device: str,
) -> Iterator[str]:
    """Yield every reason why torch.compile cannot compile the transformer layers of this run.

    Args:
        has_curriculum: whether the length of samples changes during the run.
    """
    mode = kernels.compile_mode
    if not kernels.compile:
        if mode:
            yield f"--compile-mode {mode} is of --compile: add that flag, or leave this one out"
        return
    if kernels.kernels in ("triton", "apex"):
        yield (
            f"--compile compiles PyTorch's operations, not those of --kernels {kernels.kernels}: "
            "leave one of the two out"
        )
    if (attention := _attention(kernels, model)) in ("flash", "flex"):
        yield f"--compile has no {attention} attention: leave it out, or take --attention-impl sdpa"
    if recompute.recompute_activations or recompute.recompute_granularity == "selective":
        yield (
            "--compile decides itself what of attention is kept: leave it or selective "
            "recomputation out, or take --recompute-granularity full"
        )
    if zero_stage == 3:
        yield "--compile needs full weights in each layer: leave it out, or take --zero-stage 2"
    if has_experts:
        yield "--compile does not compile experts: leave it or --num-experts out"
    if has_curriculum:
        yield "--compile compiles one length of samples: leave it or curriculum_learning out"
    dropout = {"--attention-dropout": model.attention_dropout, "--lora-dropout": lora_dropout}
    if parallel.tensor_model_parallel_size > 1:
        for flag, share in dropout.items():
            if share:
                yield (
                    f"--compile has one RNG state, and {flag} {share} needs one for each tensor-"
                    f"parallel rank: write {flag} 0, or leave --compile out"
                )
    if mode == "reduce-overhead":
        yield from _cuda_graph_problems(recompute, parallel, device)


def ring_kernels_problems(kernels: KernelsConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield which implementations ring attention does not take: it has blocks of its own."""
    flag = f"--context-parallel-size {parallel.context_parallel_size}"
    attention = kernels.attention_impl
    if attention == "flex" or ATTENTIONS.is_own(attention):
        yield (
            f"{flag}: ring attention has no blocks by --attention-impl {attention}: leave that out, or "
            "write --cp-comm-type a2a"
        )
    if kernels.compile:
        yield f"{flag}: --compile does not compile ring attention: leave one of the two out"


def _cuda_graph_problems(
    recompute: RecomputeConfig, parallel: ParallelConfig, device: str
) -> Iterator[str]:
    """Yield why CUDA graphs cannot be used: they reuse the memory of a finished micro-batch."""
    flag, others = "--compile-mode reduce-overhead", "take another mode"
    if device == "cpu":
        yield f"{flag} needs a GPU and this run is on CPUs: {others}"
    if parallel.pipeline_model_parallel_size > 1:
        yield f"{flag} has one micro-batch at a time, pipeline stages have several: {others}"
    if recompute.checkpoint_activations or recompute.recompute_granularity == "full":
        yield f"{flag} and full recomputation exclude each other: {others}"


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


def _attention(kernels: KernelsConfig, model: ModelConfig) -> str:
    if kernels.use_flash_attn:
        return "flash"
    if kernels.attention_impl != "auto":
        return kernels.attention_impl
    return "fused-softmax" if model.attn_logit_softcapping else "sdpa"
