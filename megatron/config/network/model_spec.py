"""The network as a frozen dataclass (ModelSpec): every size is a number, every choice is made.

Its parts are defined with their flags. It needs none of them, so that a model can be built and read without
the command line.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from megatron.common.errors import CheckpointError
from megatron.common.registry import HEADS, NETWORKS
from megatron.config.network.experts import MoESpec
from megatron.config.network.latent import LatentSpec
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model import (
    AttentionSpec,
    MLPSpec,
    NormSpec,
    PositionSpec,
    VocabularySpec,
)
from megatron.config.network.prediction import PredictionSpec
from megatron.config.network.spec_part import SpecPart
from megatron.config.parallelism.recompute_plan import RecomputePlan

Part = TypeVar("Part")


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
    residual_multiplier: float = 1.0  # of the outputs of attention and MLP, when they are added
    moe: MoESpec | None = None
    latent: LatentSpec | None = None
    lora: LoraSpec | None = None
    prediction: PredictionSpec | None = None
    own_flags: tuple[tuple[str, Any], ...] = ()  # of parts of plugins
    architecture: str = "gpt"  # name of a network in NETWORKS
    own: Any = None  # what only that network has: an instance of its `part`
    head: Any = None  # of a downstream task, in place of the network's: of the head's `part`

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a class; its defaults, which stand for its absence, without it."""
        found = (part for part in vars(self).values() if isinstance(part, kind))
        return next(found, None) or kind()

    @property
    def parts(self) -> list[SpecPart]:
        """The optional parts that it has, also in the part of a plugin's network."""
        return [part for part in vars(self).values() if isinstance(part, SpecPart)]

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return max((part.value_dim for part in self.parts), default=0) or self.attention.head_dim

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
        """Weights of the transformer layers, the final norm, and the weights of a head other than its table."""
        tables = ("embedding", "positions", "logits")
        return sum(each.weights.total for each in self._entries() if each.kind not in tables)

    @property
    def num_active_parameters_without_embeddings(self) -> int:
        """The same, without the experts that a token does not pass through."""
        idle = sum(
            entry.weights.experts // experts * (experts - self.part(MoESpec).experts_per_token)
            for entry in self._entries()
            if entry.weights.experts and (experts := self.experts_of(entry.number))
        )
        return self.num_parameters_without_embeddings - idle

    def _entries(self) -> list[Any]:
        """Return the entries of the list of layers; entries with the same tie count once."""
        entries = self.network.entries(self)
        return [
            *{
                entry.tie or index: entry for index, entry in reversed([*enumerate(entries)])
            }.values()
        ]

    def experts_of(self, number: int) -> int:
        """Return the number of experts of layer `number`, from 1 on; 1 for an ordinary MLP.

        Layers behind the last one, of multi-token prediction, are like it.
        """
        return self.moe.num_experts[min(number, self.num_layers) - 1] if self.moe else 1

    @property
    def scores_per_token(self) -> int:
        """How often each token gets logits: of the next token, and of each later one."""
        return 1 + self.part(PredictionSpec).prediction_depths

    @property
    def shares_embedding(self) -> bool:
        """Whether later layers have the embedding's table too: the head, or layers that predict."""
        return self.vocabulary.tied_embeddings or self.prediction is not None

    @property
    def expert_width(self) -> int:
        """Inner features of an expert, before a gate halves them or not."""
        return self.part(MoESpec).expert_ffn_hidden_size or self.mlp.ffn_hidden_size

    def positions_of(self, number: int) -> PositionSpec:
        """Return the positions of layer `number`, from 1 on: some may have none, or others in a window."""
        if number in self.positions.unrotated_layers:
            return replace(self.positions, position_embedding="none", rotary_dim=0)
        if not (self.positions.rotary_local_base and self.attention.window_of(number)):
            return self.positions.within(self.seq_length)
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
retro_attention_gate retro_normed_residual final_norm unrotated_layers embedding_multiplier
residual_multiplier logit_divisor input_norm qk_norm_across_heads rope_short_factors rope_long_factors
"""
"""Fields in every manifest, absent parts included."""
_PARTS: Mapping[str, type] = {
    name: kind
    for name, hint in get_type_hints(ModelSpec).items()
    if is_dataclass(kind := (*get_args(hint), hint)[0]) and isinstance(kind, type)
}
OPTIONAL = {name: kind for name, kind in _PARTS.items() if issubclass(kind, SpecPart)}
"""The optional parts of a network by the field of ModelSpec that has them."""
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
        parts |= {name: None for name in OPTIONAL if parts[name] == _PARTS[name]()}
        parts["own"] = own and _take(own, left)
        if any(left.get(name, value) != value for name, value in NO_HEAD.items()):
            parts["head"] = _take(HEADS.get_class("classes").part, left)
        absent = {**_NO_PART, **NO_HEAD}
        others = {name: v for name, v in left.items() if v != absent.get(name, MISSING)}
        if architecture not in NETWORKS:
            unknown = {name: others.pop(name) for name in {*others} - {*names_of(ModelSpec)}}
            parts["own"] = make_dataclass("UnknownPart", unknown, frozen=True)(**unknown)
        return ModelSpec(**parts, **others)
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's network is not understood: {error}") from error


def _take(part: type, left: dict[str, Any]) -> Any:
    """Remove the fields of a part from `left`, and return the part with them."""
    return part(**{name: left.pop(name) for name in names_of(part) if name in left})


def every_field() -> frozenset[str]:
    """Return the names of the fields that all networks have, including fields of optional parts."""
    names = {*names_of(ModelSpec)} - {*_HOLD_PARTS}
    return frozenset(names.union(*map(names_of, _PARTS.values())))


def names_of(part: type) -> tuple[str, ...]:
    """Return the names of a part's fields."""
    return tuple(each.name for each in fields(part))
