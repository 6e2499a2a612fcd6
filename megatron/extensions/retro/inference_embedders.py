"""Embedders of Retro that are encoder networks: a BERT of this system, or one of transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.common.errors import ConfigError
from megatron.extensions.bert.inference import MaskedLM
from megatron.extensions.bert.layers import bert_layers
from megatron.inference.engine.encoder_runner import EncoderRunner
from megatron.inference.loading.loaded_model import (
    PreparedProcess,
    lone_groups,
    require_service,
    tokenizer_and_spec,
)
from megatron.inference.loading.model_source import ModelSource
from megatron.tokenizer.types.hugging_face import load_problem
from megatron.training.process.device import choose_device
from megatron.training.process.environment import Launch, cpu_threads


@dataclass(frozen=True)
class Batches:
    """Sizes of the batches of an encoder.

    Args:
        size: texts.
        max_length: tokens of a text, with [CLS] and [SEP].
    """

    size: int
    max_length: int

    def of(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the texts of each batch."""
        for first in range(0, len(texts), self.size):
            yield texts[first : first + self.size]


class BertEmbedder:
    """Embeds texts with a BERT: the mean of the last hidden states, without [CLS] and [SEP].

    A text without a token is embedded as one [PAD].
    """

    def __init__(self, model: MaskedLM, batches: Batches):
        self._model, self._batches = model, batches
        spec = model.runner.spec
        self.width = spec.hidden_size
        self._most = min(batches.max_length, spec.positions.max_position_embeddings) - 2

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts. Shapes: -> [texts, width] float32."""
        found = [self._model.embed_batch(self._rows(batch)) for batch in self._batches.of(texts)]
        return np.concatenate([np.empty((0, self.width), np.float32), *found])

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._model.tokenizer
        ends = tokenizer.special("cls"), tokenizer.special("sep")
        nothing = [tokenizer.special("pad")]
        return [
            [ends[0], *(tokens[: self._most] or nothing), ends[1]]
            for tokens in tokenizer.encode_batch(texts)
        ]


def load_bert_embedder(source: ModelSource, batches: Batches, launch: Launch) -> BertEmbedder:
    """Load the BERT of a checkpoint in this process alone, whatever other ranks do.

    Raises:
        ConfigError: flags of the tokenizer do not fit.
        WrongCheckpointError: the checkpoint holds another network.
        CheckpointError: it is damaged.
    """
    tokenizer, spec = tokenizer_and_spec(source)
    require_service(source, spec, "masks")
    process = PreparedProcess(
        tokenizer=tokenizer,
        spec=spec,
        groups=lone_groups(),
        dtype=torch.float32,
        device=_device(launch),
        is_first=True,
    )
    runner = process.build(partial(EncoderRunner, layers=bert_layers), source)
    return BertEmbedder(MaskedLM(runner, tokenizer), batches)


class TransformersEmbedder:
    """Embeds texts with an encoder in transformers' format, as `BertEmbedder` does.

    A text without a token becomes zeros.

    Raises:
        ConfigError: there is no such encoder, or transformers cannot load it without the folder's code.
    """

    def __init__(self, folder: Path, batches: Batches, launch: Launch):
        from transformers import AutoModel, AutoTokenizer

        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model = AutoModel.from_pretrained(folder, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--bert-load {folder}: {load_problem(error)}") from error
        self._tokenizer.padding_side = "right"
        self._device = _device(launch)
        self._model = model.float().to(self._device).eval()
        self._batches = batches
        self.width = int(model.config.hidden_size)
        positions = getattr(model.config, "max_position_embeddings", batches.max_length)
        self._most = min(batches.max_length, positions)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts. Shapes: -> [texts, width] float32."""
        rows = [np.empty((0, self.width), np.float32)]
        for batch in self._batches.of(texts):
            words = self._tokenizer(
                list(batch),
                padding=True,
                truncation=True,
                max_length=self._most,
                return_tensors="pt",
            ).to(self._device)
            hidden_bsh = self._model(**words).last_hidden_state.float()
            inner = words["attention_mask"].clone()
            inner[:, 0] = 0
            inner[torch.arange(len(batch)), words["attention_mask"].sum(1) - 1] = 0
            total = (hidden_bsh * inner[:, :, None]).sum(1)
            mean = total / inner.sum(1, keepdim=True).clamp(min=1)
            rows.append(mean.cpu().numpy())
        return np.concatenate(rows)


def _device(launch: Launch) -> torch.device:
    """Return the device of this process, and limit its threads to its share of the CPU cores."""
    device = choose_device("auto", launch)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(launch))
    return device
