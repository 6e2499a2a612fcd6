"""Hybrid networks: layers of Mamba-2, Gated DeltaNet, attention, MLPs and experts by a pattern."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import Entry
from megatron.config.architecture.counts import (
    Branches,
    Weights,
    attention_matrices,
    attention_weights,
    block_weights,
    core_features,
    mlp_products,
    norm_width,
    visible_keys,
)
from megatron.config.architecture.options import DECODER, STREAM
from megatron.config.config import Config
from megatron.config.network.experts import MoESpec
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_spec import OPTIONAL, ModelSpec, names_of
from megatron.config.network.spec_part import LINEAR_LAYERS
from megatron.config.network_contract import Network
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.config.parsing.flags import given_options
from megatron.extensions.hybrid.activations import layer_bytes, product_bytes
from megatron.extensions.hybrid.flags import (
    HybridConfig,
    HybridSpec,
    division_problems,
    hybrid_problems,
    with_pattern,
)
from megatron.extensions.hybrid.pattern import ATTENTION, DELTA_NET, MAMBA

_ABSENT = (name for part in {*OPTIONAL.values()} - {LoraSpec, MoESpec} for name in names_of(part))
"""Options of parts that are not built for hybrid networks."""


@NETWORKS.register("hybrid")
class HybridNetwork(Network):
    """A decoder whose layers have one part each: a recurrence, attention, an MLP or experts."""

    name = "hybrid"
    in_place_of = "gpt"
    service = "prompts"
    use = "tools/generate_samples_gpt.py continues texts with it"
    usage = "generate with: tools/generate_samples_gpt.py --load {directory} --prompt TEXT"
    part = HybridSpec
    options = (DECODER - STREAM - {"input_norm", *_ABSENT}) | {*names_of(HybridSpec)}
    lacks = "is not built for hybrid networks: leave it out"
    layers_in = "megatron.extensions.hybrid.layers.hybrid_layers"
    caches = True

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why a hybrid network cannot be built or divided."""
        return hybrid_problems(config)

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield the flags of hybrid networks."""
        for option in given_options(config.section(HybridConfig)):
            yield f"{option} is for hybrid networks: add --network hybrid"

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return a decoder with layers of the kinds in the pattern."""
        return with_pattern(super().spec(plain, config), config.section(HybridConfig))

    def division_problems(self, spec: ModelSpec, *, tensor: int) -> Iterator[str]:
        """Yield the sizes of a hybrid network that `tensor` ranks cannot divide."""
        hybrid, groups = spec.part(HybridSpec), spec.attention.num_query_groups
        return division_problems(hybrid, groups, tensor)

    def linear_layers(self, spec: ModelSpec, number: int) -> Sequence[str]:
        """Return the projections of a layer's mixer or of its MLP."""
        mixes = spec.part(HybridSpec).kind_of(number) in (MAMBA, DELTA_NET, ATTENTION)
        return LINEAR_LAYERS[:2] if mixes else LINEAR_LAYERS[2:]

    def branches(self, spec: ModelSpec, number: int) -> Branches:
        """Return the only residual branch of a layer."""
        attends = spec.part(HybridSpec).kind_of(number) == ATTENTION
        return Branches(attention=int(attends), others=int(not attends))

    def block(self, spec: ModelSpec, number: int, *, tensor: int, expert: int) -> Entry:
        """Return the layer `number`, from 1 on."""
        entry = super().block(spec, number, tensor=tensor, expert=expert)
        hybrid, norm = spec.part(HybridSpec), norm_width(spec, spec.hidden_size)
        match hybrid.kind_of(number):
            case "M":
                own = Weights(mamba_weights(hybrid, spec.hidden_size) // tensor)
            case "G":
                shared = hybrid.linear_value_head_dim
                own = Weights((delta_net_weights(hybrid, spec.hidden_size) - shared) // tensor)
                own += Weights(shared)
            case "*":
                own = Weights(attention_weights(spec, tensor) + gate_weights(spec) // tensor)
            case _:
                others = attention_weights(spec, tensor) + spec.norm.per_layer * norm
                own = block_weights(spec, number, tensor=tensor, expert=expert) - Weights(others)
        return replace(entry, name="HybridLayerPipe", weights=own + Weights(norm))

    def kept_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that an entry keeps for backward when nothing is recomputed."""
        if entry.kind != "block":
            return super().kept_bytes(entry, sizes)
        return layer_bytes(entry.number, sizes)

    def deferred_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that the weight gradients of a layer are computed from."""
        hybrid = sizes.spec.part(HybridSpec)
        is_mamba = hybrid.kind_of(entry.number) == "M"
        of_mamba = hybrid.mamba_rows + hybrid.mamba_inner
        rows = of_mamba if is_mamba else hybrid.linear_rows + hybrid.linear_inner
        return product_bytes(entry.number, sizes, rows)

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample."""
        hybrid = spec.part(HybridSpec)
        forward, core = 0, 0
        for number in range(1, spec.num_layers + 1):
            match hybrid.kind_of(number):
                case "M":
                    forward += mamba_products(hybrid, spec.hidden_size)
                case "G":
                    forward += delta_net_products(hybrid, spec.hidden_size)
                case "*":
                    core += core_features(spec) * visible_keys(spec, number)
                    forward += attention_matrices(spec) + gate_weights(spec)
                case _:
                    forward += mlp_products(spec, number)
        again = core if recompute.granularity == "selective" else 0
        layers = (3 + recompute.share) * (forward + core) + again
        head = spec.vocabulary.padded_vocab_size * spec.hidden_size
        return float(2 * spec.seq_length * (layers + 3 * head))


def gate_weights(spec: ModelSpec) -> int:
    """Return the weights of the output gates of a layer of attention."""
    rows = spec.attention.query_features if spec.part(HybridSpec).attention_output_gate else 0
    return rows * (spec.hidden_size + spec.attention.qkv_bias)


def mamba_weights(hybrid: HybridSpec, width: int) -> int:
    """Return the weights of a Mamba-2 layer without its norm before it."""
    inner = hybrid.mamba_inner
    matrices = width * (hybrid.mamba_rows + inner)
    convolution = hybrid.mamba_channels * (hybrid.linear_conv_kernel_dim + 1)
    return matrices + convolution + 3 * hybrid.mamba_num_heads + inner


def mamba_products(hybrid: HybridSpec, width: int) -> int:
    """Return half the operations of a Mamba-2 layer forward, for one token.

    The recurrence counts as its two products of a state with a vector, whatever the size of chunks.
    """
    inner = hybrid.mamba_inner
    matrices = width * (hybrid.mamba_rows + inner)
    convolution = hybrid.mamba_channels * hybrid.linear_conv_kernel_dim
    return matrices + convolution + 2 * inner * hybrid.mamba_state_dim


def delta_net_weights(hybrid: HybridSpec, width: int) -> int:
    """Return the weights of a Gated DeltaNet layer without its norm before it."""
    matrices = width * (hybrid.linear_rows + hybrid.linear_inner)
    convolution = hybrid.linear_channels * hybrid.linear_conv_kernel_dim
    heads = 2 * hybrid.linear_num_value_heads
    return matrices + convolution + heads + hybrid.linear_value_head_dim


def delta_net_products(hybrid: HybridSpec, width: int) -> int:
    """Return half the operations of a Gated DeltaNet layer forward, for one token.

    The recurrence counts as its products of a state: with a key, an outer one, and with a query.
    """
    matrices = width * (hybrid.linear_rows + hybrid.linear_inner)
    convolution = hybrid.linear_channels * hybrid.linear_conv_kernel_dim
    return matrices + convolution + 3 * hybrid.linear_inner * hybrid.linear_key_head_dim
