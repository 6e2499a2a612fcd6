"""Choice of attention: cuDNN, FlashAttention 2 to 4, FlexAttention, memory-efficient or math, and why.

`sdpa` stands for several kernels of PyTorch. Which one runs depends on the GPU, PyTorch's build, the
dtype, sizes and masks, so PyTorch's own choice is requested for tensors of the run's shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend

from megatron.common.errors import ConfigError
from megatron.common.registry import import_dotted
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.kernels_plan import NARROWEST_FLEX_HEAD, KernelsPlan
from megatron.fused_kernels.attention_blocks import Scoring, takes_flash_in_ring

_FLEX = "megatron.fused_kernels.flex_attention"
"""Imported where it runs."""

_BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math: scores are written out",
}

_NEWER_FLASH = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""By major compute capability: PyTorch's name of a newer FlashAttention, and its package."""

_NOTES = {
    "flash": "the flash-attn package",
    "flex": "block masks, compiled by torch.compile",
    "fused-softmax": "scores are written out and go through the softmax below",
    "reference": "scores are written out in 32 bits",
}


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """What one rank's attention is computed of.

    Args:
        samples: of a micro-batch.
        heads: of a rank.
        groups: query groups of a rank: keys and values.
        has_spans: whether batches limit what tokens see: documents, prefixes, padding.
        ring: whether it is ring attention.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    samples: int
    heads: int
    groups: int
    has_spans: bool
    ring: bool = False

    def dense(self) -> Iterator[str]:
        """Yield options that need s x s masks or biases in `sdpa`, or materialized scores."""
        if self.has_spans:
            yield "documents, prefixes or padding"
        if self.spec.attention.window:
            yield "sliding windows"
        if self.spec.positions.position_embedding == "alibi":
            yield "ALiBi"
        if self.spec.positions.relative_buckets:
            yield "relative positions"
        if self.spec.attention.attention_softcap:
            yield "soft-capped scores"
        if self.spec.attention.has_sinks:
            yield "attention sinks"


def choose_attention(
    plan: KernelsPlan, work: AttentionWork, *, no_triton: str | None
) -> tuple[str, str]:
    """Choose the attention implementation of a run; return its name and a note for the table.

    Args:
        no_triton: why Triton cannot be used; None if it can.

    Raises:
        ConfigError: --attention-impl flex, where it cannot run or is not deterministic as demanded.
    """
    name, note = plan.attention, ""
    if work.ring:
        return name, f"ring: {_ring_blocks(name, work)}"
    missing = no_triton if plan.source != "reference" else None
    if name == "flex" and (why := missing or _not_deterministic(work) or _not_compiled(work)):
        raise ConfigError(f"--attention-impl flex: {why}; leave it out to let the run choose")
    dense = ", ".join(work.dense())
    may_choose = plan.chooses_attention or (name == "flash" and _limits_flash(work))
    if may_choose and dense and work.device.type == "cuda":
        obstacle = flex_obstacle(work, no_triton=no_triton)
        if obstacle is None:
            return "flex", f"block masks instead of dense ones, for {dense}"
        note = f"; not FlexAttention, for {dense}: {obstacle}"
    if name == "sdpa":
        newer = _activate_newer_flash(work) if not dense else ""
        return name, f"{sdpa_backend(work)}{newer}{note}"
    return name, f"{_NOTES.get(name, 'a plugin')}{note}"


def _ring_blocks(name: str, work: AttentionWork) -> str:
    """Return a note about the kernels of ring attention's blocks."""
    scoring = Scoring(
        scale=1.0,
        softcap=work.spec.attention.attention_softcap,
        slopes_a=torch.ones(1) if work.spec.positions.position_embedding == "alibi" else None,
        dropout=work.spec.attention.attention_dropout,
        flash=takes_flash_in_ring(name, sinks=work.spec.attention.has_sinks),
    )
    if scoring.takes_flash(work.spec.attention.head_dim, work.dtype, work.device):
        return (
            "FlashAttention; scores of blocks at the edge of documents and windows are written out"
        )
    return "scores of a block are written out in 32 bits"


def _limits_flash(work: AttentionWork) -> bool:
    """Whether the flash-attn package lacks an argument for the masks or biases of a run."""
    spec = work.spec
    return work.has_spans or bool(spec.positions.relative_buckets) or spec.attention.has_sinks


def flex_obstacle(work: AttentionWork, *, no_triton: str | None) -> str | None:
    """Return why FlexAttention does not support this work; None if it does."""
    spec = work.spec
    if no_triton is not None:
        return no_triton
    if spec.attention.attention_dropout:
        return f"it has no dropout (--attention-dropout {spec.attention.attention_dropout:g})"
    if work.dtype.itemsize > 2:
        return "it is for 16-bit dtypes"
    if spec.attention.head_dim < NARROWEST_FLEX_HEAD:
        return (
            f"heads of {spec.attention.head_dim} features, and {NARROWEST_FLEX_HEAD} is the least"
        )
    return _not_deterministic(work) or _not_compiled(work)


def _not_compiled(work: AttentionWork) -> str | None:
    """Return why FlexAttention cannot be compiled; None if it can, or if the GPU is not here."""
    if work.device.type != "cuda" or not torch.cuda.is_available():
        return None
    obstacle: Callable[..., str | None] = import_dotted(f"{_FLEX}.compile_obstacle")
    attention = work.spec.attention
    form = {"value_dim": work.spec.value_dim, "has_sinks": attention.has_sinks}
    return obstacle(attention.head_dim, work.dtype, work.device, **form)


def _not_deterministic(work: AttentionWork) -> str | None:
    """Return the nondeterministic operation of FlexAttention, if determinism is required."""
    if work.spec.positions.relative_buckets and torch.are_deterministic_algorithms_enabled():
        return "the gradient of relative positions is not deterministic"
    return None


def sdpa_backend(
    work: AttentionWork, *, choose: Callable[..., int] = torch._fused_sdp_choice
) -> str:
    """Return the name of the kernel that scaled_dot_product_attention takes for this work.

    On a GPU it allocates queries, keys and values of a micro-batch for a moment.

    Args:
        choose: PyTorch's selection function.
    """
    if work.device.type == "cuda" and not torch.cuda.is_available():
        return "PyTorch takes the fastest of its kernels that supports the mask"
    spec = work.spec
    length, width = spec.seq_length, spec.attention.head_dim
    needs_mask = any(True for _ in work.dense())
    with torch.enable_grad():
        query, key, value = (
            torch.empty(
                (work.samples, heads, length, features),
                dtype=work.dtype,
                device=work.device,
                requires_grad=True,
            )
            for heads, features in (
                (work.heads, width),
                (work.groups, width),
                (work.groups, spec.value_dim),
            )
        )
        mask = None
        if needs_mask:
            mask = torch.empty((length, length), dtype=work.dtype, device=work.device)
        taken = choose(
            query,
            key,
            value,
            mask.expand(work.samples, work.heads, -1, -1) if mask is not None else None,
            spec.attention.attention_dropout,
            mask is None,
            scale=spec.attention.scale,
            enable_gqa=work.heads != work.groups,
        )
    name = _BACKENDS.get(SDPBackend(taken), SDPBackend(taken).name)
    if name == "FlashAttention" and work.device.type == "cuda":
        name += f" {(torch.nn.attention.current_flash_attention_impl() or 'FA2')[-1]}"
    return f"{name}{', of one dense mask for all layers' if needs_mask else ''}"


def _activate_newer_flash(work: AttentionWork) -> str:
    """Let `sdpa` take FlashAttention 3 or 4 where its package is installed for this GPU.

    Returns a note for the table when the package cannot be used, else nothing.
    """
    if work.device.type != "cuda" or not torch.cuda.is_available():
        return ""
    if work.spec.attention.attention_dropout or work.dtype.itemsize > 2:
        return ""
    major, _ = torch.cuda.get_device_capability(work.device)
    if major not in _NEWER_FLASH:
        return ""
    name, package = _NEWER_FLASH[major]
    try:
        if find_spec(package) is None:
            return ""
        torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError) as error:
        return f"; not {name}: {str(error).splitlines()[0]}"
    # PyTorch prefers cuDNN on these GPUs.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return ""
