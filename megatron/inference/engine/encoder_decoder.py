"""T5 generation: encoder, decode steps with a KV cache, sampling and beam search of many texts."""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.checkpointing.resharding.sharded_tensor import ParameterState
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.t5.layers import (
    DECODER_TOKENS,
    PositionEmbeddingPipe,
    PositionsPipe,
    RelativePositionsPipe,
    t5_layers,
)
from megatron.inference.engine.beam_search import BeamSearchRequest, beam_search
from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.device import to_device, without_cudnn_attention
from megatron.inference.engine.encoder_runner import EncoderRunner, Value
from megatron.inference.engine.sampling import SamplingParams, mask_nonfinite, sample_tokens
from megatron.model.layers.attention_kernels import Attend, Mask, Weighing
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import in_turn
from megatron.model.layers.positions import RelativePositions
from megatron.model.layers.transformer_block import ParallelTransformerDecoderLayerPipe
from megatron.tensor_parallel.process_groups import Groups

_ENCODER = 4  # entries of the list up to the encoder's norm, without the transformer layers


class EncoderDecoderRunner(EncoderRunner):
    """Runs a T5: the encoder once for a batch of texts, then one decode step for each new token.

    Args:
        spec: the network.
        weights: unsharded, by name.
        groups: this rank's process groups, of one pipeline stage.
        dtype: of weights and activations.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, ParameterState],
        *,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(spec, weights, layers=t5_layers, groups=groups, dtype=dtype, device=device)
        split = spec.num_layers + _ENCODER
        end = split + 2 + spec.num_decoder_layers
        calls = self.model.calls
        self._encoder, self._blocks, self._head = (
            calls[:split],
            calls[split + 2 : end],
            calls[end + 1 :],
        )
        self._words = self.model.tied_modules["embed"].get_submodule("word_embeddings")
        self._positions = cast(PositionsPipe, calls[split + 1])
        self.cache = DecoderCache(cast(list[ParallelTransformerDecoderLayerPipe], self._blocks))

    @property
    def max_length(self) -> int:
        """Most tokens of a decoder's text, with the BOS token."""
        return self.cache.capacity + 1

    @torch.inference_mode()
    @without_cudnn_attention()
    def encode(self, sources: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Run the encoder, and begin a decoder's text for each of `sources`.

        Args:
            new_tokens: most tokens of each.

        Communication: every rank must call this, in step.
        """
        longest = max(map(len, sources))
        rows = [[*source, *[0] * (longest - len(source))] for source in sources]
        tokens_bs = to_device(rows, self.device)
        batch = {
            "tokens": tokens_bs,
            "lengths": to_device([*map(len, sources)], self.device),
            DECODER_TOKENS: tokens_bs[:, :0],
        }
        self.cache.start(in_turn(self._encoder, batch), new_tokens)

    def prefill(self, sequences: Sequence[Sequence[int]], prefixes: Sequence[int]) -> Tensor:
        """Run the BOS token, with which each decoder's text begins; see `decode`."""
        return self.decode([tokens[0] for tokens in sequences], [0] * len(sequences))

    @torch.inference_mode()
    @without_cudnn_attention()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Decode step: run one more token of each text, at the same position in all of them.

        Shapes: returns the hidden states, the input of the head, [b, 1, h].
        Communication: every rank must call this, in step.
        """
        cache, position, where = self.cache, positions[0], self._positions
        cache.position, cache.bias = position, None
        x_b1h = self._words(to_device(tokens, self.device)[:, None])
        if isinstance(where, PositionEmbeddingPipe):
            x_b1h = x_b1h + where.shared_positions.weight[position]
        elif isinstance(where, RelativePositionsPipe):
            relative = RelativePositions(
                where.weight, max_distance=self.spec.relative_max_distance, bidirectional=False
            )
            cache.bias = relative.bias(1, position + 1)
        inputs = where.to_layers(cache.encoded, x_b1h)
        x_1bh: Tensor = in_turn(self._blocks, inputs).hidden
        return x_1bh.transpose(0, 1)

    def run_on_last_stage(self, function: Callable[[], Value]) -> Value:
        """Call `function` on every rank; return the first rank's result."""
        return self.broadcast(function())

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of the tokenizer's vocabulary.

        Shapes: features [n, h] -> [n, V] float32, without the padded tokens.
        Communication: an all-gather over the tensor group.
        """
        return self.full_logits(in_turn(self._head, features[:, None])[:, 0])


class DecoderCache:
    """KV cache of a T5's decoder: its own tokens, and the encoder's output projected once.

    Puts itself between the layers: self-attention reads the tokens so far from here, and
    cross-attention keys and values that were computed when the text began.

    Args:
        blocks: layers of the decoder.
    """

    def __init__(self, blocks: Sequence[ParallelTransformerDecoderLayerPipe]):
        self.position, self.capacity = 0, 0
        self.bias: Tensor | None = None  # of the decode step's scores, [1, a, 1, tokens so far]
        self._own, self._cross = [], []
        for block in blocks:
            self._own.append(CachedSelfAttention(block.self_attention.core_attention, self))
            self._cross.append(KeptProjection(block.inter_attention.key_value))
            block.self_attention.core_attention = self._own[-1]
            block.inter_attention.key_value = self._cross[-1]

    def start(self, encoded: LayerInput, new_tokens: int) -> None:
        """Drop all texts, and begin one for each of the encoder's.

        Shapes: encoded.hidden [s, b, h], encoded.attention_span [b, 1, 2].
        """
        self.encoded = LayerInput(
            encoded.hidden, encoder_hidden=encoded.hidden, encoder_span=encoded.attention_span
        )
        self.capacity = new_tokens
        for own, cross in zip(self._own, self._cross, strict=True):
            own.clear()
            cross.keep(encoded.hidden)

    def reorder(self, rows: Sequence[int], length: int) -> None:
        """Make the text of rows[i] that of row i, for all i; others are dropped."""
        spans_b12 = self.encoded.encoder_span
        assert spans_b12 is not None, "the encoder's texts have spans"
        if list(rows) == list(range(len(spans_b12))):
            return
        order = to_device(rows, spans_b12.device)
        self.encoded = self.encoded._replace(encoder_span=spans_b12[order])
        for own, cross in zip(self._own, self._cross, strict=True):
            own.reorder(order)
            cross.reorder(order)


class CachedSelfAttention:
    """Core attention of one decoder layer, from a new token of each text to all tokens so far.

    Args:
        attend: the attention kernel.
        cache: has the position of the new token.

    Shapes: query [b, a, 1, d], key and value [b, g, 1, d] -> [b, a, 1, d].
    """

    def __init__(self, attend: Attend, cache: DecoderCache):
        self.attend, self.cache = attend, cache
        self._kept: list[Tensor] = []

    def clear(self) -> None:
        """Drop all tokens."""
        self._kept = []

    def reorder(self, order: Tensor) -> None:
        """Make row order[i] row i."""
        self._kept = [x[order] for x in self._kept]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: Weighing) -> Tensor:
        """Append the key and the value, and attend to all of them."""
        cache, new = self.cache, (key, value)
        if not self._kept:
            self._kept = [x.new_zeros(*x.shape[:2], cache.capacity, x.size(3)) for x in new]
        for kept, x in zip(self._kept, new, strict=True):
            kept[:, :, cache.position] = x[:, :, 0]
        keys, values = (x[:, :, : cache.position + 1] for x in self._kept)
        seen = replace(how, mask=Mask(causal=False), bias=cache.bias)
        return self.attend(query, keys, values, seen)


class KeptProjection(nn.Module):
    """Keys and values of cross-attention, computed once from the encoder's output and then kept.

    Args:
        key_value: the linear layer of cross-attention.

    Shapes: encoder's output [s, b, h] -> [s, b, 2 * g * d].
    """

    def __init__(self, key_value: nn.Module):
        super().__init__()
        self.key_value = key_value

    def keep(self, encoder_sbh: Tensor) -> None:
        """Compute and keep the projection of the encoder's output."""
        self._kept: Tensor = self.key_value(encoder_sbh)

    def reorder(self, order: Tensor) -> None:
        """Make text order[i] text i."""
        self._kept = self._kept[:, order]

    def forward(self, encoder_sbh: Tensor) -> Tensor:
        """Return what was kept."""
        return self._kept


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Tokens of the decoder, without BOS and EOS; `is_finished` if EOS came after them."""

    tokens: tuple[int, ...]
    is_finished: bool


@dataclass(frozen=True, kw_only=True)
class TextToTextRequest(ExclusiveRequest[Generated]):
    """Texts of the encoder, and how the decoder's texts are chosen.

    Args:
        sources: tokens of each text.
        bos: token that the decoder begins with.
        eos: token that ends its text.
        max_new_tokens: most tokens to generate for each.
        sampling: ignored in a beam search.
        seeds: of the random draws of each text.
        rows: most texts at once.
        beam_width: beams of a search; None for sampling.
        length_penalty: of a search; see `BeamSearchRequest`.
    """

    sources: tuple[tuple[int, ...], ...]
    bos: int
    eos: int
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seeds: tuple[str, ...]
    rows: int
    beam_width: int | None = None
    length_penalty: float = 1.0

    @property
    def prompt(self) -> tuple[int, ...]:  # type: ignore[override]
        """All tokens of the sources."""
        return tuple(token for source in self.sources for token in source)

    def problems(self, engine: Any) -> Iterator[str]:
        """Yield nothing: texts are checked when they are encoded."""
        yield from ()

    def run(self, runner: Any) -> Generator[None, None, list[Generated]]:
        """Generate the decoder's texts, in the order of the sources. Yields after each token.

        Raises:
            MegatronError: the logits are NaN or infinite, on all ranks alike.
        """
        found: list[Generated] = []
        if self.beam_width is not None:
            for source in self.sources:
                runner.encode([source], self.max_new_tokens)
                found.append((yield from self._likeliest(runner)))
            return found
        for first in range(0, len(self.sources), self.rows):
            rows = slice(first, first + self.rows)
            found += yield from self._sampled(runner, rows)
        return found

    def _likeliest(self, runner: EncoderDecoderRunner) -> Generator[None, None, Generated]:
        """Search the decoder's text of the source that is encoded."""
        request = BeamSearchRequest(
            prompt=(self.bos,),
            width=self.beam_width or 1,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=frozenset({self.eos}),
            length_penalty=self.length_penalty,
        )
        best, *_ = yield from beam_search(cast(Any, runner), request)
        return self._generated(best.tokens)

    def _sampled(
        self, runner: EncoderDecoderRunner, rows: slice
    ) -> Generator[None, None, list[Generated]]:
        """Sample the decoder's texts of some sources; texts that have ended leave the batch."""
        sources = self.sources[rows]
        draws = [random.Random(seed) for seed in self.seeds[rows]]
        texts = [[self.bos] for _ in sources]
        running = [*range(len(sources))]
        runner.encode(sources, self.max_new_tokens)
        for position in range(self.max_new_tokens):
            last = [texts[i][-1] for i in running]
            logits = runner.logits(runner.decode(last, [position] * len(last))[:, 0])
            new = self._next_tokens(runner, logits, [draws[i].random() for i in running], position)
            for i, token in zip(running, new, strict=True):
                texts[i].append(token)
            left = [row for row, token in enumerate(new) if token != self.eos]
            running = [running[row] for row in left]
            yield
            if not running:
                break
            runner.cache.reorder(left, position + 1)
        return [self._generated(text[1:]) for text in texts]

    def _next_tokens(
        self, runner: EncoderDecoderRunner, logits: Tensor, draws: Sequence[float], position: int
    ) -> list[int]:
        """Sample a token for each text; return those of the first rank."""
        logits, is_finite_b1 = mask_nonfinite(logits)
        sampled = sample_tokens(
            logits,
            [self.sampling] * len(draws),
            draws,
            [position] * len(draws),
            lambda tokens_b: is_finite_b1,
        )
        if not all(is_finite for _, is_finite in sampled):
            raise runner.nonfinite_logits_error()
        return runner.broadcast([int(token) for token, _ in sampled])

    def _generated(self, tokens: Sequence[int]) -> Generated:
        """Return generated `tokens` without the EOS token that may end them."""
        is_finished = tokens[-1] == self.eos
        return Generated(tokens=tuple(tokens[: len(tokens) - is_finished]), is_finished=is_finished)
