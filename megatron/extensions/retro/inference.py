"""Retro generation: encodes the neighbors of prompts in prefill, and keeps them for decode steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.extensions.retro.layers import (
    PROMPT_LENGTHS,
    ParallelTransformerRetroLayerPipe,
)
from megatron.inference.engine.device import to_device
from megatron.inference.engine.model_runner import ModelRunner, Neighbors


class RetroRunner(ModelRunner):
    """Runs a Retro whose prompts have retrieved neighbors, in one pipeline stage.

    A prompt is one chunk: its last token and all generated ones attend to its neighbors. Prefill
    runs their encoder. The keys and values that each layer makes of its output stay beside the KV
    cache, so that a decode step reads no neighbors.

    Args:
        arguments: those of ModelRunner.
    """

    batch_fields = (PROMPT_LENGTHS,)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.cache is None:
            return
        spec = self.spec
        self._lengths = torch.zeros(
            self.rows, spec.retro_num_neighbors, dtype=torch.int64, device=self.device
        )
        self._kept: list[KeptContexts] = []
        for layer in self.model.calls:
            if isinstance(layer, ParallelTransformerRetroLayerPipe):
                attention = layer.inter_attention
                width = 2 * attention.local_groups * spec.head_dim
                shape = (self.rows, spec.retro_num_neighbors, spec.retro_retrieved_length, width)
                kept = torch.zeros(shape, dtype=self.dtype, device=self.device)
                self._kept.append(KeptContexts(attention.key_value, kept))
                attention.key_value = self._kept[-1]
                if layer.encoder is not None:
                    encoder = EncoderOfPrefill(layer.encoder)
                    layer.encoder = encoder  # type: ignore[assignment]
        self.cache.others = (self._lengths, *(each.kept for each in self._kept))

    def retrieved(
        self, prefixes: Sequence[int], neighbors: Sequence[Neighbors], first: int
    ) -> Mapping[str, Tensor]:
        """Return neighbors, padded, and the lengths of prompts; those behind the k-th are dropped."""
        count, length = self.spec.retro_num_neighbors, self.spec.retro_retrieved_length
        rows = [
            [list(text[:length]) for text in own[:count]]
            for own in neighbors or [()] * len(prefixes)
        ]
        rows = [own + [[]] * (count - len(own)) for own in rows]
        padded = [[text + [0] * (length - len(text)) for text in own] for own in rows]
        lengths_bk = to_device([[len(text) for text in own] for own in rows], self.device)
        if self.cache is not None:
            self._lengths[first : first + len(rows)] = lengths_bk
            for each in self._kept:
                each.first = first
        return {
            "neighbor_tokens": to_device(padded, self.device)[:, None],
            "neighbor_lengths": lengths_bk[:, None],
            PROMPT_LENGTHS: to_device(list(prefixes), self.device),
        }

    def retrieved_before(self, rows: int) -> Mapping[str, Tensor]:
        """Return neighbors without tokens, and how many tokens are kept of each."""
        lengths_b1k = self._lengths[:rows, None]
        return {
            "neighbor_tokens": lengths_b1k.new_zeros((*lengths_b1k.shape, 0)),
            "neighbor_lengths": lengths_b1k,
            # Every token of a decode step is behind its prompt.
            PROMPT_LENGTHS: lengths_b1k.new_zeros(rows),
        }


class EncoderOfPrefill(nn.Module):
    """Encoder of neighbors, which does not run in decode steps.

    Shapes: neighbors [r, e, h] -> [r, e, h]; in decode steps r is 0.
    """

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, neighbors_reh: Tensor, *others: Any) -> Tensor:
        """Return the encoder's output; nothing without tokens."""
        if not len(neighbors_reh):
            return neighbors_reh
        encoded: Tensor = self.encoder(neighbors_reh, *others)
        return encoded


class KeptContexts(nn.Module):
    """Keys and values of cross-attention: computed in prefill, read in decode steps.

    Args:
        key_value: the linear layer of cross-attention.
        kept: a row for each sequence.

    Shapes: encoder's output [r, b*k, h], in decode steps [0, b*k, h] -> [r, b*k, 2 * g * d]; kept
        [rows, k, r, 2 * g * d].
    """

    def __init__(self, key_value: nn.Module, kept: Tensor):
        super().__init__()
        self.key_value, self.kept = key_value, kept
        self.first = 0  # row of the first sequence of a prefill

    def forward(self, context_reh: Tensor) -> Tensor:
        """Return the projection of the encoder's output, or what was kept of it."""
        k = self.kept.size(1)
        rows = context_reh.size(1) // k
        if not len(context_reh):
            return self.kept[:rows].flatten(0, 1).transpose(0, 1)
        projected: Tensor = self.key_value(context_reh)
        kept = projected.transpose(0, 1).unflatten(0, (rows, k))
        self.kept[self.first : self.first + rows] = kept
        return projected
