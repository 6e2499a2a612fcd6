"""Retro: GPT with chunked cross-attention (CCA) to retrieved neighbors, as a list of layers.

Letters: m tokens of a chunk, c chunks of a sample, k neighbors of a chunk, r tokens of a neighbor. The
batch of neighbors is e = b * c * k, of chunks n = b * c; sample by sample, then chunk by chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.retro.flags import RetroSpec
from megatron.model.gpt import gpt_batch, gpt_layers
from megatron.model.layers.attention import ParallelCrossAttention, Regrouping, keep
from megatron.model.layers.embedding import EmbeddingPipe
from megatron.model.layers.layer_input import LayerInput, PassInput, Shared, once
from megatron.model.layers.layer_list import Layer, Step
from megatron.model.layers.norms import norm_layer, residual_and_norm
from megatron.model.layers.parts import LayerParts, once_per_sequence
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.sharding import mark_added

FIRST_LAYER = 3
"""Index of the first transformer layer in the list of GPT."""

PROMPT_LENGTHS = "prompt_lengths"
"""Field of a batch whose samples are a prompt, which retrieved its neighbors, and an answer: tokens of
the prompt. Without it chunks of equal length have retrieved them."""


def retro_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the network: a batch with tokens and neighbors in, logits_bsv [b, s, V/t] out.

    The list is GPT's with some layers replaced, so that a GPT's checkpoint has the names of all
    weights except the encoder's and cross-attention's (Retro-fitting).

    Embedded neighbors travel down to the first Retro layer, which encodes them; the encoder's output
    travels to the last one.

    No layer has experts.
    """
    steps = gpt_layers(spec, parts)
    embedding = _layer_of(steps[1])
    plain = embedding.carried or ()
    neighbors = ("encoder_hidden", "encoder_span")
    fields = [name for name in LayerInput._fields if name in (*plain, *neighbors)]
    if PROMPT_LENGTHS in parts.batch_fields:
        fields.append(PROMPT_LENGTHS)
    steps[1] = replace(embedding, cls=RetroEmbeddingPipe, carried=tuple(fields))
    retro = spec.part(RetroSpec)
    for number in retro.retro_layers:
        index = FIRST_LAYER + number - 1
        layer = _layer_of(steps[index])
        ends = number == retro.retro_layers[-1]
        steps[index] = replace(
            layer,
            cls=ParallelTransformerRetroLayerPipe,
            carried=plain if ends else None,
        )
    if not retro.final_norm:
        steps[FIRST_LAYER + spec.num_layers + 1] = no_final_norm
    return steps


def retro_batch(spec: ModelSpec, tokens: PassInput) -> Batch:
    """Return the batch of a pass of generation: each prompt is one chunk, which has neighbors."""
    batch = gpt_batch(spec, tokens)
    if tokens.contexts is None or tokens.context_lengths is None or tokens.prompt_lengths is None:
        # Every token of a decode step is after its prompt.
        return {**batch, PROMPT_LENGTHS: tokens.tokens.new_zeros(len(tokens.tokens))}
    length = spec.part(RetroSpec).retro_retrieved_length
    neighbors_bkr = tokens.contexts[..., :length]
    padded_bkr = F.pad(neighbors_bkr, (0, length - neighbors_bkr.size(2)))
    return {
        **batch,
        "neighbor_tokens": padded_bkr[:, None],
        "neighbor_lengths": tokens.context_lengths.clamp(max=length)[:, None],
        PROMPT_LENGTHS: tokens.prompt_lengths,
    }


def _layer_of(step: Step) -> Layer:
    if not isinstance(step, Layer):
        raise TypeError(f"{step} is not a layer")
    return step


def no_final_norm(x_bsh: Tensor) -> Tensor:
    """Return the activations as they are, in the place of the final norm."""
    return x_bsh


class RetroEmbeddingPipe(EmbeddingPipe):
    """Embedding of tokens and of retrieved neighbors, whose positions begin at 0 in each neighbor.

    In generation the lengths of neighbors are kept for decode steps, where neighbors have no tokens.

    Shapes: tokens, positions [b, s], neighbor_tokens [b, c, k, r], neighbor_lengths [b, c, k] int64,
        perhaps prompt_lengths [b] int64, which stay
        -> hidden [b, s, h], encoder_hidden [r, e, h], encoder_span [e, 1, 2].
    Communication: two all-reduces, of [b, s, h] and of [e, r, h], over `group` forward.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__(spec, parts)
        count = spec.part(RetroSpec).retro_num_neighbors
        self.lengths = parts.state(count, dtype=torch.int64)

    def forward(self, batch: Batch) -> LayerInput:
        lengths_bk = once_per_sequence(self.lengths, lambda: batch["neighbor_lengths"].flatten(1))
        lengths_e = lengths_bk.flatten()
        none_er = lengths_e.new_zeros(len(lengths_e), 0)
        tokens_er = (
            batch["neighbor_tokens"].flatten(0, 2) if "neighbor_tokens" in batch else none_er
        )
        inputs = super().forward(batch)
        positions_er = torch.arange(tokens_er.size(1), device=tokens_er.device).expand_as(tokens_er)
        neighbors = super().forward({"tokens": tokens_er, "positions": positions_er})
        return inputs.replace(
            encoder_hidden=neighbors.hidden.transpose(0, 1).contiguous(),
            encoder_span=_span_to(lengths_e),
            batch={name: batch[name] for name in (PROMPT_LENGTHS,) if name in batch} or None,
        )


class CrossAttentionLayer(ParallelTransformerLayerPipe):
    """Base of layers with cross-attention between self-attention and MLP, after a separate norm.

    The other weights have the names of a GPT layer. Ranks may divide the sequence into `parts`.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int = 1):
        super().__init__(spec, parts, number=number)
        self.own = spec.part(RetroSpec)
        contexts = self.own.retro_num_neighbors, self.own.retro_retrieved_length
        self.inter_attention = ParallelCrossAttention(spec, parts, number=number, contexts=contexts)
        self.pre_inter_attention_layernorm = norm_layer(spec, kernels=parts.kernels).build()
        mark_added(self.inter_attention)
        mark_added(self.pre_inter_attention_layernorm)
        divided = parts.sequence_parallel
        self.parts, self.part = (parts.group.size(), parts.group.rank()) if divided else (1, 0)

    def self_attended(self, inputs: LayerInput) -> tuple[Tensor, Tensor]:
        """Return the residual stream after self-attention, and its norm for cross-attention."""
        x_sbh, normed_sbh = residual_and_norm(self.input_layernorm, inputs.hidden)
        y_sbh, bias = self.attend(inputs, normed_sbh)
        norm = self.pre_inter_attention_layernorm
        return self._add_norm(norm, y_sbh, bias, x_sbh, normed_sbh)

    def to_mlp(self, y_sbh: Tensor, bias: Tensor | None, residual_sbh: Tensor) -> Tensor:
        """Add the outputs of cross-attention, then of the MLP, to the residual stream."""
        norm = self.post_attention_layernorm
        x_sbh, normed_sbh = self._add_norm(norm, y_sbh, bias, residual_sbh, residual_sbh)
        y_sbh, bias = self.mlp(normed_sbh)
        return self._add(y_sbh, bias, x_sbh, normed_sbh)


class ParallelTransformerRetroLayerPipe(CrossAttentionLayer):
    """Retro layer: self-attention, chunked cross-attention (CCA) to retrieved neighbors, MLP.

    The last token of chunk i and the following m - 1 tokens attend to the neighbors of chunk i, so
    that no token sees neighbors of later tokens; the first m - 1 tokens attend to none. If m
    does not divide the sequence, the first chunk is the short one. A chunk without neighbors gets
    zeros, the bias included. The gate multiplies the output of cross-attention.

    In decode steps neighbors have no tokens: their keys and values are kept.

    If a batch has the lengths of prompts, each prompt is the one chunk of its sample (c = 1): its
    last token and all tokens after it attend to its neighbors.

    The first Retro layer has the encoder of neighbors, the last one drops its output.

    Padding of neighbors is no key: rows of real tokens come first, so that a span of positions says
    which those are. The order of rows has no effect on attention without positions.

    Shapes: hidden [s, b, h] -> the same; encoder_hidden: embedded neighbors [r, e, h] -> encoded ones
        in the first Retro layer; encoder_span [e, 1, 2] stays.
    Communication: three all-reduces of [s, b, h] over the group forward; backward three, and one of
        [r, e, h]; the first layer also the encoder's all-reduces.
    Source: arXiv:2112.04426, section 2.4; arXiv:2304.06762, section 3.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int):
        super().__init__(spec, parts, number=number)
        self.encoder = None
        if number == self.own.retro_layers[0]:
            self.encoder = RetroEncoder(spec, parts.without_states)
            mark_added(self.encoder)
            self.replaces = ("hidden", "encoder_hidden")
        if number == self.own.retro_layers[-1]:
            self.drops = ("encoder_hidden", "encoder_span", "batch")

    def forward(self, inputs: LayerInput) -> LayerInput:
        context, span_e12 = inputs.encoder_hidden, inputs.encoder_span
        if context is None or span_e12 is None:
            raise ValueError("a Retro layer needs retrieved neighbors")
        x_sbh, normed_sbh = self.self_attended(inputs)
        if self.encoder is not None and len(context):  # decode steps have the keys of its output
            context = self.encoder(context, span_e12, normed_sbh, inputs)
        y_sbh = self.attend_neighbors(normed_sbh, context, span_e12, inputs)
        hidden = self.to_mlp(y_sbh, None, x_sbh)
        if self.drops:
            return inputs.replace(hidden=hidden, **dict.fromkeys(self.drops))
        return inputs.replace(hidden=hidden, encoder_hidden=context)

    def attend_neighbors(
        self, normed_sbh: Tensor, context: Tensor, span_e12: Tensor, inputs: LayerInput
    ) -> Tensor:
        """Return the output of chunked cross-attention for the residual stream, [s, b, h]."""
        shared: Shared = {} if inputs.shared is None else inputs.shared
        s, b, k = normed_sbh.size(0) * self.parts, normed_sbh.size(1), self.own.retro_num_neighbors
        n = context.size(1) // k
        span_n12 = once(shared, "Retro context span", lambda: _span_of_chunks(span_e12, n))

        def rows(projected_rew: Tensor) -> Tensor:
            r = len(projected_rew)
            order = once(shared, "Retro context order", lambda: _real_first(span_e12, r, n))
            found = to_rows(projected_rew, k)
            return found.gather(0, order[..., None].expand_as(found))

        prompts_b = _prompts_of(inputs)
        if prompts_b is None:
            chunks = Chunks(s, n // b, self.own.retro_chunk_length)
            regrouping = Regrouping(chunks.of_queries, rows, chunks.to_tokens)
            attends_sb = once(shared, "Retro tokens", lambda: chunks.attending(span_n12))
        else:
            regrouping = Regrouping(keep, rows, keep)
            positions_s1 = torch.arange(s, device=prompts_b.device)[:, None]
            attends_sb = (positions_s1 >= prompts_b - 1) & (span_n12[:, 0, 1] > 0)
        # The encoder ends without a norm, in the dtype of its residual stream.
        context = context.to(normed_sbh.dtype)
        y, bias = self.inter_attention(
            normed_sbh, context, span_n12, shared=shared, regrouping=regrouping
        )
        own_sb = attends_sb.chunk(self.parts)[self.part]
        gate_sb1 = self.own.retro_attention_gate * own_sb.to(y.dtype)[..., None]
        return (y if bias is None else y + bias) * gate_sb1


@dataclass(frozen=True)
class Chunks:
    """The c chunks of m tokens of s tokens, of which the first is the short one.

    Shapes: x_sbw [s, b, w]; a chunk each x_mnw [m, n, w].
    """

    s: int
    c: int
    m: int

    @property
    def first(self) -> int:
        """Return the number of tokens of the first chunk; other chunks have m each.

        Raises:
            ValueError: s tokens are not c chunks.
        """
        first = self.s - (self.c - 1) * self.m
        if not 0 < first <= self.m:
            raise ValueError(
                f"{self.s} tokens are not {self.c} chunks of {self.m}, or of less in the first one"
            )
        return first

    def of_keys(self, x_sbw: Tensor) -> Tensor:
        """Return the chunks; the first one is padded after its tokens."""
        padding = F.pad(x_sbw[: self.first], (0, 0, 0, 0, 0, self.m - self.first))
        return to_chunks(torch.cat([padding, x_sbw[self.first :]]), self.c)

    def of_queries(self, x_sbw: Tensor) -> Tensor:
        """Return for each chunk the tokens that attend to its neighbors, padded after the last."""
        taken = x_sbw[self.first - 1 :]
        padded = F.pad(taken, (0, 0, 0, 0, 0, self.c * self.m - len(taken)))
        return to_chunks(padded, self.c)

    def to_tokens(self, x_mnw: Tensor) -> Tensor:
        """Invert `of_queries`; tokens that attend to no neighbors get zeros."""
        x = x_mnw.unflatten(1, (-1, self.c)).permute(2, 0, 1, 3).flatten(0, 1)
        return F.pad(x[: self.s - self.first + 1], (0, 0, 0, 0, self.first - 1, 0))

    def attending(self, span_n12: Tensor) -> Tensor:
        """Return whether each token attends to neighbors, [s, b]; `span_n12`: the real ones."""
        has_neighbors_1n1 = (span_n12[:, 0, 1:] > 0)[None].expand(self.m, -1, -1)
        return self.to_tokens(has_neighbors_1n1)[..., 0]

    def lengths(self, n: int, device: torch.device) -> Tensor:
        """Return the number of real tokens of each of n chunks of several samples."""
        stops_n = torch.full((n,), self.m, device=device)
        stops_n[:: self.c] = self.first
        return stops_n


class RetroEncoder(nn.Module):
    """Bidirectional encoder of retrieved neighbors; its first layer attends to the retrieving chunk.

    It has separate dropout rates, and no final norm. Padding of a neighbor is no key.

    Shapes: neighbors [r, e, h], span [e, 1, 2], chunk states [s, b, h] -> [r, e, h].
    Communication: as many all-reduces as layers have, of [r, e, h].
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.spec, self.own = spec, spec.part(RetroSpec)
        encoder_spec = replace(
            spec,
            hidden_dropout=self.own.retro_encoder_hidden_dropout,
            attention=replace(
                spec.attention,
                attention_dropout=self.own.retro_encoder_attention_dropout,
                window=0,
                full_attention_layers=(),
            ),
        )
        # Into which ranks divide sequences.
        self.parts = parts.group.size() if parts.sequence_parallel else 1
        self.layers = nn.ModuleList(
            (RetroEncoderLayer if number == 1 else ParallelTransformerLayerPipe)(
                encoder_spec, parts, number=number
            )
            for number in range(1, self.own.retro_encoder_layers + 1)
        )

    def forward(
        self, neighbors_reh: Tensor, span_e12: Tensor, states_sbh: Tensor, inputs: LayerInput
    ) -> Tensor:
        (r, e), s = neighbors_reh.shape[:2], len(states_sbh)
        r, s = r * self.parts, s * self.parts
        positions_er = None
        if self.spec.positions.reach_attention:
            positions_er = torch.arange(r, device=neighbors_reh.device).expand(e, r)
        n, b = e // self.own.retro_num_neighbors, states_sbh.size(1)
        lengths_n = _prompts_of(inputs)
        if lengths_n is None:
            chunks = Chunks(s, n // b, self.own.retro_chunk_length)
            lengths_n = chunks.lengths(n, states_sbh.device)
        neighbors = LayerInput(
            neighbors_reh,
            positions=positions_er,
            attention_span=span_e12,
            encoder_hidden=states_sbh,
            encoder_span=_span_to(lengths_n),
            batch=inputs.batch,
            shared=once({} if inputs.shared is None else inputs.shared, "Retro encoder", dict),
        )
        for layer in self.layers:
            neighbors = layer(neighbors)
        return neighbors.hidden


class RetroEncoderLayer(CrossAttentionLayer):
    """First layer of the Retro encoder: each neighbor attends to the chunk that retrieved it.

    The residual of cross-attention is the stream; with `retro_normed_residual` its norm, as in
    Megatron core.

    Shapes: hidden [r, e, h], encoder_hidden: the states of all tokens [s, b, h] -> hidden [r, e, h].
    Communication: three all-reduces of [r, e, h] over the group forward; backward three, and one of
        [s, b, h].
    """

    def forward(self, inputs: LayerInput) -> LayerInput:
        states_sbh = inputs.encoder_hidden
        if states_sbh is None:
            raise ValueError("the first layer of the encoder needs the states of chunks")
        x, normed = self.self_attended(inputs)
        k, b, s = self.own.retro_num_neighbors, states_sbh.size(1), len(states_sbh) * self.parts
        context: Callable[[Tensor], Tensor] = keep
        if _prompts_of(inputs) is None:
            c = normed.size(1) // k // b
            context = Chunks(s, c, self.own.retro_chunk_length).of_keys
        regrouping = Regrouping(lambda q: to_rows(q, k), context, lambda y: from_rows(y, k))
        y, bias = self.inter_attention(
            normed, states_sbh, inputs.encoder_span, regrouping=regrouping
        )
        residual = normed if self.own.retro_normed_residual else x
        return inputs.replace(hidden=self.to_mlp(y, bias, residual))


def to_chunks(x_sbh: Tensor, c: int) -> Tensor:
    """Return c equal chunks of the sequence as a batch: [c*m, b, h] -> [m, n, h]."""
    return x_sbh.unflatten(0, (c, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def to_rows(x_reh: Tensor, k: int) -> Tensor:
    """Return the tokens of the k neighbors of each chunk, concatenated: [k*r, n, h]."""
    return x_reh.unflatten(1, (-1, k)).permute(2, 0, 1, 3).flatten(0, 1)


def from_rows(x_qnw: Tensor, k: int) -> Tensor:
    """Invert `to_rows`: [k*r, n, w] -> [r, e, w]."""
    return x_qnw.unflatten(0, (k, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _prompts_of(inputs: LayerInput) -> Tensor | None:
    """Return the lengths of prompts; None where chunks of equal length have retrieved neighbors."""
    return (inputs.batch or {}).get(PROMPT_LENGTHS)


def _real_first(span_e12: Tensor, r: int, n: int) -> Tensor:
    """Return the order [k*r, n] of a chunk's rows in which real tokens come first."""
    positions_r = torch.arange(r, device=span_e12.device)
    is_padding_nq = (positions_r >= span_e12[:, 0, 1:]).view(n, -1)
    return is_padding_nq.to(torch.uint8).argsort(dim=1, stable=True).T.contiguous()


def _span_to(stops_n: Tensor) -> Tensor:
    """Return spans [n, 1, 2] of the positions from 0 to `stops_n`."""
    return torch.stack([torch.zeros_like(stops_n), stops_n], -1)[:, None]


def _span_of_chunks(span_e12: Tensor, n: int) -> Tensor:
    """Return the span of real rows of each chunk, [n, 1, 2], from the spans of its neighbors."""
    return span_e12.view(n, -1, 2).sum(1, keepdim=True)
