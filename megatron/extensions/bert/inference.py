"""A trained BERT: fill-mask, sentence scores, sentence order, sentence embeddings."""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.common.errors import DataError, raise_if_any
from megatron.config.inference.generation import DecodingConfig
from megatron.extensions.bert.flags import BertSpec
from megatron.extensions.bert.layers import BertOutput, bert_layers
from megatron.extensions.bert.objective import bert_batch
from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.encoder_runner import EncoderRunner
from megatron.inference.loading.loaded_model import prepare_encoder
from megatron.inference.loading.model_source import ModelSource
from megatron.inference.runner.device import without_cudnn_attention
from megatron.model.layers.layer_list import in_turn
from megatron.tensor_parallel.broadcast import Batch
from megatron.tokenizer.types.tokenizer import Tokenizer

MASK = "[MASK]"
_BEHIND_NORM = 5  # entries of the list up to the final norm, without the transformer layers


@dataclass(frozen=True)
class Candidate:
    """A token for a [MASK], and its probability."""

    token: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Result of a BERT for a text: candidates for its masks, or its score without one.

    Args:
        masks: candidates for each [MASK].
        log_likelihood: pseudo-log-likelihood; None with a [MASK].
        num_tokens: number of tokens that it is the sum over.
        in_order: probability that two segments stand in their order.
        embedding: mean of the last hidden states, if requested.
        tokens: none are generated.
    """

    masks: list[list[Candidate]]
    log_likelihood: float | None = None
    num_tokens: int = 0
    in_order: float | None = None
    embedding: list[float] | None = None
    tokens: tuple[int, ...] = ()


class MaskedLM:
    """A BERT that fills masks, scores sentences and embeds them.

    Args:
        runner: the network.

    Communication: every rank must call its methods, in step.
    """

    def __init__(self, runner: EncoderRunner, tokenizer: Tokenizer):
        self.runner, self.tokenizer = runner, tokenizer
        self._cls, self._sep = tokenizer.special("cls"), tokenizer.special("sep")
        self._mask = tokenizer.special("mask")
        self._encoder = runner.model.calls[: runner.spec.num_layers + _BEHIND_NORM]

    def fill(self, text: str, top: int) -> list[list[Candidate]]:
        """Return the likeliest tokens of each [MASK] in `text`, in order."""
        batch = self._batch(text)
        is_mask = batch["tokens"][0] == self._mask
        chances, ids = (
            self._log_probabilities(batch)[0, is_mask]
            .exp()
            .topk(min(top, self.tokenizer.vocab_size))
        )
        return [
            [Candidate(self.tokenizer.decode([i]), p) for i, p in zip(row, found, strict=True)]
            for row, found in zip(ids.tolist(), chances.tolist(), strict=True)
        ]

    def score(self, text: str) -> tuple[float, int]:
        """Return the pseudo-log-likelihood of `text`, and how many tokens it is the sum over.

        Each token is masked in turn, and predicted from all other tokens.

        Source: arXiv:1910.14659, section 2.
        """
        batch = self._batch(text)
        tokens = batch["tokens"][0]
        total, count = 0.0, 0
        for position in range(1, len(tokens) - 1):
            if tokens[position] == self._sep:
                continue
            masked = tokens.clone()
            masked[position] = self._mask
            chances = self._log_probabilities({**batch, "tokens": masked[None]})
            total, count = total + float(chances[0, position, tokens[position]]), count + 1
        return total, count

    @torch.no_grad()
    @without_cudnn_attention()
    def in_order(self, text: str) -> float | None:
        """Return the probability that the two segments of `text` stand in their order.

        None without a binary head, or for a text of one segment.
        """
        batch = self._batch(text)
        if not self.runner.spec.part(BertSpec).binary_head or not bool(batch["token_types"].any()):
            return None
        output: BertOutput = self.runner.model(batch)
        assert output.order_logits is not None  # there is a binary head
        return float(output.order_logits.softmax(-1)[0, 0])

    def assess(self, text: str, top: int, *, embeds: bool = False) -> Assessment:
        """Return candidates for the masks of `text`, its score without one, or its embedding."""
        if embeds:
            return Assessment(masks=[], embedding=self.embed([text])[0].tolist())
        if MASK in text:
            return Assessment(masks=self.fill(text, top))
        total, count = self.score(text)
        return Assessment(
            masks=[], log_likelihood=total, num_tokens=count, in_order=self.in_order(text)
        )

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the mean of the last hidden states of each text, without [CLS] and [SEP].

        Raises:
            ConfigError: texts have no tokens; nothing is computed then.

        Shapes: -> [texts, h] float32.
        """
        self.require_tokens(texts)
        pairs = map(self.tokens_and_types, texts)
        return np.concatenate([self.embed_batch([tokens], [types]) for tokens, types in pairs])

    @torch.no_grad()
    @without_cudnn_attention()
    def embed_batch(
        self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> NDArray[np.float32]:
        """Return the mean of the last hidden states of each row of tokens, without its ends.

        Args:
            rows: as long as they are; the batch is padded.
            types: the segment of each token (default: the first).

        Shapes: -> [rows, h] float32.
        """
        batch = self._batch_of(rows, types or [[0] * len(row) for row in rows])
        hidden_bsh: Tensor = in_turn(self._encoder, batch)
        means = [
            hidden_bsh[i, 1 : len(row) - 1].float().mean(0).cpu().numpy()
            for i, row in enumerate(rows)
        ]
        return np.stack(means)

    @torch.no_grad()
    @without_cudnn_attention()
    def _log_probabilities(self, batch: Batch) -> Tensor:
        """Return the vocabulary's log-probabilities at each token, [b, s, V] without padding."""
        output: BertOutput = self.runner.model(batch)
        logits = self.runner.full_logits(output.logits)
        if not logits.isfinite().all():
            raise self.runner.nonfinite_logits_error()
        return logits.log_softmax(-1)

    def require_tokens(self, texts: Sequence[str]) -> None:
        """Refuse texts without tokens, such as empty lines: they have neither score nor embedding.

        Raises:
            ConfigError: names each of them.
        """
        raise_if_any(
            f"text {number} of {len(texts)}, {text[:40]!r}, has no tokens; leave it out"
            for number, text in enumerate(texts, 1)
            if not self._tokens(text)
        )

    def tokens_and_types(self, text: str) -> tuple[list[int], list[int]]:
        """Return [CLS] first [SEP] second [SEP], and to which segment each token belongs.

        Raises:
            DataError: the text is longer than the network takes.
        """
        segments = [self._tokens(segment) for segment in text.split("\t", 1)]
        tokens = [self._cls, *segments[0], self._sep]
        types = [0] * len(tokens)
        if len(segments) > 1:
            tokens += [*segments[1], self._sep]
            types += [1] * (len(tokens) - len(types))
        most = self.runner.spec.positions.max_position_embeddings
        if len(tokens) > most:
            raise DataError(
                f"the text {text[:40]!r} has {len(tokens)} tokens with [CLS] and [SEP]; the network "
                f"takes {most}"
            )
        return tokens, types

    def _batch(self, text: str) -> Batch:
        """Return the tokens of `text` as a batch of one sample."""
        tokens, types = self.tokens_and_types(text)
        return self._batch_of([tokens], [types])

    def _batch_of(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Batch:
        """Return rows of tokens as a batch, padded with 0."""
        tokens = _pad(rows, self.runner.device)
        nothing = torch.zeros_like(tokens)
        return bert_batch(
            text=tokens,
            types=_pad(types, self.runner.device),
            labels=nothing,
            is_random=nothing[:, 0],
            loss_mask=nothing,
            padding_mask=_pad([[1] * len(row) for row in rows], self.runner.device),
            truncated=nothing[:, 0],
        )

    def _tokens(self, segment: str) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(segment.split(MASK)):
            tokens += [self._mask] * (number > 0) + self.tokenizer.encode(part)
        return tokens


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


@dataclass(frozen=True, kw_only=True)
class MaskedLMRequest(ExclusiveRequest[Assessment]):
    """Texts for a BERT.

    Args:
        prompt: the tokens of all texts.
        top: number of candidates for each [MASK].
        embeds: compute embeddings alone.
    """

    prompt: tuple[int, ...]
    texts: tuple[str, ...]
    top: int = 1
    embeds: bool = False

    def problems(self, engine: Any) -> Iterator[str]:
        """Yield nothing: texts are checked when they are encoded."""
        yield from ()

    def run(self, runner: Any) -> Generator[None, None, list[Assessment]]:
        """Return a `MaskedLM`'s result for each text. Yields after each."""
        model: MaskedLM = runner
        found = []
        for text in self.texts:
            found.append(model.assess(text, self.top, embeds=self.embeds))
            yield
        return found


def mask_notice(text: str) -> str | None:
    """Return a notice about a mask in other letters than [MASK], which counts as plain text."""
    other = re.search(re.escape(MASK), text.replace(MASK, ""), re.IGNORECASE)
    return f"{other[0]} in {text[:40]!r} is plain text: a mask is written {MASK}" if other else None


def load_masked_lm(
    source: ModelSource, options: DecodingConfig | None = None
) -> tuple[MaskedLM, bool]:
    """Load the BERT of a checkpoint; return it, and whether this process is the first.

    Args:
        options: name the dtype; None for fp32.

    Raises:
        ConfigError: flags do not fit the network or the machine.
        WrongCheckpointError: the checkpoint holds another network.
        CheckpointError: it is damaged.

    Communication: every rank must call this, in step.
    """
    process = prepare_encoder(source, "masks", options)
    runner = process.build(partial(EncoderRunner, layers=bert_layers), source)
    return MaskedLM(runner, process.tokenizer), process.is_first
