"""T5: encoder and decoder, front to back, as a list of layers that are not built yet."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.t5.flags import DecoderSpec
from megatron.model.gpt import end_of, logits_layer, take_tokens, to_batch_first, to_float32
from megatron.model.layers.embedding import OutputBiasPipe
from megatron.model.layers.layer_input import LayerInput, PassInput
from megatron.model.layers.layer_list import Layer, Step, Tie
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts, once_per_sequence
from megatron.model.layers.transformer_block import (
    ParallelTransformerDecoderLayerPipe,
    ParallelTransformerLayerPipe,
)
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.sharding import exact_quotient, mark_sharded

DECODER_TOKENS = "decoder_tokens"
"""The field of a batch that the decoder's embedding reads."""

DECODER_POSITIONS = "decoder_positions"
"""Field of a batch with the positions of the decoder's tokens; without it they begin at 0."""

_WORDS = "word_embeddings.weight"


def t5_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the network: a batch with tokens, lengths and decoder_tokens in, logits [b, d, V/t] out.

    Words are one table for encoder, decoder and logits, and learned positions one table for
    encoder and decoder. In a pipeline each is on up to three stages, as two ties: the stage of the
    logits has no positions.

    `parts.core_attention` counts layers from 1 in each stack, and no layer has experts.
    """
    common: dict[str, Any] = {"spec": spec, "parts": parts}
    rows = {"padded_vocab_size": spec.vocabulary.padded_vocab_size}
    words = partial(
        Layer, WordEmbeddingPipe, rows | {"hidden_size": spec.hidden_size, "parts": parts}
    )
    encoder = partial(Layer, prefill_only=True)
    table = ("relative_table",) if spec.positions.relative_buckets else ()
    numbers = range(1, spec.num_layers + 1), range(1, spec.part(DecoderSpec).num_decoder_layers + 1)

    return [
        take_tokens,
        words(
            tie=Tie("embed", _WORDS),
            carried=("hidden", "attention_span", DECODER_TOKENS),
            prefill_only=True,
        ),
        replace(
            _positions(spec, parts, carried=("hidden", "attention_span", *table, DECODER_TOKENS)),
            prefill_only=True,
        ),
        *(
            encoder(
                ParallelTransformerLayerPipe,
                {"spec": spec, "parts": parts.without_states, "number": number},
            )
            for number in numbers[0]
        ),
        encoder(EncoderNormPipe, common, carried=("hidden", "attention_span", DECODER_TOKENS)),
        words(
            tie=Tie("embed", _WORDS, embed_decoder),
            carried=("hidden", "encoder_hidden", "encoder_span"),
        ),
        _positions(spec, parts, carried=("hidden", "encoder_hidden", "encoder_span", *table)),
        *(
            Layer(ParallelTransformerDecoderLayerPipe, {**common, "number": number})
            for number in numbers[1]
        ),
        to_batch_first,
        norm_layer(spec, kernels=parts.kernels),
        logits_layer(spec, parts),
        Layer(OutputBiasPipe, rows | {"group": parts.group}),
        *end_of(to_float32, parts),
    ]


def t5_batch(spec: ModelSpec, tokens: PassInput) -> Batch | LayerInput:
    """Return the batch of a generation pass; for a decode step, the decoder's first inputs."""
    decoder = {DECODER_TOKENS: tokens.tokens, DECODER_POSITIONS: tokens.positions}
    if tokens.contexts is None or tokens.context_lengths is None:
        nothing = tokens.tokens.new_empty(0)  # kept: keys and values of the encoder's output
        return LayerInput(nothing, batch=decoder)
    return {
        "tokens": tokens.contexts[:, 0],
        "lengths": tokens.context_lengths[:, 0],
        **decoder,
    }


def _positions(spec: ModelSpec, parts: LayerParts, *, carried: tuple[str, ...]) -> Layer:
    """Return the positions of a stack: of a shared table, or separate biases."""
    common = {"spec": spec, "parts": parts}
    if spec.positions.relative_buckets:
        return Layer(RelativePositionsPipe, common, carried=carried)
    tie = Tie("positions", "shared_positions.weight")
    return Layer(PositionEmbeddingPipe, common, tie=tie, carried=carried)


class WordEmbeddingPipe(nn.Module):
    """Token embedding of an encoder, without positions; of a decoder as `embed_decoder`.

    The result has the span of real tokens in addition to the activations, and the decoder's tokens. In
    generation the span is kept for decode steps.

    Args:
        parts: dependencies of the network's layers.

    Shapes: tokens [b, s], lengths [b] -> hidden [b, s, h], attention_span [b, 1, 2].
    Communication: one all-reduce of [b, s, h] over `group` forward.
    """

    def __init__(
        self,
        *,
        padded_vocab_size: int,
        hidden_size: int,
        parts: LayerParts,
    ):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, hidden_size, **parts.division
        )
        self.span = parts.state(1, 2, dtype=torch.int64)

    # A method: of tied layers DeepSpeed saves those alone that are called without a function.
    def forward(self, batch: Batch) -> LayerInput:
        lengths_b = batch["lengths"]
        span_b12 = torch.stack([torch.zeros_like(lengths_b), lengths_b], -1)[:, None]
        decoder = (DECODER_TOKENS, DECODER_POSITIONS)
        return LayerInput(
            self.word_embeddings(batch["tokens"]),
            attention_span=once_per_sequence(self.span, lambda: span_b12),
            batch={name: batch[name] for name in decoder if name in batch},
        )


def embed_decoder(layer: WordEmbeddingPipe, inputs: LayerInput) -> LayerInput:
    """Return the decoder's token embeddings, together with the output of the encoder.

    Padding is at the end of the decoder's tokens, where no real token sees it: attention is causal.

    Shapes: decoder_tokens [b, d] -> hidden [b, d, h]; encoder_hidden [s, b, h], in decode steps empty.
    """
    batch = inputs.batch or {}
    span_b12 = inputs.attention_span
    if span_b12 is None and layer.span:
        span_b12 = layer.span.read()
    return LayerInput(
        layer.word_embeddings(batch[DECODER_TOKENS]),
        positions=batch.get(DECODER_POSITIONS),
        encoder_hidden=inputs.hidden,
        encoder_span=span_b12,
    )


class PositionsPipe(nn.Module):
    """Base of position embeddings of a stack: dropout, and activations with the sequence first.

    Args:
        spec: the network.
        parts: dependencies of its layers.

    Shapes: hidden [b, s, h] -> hidden [s, b, h].
    Randomness: dropout draws from the ordinary stream, which differs between pipeline stages.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.spec, self.parts = spec, parts

    def to_layers(self, inputs: LayerInput, x_bsh: Tensor) -> LayerInput:
        """Return the inputs of the first transformer layer of the stack."""
        x_bsh = F.dropout(x_bsh, self.spec.hidden_dropout, self.training)
        if self.spec.fp32_residual:
            x_bsh = x_bsh.float()
        if torch.is_grad_enabled() and not x_bsh.requires_grad:
            # Of a frozen table. Layers that are recomputed get gradients only if their input does.
            x_bsh.requires_grad_()
        x_sbh = x_bsh.transpose(0, 1).contiguous()
        return inputs.replace(hidden=x_sbh, positions=None, shared={})


class PositionEmbeddingPipe(PositionsPipe):
    """Learned absolute positions, of one table for encoder and decoder."""

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__(spec, parts)
        self.shared_positions = nn.Embedding(
            spec.positions.max_position_embeddings, spec.hidden_size
        )

    def forward(self, inputs: LayerInput) -> LayerInput:
        x_bsh = inputs.hidden
        if inputs.positions is not None:
            return self.to_layers(inputs, x_bsh + self.shared_positions(inputs.positions))
        first = self.parts.group.rank() * x_bsh.size(1) if self.parts.sequence_parallel else 0
        positions_s = torch.arange(first, first + x_bsh.size(1), device=x_bsh.device)
        return self.to_layers(inputs, x_bsh + self.shared_positions(positions_s))


class RelativePositionsPipe(PositionsPipe):
    """Relative positions: one table of biases [buckets, heads] for all layers of a stack.

    The table travels to the layers with the activations, and its gradient back.

    Source: arXiv:1910.10683, section 2.1.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__(spec, parts)
        heads = exact_quotient(
            spec.attention.num_attention_heads, parts.group.size(), "num_attention_heads"
        )
        self.weight = mark_sharded(
            nn.Parameter(torch.empty(spec.positions.relative_buckets, heads)), 1, parts.group
        )

    def forward(self, inputs: LayerInput) -> LayerInput:
        # A copy: with ZeRO-3 the weight is empty between this layer and those that read it.
        inputs = inputs.replace(relative_table=self.weight.clone())
        return self.to_layers(inputs, inputs.hidden)


class EncoderNormPipe(nn.Module):
    """Norm of the encoder's output.

    Shapes: hidden [s, b, h] -> the same. The encoder's relative positions end here.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.final_layernorm = norm_layer(spec, kernels=parts.kernels).build()

    def forward(self, inputs: LayerInput) -> LayerInput:
        return inputs.replace(hidden=self.final_layernorm(inputs.hidden), relative_table=None)
