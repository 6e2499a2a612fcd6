"""Kernel registry: choose the implementation (PyTorch, Triton, apex) of each operation."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from shutil import which

import torch

from megatron.common.errors import ConfigError
from megatron.common.registry import ACTIVATIONS, import_dotted
from megatron.config.architecture.architecture import network_of
from megatron.config.config import Config
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.kernels_plan import FLAGS, KernelsPlan
from megatron.fused_kernels import apex_norms, float8
from megatron.fused_kernels.attention_choice import choose_attention
from megatron.fused_kernels.reference import cross_entropy, softmax
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.fused_kernels.trials import ALONE, Trials, Workload, turning_off
from megatron.fused_kernels.triton.limits import (
    decode_limit,
    dropout_limit,
    dtype_limit,
    norm_limit,
    rotary_limit,
    softmax_limit,
)

log = logging.getLogger(__name__)

_FIELDS = {
    "softmax": ("scaled_causal_softmax", "scaled_masked_softmax"),
    "norm": ("layer_norm", "rms_norm", "add_norm"),
    "activation": ("bias_gelu", "glu", "activation_adds_bias"),
    "bias, dropout, residual": ("bias_dropout_add",),
    "rotary positions": ("rotary", "split_heads", "split_sums_bias"),
    "queries, keys, values": ("split_heads", "split_sums_bias"),
    "attention of decode steps": ("decode_attention",),
    "cross-entropy": ("cross_entropy",),
}
"""Fields of `Kernels` by operation."""

_TRITON = "megatron.fused_kernels.triton"
"""The package's kernels, imported where they run."""

_SOFTCAPPING_FLASH = (2, 6)
"""The first version of flash-attn that takes a soft cap."""


@dataclass(frozen=True)
class Choice:
    """Implementation of one operation.

    Args:
        unmet: whether PyTorch replaces a fused kernel whose requirements are not met.
    """

    operation: str
    implementation: str
    why: str
    unmet: bool = False

    def __str__(self) -> str:
        return f" > {self.operation}: {self.implementation} ({self.why})"


def package_problems(config: Config) -> Iterator[str]:
    """Yield a message for each package that a flag requires and that cannot be used."""
    flags, softcap = config.kernels, config.model.attn_logit_softcapping
    flash = flags.use_flash_attn or flags.attention_impl == "flash"
    for flag, package, required in (
        ("--kernels triton", "triton", flags.kernels == "triton"),
        ("--kernels apex", "apex", flags.kernels == "apex"),
        ("--use-flash-attn or --attention-impl flash", "flash_attn", flash),
        ("--fp8-format", "torchao", config.precision.fp8_format is not None),
    ):
        if required and not find_spec(package):
            yield f"{flag}: the package {package} is not installed; install it, or leave it out"
    if flash and softcap and find_spec("flash_attn"):
        installed = version("flash_attn")
        if tuple(map(int, installed.split(".")[:2])) < _SOFTCAPPING_FLASH:
            yield (
                f"--attn-logit-softcapping {softcap}: the package flash_attn {installed} cannot "
                "soft-cap scores; install 2.6 or newer, or take --attention-impl fused-softmax"
            )


def choose_kernels(
    plan: KernelsPlan,
    work: Workload,
    *,
    trials: Trials = ALONE,
) -> tuple[Kernels, tuple[Choice, ...]]:
    """Choose the kernels that layers call; return them and a table of the choices.

    Args:
        trials: launches Triton kernels, to find out whether that works.

    Raises:
        ConfigError: --abort-on-unmet-fused-kernel-constraints, and some are unmet; --kernels
            triton, and a Triton kernel does not run; or --compile, without what compiles.
    """
    obstacle: str | None = "--kernels reference"
    if plan.source != "reference":
        obstacle = _obstacle(work, trials)
    if obstacle and plan.source == "triton":
        raise ConfigError(f"--kernels triton: {obstacle}")
    if plan.compile != "none":
        _require_compiler(work, trials)
    attention, note = choose_attention(plan, work.of_attention(), no_triton=obstacle)
    kernels = replace(
        REFERENCE,
        attention=attention,
        scaled_causal_softmax=partial(softmax.scaled_causal_softmax, in_fp32=plan.softmax_in_fp32),
        scaled_masked_softmax=partial(softmax.scaled_masked_softmax, in_fp32=plan.softmax_in_fp32),
    )
    choices = [Choice("attention", attention, note)]
    if plan.fp8_format:
        kernels, choice = _with_fp8(kernels, plan, work.device)
        choices.append(choice)
    for operation in (*_operations(attention, work.spec), *_operations_of_training(work.spec)):
        kernels, choice = _choose(operation, kernels, plan, work, obstacle, trials)
        choices.append(choice)
    kernels = _without_lone_add_norm(kernels)
    unmet = [choice for choice in choices if choice.unmet and choice.operation in FLAGS]
    if plan.must_fuse and unmet:
        raise ConfigError(
            *(
                f"--abort-on-unmet-fused-kernel-constraints: no fused kernel for "
                f"{choice.operation}: {choice.why}; fix that, or turn the kernel off with "
                f"{FLAGS[choice.operation]}"
                for choice in unmet
            )
        )
    return kernels, tuple(choices)


def choose_inference_kernels(
    plan: KernelsPlan,
    spec: ModelSpec,
    *,
    tensor: int,
    dtype: torch.dtype,
    device: torch.device,
    trials: Trials = ALONE,
) -> Kernels:
    """Choose the kernels of inference, where attention is sdpa but in decode steps; logs why not Triton.

    Args:
        plan: of training, maybe on another machine: its sources but the reference are not required.
        tensor: ranks that share a layer.
        trials: launches Triton kernels, to find out whether that works.

    Raises:
        ConfigError: a kernel leaves a GPU that runs nothing more.
    """
    kernels = REFERENCE
    if device.type == "cpu" or plan.source == "reference":
        return kernels
    plan = replace(plan, source="auto", compile="none")
    work = Workload(spec=spec, dtype=dtype, positions=1, tensor=tensor, device=device, trains=False)
    obstacle = _obstacle(work, trials)
    decoding = ["attention of decode steps"] if network_of(spec).caches else []
    for operation in (*_operations("sdpa", spec), *decoding):
        kernels, choice = _choose(operation, kernels, plan, work, obstacle, trials)
        if choice.unmet:
            reason = f"{choice.why}; {turning_off(operation)} turns the kernel off"
            log.warning("inference without a fused kernel for %s: %s", operation, reason)
    return _without_lone_add_norm(kernels)


def _without_lone_add_norm(kernels: Kernels) -> Kernels:
    """Return `kernels` without the sum in a norm if the sum of residuals is left to the reference."""
    lone = kernels.bias_dropout_add is REFERENCE.bias_dropout_add
    return replace(kernels, add_norm=None) if lone else kernels


def _choose(
    operation: str,
    kernels: Kernels,
    plan: KernelsPlan,
    work: Workload,
    no_triton: str | None,
    trials: Trials,
) -> tuple[Kernels, Choice]:
    """Return the kernels with one operation's kernel chosen, and its line of the table.

    Args:
        no_triton: why no Triton kernel is used; None where they run.

    Raises:
        ConfigError: the operation's Triton kernel does not run, and it is required, or nothing else
            runs after it.
    """
    if _is_compiled(operation, plan, work.device):
        if operation == "cross-entropy":
            kernels = replace(kernels, cross_entropy=cross_entropy.COMPILED)
        return kernels, Choice(operation, "compiled", "--compile")
    if plan.source == "reference" or operation in plan.unfused:
        flag = "--kernels reference" if plan.source == "reference" else FLAGS[operation]
        return kernels, Choice(operation, "PyTorch", flag)
    if plan.source == "apex" and operation == "norm":
        kernels = replace(kernels, layer_norm=apex_norms.layer_norm, rms_norm=apex_norms.rms_norm)
        return kernels, Choice(operation, "apex", "--kernels apex")
    why = no_triton or _unsupported_reason(operation, work)
    why = why or _failed_trial(operation, plan, work, trials)
    if why:
        return kernels, Choice(operation, "PyTorch", why, unmet=True)
    return _with_triton(kernels, operation), Choice(operation, "Triton", "its limits are met")


def _is_compiled(operation: str, plan: KernelsPlan, device: torch.device) -> bool:
    """Whether torch.compile generates the code of `operation`.

    On a GPU the loss keeps its Triton kernels: their gradient overwrites the logits. A loss in
    chunks calls autograd itself.
    """
    if plan.compile == "none":
        return False
    if operation != "cross-entropy":
        return True
    on_reference = device.type == "cpu" or plan.source == "reference" or operation in plan.unfused
    return on_reference and not plan.loss_chunk_tokens


def _require_compiler(work: Workload, trials: Trials) -> None:
    """Refuse --compile where what it generates cannot be compiled."""
    if work.device.type == "cpu":
        # Imports setuptools, which takes a tenth of the start of a run.
        from torch.utils.cpp_extension import get_cxx_compiler

        if not any(map(which, ("g++", get_cxx_compiler()))):
            raise ConfigError(
                "--compile: torch.compile generates C++ on CPUs and there is no C++ compiler on "
                "PATH; install g++, or leave the flag out"
            )
    elif why := _obstacle(work, trials):
        raise ConfigError(
            f"--compile: torch.compile generates Triton kernels on GPUs: {why}; fix that, or "
            "leave the flag out"
        )


def _operations(attention: str, spec: ModelSpec) -> Iterator[str]:
    """Yield the operations that layers of this network call."""
    if attention == "fused-softmax":
        yield "softmax"
    yield "norm"
    if spec.mlp.activation not in ("relu", "squared_relu") and not (
        ACTIVATIONS.is_own(spec.mlp.activation)
    ):
        yield "activation"
    yield "bias, dropout, residual"
    if spec.positions.position_embedding == "rotary":
        yield "rotary positions"


def _operations_of_training(spec: ModelSpec) -> Iterator[str]:
    """Yield the operations whose kernels have work in training alone."""
    if spec.positions.position_embedding != "rotary":
        yield "queries, keys, values"
    yield "cross-entropy"


def _obstacle(work: Workload, trials: Trials) -> str | None:
    """Return why no Triton kernel runs here; None if they do.

    Triton compiles at the first launch: that needs a C compiler, Python's headers, a driver, and a
    directory that it can write. So one is launched.
    """
    if work.device.type != "cuda":
        return "Triton needs a GPU"
    if reason := trials.failure(work, None):
        return f"Triton's first kernel failed: {reason}"
    return None


def _failed_trial(operation: str, plan: KernelsPlan, work: Workload, trials: Trials) -> str | None:
    """Return why the Triton kernels of `operation` do not run here; None if they do.

    Raises:
        ConfigError: Triton's are required, or the GPU runs nothing after them.
    """
    reason = trials.failure(work, operation)
    if reason is None:
        return None
    if plan.source == "triton":
        raise ConfigError(
            f"--kernels triton: the kernel for {operation} failed: {reason}; fix that, or turn the "
            f"kernel off with {turning_off(operation)}"
        )
    return f"its kernel failed: {reason}"


def _unsupported_reason(operation: str, work: Workload) -> str | None:
    """Return why the Triton kernel of `operation` does not support this workload; None if it does."""
    spec, dtype = work.spec, work.dtype
    match operation:
        case "softmax":
            return softmax_limit(dtype, spec.seq_length + spec.attention.has_sinks)
        case "activation" if spec.mlp.is_composed:
            return "no kernel of quick_geglu, or of gates that are clamped or shifted"
        case "norm":
            return norm_limit(dtype, spec.hidden_size)
        case "bias, dropout, residual":
            return dropout_limit(dtype, work.positions * spec.hidden_size)
        case "rotary positions" | "queries, keys, values":
            heads = spec.attention.num_attention_heads // work.tensor
            return rotary_limit(dtype, heads, spec.attention.head_dim)
        case "attention of decode steps":
            attention = spec.attention
            queries = attention.num_attention_heads // attention.num_query_groups
            return decode_limit(dtype, queries, attention.head_dim)
        case _:
            return dtype_limit(dtype)


def _with_fp8(kernels: Kernels, plan: KernelsPlan, device: torch.device) -> tuple[Kernels, Choice]:
    """Return the kernels with linear layers in fp8, and their line of the table.

    Raises:
        ConfigError: `device` has no fp8.
    """
    flag = f"--fp8-format {plan.fp8_format}"
    if why := float8.unsupported_reason(device):
        raise ConfigError(f"{flag}: {why}; leave the flag out")
    linear = float8.fp8_linear(plan.fp8_format, plan.fp8_recipe)
    choice = Choice("linear layers", "torchao", f"{flag}, scales {plan.fp8_recipe}")
    return replace(kernels, linear=linear), choice


def _with_triton(kernels: Kernels, operation: str) -> Kernels:
    table: Kernels = import_dotted(f"{_TRITON}.all.TRITON")
    return replace(kernels, **{field: getattr(table, field) for field in _FIELDS[operation]})
