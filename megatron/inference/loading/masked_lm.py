"""A trained BERT in one process: fill-mask, sentence scores, sentence order, sentence embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.checkpointing.hugging_face.network import load_network
from megatron.common.errors import DataError
from megatron.config.network.model_spec import ModelSpec
from megatron.inference.loading.loaded_model import require_architecture, tokenizer_and_spec
from megatron.inference.loading.model_source import ModelSource
from megatron.model.bert import BertOutput
from megatron.model.layers.layer_list import SequentialModel, in_turn
from megatron.objectives.bert import bert_batch
from megatron.tensor_parallel.broadcast import Batch
from megatron.tokenizer.types.tokenizer import Tokenizer

MASK = "[MASK]"
_BEHIND_NORM = 5  # entries of the list up to the final norm, without the transformer layers


@dataclass(frozen=True)
class Candidate:
    """A token for a [MASK], and its probability."""

    token: str
    probability: float


class MaskedLM:
    """A BERT that fills masks and scores sentences, in fp32.

    Args:
        model: built by `load_network`.
        device: what it computes on.
    """

    def __init__(
        self, model: SequentialModel, spec: ModelSpec, tokenizer: Tokenizer, device: torch.device
    ):
        self.model, self.spec, self.tokenizer = model.to(device), spec, tokenizer
        self._device = device
        self._cls, self._sep = tokenizer.special("cls"), tokenizer.special("sep")
        self._mask = tokenizer.special("mask")
        self._encoder = model.calls[: spec.num_layers + _BEHIND_NORM]

    def fill(self, text: str, top: int) -> list[list[Candidate]]:
        """Return the likeliest tokens of each [MASK] in `text`, in order."""
        batch = self._batch(text)
        places = batch["tokens"][0] == self._mask
        chances, ids = self._log_probabilities(batch)[0, places].exp().topk(top)
        return [
            [Candidate(self.tokenizer.decode([i]), p) for i, p in zip(row, found, strict=True)]
            for row, found in zip(ids.tolist(), chances.tolist(), strict=True)
        ]

    def score(self, text: str) -> tuple[float, int]:
        """Return the pseudo-log-likelihood of `text`, and how many tokens it is the sum over.

        Each token is masked in turn, and predicted from all others.

        Source: arXiv:1910.14659, section 2.
        """
        batch = self._batch(text)
        tokens = batch["tokens"][0]
        total, count = 0.0, 0
        for place in range(1, len(tokens) - 1):
            if tokens[place] == self._sep:
                continue
            masked = tokens.clone()
            masked[place] = self._mask
            chances = self._log_probabilities({**batch, "tokens": masked[None]})
            total, count = total + float(chances[0, place, tokens[place]]), count + 1
        return total, count

    @torch.no_grad()
    def in_order(self, text: str) -> float | None:
        """Return the probability that the two segments of `text` stand in their order.

        None without a binary head, or for a text of one segment.
        """
        batch = self._batch(text)
        if not self.spec.binary_head or not bool(batch["token_types"].any()):
            return None
        output: BertOutput = self.model(batch)
        assert output.order_logits is not None  # there is a binary head
        return float(output.order_logits.softmax(-1)[0, 0])

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the mean of the last hidden states of each text, without [CLS] and [SEP].

        Shapes: -> [texts, h] float32; NaN for a text without a token.
        """
        rows = []
        for text in texts:
            hidden_bsh: Tensor = in_turn(self._encoder, self._batch(text))
            rows.append(hidden_bsh[0, 1:-1].mean(0).cpu().numpy())
        return np.stack(rows)

    @torch.no_grad()
    def _log_probabilities(self, batch: Batch) -> Tensor:
        """Return those of the tokens of the vocabulary, [b, s, V] without its padding."""
        output: BertOutput = self.model(batch)
        return output.logits[..., : self.tokenizer.vocab_size].log_softmax(-1)

    def _batch(self, text: str) -> Batch:
        """Return [CLS] first [SEP] second [SEP] as a batch of one sample.

        Raises:
            DataError: the text is longer than the network takes.
        """
        segments = [self._tokens(segment) for segment in text.split("\t", 1)]
        tokens = [self._cls, *segments[0], self._sep]
        types = [0] * len(tokens)
        if len(segments) > 1:
            tokens += [*segments[1], self._sep]
            types += [1] * (len(tokens) - len(types))
        if len(tokens) > self.spec.max_position_embeddings:
            raise DataError(
                f"the text {text[:40]!r} has {len(tokens)} tokens with [CLS] and [SEP]; the network "
                f"takes {self.spec.max_position_embeddings}"
            )
        row = torch.tensor([tokens], device=self._device)
        nothing = torch.zeros_like(row)
        return bert_batch(
            text=row,
            types=torch.tensor([types], device=self._device),
            labels=nothing,
            is_random=nothing[:, 0],
            loss_mask=nothing,
            padding_mask=torch.ones_like(row),
            truncated=nothing[:, 0],
        )

    def _tokens(self, segment: str) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(segment.split(MASK)):
            tokens += [self._mask] * (number > 0) + self.tokenizer.encode(part)
        return tokens


def load_masked_lm(source: ModelSource, device: torch.device) -> MaskedLM:
    """Load the BERT of a checkpoint.

    Raises:
        WrongCheckpointError: it holds another network.
        CheckpointError: it is damaged.
    """
    tokenizer, spec = tokenizer_and_spec(source)
    require_architecture(source, spec, "bert")
    with source.weights() as full:
        return MaskedLM(load_network(spec, full), spec, tokenizer, device)
