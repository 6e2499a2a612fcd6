"""The network, decided: every size is a number, every choice is made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.config.config import Config
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.network.expert_layers import experts_of_layers
from megatron.config.network.layer_pattern import is_of_layers, pattern_of
from megatron.config.network.lora_plan import lora_targets
from megatron.config.network.model import ModelConfig
from megatron.config.parallelism.recompute_plan import RecomputePlan

Position = Literal["learned", "rotary", "alibi", "none"]
Activation = Literal[
    "gelu_tanh",
    "gelu_erf",
    "relu",
    "squared_relu",
    "geglu",
    "geglu_tanh",
    "liglu",
    "reglu",
    "swiglu",
]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What layers are built from. Two checkpoints with equal specs hold the same network.

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
    position_embedding: Position
    rotary_dim: int  # features of a head that are turned; 0 without rotary positions
    rotary_base: float
    rotary_interpolation: float  # positions are divided by it
    rope_scaling: float  # by how much `rope_rule` stretches long wavelengths; 1: not at all
    window: int  # most tokens that a token sees, itself included; 0: no limit
    query_key_layer_scaling: bool
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float
    layernorm_1p: bool
    embed_layernorm: bool
    qk_layernorm: bool
    residual_after_norm: bool
    activation: Activation
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
    full_attention_layers: tuple[int, ...] = ()  # numbers, from 1 on, of those without the window
    scaled_embedding: bool = False  # the token embedding is multiplied by sqrt(hidden_size)
    attention_bias_apart: bool = False  # attention's output has a bias where the MLP has none
    rope_rule: Literal["llama3", "yarn", "dynamic"] = "llama3"  # by which `rope_scaling` stretches
    rope_low_freq_factor: float = 1.0  # turns up to which a wavelength is stretched in full
    rope_high_freq_factor: float = 4.0  # turns from which a wavelength is left alone
    rope_original_length: int = 8192  # tokens within which turns are counted
    rope_attention_factor: float = 1.0  # of turned queries and of turned keys
    rope_truncation: bool = True  # YaRN's bounds are rounded outward to whole pairs
    rotary_local_base: float = 0.0  # of layers with the window, unstretched; 0: that of the others
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float = 0.0  # bound of scores; 0: none
    logit_softcap: float = 0.0  # bound of logits; 0: none
    sandwich_norm: bool = False  # outputs of attention and of the MLP are normed too
    lora_rank: int = 0  # of the adapters; 0: there are none
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()  # linear layers with an adapter
    padded_vocab_in_softmax: bool = False  # whether the loss counts the columns of padding
    qkv_layout: str = "group, {queries, key, value}, head_dim"  # rows of the fused weight
    mlp_layout: str = "feature, {gate, up}"  # rows of a gated MLP's first weight

    @property
    def is_gated(self) -> bool:
        """Whether one half of the MLP's inner features multiplies the other."""
        return "glu" in self.activation

    @property
    def attention_output_bias(self) -> bool:
        """Whether attention's output layer has a bias."""
        return self.linear_bias != self.attention_bias_apart

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def norms_per_layer(self) -> int:
        """Norms of the residual stream's width in each layer."""
        return 4 if self.sandwich_norm else 2

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return self.lora_alpha / self.lora_rank

    @property
    def num_parameters(self) -> int:
        """Weights of the whole network without adapters; a tied embedding is counted once."""
        tables = 1 if self.tied_embeddings else 2
        positions = self.max_position_embeddings if self.position_embedding == "learned" else 0
        embedding_norm = self._norm_parameters(self.hidden_size) if self.embed_layernorm else 0
        rows = tables * self.padded_vocab_size + positions
        return self.num_parameters_without_embeddings + rows * self.hidden_size + embedding_norm

    @property
    def num_padding_parameters(self) -> int:
        """Weights of the token tables that are padding."""
        tables = 1 if self.tied_embeddings else 2
        return tables * (self.padded_vocab_size - self.vocab_size) * self.hidden_size

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the transformer layers and the final norm."""
        return self._layer_parameters([experts or 1 for experts in self._experts])

    @property
    def num_active_parameters_without_embeddings(self) -> int:
        """The same, without the experts that a token does not pass through."""
        return self._layer_parameters(
            [self.experts_per_token if experts else 1 for experts in self._experts]
        )

    def experts_of(self, number: int) -> int:
        """Return how many experts the layer `number`, from 1 on, has; 1 for an ordinary MLP."""
        return self.num_experts[number - 1] if self.num_experts else 1

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
        """Return floating-point operations of forward and backward on one sample.

        Two for every weight of a matrix and token, and for every feature of every visible key and
        value; masked halves of attention are counted, as usual. Backward is twice forward, and
        recomputation another forward of what it computes again: layers or attention, not the head.

        Source: arXiv:2104.04473, section 5.1 and appendix; for multi-head attention with an MLP
        four times as wide it is their formula (3).
        """
        s = self.seq_length
        windows = [self.window_of(number + 1) for number in range(self.num_layers)]
        visible = sum(min(s, window or s) for window in windows)
        attention = 2 * self.num_attention_heads * self.head_dim * visible
        forward = (
            self.num_layers * self._attention_weights
            + attention
            + sum(
                (self.experts_per_token if experts else 1) * self._mlp_weights
                + self._routing_weights(experts)
                for experts in self._experts
            )
        )
        layers = (3 + recompute.share) * forward
        if recompute.granularity == "selective":
            layers += attention
        head = self.padded_vocab_size * self.hidden_size
        return float(2 * s * (layers + 3 * head))

    @property
    def _qkv_width(self) -> int:
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim

    @property
    def _inner_width(self) -> int:
        return (2 if self.is_gated else 1) * self.ffn_hidden_size

    @property
    def _attention_weights(self) -> int:
        """Weights of the two matrices of attention."""
        return self.hidden_size * (self._qkv_width + self.num_attention_heads * self.head_dim)

    @property
    def _mlp_weights(self) -> int:
        """Weights of the two matrices of an MLP."""
        return self.hidden_size * (self._inner_width + self.ffn_hidden_size)

    @property
    def _experts(self) -> list[int]:
        """Experts of each layer; 0 for an ordinary MLP."""
        counts = self.num_experts or (1,) * self.num_layers
        return [count if count > 1 else 0 for count in counts]

    def _routing_weights(self, experts: int) -> int:
        """Weights of the matrices beside `experts` experts: the router, and the residual MLP."""
        residual = self._mlp_weights + 2 * self.hidden_size if self.residual_experts else 0
        return experts * self.hidden_size + residual if experts else 0

    def _layer_parameters(self, mlps: Sequence[int]) -> int:
        """Return the weights of all layers and the final norm, with so many MLPs in each layer."""
        width = self.hidden_size
        bias = self._inner_width + width if self.linear_bias else 0
        attention = self._attention_weights + (self._qkv_width if self.qkv_bias else 0)
        attention += width if self.attention_output_bias else 0
        norms = self.norms_per_layer * self._norm_parameters(width)
        if self.qk_layernorm:
            norms += 2 * self._norm_parameters(self.head_dim)
        mixing = bias + 2 if self.residual_experts else 0
        return self._norm_parameters(width) + sum(
            attention
            + norms
            + count * (self._mlp_weights + bias)
            + self._routing_weights(experts)
            + (mixing if experts else 0)
            for count, experts in zip(mlps, self._experts, strict=True)
        )

    def _norm_parameters(self, width: int) -> int:
        return (2 if self.normalization == "LayerNorm" else 1) * width


def plan_model(config: Config, *, vocab_size: int, tensor: int) -> ModelSpec:
    """Return the decided network for a tokenizer of `vocab_size` tokens."""
    model = config.model
    tokenizer = config.tokenizer
    real_rows = true_vocab_size(tokenizer, vocab_size)
    rows = padded_vocab_size(
        real_rows,
        divisible_by=tokenizer.make_vocab_size_divisible_by,
        tensor=tensor,
        pad_to=tokenizer.pad_vocab_size_to,
    )
    experts = config.experts
    head_dim = head_dim_of(model)
    position = position_of(model)
    is_rotary = position == "rotary"
    num_experts = experts_of_layers(experts, model.num_layers)
    lora, scalar = config.lora, model.query_pre_attn_scalar
    return ModelSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_hidden_size_of(model),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=num_query_groups_of(model),
        head_dim=head_dim,
        seq_length=model.seq_length,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=real_rows,
        padded_vocab_size=rows,
        padded_vocab_in_softmax=bool(tokenizer.padded_vocab_in_softmax) and rows > real_rows,
        position_embedding=position,
        rotary_dim=int(head_dim * model.rotary_percent) if is_rotary else 0,
        rotary_base=model.rotary_base if is_rotary else 0.0,
        rotary_interpolation=(is_rotary and model.rotary_seq_len_interpolation_factor) or 1.0,
        **_stretching(model, is_rotary=is_rotary),
        window=window_of(model.window_size),
        full_attention_layers=full_attention_layers_of(model),
        rotary_local_base=(is_rotary and model.rotary_local_base) or 0.0,
        query_key_layer_scaling=model.apply_query_key_layer_scaling,
        query_scalar=0.0 if scalar in (None, head_dim) else scalar,
        attention_softcap=model.attn_logit_softcapping or 0.0,
        logit_softcap=model.final_logit_softcapping or 0.0,
        sandwich_norm=model.sandwich_norm,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        layernorm_1p=model.apply_layernorm_1p,
        scaled_embedding=model.scale_embedding,
        embed_layernorm=model.embed_layernorm or config.optimizer.use_bnb_optimizer,
        qk_layernorm=model.qk_layernorm,
        residual_after_norm=model.apply_residual_connection_post_layernorm,
        parallel_residual=model.parallel_residual,
        activation=activation_of(model),
        linear_bias=model.add_bias_linear,
        qkv_bias=_attention_bias(model) or model.add_qkv_bias,
        attention_bias_apart=_attention_bias(model) != model.add_bias_linear,
        tied_embeddings=not model.untie_embeddings_and_output_weights,
        fp32_residual=model.fp32_residual_connection,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init="xavier_uniform" if model.init_method_xavier_uniform else "normal",
        init_std=model.init_method_std,
        num_experts=num_experts,
        experts_per_token=experts.topk if num_experts else 1,
        residual_experts=bool(num_experts) and experts.mlp_type == "residual",
        lora_rank=lora.lora_rank,
        lora_alpha=float((lora.lora_alpha or lora.lora_rank) if lora.lora_rank else 0),
        lora_dropout=lora.lora_dropout,
        lora_target_modules=lora_targets(lora.lora_target_modules) if lora.lora_rank else (),
    )


def _attention_bias(model: ModelConfig) -> bool:
    return model.attention_bias == "on" if model.attention_bias else model.add_bias_linear


def _stretching(model: ModelConfig, *, is_rotary: bool) -> dict[str, Any]:
    """Return how wavelengths of rotary positions are stretched."""
    if not (is_rotary and model.use_rope_scaling and model.rope_scaling_factor != 1):
        return {"rope_scaling": 1.0}
    factor, rule = model.rope_scaling_factor, model.rope_scaling_type
    said: dict[str, float | None] = {
        "rope_original_length": model.rope_original_max_position_embeddings
    }
    if rule != "dynamic":
        low, high = turns_of(model)
        said |= {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if rule == "yarn":
        of_length = 0.1 * math.log(factor) + 1
        given["rope_attention_factor"] = model.rope_attention_factor or of_length
        given["rope_truncation"] = model.rope_truncation
    return {"rope_scaling": factor, "rope_rule": rule, **given}


def turns_of(model: ModelConfig) -> tuple[float, float]:
    """Return the turns up to which a wavelength is stretched in full, and from which not at all."""
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    default = 32.0 if model.rope_scaling_type == "yarn" else 4.0
    return 1.0 if low is None else low, default if high is None else high


def true_vocab_size(tokenizer: TokenizerConfig, known: int) -> int:
    """Return the rows of the token table without padding, for a tokenizer of `known` tokens."""
    return known if tokenizer.true_vocab_size is None else tokenizer.true_vocab_size


def padded_vocab_size(
    vocab_size: int, *, divisible_by: int, tensor: int, pad_to: int | None = None
) -> int:
    """Return the next multiple of `divisible_by` * `tensor` from `vocab_size` up.

    With `pad_to` it is the next multiple of `tensor` from there up.

    >>> padded_vocab_size(50257, divisible_by=128, tensor=2)
    50432
    >>> padded_vocab_size(50257, divisible_by=128, tensor=2, pad_to=50257)
    50258
    """
    least, multiple = (pad_to, tensor) if pad_to else (vocab_size, divisible_by * tensor)
    return -(-least // multiple) * multiple


def ffn_hidden_size_of(model: ModelConfig) -> int:
    """Return the width inside the MLP."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def head_dim_of(model: ModelConfig) -> int:
    """Return the features per attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def num_query_groups_of(model: ModelConfig) -> int:
    """Return the number of keys and values per token."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return 1 if model.num_query_groups is None else model.num_query_groups


def position_of(model: ModelConfig) -> Position:
    """Return how tokens learn their positions."""
    match model.position_embedding_type:
        case "rotary" | "rope":
            return "rotary"
        case "alibi" | "none" as said:
            return said
        case None if model.use_rotary_position_embeddings:
            return "rotary"
        case None if not model.add_position_embedding:
            return "none"
    return "learned"


def activation_of(model: ModelConfig) -> Activation:
    """Return what stands inside the MLP."""
    if model.swiglu:
        return "swiglu"
    if model.glu_activation is not None:
        return model.glu_activation
    if model.squared_relu:
        return "squared_relu"
    if model.relu:
        return "relu"
    return "gelu_erf" if "erf" in gelu_forms(model).values() else "gelu_tanh"


def gelu_forms(model: ModelConfig) -> dict[str, str]:
    """Return {flag: form} of the flags that name a form of GELU."""
    forms: dict[str, str] = {"--gelu": model.gelu} if model.gelu else {}
    if model.openai_gelu:
        forms["--openai-gelu"] = "tanh"
    if model.onnx_safe in ("True", "true"):
        forms["--onnx-safe"] = "erf"
    return forms


def window_of(said: str | None) -> int:
    """Return how many tokens a token sees at most, itself included; 0 for no limit.

    Takes Megatron's pair "(LEFT, RIGHT)", with or without parentheses, and LEFT alone: how many
    on each side of the token, -1 for all.

    Raises:
        ValueError: it is none of that, or RIGHT lets a token see what it has to predict.
    """
    if said is None:
        return 0
    left, comma, right = said.strip().removeprefix("(").removesuffix(")").partition(",")
    if int(left) < -1 or (comma and int(right) != 0):
        raise ValueError(said)
    return int(left) + 1


def full_attention_layers_of(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers without the window; () where all are alike.

    Raises:
        ValueError: --window-attn-skip-freq does not fit the layers.
    """
    said = model.window_attn_skip_freq
    if said is None or not window_of(model.window_size):
        return ()
    pattern, layers = pattern_of(said), model.num_layers
    if isinstance(pattern, int) and pattern > 0:
        return tuple(range(pattern, layers + 1, pattern))
    if not is_of_layers(pattern, layers):
        raise ValueError(
            f"--window-attn-skip-freq {said} is neither a number from 1 on nor a list of {layers} "
            "times 1 (a layer with the window) or 0, such as [1]*3+[0]"
        )
    return tuple(number for number, windowed in enumerate(pattern, 1) if not windowed)
