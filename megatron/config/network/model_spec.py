"""The network as a frozen dataclass (ModelSpec): every size is a number, every choice is made.

Imports no flags, so that a model can be built and read without the command line.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, make_dataclass, replace
from typing import Any, Literal, TypeVar

from megatron.common.errors import CheckpointError
from megatron.common.registry import HEADS, NETWORKS
from megatron.config.parallelism.recompute_plan import RecomputePlan

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Self-attention."""

    num_attention_heads: int
    num_query_groups: int  # keys and values per token
    head_dim: int
    attention_dropout: float
    window: int  # most tokens that a token sees, itself included; 0: no limit
    full_attention_layers: tuple[int, ...] = ()  # numbers, from 1 on, of those without the window
    query_key_layer_scaling: bool
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float = 0.0  # bound of scores; 0: none
    qkv_bias: bool
    attention_bias_apart: bool = False  # attention's output has a bias where the MLP has none
    qkv_layout: str = "group, {queries, key, value}, head_dim"  # rows of the fused weight
    attention: str = ""  # name of a plugin's; "": softmax attention, by the kernels of the run

    @property
    def query_features(self) -> int:
        """Features of the queries of a token, over all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_features(self) -> int:
        """Features of the keys of a token, and as many of the values."""
        return self.num_query_groups * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def window_of(self, number: int) -> int:
        """Return the window of the layer `number`, from 1 on; 0 for no limit."""
        return 0 if number in self.full_attention_layers else self.window


@dataclass(frozen=True, kw_only=True)
class VocabularySpec:
    """The table of tokens, and the logits."""

    vocab_size: int  # rows of the token table that are no padding
    padded_vocab_size: int  # rows of the token table
    padded_vocab_in_softmax: bool = False  # whether the loss counts the columns of padding
    tied_embeddings: bool
    scaled_embedding: bool = False  # the token embedding is multiplied by sqrt(hidden_size)
    logit_softcap: float = 0.0  # bound of logits; 0: none

    def in_equal_shards(self, tensor: int) -> "VocabularySpec":
        """Return this with as many rows on each of `tensor` ranks; the padding has no token."""
        return replace(self, padded_vocab_size=-(-self.padded_vocab_size // tensor) * tensor)

    def with_softmax(self, *, counts_padding: bool) -> "VocabularySpec":
        """Return this with or without the columns of padding in the loss, if there are any."""
        counts = counts_padding and self.padded_vocab_size > self.vocab_size
        return replace(self, padded_vocab_in_softmax=counts)


@dataclass(frozen=True, kw_only=True)
class PositionSpec:
    """Positions of tokens, and what attention makes of them."""

    max_position_embeddings: int  # most tokens at once; rows of the table when it is learned
    position_embedding: str  # learned, relative, rotary, alibi, none, or the name of a plugin's
    rotary_dim: int  # features of a head that are turned; 0 without rotary positions
    rotary_base: float
    rotary_interpolation: float  # positions are divided by it
    rope_scaling: float  # by how much `rope_rule` stretches long wavelengths; 1: not at all
    rope_rule: Literal["llama3", "yarn", "dynamic"] = "llama3"  # by which `rope_scaling` stretches
    rope_low_freq_factor: float = 1.0  # turns up to which a wavelength is stretched in full
    rope_high_freq_factor: float = 4.0  # turns from which a wavelength is left alone
    rope_original_length: int = 8192  # tokens within which turns are counted
    rope_attention_factor: float = 1.0  # of turned queries and of turned keys
    rope_truncation: bool = True  # YaRN's bounds are rounded outward to full pairs
    rotary_local_base: float = 0.0  # of layers with the window, unstretched; 0: that of the others
    relative_buckets: int = 0  # of relative positions; 0 with other positions
    relative_max_distance: int = 0  # from which distances share the last bucket

    @property
    def reach_attention(self) -> bool:
        """Whether attention needs the positions of tokens: rotary positions, and a plugin's."""
        return self.position_embedding not in ("learned", "relative", "alibi", "none")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Norms: their kind, and where they are."""

    normalization: str
    norm_epsilon: float
    layernorm_1p: bool
    embed_layernorm: bool
    qk_layernorm: bool
    residual_after_norm: bool
    sandwich_norm: bool = False  # outputs of attention and of the MLP are normed too

    @property
    def per_layer(self) -> int:
        """Norms of the residual stream's width in each layer."""
        return 4 if self.sandwich_norm else 2


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """The MLP, of an expert too unless that has a width of its own."""

    ffn_hidden_size: int
    activation: str
    linear_bias: bool  # of the MLP, and of attention's output unless that is apart
    mlp_layout: str = "feature, {gate, up}"  # rows of a gated MLP's first weight

    @property
    def is_gated(self) -> bool:
        """Whether one half of the MLP's inner features multiplies the other."""
        return "glu" in self.activation

    @property
    def inner_features(self) -> int:
        """Features in front of the activation, of which a gate halves the number."""
        return self.ffn_hidden_size * (2 if self.is_gated else 1)


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Mixtures of experts in place of MLPs. The defaults, on disk, stand for a network without any."""

    num_experts: tuple[int, ...] = ()  # of each layer, 1 for an ordinary MLP
    experts_per_token: int = 1
    residual_experts: bool = False  # beside the experts there is an MLP for every token
    expert_ffn_hidden_size: int = 0  # of an expert; 0: ffn_hidden_size
    shared_expert_ffn_hidden_size: int = 0  # of the experts of every token; 0: there are none
    shared_expert_gate: bool = False  # factor of their output for each token
    router_score: str = "softmax"  # or sigmoid
    router_normalises: bool = False  # weights of the chosen experts to a sum of 1
    router_scale: float = 1.0  # factor of these weights
    router_bias: bool = False  # experts are chosen by their scores plus a bias
    router_groups: int = 0  # of experts, of which a token uses some; 0: there are none
    router_groups_per_token: int = 0


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters (LoRA). The defaults, on disk, stand for a network without adapters."""

    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()  # linear layers with an adapter

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of the network. Two checkpoints with equal specs hold the same network.

    What a choice makes meaningless has one value, so that it makes no difference between specs.
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    vocabulary: VocabularySpec
    positions: PositionSpec
    attention: AttentionSpec
    norm: NormSpec
    mlp: MLPSpec
    fp32_residual: bool
    hidden_dropout: float
    init: Literal["normal", "xavier_uniform"]
    init_std: float
    parallel_residual: bool = False  # attention and MLP read the same, and both are added to it
    moe: MoESpec | None = None
    lora: LoraSpec | None = None
    own_flags: tuple[tuple[str, Any], ...] = ()  # of parts of plugins
    architecture: str = "gpt"  # name of a network in NETWORKS
    own: Any = None  # what only that network has: an instance of its `part`
    head: Any = None  # of a downstream task, in place of the network's: of the head's `part`

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a class; its defaults, which stand for its absence, without it."""
        found = (part for part in vars(self).values() if isinstance(part, kind))
        return next(found, None) or kind()

    @property
    def attention_output_bias(self) -> bool:
        """Whether attention's output layer has a bias."""
        return self.mlp.linear_bias != self.attention.attention_bias_apart

    @property
    def network(self) -> Any:
        """What answers for this network: a `megatron.config.network_contract.Network`."""
        network = NETWORKS.get(self.architecture, self.own_flags)()
        return network if self.head is None else network.classifier()

    @property
    def num_parameters(self) -> int:
        """Weights of the full network without adapters; a tied embedding is counted once."""
        return sum(entry.weights.total for entry in self._entries())

    @property
    def num_padding_parameters(self) -> int:
        """Weights of the token tables, and of the bias of the logits, that are padding."""
        rows = sum(entry.row for entry in self._entries())
        return (self.vocabulary.padded_vocab_size - self.vocabulary.vocab_size) * rows

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the transformer layers, the final norm, and what a head has beside its table."""
        tables = ("embedding", "positions", "logits")
        return sum(each.weights.total for each in self._entries() if each.kind not in tables)

    @property
    def num_active_parameters_without_embeddings(self) -> int:
        """The same, without the experts that a token does not pass through."""
        idle = sum(
            entry.weights.experts // experts * (experts - self.part(MoESpec).experts_per_token)
            for entry in self._entries()
            if entry.kind == "block" and (experts := self.experts_of(entry.number)) > 1
        )
        return self.num_parameters_without_embeddings - idle

    def _entries(self) -> list[Any]:
        """Return the entries of the list of layers, those with the same tie once."""
        entries = self.network.entries(self)
        return [
            *{
                entry.tie or index: entry for index, entry in reversed([*enumerate(entries)])
            }.values()
        ]

    def experts_of(self, number: int) -> int:
        """Return the number of experts of layer `number`, from 1 on; 1 for an ordinary MLP."""
        return self.moe.num_experts[number - 1] if self.moe else 1

    @property
    def expert_width(self) -> int:
        """Inner features of an expert, before a gate halves them or not."""
        return self.part(MoESpec).expert_ffn_hidden_size or self.mlp.ffn_hidden_size

    def positions_of(self, number: int) -> PositionSpec:
        """Return the positions of the layer `number`, from 1 on, as those with a window may have others."""
        if not (self.positions.rotary_local_base and self.attention.window_of(number)):
            return self.positions
        return replace(
            self.positions,
            rotary_base=self.positions.rotary_local_base,
            rotary_interpolation=1.0,
            rope_scaling=1.0,
            rope_attention_factor=1.0,
        )

    def flops_per_sample(self, *, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample."""
        flops: float = self.network.flops(self, recompute)
        return flops


_ORDER = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim seq_length
max_position_embeddings vocab_size padded_vocab_size position_embedding rotary_dim rotary_base
rotary_interpolation rope_scaling window query_key_layer_scaling normalization norm_epsilon
layernorm_1p embed_layernorm qk_layernorm residual_after_norm activation linear_bias qkv_bias
tied_embeddings fp32_residual attention_dropout hidden_dropout init init_std parallel_residual
num_experts experts_per_token residual_experts expert_ffn_hidden_size shared_expert_ffn_hidden_size
shared_expert_gate router_score router_normalises router_scale router_bias router_groups
router_groups_per_token full_attention_layers scaled_embedding attention_bias_apart rope_rule
rope_low_freq_factor rope_high_freq_factor rope_original_length rope_attention_factor
rope_truncation rotary_local_base query_scalar attention_softcap logit_softcap sandwich_norm
lora_rank lora_alpha lora_dropout lora_target_modules padded_vocab_in_softmax qkv_layout own_flags
attention num_decoder_layers decoder_seq_length relative_buckets relative_max_distance mlp_layout
architecture num_token_types binary_head num_outputs num_choices head_layers first_token_head
head_dropout labels head_activation retro_layers retro_encoder_layers retro_encoder_hidden_dropout
retro_encoder_attention_dropout retro_chunk_length retro_num_neighbors retro_retrieved_length
retro_attention_gate retro_normed_residual final_norm
"""
"""Fields in every manifest, those of absent parts too."""
_PARTS: Mapping[str, type] = {
    "vocabulary": VocabularySpec,
    "positions": PositionSpec,
    "attention": AttentionSpec,
    "norm": NormSpec,
    "mlp": MLPSpec,
    "moe": MoESpec,
    "lora": LoraSpec,
}
_OPTIONAL = ("moe", "lora")
_HOLD_PARTS = (*_PARTS, "own", "head")
_NO_PART: Mapping[str, Any] = {
    **{"num_decoder_layers": 0, "decoder_seq_length": 0},
    **{"num_token_types": 0, "binary_head": False, "head_activation": "gelu_erf"},
    **{"retro_layers": (), "retro_encoder_layers": 0, "retro_encoder_hidden_dropout": 0.0},
    **{"retro_encoder_attention_dropout": 0.0, "retro_chunk_length": 0, "retro_num_neighbors": 0},
    **{"retro_retrieved_length": 0, "retro_attention_gate": 1.0, "retro_normed_residual": False},
    "final_norm": True,
}
"""Fields of parts of networks in extensions, with the values in manifests of other networks."""
NO_HEAD: Mapping[str, Any] = {
    **{"num_outputs": 0, "num_choices": 1, "head_layers": 0, "first_token_head": False},
    **{"head_dropout": 0.0, "labels": ()},
}
"""Fields of heads of downstream tasks, with the values in manifests of networks without such a head."""


def flat(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a network and of its parts side by side, as in a manifest."""
    values = defaults_of(spec) | vars(spec)
    for part in map(values.pop, _HOLD_PARTS):
        values |= vars(part) if part else {}
    return {name: values[name] for name in dict.fromkeys((*_ORDER.split(), *values))}


def defaults_of(spec: ModelSpec | type[ModelSpec] = ModelSpec) -> dict[str, Any]:
    """Return the values of fields that manifests of older versions lack, and of absent parts."""
    found = {each.name: each.default for each in fields(spec) if each.name not in _HOLD_PARTS}
    for part in filter(None, (*_PARTS.values(), spec.own, spec.head)):
        found |= {each.name: each.default for each in fields(part)}
    given = {name: value for name, value in found.items() if value is not MISSING}
    return {**_NO_PART, **NO_HEAD, **given}


def spec_of(model: Mapping[str, Any]) -> ModelSpec:
    """Parse the network in a manifest's plan, or in `flat`: sort its fields into parts.

    The fields that only a network of a missing plugin has are kept as they are.

    Raises:
        CheckpointError: a version with other fields wrote it.
    """
    architecture = model.get("architecture", "gpt")
    own = NETWORKS.get_class(architecture).part if architecture in NETWORKS else None
    left: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in model.items()
    }
    left["own_flags"] = tuple(map(tuple, model.get("own_flags", ())))
    try:
        parts = {name: _take(part, left) for name, part in _PARTS.items()}
        parts |= {name: None for name in _OPTIONAL if parts[name] == _PARTS[name]()}
        parts["own"] = own and _take(own, left)
        if any(left.get(name, value) != value for name, value in NO_HEAD.items()):
            parts["head"] = _take(HEADS.get_class("classes").part, left)
        absent = {**_NO_PART, **NO_HEAD}
        others = {name: v for name, v in left.items() if v != absent.get(name, MISSING)}
        if architecture not in NETWORKS:
            unknown = {name: others.pop(name) for name in [*others] if name not in _SPEC}
            parts["own"] = make_dataclass("UnknownPart", unknown, frozen=True)(**unknown)
        return ModelSpec(**parts, **others)
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's network is not understood: {error}") from error


def _take(part: type, left: dict[str, Any]) -> Any:
    """Remove the fields of a part from `left`, and return the part with them."""
    return part(**{name: left.pop(name) for name in names_of(part) if name in left})


def names_of(part: type) -> tuple[str, ...]:
    """Return the names of a part's fields."""
    return tuple(each.name for each in fields(part))


_SPEC = names_of(ModelSpec)
