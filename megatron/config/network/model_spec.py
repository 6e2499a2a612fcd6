"""The network as a frozen dataclass (ModelSpec): every size is a number, every choice is made.

Imports no flags, so that a model can be built and read without the command line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.config.parallelism.recompute_plan import RecomputePlan

Architecture = Literal["gpt", "bert", "t5", "retro"]
"""A decoder, an encoder whose tokens see all tokens of their sample, both, or a decoder that attends to
retrieved neighbors."""


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
    lora_rank: int = 0  # of the adapters; 0: there are none
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()  # linear layers with an adapter
    padded_vocab_in_softmax: bool = False  # whether the loss counts the columns of padding
    qkv_layout: str = "group, {queries, key, value}, head_dim"  # rows of the fused weight
    own_flags: tuple[tuple[str, Any], ...] = ()  # of parts of plugins
    attention: str = ""  # name of a plugin's; "": softmax attention, by the kernels of the run
    num_decoder_layers: int = 0  # behind an encoder of `num_layers`; 0: there is one stack
    decoder_seq_length: int = 0
    relative_buckets: int = 0  # of relative positions; 0 with other positions
    relative_max_distance: int = 0  # from which distances share the last bucket
    mlp_layout: str = "feature, {gate, up}"  # rows of a gated MLP's first weight
    architecture: Architecture = "gpt"
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
    def lora_scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.lora_alpha / self.lora_rank

    @property
    def num_parameters(self) -> int:
        """Weights of the full network without adapters; a tied embedding is counted once."""
        tables = 1 if self.tied_embeddings or self.num_outputs else 2
        positions = self.max_position_embeddings if self.position_embedding == "learned" else 0
        embedding_norm = self._norm_parameters(self.hidden_size) if self.embed_layernorm else 0
        rows = tables * self.padded_vocab_size + positions + self.num_token_types
        return self.num_parameters_without_embeddings + rows * self.hidden_size + embedding_norm

    @property
    def num_padding_parameters(self) -> int:
        """Weights of the token tables, and of the bias of the logits, that are padding."""
        tables = 1 if self.tied_embeddings or self.num_outputs else 2
        has_bias = self.architecture != "gpt" and not self.num_outputs
        row = tables * self.hidden_size + has_bias
        return (self.padded_vocab_size - self.vocab_size) * row

    @property
    def num_parameters_without_embeddings(self) -> int:
        """Weights of the transformer layers, the final norm, and what a head has beside its table."""
        layers = self._layer_parameters([experts or 1 for experts in self._experts])
        return layers + self.num_head_parameters + self.num_retro_parameters

    @property
    def num_active_parameters_without_embeddings(self) -> int:
        """The same, without the experts that a token does not pass through."""
        layers = self._layer_parameters(
            [self.experts_per_token if experts else 1 for experts in self._experts]
        )
        return layers + self.num_head_parameters + self.num_retro_parameters

    @property
    def num_head_parameters(self) -> int:
        """Weights of the heads beside the token table: BERT's dense layers and norm, and biases."""
        if self.architecture == "t5":
            return self.padded_vocab_size
        if self.architecture != "bert":
            return self.num_outputs * self.hidden_size
        dense = self.hidden_size**2 + self.hidden_size
        if self.num_outputs:
            # The pooler counts as a layer.
            others = self.head_layers - 1 if self.head_layers else 1
            return others * dense + self.num_outputs * (self.hidden_size + 1)
        masked_lm = dense + self._norm_parameters(self.hidden_size) + self.padded_vocab_size
        return masked_lm + (dense + 2 * self.hidden_size + 2 if self.binary_head else 0)

    @property
    def num_retro_parameters(self) -> int:
        """Weights of chunked cross-attention and of the encoder of neighbors, less a final norm."""
        return sum(self.num_retro_parameters_of(number) for number in self.retro_layers) - (
            0 if self.final_norm else self._norm_parameters(self.hidden_size)
        )

    def num_retro_parameters_of(self, number: int) -> int:
        """Return the weights that the layer `number`, from 1 on, has beside those of a GPT's layer."""
        if number not in self.retro_layers:
            return 0
        cross = self._attention_parameters + self._norm_parameters(self.hidden_size)
        if number != self.retro_layers[0]:
            return cross
        plain = replace(self, num_layers=self.retro_encoder_layers, num_experts=())
        layers = plain._layer_parameters([1] * plain.num_layers)
        return 2 * cross + layers - self._norm_parameters(self.hidden_size)

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
                self.experts_per_token * self._expert_weights + self._routing_weights(experts)
                if experts
                else self._mlp_weights
                for experts in self._experts
            )
        )
        layers = (3 + recompute.share) * forward
        if recompute.granularity == "selective":
            layers += attention
        if self.num_outputs:
            return float(2 * s * layers * self.num_choices)
        head = self.padded_vocab_size * self.hidden_size
        if self.architecture == "bert":
            head += self.hidden_size**2
        if self.architecture == "t5":
            return float(2 * s * layers + self._decoder_flops(recompute) + 6 * self._decoder_head)
        return float(2 * s * (layers + 3 * head) + self._retro_flops(recompute))

    @property
    def _decoder_head(self) -> int:
        """Products of all tokens of the decoder with the token table."""
        return self.decoder_seq_length * self.padded_vocab_size * self.hidden_size

    def _decoder_flops(self, recompute: RecomputePlan) -> float:
        """Return floating-point operations of the decoder's layers on one sample.

        The keys and values of cross-attention are those of the encoder's tokens.
        """
        s, d = self.seq_length, self.decoder_seq_length
        heads = self.num_attention_heads * self.head_dim
        keys = 2 * self.num_query_groups * self.head_dim * self.hidden_size
        attention = 2 * heads * d * (d + s)
        weights = 2 * self._attention_weights - keys + self._mlp_weights
        forward = d * weights + s * keys + attention
        again = attention if recompute.granularity == "selective" else 0
        return 2 * self.num_decoder_layers * ((3 + recompute.share) * forward + again)

    def _retro_flops(self, recompute: RecomputePlan) -> float:
        """Return floating-point operations of retrieval on one sample, beside those of a GPT."""
        if not self.retro_layers:
            return 0.0
        r, s, m = self.retro_retrieved_length, self.seq_length, self.retro_chunk_length
        tokens = s // m * self.retro_num_neighbors * r  # of neighbors
        heads = self.num_attention_heads * self.head_dim
        keys = 2 * self.num_query_groups * self.head_dim * self.hidden_size
        queries = self._attention_weights - keys
        visible = self.retro_num_neighbors * r
        cross = s * queries + tokens * keys + 2 * heads * s * visible
        encoder = (
            self.retro_encoder_layers
            * tokens
            * (self._attention_weights + self._mlp_weights + 2 * heads * r)
        )
        encoder += tokens * queries + s * keys + 2 * heads * tokens * m
        forward = len(self.retro_layers) * cross + encoder
        return 2 * (3 + recompute.share) * forward

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

    @property
    def _expert_weights(self) -> int:
        """Weights of the two matrices of an expert."""
        return self._mlp_weights // self.ffn_hidden_size * self.expert_width

    def _routing_weights(self, experts: int) -> int:
        """Weights of the matrices beside `experts` experts: the router, and the MLP of every token."""
        residual = self._mlp_weights + 2 * self.hidden_size if self.residual_experts else 0
        width = self.shared_expert_ffn_hidden_size
        shared = self._mlp_weights // self.ffn_hidden_size * width
        gate = self.hidden_size if self.shared_expert_gate else 0
        return experts * self.hidden_size + residual + shared + gate

    def _mixture_parameters(self, experts: int, counted: int) -> int:
        """Weights of a layer's experts, of which `counted` count, and of what is beside them."""
        gates = 2 if self.is_gated else 1
        biases = counted * (gates * self.expert_width + self.hidden_size)
        if self.residual_experts:
            biases += self._inner_width + self.hidden_size
        if self.shared_expert_ffn_hidden_size:
            biases += gates * self.shared_expert_ffn_hidden_size + self.hidden_size
        return (
            counted * self._expert_weights
            + self._routing_weights(experts)
            + (biases if self.linear_bias else 0)
            + (2 if self.residual_experts else 0)
        )

    def _layer_parameters(self, mlps: Sequence[int]) -> int:
        """Return the weights of all layers and the final norm, with so many MLPs in each layer."""
        width = self.hidden_size
        bias = self._inner_width + width if self.linear_bias else 0
        attention = self._attention_parameters
        norms = self.norms_per_layer * self._norm_parameters(width)
        mlp = self._mlp_weights + bias
        cross = attention + norms - self._norm_parameters(width)
        decoder = self.num_decoder_layers * (attention + norms + mlp + cross)
        if self.num_decoder_layers:
            tables = 2 * self.relative_buckets * self.num_attention_heads
            decoder += self._norm_parameters(width) + tables
        return (
            decoder
            + self._norm_parameters(width)
            + sum(
                attention
                + norms
                + (self._mixture_parameters(experts, count) if experts else count * mlp)
                for count, experts in zip(mlps, self._experts, strict=True)
            )
        )

    @property
    def _attention_parameters(self) -> int:
        """Weights of attention, with the norms of queries and keys."""
        norms = 2 * self._norm_parameters(self.head_dim) if self.qk_layernorm else 0
        return (
            self._attention_weights
            + (self._qkv_width if self.qkv_bias else 0)
            + (self.hidden_size if self.attention_output_bias else 0)
            + norms
        )

    def _norm_parameters(self, width: int) -> int:
        return (2 if self.normalization == "LayerNorm" else 1) * width
