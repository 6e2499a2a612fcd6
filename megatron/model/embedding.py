"""Tokens to features at the front, features to logits at the back, over one shared table."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.carry import Carried, pack
from megatron.parallel.embedding import VocabParallelEmbedding
from megatron.parallel.regions import copy_to_tensor_parallel


class EmbeddingPipe(nn.Module):
    """Token embedding plus learned position, then dropout.

    A third input, the spans of what tokens see, is passed on beside the result.

    Shapes: (tokens_bs, positions_bs) [b, s] int64 -> [b, s, h].
    Communication: one all-reduce of [b, s, h] over `group` forward.
    Randomness: draws from the ordinary stream, the same on all tensor-parallel ranks.
    """

    def __init__(
        self,
        *,
        padded_vocab_size: int,
        hidden_size: int,
        max_position_embeddings: int,
        hidden_dropout: float,
        group: dist.ProcessGroup,
    ):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, hidden_size, group=group)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.hidden_dropout = hidden_dropout

    def forward(self, inputs: tuple[Tensor, ...]) -> Carried:
        tokens_bs, positions_bs, *spans_bs2 = inputs
        x_bsh = self.word_embeddings(tokens_bs) + self.position_embeddings(positions_bs)
        x_bsh = F.dropout(x_bsh, self.hidden_dropout, self.training)
        return pack(x_bsh, spans_bs2[0] if spans_bs2 else None)


class OutputEmbeddingPipe(nn.Module):
    """What the last pipeline stage holds of the embedding: the token table alone."""

    def __init__(self, *, padded_vocab_size: int, hidden_size: int, group: dist.ProcessGroup):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, hidden_size, group=group)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return tied_logits(self, x_bsh)


def tied_logits(layer: EmbeddingPipe | OutputEmbeddingPipe, x_bsh: Tensor) -> Tensor:
    """Return the product of `x_bsh` with the token table of `layer`.

    Shapes: x_bsh [b, s, h] -> [b, s, V/t].
    Communication: none forward; one all-reduce of [b, s, h] backward.
    """
    table = layer.word_embeddings
    return F.linear(copy_to_tensor_parallel(x_bsh, table.group), table.weight)
