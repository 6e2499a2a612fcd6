"""Which implementations are wanted, decided as far as no library has to be looked at."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.config.config import Config

AttentionName = Literal["sdpa", "flash", "fused-softmax", "reference"]
"""PyTorch's scaled_dot_product_attention; the flash-attn package; written-out scores and the
softmax kernels; the same in at least 32 bits with the reference softmax."""

FLAGS: Mapping[str, str] = {
    "softmax": "--no-masked-softmax-fusion",
    "norm": "--no-layer-norm-fusion",
    "activation": "--no-bias-gelu-fusion",
    "bias, dropout, residual": "--no-bias-dropout-fusion",
    "rotary positions": "--no-rope-fusion",
    "cross-entropy": "--no-cross-entropy-fusion",
}
"""The operations that have fused kernels, and the flag that turns each one's off."""

_WIDEST_FLASH_HEAD = 256


@dataclass(frozen=True, kw_only=True)
class KernelsPlan:
    """What computes the operations inside layers."""

    source: Literal["auto", "triton", "apex", "reference"]
    unfused: tuple[str, ...]  # operations that are left to the reference
    attention: AttentionName
    softmax_in_fp32: bool
    must_fuse: bool  # refuse to run where a wanted kernel cannot be used


def plan_kernels(config: Config) -> KernelsPlan:
    """Return what should compute the operations."""
    said = config.kernels
    wanted = {
        "softmax": said.masked_softmax_fusion,
        "norm": said.layer_norm_fusion,
        "activation": said.bias_gelu_fusion,
        "bias, dropout, residual": said.bias_dropout_fusion,
        "rotary positions": said.rope_fusion,
        "cross-entropy": said.cross_entropy_fusion,
    }
    return KernelsPlan(
        source=said.kernels,
        unfused=tuple(operation for operation, fused in wanted.items() if not fused),
        attention=_attention(config),
        softmax_in_fp32=(
            said.attention_softmax_in_fp32 or config.model.apply_query_key_layer_scaling
        ),
        must_fuse=said.abort_on_unmet_fused_kernel_constraints,
    )


def kernels_problems(config: Config, *, device: str) -> Iterator[str]:
    """Yield every reason why the wanted implementations cannot be used."""
    said = config.kernels
    if said.use_flash_attn and said.attention_impl not in ("auto", "flash"):
        yield f"--use-flash-attn contradicts --attention-impl {said.attention_impl}"
    if said.kernels in ("triton", "apex") and device == "cpu":
        yield f"--kernels {said.kernels} needs a GPU and this run is on CPUs: leave the flag out"
    if said.attention_impl == "sdpa" and config.model.attn_logit_softcapping:
        yield (
            "--attention-impl sdpa has no --attn-logit-softcapping: leave it out, or take flash, "
            "fused-softmax or reference"
        )
    if _attention(config) == "flash":
        flag = "--use-flash-attn" if said.use_flash_attn else "--attention-impl flash"
        if device == "cpu":
            yield f"{flag} needs a GPU and this run is on CPUs: leave the flag out"
        if not (config.precision.fp16 or config.precision.bf16):
            yield f"{flag} computes in 16 bits: write --bf16 or --fp16, or leave the flag out"
        model = config.model
        width = model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)
        if width > _WIDEST_FLASH_HEAD:
            yield f"{flag} takes heads of {_WIDEST_FLASH_HEAD} features at most, not {width}"


def _attention(config: Config) -> AttentionName:
    said = config.kernels
    if said.use_flash_attn:
        return "flash"
    if said.attention_impl != "auto":
        return said.attention_impl
    return "fused-softmax" if config.model.attn_logit_softcapping else "sdpa"
