"""T5: an encoder-decoder network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import (
    FIRST_LAYER,
    Entry,
    Stacks,
    bias_entry,
    logits_entry,
)
from megatron.config.architecture.counts import (
    Branches,
    Weights,
    attention_matrices,
    attention_weights,
    key_matrices,
    mlp_matrices,
    mlp_weights,
    norm_weights,
    norm_width,
    stack_flops,
    table_weights,
)
from megatron.config.architecture.options import COMMON
from megatron.config.config import Config
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.network_contract import Network
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.config.parsing.flags import given_options
from megatron.extensions.masked_lm.flags import MaskedLMConfig
from megatron.extensions.t5.flags import (
    DecoderSpec,
    EncoderDecoderConfig,
    encoder_decoder_problems,
    num_decoder_layers,
    unsupported_problems,
    with_decoder,
)


@NETWORKS.register("t5")
class T5Network(Network):
    """An encoder, and a decoder that attends to its output."""

    name = "t5"
    is_causal = False
    masks_padding = True
    service = "texts"
    served_in = "megatron.extensions.t5.routes.text_to_text_backend"
    use = "tools/text_to_text.py generates text from text with it"
    usage = "generate with: tools/text_to_text.py --load {directory} --text TEXT"
    part = DecoderSpec
    options = COMMON | {
        *("residual_after_norm", "relative_buckets", "relative_max_distance"),
        *names_of(DecoderSpec),
    }
    lacks = "is not built for networks with an encoder and a decoder: leave it out"
    layers_in = "megatron.extensions.t5.layers.t5_layers"
    batch_in = "megatron.extensions.t5.layers.t5_batch"
    caches = True
    has_decoder_stack = True
    megatron_in = "megatron.extensions.t5.checkpoints.T5Form"
    not_in_transformers = (
        "T5 of transformers is another network than Megatron's T5, which has LayerNorm with biases, "
        "biases in all layers and on the logits, scaled scores, and learned positions"
    )
    unlike: ClassVar[Mapping[str, str]] = dict.fromkeys(("t5", "mt5"), not_in_transformers)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why an encoder and a decoder cannot be built or divided."""
        model, parallel = config.model, config.parallel
        yield from unsupported_problems(model, config.masks, parallel, self.lacks)
        yield from encoder_decoder_problems(
            config.section(EncoderDecoderConfig),
            model,
            parallel,
            decoder_seq_length=config.section(MaskedLMConfig).decoder_seq_length or 1,
        )

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield the flags of encoder-decoder networks."""
        for option in given_options(config.section(EncoderDecoderConfig)):
            yield f"{option} is for pretrain_t5.py: this is not an encoder-decoder network"

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return an encoder-decoder network."""
        return with_decoder(
            super().spec(plain, config),
            config.section(EncoderDecoderConfig),
            config.model,
            decoder_seq_length=config.section(MaskedLMConfig).decoder_seq_length or 0,
        )

    def num_contexts(self, spec: ModelSpec) -> int:
        """Return 1: the decoder attends to the encoder's text."""
        return 1

    def max_length(self, spec: ModelSpec) -> int | None:
        """Return the positions of the decoder, and the last token, which has none."""
        positions = spec.positions
        return None if positions.relative_buckets else positions.max_position_embeddings + 1

    def num_layers(self, config: Config) -> int:
        """Return the layers of both stacks."""
        return config.model.num_layers + num_decoder_layers(
            config.section(EncoderDecoderConfig), config.model
        )

    def entries(self, spec: ModelSpec, *, tensor: int = 1, expert: int = 1) -> list[Entry]:
        """Return both stacks, each after its embedding, and the head."""
        norm, layers = norm_weights(spec), spec.num_layers
        numbers = range(layers + 1, layers + spec.part(DecoderSpec).num_decoder_layers + 1)
        decoder = self._decoder_weights(spec, tensor)
        return [
            Entry(name="take_tokens"),
            *self._embedding(spec, tensor, number=0),
            *(self.block(spec, n, tensor=tensor, expert=expert) for n in range(1, layers + 1)),
            Entry(name="EncoderNormPipe", weights=norm),
            *self._embedding(spec, tensor, number=layers + 1),
            *(
                Entry(
                    name="ParallelTransformerDecoderLayerPipe",
                    kind="block",
                    weights=decoder,
                    number=number,
                )
                for number in numbers
            ),
            Entry(name="to_batch_first"),
            Entry(name=spec.norm.normalization, kind="norm", weights=norm),
            logits_entry("OutputEmbeddingPipe", spec, tensor=tensor),
            bias_entry("OutputBiasPipe", spec, tensor=tensor),
        ]

    def _embedding(self, spec: ModelSpec, tensor: int, *, number: int) -> list[Entry]:
        words = Entry(
            name="WordEmbeddingPipe",
            kind="embedding",
            weights=Weights(table_weights(spec, tensor=tensor)),
            row=spec.hidden_size,
            tie="embed",
            number=number,
        )
        if spec.positions.relative_buckets:
            biases = spec.positions.relative_buckets * spec.attention.num_attention_heads
            return [words, Entry(name="RelativePositionsPipe", weights=Weights(biases // tensor))]
        table = Weights(spec.positions.max_position_embeddings * spec.hidden_size)
        name = "PositionEmbeddingPipe"
        return [words, Entry(name=name, kind="positions", weights=table, tie="positions")]

    def _decoder_weights(self, spec: ModelSpec, tensor: int) -> Weights:
        norms = (spec.norm.per_layer + 1) * norm_width(spec, spec.hidden_size)
        return Weights(2 * attention_weights(spec, tensor) + norms + mlp_weights(spec, tensor))

    def branches(self, spec: ModelSpec, number: int) -> Branches:
        """Return the residual branches of a layer: in the decoder also of cross-attention."""
        return Branches(others=1 if number <= spec.num_layers else 2)

    def attended_pairs(self, spec: ModelSpec) -> int:
        """Return the pairs of the encoder, and of both kinds of attention in the decoder."""
        s, decoder = spec.seq_length, spec.part(DecoderSpec)
        d = decoder.decoder_seq_length
        return super().attended_pairs(spec) + decoder.num_decoder_layers * d * (d + s)

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample.

        The keys and values of cross-attention are computed from the encoder's tokens.
        """
        s, decoder_spec = spec.seq_length, spec.part(DecoderSpec)
        d = decoder_spec.decoder_seq_length
        keys = key_matrices(spec)
        attention = 2 * spec.attention.query_features * d * (d + s)
        weights = 2 * attention_matrices(spec) - keys + mlp_matrices(spec)
        forward = d * weights + s * keys + attention
        again = attention if recompute.granularity == "selective" else 0
        decoder = 2 * decoder_spec.num_decoder_layers * ((3 + recompute.share) * forward + again)
        head = d * spec.vocabulary.padded_vocab_size * spec.hidden_size
        return float(2 * s * stack_flops(spec, recompute) + decoder + 6 * head)

    def kept_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that an entry keeps; the norm is the decoder's."""
        decoder = sizes.of(self.scored_spec(sizes.spec))
        if entry.kind != "norm" and entry.number <= sizes.spec.num_layers:
            return super().kept_bytes(entry, sizes)
        if entry.kind != "block":
            return super().kept_bytes(entry, decoder)
        return int(decoder.layer(1) + decoder.cross_attention(sizes))

    def deferred_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that the weight gradients of a layer are computed from."""
        if entry.number <= sizes.spec.num_layers:
            return super().deferred_bytes(entry, sizes)
        decoder = sizes.of(self.scored_spec(sizes.spec))
        return int(decoder.products(1) + decoder.attention_products(sizes))

    def kept_masks(self, numbers: Sequence[int], sizes: Any) -> int:
        """Return the bytes of masks of padding, of the encoder and of cross-attention.

        The mask of the decoder's self-attention is causal.
        """
        spec, length = sizes.spec, sizes.spec.part(DecoderSpec).decoder_seq_length
        encodes = any(number <= spec.num_layers for number in numbers)
        decodes = any(number > spec.num_layers for number in numbers)
        return int(sizes.padding_masks(spec.seq_length * encodes + length * decodes))

    def scored_spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the decoder, with its samples."""
        return replace(spec, seq_length=spec.part(DecoderSpec).decoder_seq_length, own=None)

    def prefixes(self, stacks: Stacks) -> Iterator[tuple[str, str]]:
        """Yield the name prefixes of both stacks' parameters and modules."""
        behind = FIRST_LAYER + stacks.num_layers
        first = behind + 3
        last = first + stacks.num_decoder_layers
        relative = "relative_pos_emb.relative_attention_bias.weight"
        yield "tied_modules.embed.", "embedding."
        for number in range(stacks.num_layers):
            yield f"{FIRST_LAYER + number}.", f"layers.{number}."
        yield "tied_modules.positions.shared_positions.", "embedding.position_embeddings."
        yield f"{FIRST_LAYER - 1}.weight", f"encoder_{relative}"
        yield f"{behind}.final_layernorm.", "final_layernorm."
        yield f"{behind + 2}.weight", f"decoder_{relative}"
        for number in range(stacks.num_decoder_layers):
            yield f"{first + number}.", f"decoder.layers.{number}."
        yield f"{last + 1}.", "decoder.final_layernorm."
        yield f"{last + 2}.word_embeddings.", "output_layer."
        yield f"{last + 3}.output_bias", "lm_head.bias"
