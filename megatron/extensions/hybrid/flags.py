"""Hybrid networks: the layer pattern and the sizes of recurrent layers; resolution and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron.config.config import Config
from megatron.config.network.model_resolution import num_query_groups_of
from megatron.config.network.model_spec import ModelSpec
from megatron.config.network.spec_part import SpecPart
from megatron.config.parallelism.layout import sequence_flags
from megatron.config.parsing.declaration import range_problems, resolve, setting
from megatron.extensions.hybrid.pattern import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MAMBA,
    RECURRENT,
    LayerPattern,
)


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Hybrid networks (--network hybrid): recurrent layers, attention, MLPs and experts by a pattern."""

    hybrid_layer_pattern: str | None = setting(None, older=("--hybrid-override-pattern",))
    """Kind of each layer, each a layer of one part: M Mamba-2, G Gated DeltaNet, * attention, - MLP, E
    experts; a transformer layer is two: *- or *E. | ends a pipeline stage, or a chunk of one. Implies
    --network hybrid, and as many --num-layers as letters. Write = before a pattern that begins with
    -."""

    mamba_state_dim: int = setting(128, at_least=1)
    """Features of the state of Mamba-2 for each feature of a head."""

    mamba_head_dim: int = setting(64, at_least=1)
    """Features of a head of Mamba-2."""

    mamba_num_groups: int = setting(8, at_least=1)
    """Groups of heads of Mamba-2, which share their B and C; a multiple of
    --tensor-model-parallel-size."""

    mamba_num_heads: int | None = setting(None, at_least=1)
    """Heads of Mamba-2 (default: 2 * hidden_size / mamba_head_dim)."""

    mamba_dt_min: float = setting(0.0, at_least=0)
    """Smallest time step of Mamba-2."""

    linear_conv_kernel_dim: int = setting(4, at_least=2)
    """Tokens that the convolutions of Mamba-2 and Gated DeltaNet see, the token itself included."""

    linear_key_head_dim: int = setting(128, at_least=1)
    """Features of a key and query head of Gated DeltaNet."""

    linear_value_head_dim: int = setting(128, at_least=1)
    """Features of a value head of Gated DeltaNet."""

    linear_num_key_heads: int = setting(16, at_least=1)
    """Key and query heads of Gated DeltaNet; a multiple of --tensor-model-parallel-size."""

    linear_num_value_heads: int = setting(32, at_least=1)
    """Value heads of Gated DeltaNet, a multiple of its key heads."""

    attention_output_gate: bool = False
    """Multiply the output of attention by the sigmoid of a projection of its input, as Qwen3-Next does."""


SECTIONS = {"hybrid": HybridConfig}
OF_NETWORK = ("hybrid",)


def settings_of(values: Mapping[str, Any]) -> LayerPattern | None:
    """Return the pattern of a command line or of a checkpoint; None if there is none.

    Args:
        values: by field or spelling, those given over those saved.
    """
    text = values.get("hybrid_override_pattern") or values.get("hybrid_layer_pattern")
    stages = str(values.get("pipeline_model_parallel_size") or 1)
    return LayerPattern(str(text), int(stages) if stages.isdigit() else 1) if text else None


@dataclass(frozen=True, kw_only=True)
class HybridSpec(SpecPart):
    """Kinds of layers, and the sizes of those that the pattern has; others are 0."""

    section: ClassVar[str] = "hybrid"

    hybrid_layer_pattern: str = ""
    mamba_state_dim: int = 0
    mamba_head_dim: int = 0
    mamba_num_groups: int = 0
    mamba_num_heads: int = 0
    mamba_dt_min: float = 0.0
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    attention_output_gate: bool = False

    @property
    def mamba_inner(self) -> int:
        """Features of all heads of Mamba-2."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_channels(self) -> int:
        """Channels of the convolution of Mamba-2: x, B and C."""
        return self.mamba_inner + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def mamba_rows(self) -> int:
        """Rows of the input projection of Mamba-2: gates, channels, and time steps."""
        return self.mamba_inner + self.mamba_channels + self.mamba_num_heads

    @property
    def linear_inner(self) -> int:
        """Features of all value heads of Gated DeltaNet."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_channels(self) -> int:
        """Channels of the convolution of Gated DeltaNet: queries, keys and values."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_inner

    @property
    def linear_rows(self) -> int:
        """Rows of the input projection of Gated DeltaNet: channels, gates, beta and decay."""
        return self.linear_channels + self.linear_inner + 2 * self.linear_num_value_heads

    def widths(self, tensor: int) -> Mapping[str, int]:
        """Return the sizes of the projections of recurrent layers on one of `tensor` ranks."""
        sizes = {
            "rows of the input projection of Mamba-2": self.mamba_rows,
            "features of the heads of Mamba-2": self.mamba_inner,
            "rows of the input projection of Gated DeltaNet": self.linear_rows,
            "features of the value heads of Gated DeltaNet": self.linear_inner,
        }
        return {name: size // tensor for name, size in sizes.items()}

    def kind_of(self, number: int) -> str:
        """Return the letter of the layer `number`, from 1 on."""
        return self.hybrid_layer_pattern[number - 1]


def with_pattern(spec: ModelSpec, config: HybridConfig) -> ModelSpec:
    """Return `spec`, a GPT's, with layers of the kinds in the pattern."""
    pattern = LayerPattern(config.hybrid_layer_pattern or "").letters
    heads = config.mamba_num_heads or 2 * spec.hidden_size // config.mamba_head_dim
    own = resolve(HybridSpec, "model", config, hybrid_layer_pattern=pattern, mamba_num_heads=heads)
    absent = [
        *(("mamba_",) if MAMBA not in pattern else ()),
        *(("linear_key_", "linear_value_", "linear_num_") if DELTA_NET not in pattern else ()),
        *(() if {*RECURRENT} & {*pattern} else ("linear_conv_",)),
    ]
    zeros: dict[str, Any] = dict.fromkeys(
        (name for name in vars(own) if name.startswith(tuple(absent))), 0
    )
    moe = spec.moe
    if moe:
        experts = max(moe.num_experts)
        moe = replace(moe, num_experts=tuple(experts if kind == EXPERTS else 1 for kind in pattern))
    return replace(spec, moe=moe, own=replace(own, **zeros))


def hybrid_problems(config: Config) -> Iterator[str]:
    """Yield why a hybrid network cannot be built or divided."""
    hybrid: HybridConfig = config.section(HybridConfig)
    if not hybrid.hybrid_layer_pattern:
        yield (
            "--hybrid-layer-pattern is missing: the kind of each layer, such as M-M-M*-, with M "
            "Mamba-2, G Gated DeltaNet, * attention, - MLP and E experts"
        )
        return
    pattern = LayerPattern(hybrid.hybrid_layer_pattern)
    yield from pattern.problems()
    yield from _layer_problems(pattern.letters, config)
    if wrong := [*range_problems(hybrid)]:
        yield from wrong
        return
    yield from _size_problems(hybrid, pattern.letters, config)
    tensor = max(1, config.parallel.tensor_model_parallel_size)
    yield from division_problems(hybrid, num_query_groups_of(config.model), tensor)


def _layer_problems(pattern: str, config: Config) -> Iterator[str]:
    if len(pattern) != config.model.num_layers:
        yield (
            f"--num-layers {config.model.num_layers}: --hybrid-layer-pattern {pattern} has "
            f"{len(pattern)} layers: write --num-layers {len(pattern)}"
        )
    has_experts = config.experts.num_experts is not None
    if EXPERTS in pattern and not has_experts:
        yield f"--hybrid-layer-pattern {pattern} has layers with experts: give --num-experts"
    if has_experts and EXPERTS not in pattern:
        yield f"--num-experts: --hybrid-layer-pattern {pattern} has no layer with experts (E)"
    if has_experts and len(config.experts.num_experts or ()) > 1:
        yield "--num-experts: give one number, which all layers with experts (E) have"
    for flag, value in (
        ("--moe-layer-freq", config.experts.moe_layer_freq),
        ("--expert-interval", config.experts.expert_interval),
    ):
        if value is not None:
            yield f"{flag}: --hybrid-layer-pattern has the layers with experts (E): leave {flag} out"


def _size_problems(hybrid: HybridConfig, pattern: str, config: Config) -> Iterator[str]:
    if MAMBA in pattern:
        inner = 2 * config.model.hidden_size
        if hybrid.mamba_num_heads is None and inner % hybrid.mamba_head_dim:
            yield (
                f"--mamba-head-dim {hybrid.mamba_head_dim} does not divide 2 * --hidden-size = "
                f"{inner}: give --mamba-num-heads"
            )
            return
        heads = hybrid.mamba_num_heads or inner // hybrid.mamba_head_dim
        if heads % hybrid.mamba_num_groups:
            yield (
                f"--mamba-num-groups {hybrid.mamba_num_groups} does not divide the {heads} heads of "
                "Mamba-2 (--mamba-num-heads)"
            )
    if DELTA_NET in pattern:
        keys, values = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads
        if values % keys:
            yield (
                f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}"
            )
    if hybrid.attention_output_gate and ATTENTION not in pattern:
        yield "--attention-output-gate: --hybrid-layer-pattern has no attention (*)"
    if {*RECURRENT} & {*pattern}:
        for flag, size in sequence_flags(config.parallel).items():
            if size > 1:
                yield (
                    f"{flag} {size}: the state of a recurrent layer (M, G) passes from each part of a "
                    "sequence to the next, which ranks that divide the sequence do not exchange: "
                    "leave it out"
                )


def division_problems(
    hybrid: HybridConfig | HybridSpec, query_groups: int, tensor: int
) -> Iterator[str]:
    """Yield the sizes that `tensor` tensor-parallel ranks cannot divide."""
    pattern = hybrid.hybrid_layer_pattern or ""
    gated = hybrid.attention_output_gate and ATTENTION in pattern
    for is_divided, flag, size in (
        (MAMBA in pattern, "--mamba-num-groups", hybrid.mamba_num_groups),
        (DELTA_NET in pattern, "--linear-num-key-heads", hybrid.linear_num_key_heads),
        (gated, "--attention-output-gate: --num-query-groups", query_groups),
    ):
        if is_divided and size % tensor:
            yield f"{flag} {size} is not a multiple of --tensor-model-parallel-size {tensor}"
