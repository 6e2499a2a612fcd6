"""Embeddings of tokens, positions and token types; logits over a tied table, and their bias."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.attention_kernels import soft_capped
from megatron.model.layers.deferred_logits import DeferredLogits, defer_logits
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.positions import own_position_embedding
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.collectives import copy_to_tensor_parallel, gather_sequence
from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import copying_linear, gathering_linear
from megatron.tensor_parallel.sharding import exact_quotient, mark_sharded


class EmbeddingPipe(nn.Module):
    """Token embedding, scaled or normed, plus learned position and token type (segment), then dropout.

    Positions that layers need are passed on with the result, and so is the attention span of a
    batch that has one.

    Args:
        spec: the network.
        parts: what its layers are built with.
        passes: fields of the batch that later layers read.

    Shapes: tokens, positions, token_types [b, s] int64, attention_span [b, s or 1, 2] int64 ->
        hidden [b, s, h].
    Communication: one all-reduce of [b, s, h] over `group` forward.
    Randomness: draws from the ordinary stream, the same on all tensor-parallel ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: LayerParts,
        *,
        num_token_types: int = 0,
        passes: Sequence[str] = (),
    ):
        super().__init__()
        self.spec, self.num_token_types, self.passes = spec, num_token_types, passes
        self.word_embeddings = VocabParallelEmbedding(
            spec.vocabulary.padded_vocab_size, spec.hidden_size, **parts.division
        )
        if spec.norm.embed_layernorm:
            # A part of the table by name, as in BLOOM's checkpoints.
            self.word_embeddings.add_module("norm", norm_layer(spec, kernels=parts.kernels).build())
        if spec.positions.position_embedding == "learned":
            self.position_embeddings = nn.Embedding(
                spec.positions.max_position_embeddings, spec.hidden_size
            )
        if num_token_types:
            self.tokentype_embeddings = nn.Embedding(num_token_types, spec.hidden_size)
        self.own_positions = own_position_embedding(spec, number=0)

    def forward(self, batch: Batch) -> LayerInput:
        tokens_bs, positions_bs = batch["tokens"], batch["positions"]
        x_bsh = embed_tokens(self.word_embeddings, tokens_bs, self.spec)
        if self.spec.norm.embed_layernorm:
            x_bsh = self.word_embeddings.get_submodule("norm")(x_bsh)
        if self.spec.positions.position_embedding == "learned":
            own_bs = self.word_embeddings.own_tokens(positions_bs)
            x_bsh = x_bsh + self.position_embeddings(own_bs)
        if self.num_token_types:
            own_bs = self.word_embeddings.own_tokens(batch["token_types"])
            x_bsh = x_bsh + self.tokentype_embeddings(own_bs)
        if self.own_positions:
            x_bsh = self.own_positions.embed(x_bsh, positions_bs)
        x_bsh = F.dropout(x_bsh, self.spec.hidden_dropout, self.training)
        if self.spec.fp32_residual:
            x_bsh = x_bsh.float()
        if torch.is_grad_enabled() and not x_bsh.requires_grad:
            # Of a frozen table. Layers that are recomputed get gradients only if their input does.
            x_bsh.requires_grad_()
        carried_bs = positions_bs if self.spec.positions.reach_attention else None
        passed = {name: batch[name] for name in self.passes}
        return LayerInput(x_bsh, carried_bs, batch.get("attention_span"), batch=passed or None)


def embed_tokens(table: VocabParallelEmbedding, tokens_bs: Tensor, spec: ModelSpec) -> Tensor:
    """Return the rows of a token table, scaled if the network does that.

    Shapes: tokens_bs [b, s] int64 -> [b, s, h].
    Communication: one all-reduce of [b, s, h] forward.
    """
    x_bsh: Tensor = table(tokens_bs)
    if spec.vocabulary.scaled_embedding:
        # The factor is rounded to the dtype of the activations, as published weights expect.
        x_bsh = x_bsh * x_bsh.new_full((), spec.hidden_size**0.5)
    if spec.vocabulary.embedding_multiplier != 1:
        x_bsh = x_bsh * spec.vocabulary.embedding_multiplier
    return x_bsh


class OutputTable(nn.Module):
    """A token table for the head: the last stage's copy of the embedding, or an untied one.

    Args:
        sequence_parallel: whether the ranks of `group` divide the sequence.
        form: further arguments of `tied_logits`.
    """

    def __init__(
        self,
        *,
        padded_vocab_size: int,
        hidden_size: int,
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        **form: Any,
    ):
        super().__init__()
        self.form = form
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, hidden_size, group=group, sequence_parallel=sequence_parallel
        )


class OutputEmbeddingPipe(OutputTable):
    """Logits by a token table.

    Shapes: x_bsh [b, s, h] -> [b, s, V/t].
    Communication: none forward; one all-reduce of [b, s, h] backward.
    """

    def forward(self, x_bsh: Tensor) -> Tensor | DeferredLogits:
        return tied_logits(self, x_bsh, **self.form)


class TokenTable(Protocol):
    """A layer with a token table."""

    word_embeddings: VocabParallelEmbedding


def tied_logits(
    layer: TokenTable,
    x_bsh: Tensor,
    *,
    divisor: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
) -> Tensor | DeferredLogits:
    """Return the product of `x_bsh` with the token table of `layer`.

    Args:
        divisor: of the logits.
        softcap: bound of the logits, which are 32-bit numbers then; 0 for none.
        chunk_tokens: leaves the logits to the loss, which computes them for this many tokens at
            a time; 0 returns the logits.

    Shapes: x_bsh [b, s, h] -> [b, s, V/t].
    Communication: none forward; one all-reduce of [b, s, h] backward.
    """
    table = layer.word_embeddings
    if divisor != 1:
        x_bsh = x_bsh / divisor  # fewer numbers than the logits
    if chunk_tokens:
        if table.sequence_parallel:
            x_bsh = gather_sequence(x_bsh, 1, table.group)
        else:
            x_bsh = copy_to_tensor_parallel(x_bsh, table.group)
        return defer_logits(x_bsh, table.weight, softcap=softcap, chunk_tokens=chunk_tokens)
    if table.sequence_parallel:
        logits_bsv = gathering_linear(x_bsh, table.weight, None, dim=1, group=table.group)
    else:
        logits_bsv = copying_linear(x_bsh, table.weight, None, group=table.group)
    if not softcap:
        return logits_bsv
    return soft_capped(logits_bsv.to(torch.promote_types(logits_bsv.dtype, torch.float32)), softcap)


class OutputBiasPipe(nn.Module):
    """Bias of the logits, divided over the tensor-parallel ranks like the rows of the token table.

    Shapes: logits [b, s, V/t] -> the same.
    """

    def __init__(self, *, padded_vocab_size: int, group: dist.ProcessGroup):
        super().__init__()
        self.output_bias = vocabulary_bias(padded_vocab_size, group)

    def forward(self, logits_bsv: Tensor | DeferredLogits) -> Tensor | DeferredLogits:
        return add_output_bias(logits_bsv, self.output_bias)


def add_output_bias(logits_bsv: Tensor | DeferredLogits, bias_v: Tensor) -> Tensor | DeferredLogits:
    """Return the logits with a bias for each token of the vocabulary."""
    if isinstance(logits_bsv, DeferredLogits):
        return logits_bsv.with_bias(bias_v)
    return logits_bsv + bias_v


def vocabulary_bias(padded_vocab_size: int, group: dist.ProcessGroup) -> nn.Parameter:
    """Return a bias of 0 for each token, divided over `group` like the rows of the token table."""
    rows = exact_quotient(padded_vocab_size, group.size(), "padded_vocab_size")
    return mark_sharded(nn.Parameter(torch.zeros(rows)), 0, group)
