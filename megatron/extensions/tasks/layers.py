"""Heads of downstream tasks on BERT or GPT: classification, multiple choice, each token."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.bert.layers import ReplicatedLinear, encoder_layers, on_first_token
from megatron.extensions.tasks.flags import HeadSpec
from megatron.model.gpt import decoder_layers, take_tokens, to_float32
from megatron.model.layers.layer_list import Layer, Step
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.collectives import gather_sequence


def classification_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the layers of a classifier: a batch in, logits out, [b, C] of a BERT and [b, s, C] of a GPT.

    The layers below the head, and the pooler, have the numbers and names of `bert_layers` or
    `gpt_layers`, whose checkpoints they open. With several choices a batch has fields [b, n, s], and
    there is a row of logits for each.
    """
    body = decoder_layers if spec.architecture == "gpt" else encoder_layers
    return [
        take_tokens if spec.part(HeadSpec).num_choices == 1 else rows_of_choices,
        *body(spec, parts),
        Layer(_head_of(spec), {"spec": spec, "parts": parts}),
        *([to_float32] if parts.mixed else []),
    ]


def _head_of(spec: ModelSpec) -> type[nn.Module]:
    if spec.architecture == "gpt":
        return ScorePipe
    return LayersHeadPipe if spec.part(HeadSpec).head_layers else ClassificationHeadPipe


def rows_of_choices(batch: Batch) -> Batch:
    """Return the inputs of a batch of questions with a row for each choice.

    Shapes: [b, n, s] -> [b * n, s], of the attention span, if there is one, [b, n, 2] ->
        [b * n, 1, 2].
    """
    inputs = ("tokens", "token_types", "positions", "attention_span")
    rows = {name: batch[name].flatten(0, 1) for name in inputs if name in batch}
    if "attention_span" in rows:
        rows["attention_span"] = rows["attention_span"][:, None]
    return rows


class ClassificationHeadPipe(nn.Module):
    """Pooler (tanh of a dense layer) on the first token, dropout and a linear layer.

    Args:
        spec: the network.
        parts: dependencies of its layers.

    Shapes: x_bsh [b, s, h] -> [b, C].
    Communication: none; with sequence parallelism one all-reduce of [b, h] forward.
    Randomness: draws from the ordinary stream, the same on all tensor-parallel ranks.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.dropout, self.division = spec.hidden_dropout, parts.division
        self.pooler = ReplicatedLinear(spec.hidden_size, spec.hidden_size)
        self.classification_head = ReplicatedLinear(
            spec.hidden_size, spec.part(HeadSpec).num_outputs
        )

    def forward(self, x_bsh: Tensor) -> Tensor:
        return on_first_token(self._logits, x_bsh, **self.division)

    def _logits(self, first_bh: Tensor) -> Tensor:
        pooled_bh: Any = self.pooler(first_bh).tanh()
        return self.classification_head(F.dropout(pooled_bh, self.dropout, self.training))


class LayersHeadPipe(nn.Module):
    """Head without a pooler: dropout, and linear layers with ReLU between them.

    On each token, or on the first one (as NeMo's SequenceClassifier).

    Args:
        spec: the network.
        parts: dependencies of its layers.

    Shapes: x_bsh [b, s, h] -> [b, s, C], or [b, C] on the first token.
    Communication: none; with sequence parallelism one all-gather of [b, s, C] forward and one
        reduce-scatter backward, or one all-reduce of [b, h] forward.
    Randomness: draws from the ordinary stream, the same on all tensor-parallel ranks, unless these
        divide the sequence.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        head, width = spec.part(HeadSpec), spec.hidden_size
        self.dropout, self.parts = head.head_dropout, parts
        self.on_first_token = head.first_token_head
        hidden = (ReplicatedLinear(width, width) for _ in range(head.head_layers - 1))
        self.classification_head = nn.ModuleList(
            [*hidden, ReplicatedLinear(width, head.num_outputs)]
        )

    def forward(self, x_bsh: Tensor) -> Tensor:
        if self.on_first_token:
            return on_first_token(self._logits, x_bsh, **self.parts.division)
        return _all_token_logits(self._logits(x_bsh), self.parts)

    def _logits(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        *hidden, last = self.classification_head
        for layer in hidden:
            x = F.relu(layer(x))
        logits: Tensor = last(x)
        return logits


class ScorePipe(nn.Module):
    """Linear layer without bias on each token of a GPT; the loss takes the logits of the last one.

    Args:
        spec: the network.
        parts: dependencies of its layers.

    Shapes: x_bsh [b, s, h] -> [b, s, C].
    Communication: as of `LayersHeadPipe`.
    Source: GPT2ForSequenceClassification of transformers.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.parts = parts
        self.classification_head = ReplicatedLinear(
            spec.hidden_size, spec.part(HeadSpec).num_outputs, bias=False
        )

    def forward(self, x_bsh: Tensor) -> Tensor:
        return _all_token_logits(self.classification_head(x_bsh), self.parts)


def _all_token_logits(logits: Tensor, parts: LayerParts) -> Tensor:
    """Gather the logits of a sequence, if it is divided.

    All ranks compute the same loss of all tokens, and the gather sums its gradients over them: only
    rank 0's gradients count.
    """
    if not parts.sequence_parallel:
        return logits
    full = gather_sequence(logits, 1, parts.group)
    return full if parts.group.rank() == 0 else full.detach() + 0 * full
