"""GPT, front to back, as a list. Numbers and names are BLOOM's, so its checkpoints open."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.layers.embedding import (
    EmbeddingPipe,
    OutputEmbeddingPipe,
    OutputTable,
    tied_logits,
)
from megatron.model.layers.layer_input import LayerInput, PassInput
from megatron.model.layers.layer_list import Layer, Step, Tie
from megatron.model.layers.multi_token_prediction import (
    FinalNormPipe,
    MultiTokenPrediction,
    embed_later_tokens,
)
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.broadcast import Batch


def gpt_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the network: a batch with tokens and positions in, logits_bsv [b, s, V/t] out.

    The batch's attention span, if it has one, says what each token sees; else attention is causal.
    """
    return [
        take_tokens,
        *decoder_layers(spec, parts),
        logits_layer(spec, parts),
        *end_of(to_float32, parts),
    ]


def decoder_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the layers of a GPT's decoder, from the embedding to the final norm.

    Shapes: a batch with fields [b, s] -> [b, s, h].
    """
    common: dict[str, Any] = {"spec": spec, "parts": parts}
    passes = ("tokens",) if spec.prediction and parts.predicts else ()
    embedding = Layer(
        EmbeddingPipe,
        common | ({"passes": passes} if passes else {}),
        tie=_tie() if spec.shares_embedding else None,
        carried=(
            "hidden",
            *(["positions"] if spec.positions.reach_attention else []),
            *(["attention_span"] if "attention_span" in parts.batch_fields else []),
            *passes,
        ),
    )
    return [
        embedding,
        to_sequence_first,
        *(
            Layer(ParallelTransformerLayerPipe, {**common, "number": number})
            for number in range(1, spec.num_layers + 1)
        ),
        *_final_norm(spec, parts),
    ]


def _final_norm(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the final norm, and the layers of multi-token prediction, which read its result.

    Shapes: hidden [s, b, h] -> [b, s, h]; with D depths of prediction [(1 + D) b, s, h].
    """
    common: dict[str, Any] = {"spec": spec, "parts": parts}
    if spec.prediction is None:
        return [to_batch_first, norm_layer(spec, kernels=parts.kernels)]
    if not parts.predicts:
        return [to_batch_first, Layer(FinalNormPipe, common)]
    sizes = {
        "padded_vocab_size": spec.vocabulary.padded_vocab_size,
        "hidden_size": spec.hidden_size,
    }
    tie = _tie(partial(embed_later_tokens, spec=spec))
    return [
        Layer(OutputTable, {**sizes, **parts.division}, tie=tie),
        Layer(MultiTokenPrediction, common),
    ]


def gpt_batch(spec: ModelSpec, tokens: PassInput) -> Batch:
    """Return the batch of a pass of generation."""
    batch = {"tokens": tokens.tokens, "positions": tokens.positions}
    if tokens.attention_span is not None:
        batch["attention_span"] = tokens.attention_span
    return batch


def logits_layer(
    spec: ModelSpec,
    parts: LayerParts,
    kind: type[nn.Module] = OutputEmbeddingPipe,
    tied: Callable[..., Any] = tied_logits,
) -> Layer:
    """Return the layer that makes logits, with the embedding's weight if they are tied.

    Args:
        kind: of the layer, with arguments like the default's.
        tied: what computes logits with the embedding.
    """
    vocabulary = spec.vocabulary
    form: dict[str, Any] = {
        "divisor": vocabulary.logit_divisor,
        "softcap": vocabulary.logit_softcap,
        "chunk_tokens": parts.loss_chunk_tokens,
    }
    sizes = {"padded_vocab_size": vocabulary.padded_vocab_size, "hidden_size": spec.hidden_size}
    tie = _tie(partial(tied, **form)) if vocabulary.tied_embeddings else None
    return Layer(kind, {**sizes, **form, **parts.division}, tie=tie)


def end_of(cast: Callable[[Any], Any], parts: LayerParts) -> list[Step]:
    """Return the last entry of a network of 16-bit weights: what makes its logits 32-bit numbers.

    Kernels that read 16 bits and compute in 32 need no copy of the logits, and the loss casts
    chunks itself. The entry stays, because pipelines may divide their stages by number of entries.

    Args:
        cast: of the network's output.
    """
    if not parts.mixed:
        return []
    is_reference = parts.kernels.cross_entropy is REFERENCE.cross_entropy
    return [cast if is_reference and not parts.loss_chunk_tokens else keep_dtype]


def _tie(forward: Callable[[Any, Any], Any] | None = None) -> Tie:
    return Tie("embed", "word_embeddings.weight", forward)


def take_tokens(batch: Batch) -> Batch:
    """Return the batch itself; this entry makes the layer numbers equal BLOOM's."""
    return batch


def to_sequence_first(inputs: LayerInput) -> LayerInput:
    """Return the inputs of the first transformer layer: activations [s, b, h]."""
    hidden_sbh = inputs.hidden.transpose(0, 1).contiguous()
    return inputs.replace(hidden=hidden_sbh, shared={})


def to_batch_first(inputs: LayerInput) -> Tensor:
    """Return the activations alone, [b, s, h]."""
    return SwapFirstTwo.apply(inputs.hidden)


class SwapFirstTwo(torch.autograd.Function):
    """Transpose the first two dimensions; the gradient lies in memory in order, as the result does.

    Recomputed layers get such gradients, and sums depend on the order of what they add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return `x` with its first two dimensions swapped."""
        return x.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient swapped back."""
        return grads[0].transpose(0, 1).contiguous()


def to_float32(x: Tensor) -> Tensor:
    """Return `x` in 32 bits."""
    return x.float()


def keep_dtype(output: Any) -> Any:
    """Return the logits as they are, in the place of `to_float32`."""
    return output
