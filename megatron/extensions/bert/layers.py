"""BERT as a list of layers: bidirectional blocks, masked-LM head, pooler and sentence-order head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.bert.flags import BertSpec
from megatron.model.gpt import end_of, logits_layer, take_tokens, to_batch_first, to_sequence_first
from megatron.model.layers.embedding import (
    EmbeddingPipe,
    OutputTable,
    TokenTable,
    add_output_bias,
    tied_logits,
    vocabulary_bias,
)
from megatron.model.layers.layer_list import Layer, Step, Tie
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.collectives import reduce_from_tensor_parallel

_WORDS = "word_embeddings.weight"


class BertOutput(NamedTuple):
    """Output of BERT's heads.

    Args:
        logits: of every token, [b, s, V/t]; before the token table its features [b, s, h];
            after it `DeferredLogits` if the loss computes them.
        order_logits: [b, 2], whether the second segment of a sample came first in its document;
            None without the binary head.
    """

    logits: Any
    order_logits: Tensor | None


def bert_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the layers of BERT: a batch in, a `BertOutput` out.

    A batch has tokens, positions, token types if there is a binary head, and an attention span:
    the real tokens of each sample, [b, 1, 2].

    Source: arXiv:1810.04805; arXiv:1909.08053, section 5.3, for norms before sublayers, and
        arXiv:1909.11942, section 3.1, for the order of segments.
    """
    bias = {"padded_vocab_size": spec.vocabulary.padded_vocab_size, "group": parts.group}
    return [
        take_tokens,
        *encoder_layers(spec, parts),
        Layer(BertHeadPipe, {"spec": spec, "parts": parts}),
        logits_layer(spec, parts, MaskedLMLogitsPipe, masked_lm_logits),
        Layer(MaskedLMBiasPipe, bias),
        *end_of(to_float32, parts),
    ]


def encoder_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the layers of BERT's encoder, from the embedding to the final norm.

    Shapes: a batch with fields [b, s] -> [b, s, h].
    """
    common: dict[str, Any] = {"spec": spec, "parts": parts}
    positions = ["positions"] if spec.positions.reach_attention else []
    embedding = Layer(
        EmbeddingPipe,
        common | {"num_token_types": spec.part(BertSpec).num_token_types},
        tie=Tie("embed", _WORDS) if spec.vocabulary.tied_embeddings else None,
        carried=("hidden", *positions, "attention_span"),
    )
    blocks = [
        Layer(ParallelTransformerLayerPipe, {**common, "number": number})
        for number in range(1, spec.num_layers + 1)
    ]
    norm = norm_layer(spec, kernels=parts.kernels)
    return [embedding, to_sequence_first, *blocks, to_batch_first, norm]


class ReplicatedLinear(nn.Linear):
    """Linear layer with the same weights on every tensor-parallel rank."""

    def reset_parameters(self) -> None:
        """Leave the weight to `initialise`, and let the bias be 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class BertHeadPipe(nn.Module):
    """Dense layer, GELU and norm before the logits; pooler and binary head on the first token.

    The pooler is tanh of a dense layer, and exists with the binary head alone.

    Args:
        spec: the network.
        parts: dependencies of its layers.

    Shapes: x_bsh [b, s, h] -> `BertOutput` of [b, s, h] and [b, 2].
    Communication: none; with sequence parallelism one all-reduce of [b, h] forward.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        width = spec.hidden_size
        bert = spec.part(BertSpec)
        self.approximate = "tanh" if bert.head_activation == "gelu_tanh" else "none"
        self.division = parts.division
        self.dense = ReplicatedLinear(width, width)
        self.layernorm = norm_layer(spec, kernels=parts.kernels).build()
        self.has_binary_head = bert.binary_head
        if bert.binary_head:
            self.pooler = ReplicatedLinear(width, width)
            self.binary_head = ReplicatedLinear(width, 2)

    def forward(self, x_bsh: Tensor) -> BertOutput:
        transformed_bsh = F.gelu(self.dense(x_bsh), approximate=self.approximate)
        order_b2 = self._order(x_bsh) if self.has_binary_head else None
        return BertOutput(self.layernorm(transformed_bsh), order_b2)

    def _order(self, x_bsh: Tensor) -> Tensor:
        return on_first_token(
            lambda first_bh: self.binary_head(self.pooler(first_bh).tanh()),
            x_bsh,
            **self.division,
        )


def on_first_token(
    head: Callable[[Tensor], Tensor],
    x_bsh: Tensor,
    *,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Tensor:
    """Return the output of a head on the first token of each sample, on every tensor-parallel rank.

    Args:
        head: of weights that all ranks of `group` have.
        sequence_parallel: whether the ranks of `group` divide the sequence of x_bsh.

    Shapes: x_bsh [b, s, h] -> the output of `head` for [b, h].
    Communication: none; with sequence parallelism one all-reduce of [b, h] forward.
    """
    first_bh = x_bsh[:, 0]
    if not sequence_parallel:
        return head(first_bh)
    # The first token is on rank 0, and all ranks compute the same with it. Gradients of
    # replicated weights are summed over the ranks: only rank 0's count.
    is_first = group.rank() == 0
    output = head(reduce_from_tensor_parallel(first_bh * is_first, group))
    return output if is_first else output.detach() + 0 * output


class MaskedLMLogitsPipe(OutputTable):
    """Token table of the masked-LM head, like `OutputEmbeddingPipe`: replaces features by logits."""

    def forward(self, output: BertOutput) -> BertOutput:
        return masked_lm_logits(self, output, **self.form)


class MaskedLMBiasPipe(nn.Module):
    """Bias of the masked-LM logits, like `OutputBiasPipe`."""

    def __init__(self, *, padded_vocab_size: int, group: dist.ProcessGroup):
        super().__init__()
        self.output_bias = vocabulary_bias(padded_vocab_size, group)

    def forward(self, output: BertOutput) -> BertOutput:
        return output._replace(logits=add_output_bias(output.logits, self.output_bias))


def masked_lm_logits(layer: TokenTable, output: BertOutput, **form: Any) -> BertOutput:
    """Return the logits of the tokens in place of their features: see `tied_logits`."""
    logits = tied_logits(layer, output.logits, **form)
    return output._replace(logits=logits)


def to_float32(output: BertOutput) -> BertOutput:
    """Return `output` in 32 bits."""
    order = output.order_logits
    return BertOutput(output.logits.float(), None if order is None else order.float())
