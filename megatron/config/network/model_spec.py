"""The network as a frozen dataclass (ModelSpec): every size is a number, every choice is made.

Imports no flags, so that a model can be built and read without the command line.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from megatron.common.errors import CheckpointError
from megatron.common.registry import NETWORKS
from megatron.config.parallelism.recompute_plan import RecomputePlan


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
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # keys and values per token
    head_dim: int
    seq_length: int
    max_position_embeddings: int  # most tokens at once; rows of the table when it is learned
    vocab_size: int  # rows of the token table that are no padding
    padded_vocab_size: int  # rows of the token table
    position_embedding: str  # learned, relative, rotary, alibi, none, or the name of a plugin's
    rotary_dim: int  # features of a head that are turned; 0 without rotary positions
    rotary_base: float
    rotary_interpolation: float  # positions are divided by it
    rope_scaling: float  # by how much `rope_rule` stretches long wavelengths; 1: not at all
    window: int  # most tokens that a token sees, itself included; 0: no limit
    query_key_layer_scaling: bool
    normalization: str
    norm_epsilon: float
    layernorm_1p: bool
    embed_layernorm: bool
    qk_layernorm: bool
    residual_after_norm: bool
    activation: str
    linear_bias: bool  # of the MLP, and of attention's output unless that is apart
    qkv_bias: bool
    tied_embeddings: bool
    fp32_residual: bool
    attention_dropout: float
    hidden_dropout: float
    init: Literal["normal", "xavier_uniform"]
    init_std: float
    parallel_residual: bool = False  # attention and MLP read the same, and both are added to it
    num_experts: tuple[int, ...] = ()  # of each layer, 1 for an ordinary MLP; (): all are
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
    full_attention_layers: tuple[int, ...] = ()  # numbers, from 1 on, of those without the window
    scaled_embedding: bool = False  # the token embedding is multiplied by sqrt(hidden_size)
    attention_bias_apart: bool = False  # attention's output has a bias where the MLP has none
    rope_rule: Literal["llama3", "yarn", "dynamic"] = "llama3"  # by which `rope_scaling` stretches
    rope_low_freq_factor: float = 1.0  # turns up to which a wavelength is stretched in full
    rope_high_freq_factor: float = 4.0  # turns from which a wavelength is left alone
    rope_original_length: int = 8192  # tokens within which turns are counted
    rope_attention_factor: float = 1.0  # of turned queries and of turned keys
    rope_truncation: bool = True  # YaRN's bounds are rounded outward to full pairs
    rotary_local_base: float = 0.0  # of layers with the window, unstretched; 0: that of the others
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float = 0.0  # bound of scores; 0: none
    logit_softcap: float = 0.0  # bound of logits; 0: none
    sandwich_norm: bool = False  # outputs of attention and of the MLP are normed too
    lora: LoraSpec | None = None
    padded_vocab_in_softmax: bool = False  # whether the loss counts the columns of padding
    qkv_layout: str = "group, {queries, key, value}, head_dim"  # rows of the fused weight
    own_flags: tuple[tuple[str, Any], ...] = ()  # of parts of plugins
    attention: str = ""  # name of a plugin's; "": softmax attention, by the kernels of the run
    num_decoder_layers: int = 0  # behind an encoder of `num_layers`; 0: there is one stack
    decoder_seq_length: int = 0
    relative_buckets: int = 0  # of relative positions; 0 with other positions
    relative_max_distance: int = 0  # from which distances share the last bucket
    mlp_layout: str = "feature, {gate, up}"  # rows of a gated MLP's first weight
    architecture: str = "gpt"  # name of a network in NETWORKS
    num_token_types: int = 0  # rows of BERT's table of segments; 0: there is none
    binary_head: bool = False  # BERT's pooler and classifier of the order of two segments
    num_outputs: int = 0  # of the head of a downstream task; 0: heads of pretraining
    num_choices: int = 1  # rows of a sample, which have a sequence each
    head_layers: int = 0  # of a head on each token; 0: a pooler and one, of a GPT the last token
    first_token_head: bool = False  # whether these are on the first token, not on each
    head_dropout: float = 0.0  # in front of these layers
    labels: tuple[str, ...] = ()  # names of the classes of a head; (): the task knows them
    head_activation: Literal["gelu_erf", "gelu_tanh"] = "gelu_erf"  # in front of BERT's logits
    retro_layers: tuple[int, ...] = ()  # numbers, from 1 on, of those with chunked cross-attention
    retro_encoder_layers: int = 0  # of the encoder of retrieved neighbors
    retro_encoder_hidden_dropout: float = 0.0
    retro_encoder_attention_dropout: float = 0.0
    retro_chunk_length: int = 0  # tokens
    retro_num_neighbors: int = 0  # of a chunk
    retro_retrieved_length: int = 0  # tokens of a neighbor
    retro_attention_gate: float = 1.0  # factor of what cross-attention to neighbors adds
    retro_normed_residual: bool = False  # in the encoder's cross-attention; False: the stream
    final_norm: bool = True  # in front of the logits

    @property
    def is_gated(self) -> bool:
        """Whether one half of the MLP's inner features multiplies the other."""
        return "glu" in self.activation

    @property
    def layers_read_positions(self) -> bool:
        """Whether attention needs the positions of tokens: rotary positions, and a plugin's."""
        return self.position_embedding not in ("learned", "relative", "alibi", "none")

    @property
    def attention_output_bias(self) -> bool:
        """Whether attention's output layer has a bias."""
        return self.linear_bias != self.attention_bias_apart

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def norms_per_layer(self) -> int:
        """Norms of the residual stream's width in each layer."""
        return 4 if self.sandwich_norm else 2

    @property
    def network(self) -> Any:
        """What answers for this network: a `megatron.config.networks.network.Network`."""
        network = NETWORKS.get(self.architecture, self.own_flags)()
        return network.classifier() if self.num_outputs else network

    @property
    def num_parameters(self) -> int:
        """Weights of the full network without adapters; a tied embedding is counted once."""
        return sum(entry.weights.total for entry in self._entries())

    @property
    def num_padding_parameters(self) -> int:
        """Weights of the token tables, and of the bias of the logits, that are padding."""
        rows = sum(entry.row for entry in self._entries())
        return (self.padded_vocab_size - self.vocab_size) * rows

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the transformer layers, the final norm, and what a head has beside its table."""
        tables = ("embedding", "positions", "logits")
        return sum(each.weights.total for each in self._entries() if each.kind not in tables)

    @property
    def num_active_parameters_without_embeddings(self) -> int:
        """The same, without the experts that a token does not pass through."""
        idle = sum(
            entry.weights.experts // experts * (experts - self.experts_per_token)
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
        return self.num_experts[number - 1] if self.num_experts else 1

    @property
    def expert_width(self) -> int:
        """Inner features of an expert, before a gate halves them or not."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    def window_of(self, number: int) -> int:
        """Return the window of the layer `number`, from 1 on; 0 for no limit."""
        return 0 if number in self.full_attention_layers else self.window

    def positions_of(self, number: int) -> "ModelSpec":
        """Return the network whose rotary positions the layer `number`, from 1 on, has."""
        if not (self.rotary_local_base and self.window_of(number)):
            return self
        return replace(
            self,
            rotary_base=self.rotary_local_base,
            rotary_interpolation=1.0,
            rope_scaling=1.0,
            rope_attention_factor=1.0,
        )

    def flops_per_sample(self, *, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample."""
        flops: float = self.network.flops(self, recompute)
        return flops


_ORDER = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim
    seq_length max_position_embeddings vocab_size padded_vocab_size position_embedding
    rotary_dim rotary_base rotary_interpolation rope_scaling window query_key_layer_scaling
    normalization norm_epsilon layernorm_1p embed_layernorm qk_layernorm residual_after_norm
    activation linear_bias qkv_bias tied_embeddings fp32_residual attention_dropout
    hidden_dropout init init_std parallel_residual num_experts experts_per_token
    residual_experts expert_ffn_hidden_size shared_expert_ffn_hidden_size shared_expert_gate
    router_score router_normalises router_scale router_bias router_groups
    router_groups_per_token full_attention_layers scaled_embedding attention_bias_apart
    rope_rule rope_low_freq_factor rope_high_freq_factor rope_original_length
    rope_attention_factor rope_truncation rotary_local_base query_scalar attention_softcap
    logit_softcap sandwich_norm lora_rank lora_alpha lora_dropout lora_target_modules
    padded_vocab_in_softmax qkv_layout own_flags attention num_decoder_layers decoder_seq_length
    relative_buckets relative_max_distance mlp_layout architecture num_token_types binary_head
    num_outputs num_choices head_layers first_token_head head_dropout labels head_activation
    retro_layers retro_encoder_layers retro_encoder_hidden_dropout
    retro_encoder_attention_dropout retro_chunk_length retro_num_neighbors
    retro_retrieved_length retro_attention_gate retro_normed_residual final_norm
"""
"""Fields in every manifest, those of absent parts too."""


_PARTS: Mapping[str, type] = {"lora": LoraSpec}


def flat(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a network and of its parts side by side, as in a manifest."""
    parts = [spec, *(part for part in vars(spec).values() if is_dataclass(part))]
    own = {name: value for part in parts for name, value in vars(part).items()}
    values = defaults_of(spec) | {name: own[name] for name in own if name not in _PARTS}
    return {name: values[name] for name in dict.fromkeys((*_ORDER.split(), *values))}


def defaults_of(spec: ModelSpec | type[ModelSpec] = ModelSpec) -> dict[str, Any]:
    """Return the values of fields that manifests of older versions lack, and of absent parts."""
    return {
        each.name: each.default
        for part in (spec, *_PARTS.values())
        for each in fields(part)
        if each.default is not MISSING and each.name not in _PARTS
    }


def spec_of(model: Mapping[str, Any]) -> ModelSpec:
    """Parse the network in a manifest's plan, or in `flat`: sort its fields into parts.

    Raises:
        CheckpointError: a version with other fields wrote it.
    """
    left: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in model.items()
    }
    left["own_flags"] = tuple(map(tuple, model.get("own_flags", ())))
    try:
        parts = {name: _take(part, left) for name, part in _PARTS.items()}
        return ModelSpec(**left, **parts)
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's network is not understood: {error}") from error


def _take(part: type, left: dict[str, Any]) -> Any:
    """Remove the fields of a part from `left`, and return it; None where they say that it is absent."""
    names = [each.name for each in fields(part) if each.name in left]
    made = part(**{name: left.pop(name) for name in names})
    return None if made == part() else made
