"""Samples for supervised finetuning: conversations of which the answers count, several to a row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.datasets.packed_dataset import PackedDataset
from megatron.data.token_files.indexed_dataset import IndexedDataset


class ChatDataset(PackedDataset):
    """Packing of conversations: as many uncut ones as fit; see PackedDataset.

    Args:
        tokens: one sequence for each conversation.
        loss_mask: as long, 1 where the token counts, 0 elsewhere.

    Raises:
        DataError: the files do not belong together, or no conversation fits into a sample.

    Shapes: dataset[i] -> {"tokens", "text_ids", "is_target"}, each [seq_length + 1] int64: the
        number of the conversation in the sample from 1 up, 0 for padding; 1 where the token counts.
    """

    noun = "conversation"

    def __init__(
        self, tokens: IndexedDataset, loss_mask: IndexedDataset, chats: range, **options: Any
    ):
        if not np.array_equal(tokens.sizes, loss_mask.sizes):
            raise DataError(
                f"{tokens.prefix} and {loss_mask.prefix} do not have as many tokens for each "
                "conversation: make both with tools/preprocess_data.py --conversations"
            )
        self.tokens, self.loss_mask = tokens, loss_mask
        super().__init__((tokens, loss_mask), chats, **options)
        self.num_tokens //= 2  # the mask is none

    def lengths(self, texts: range) -> NDArray:
        """Return the number of tokens of each conversation."""
        return self.tokens.sizes[texts.start : texts.stop].astype(np.int64)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        tokens, text_ids, is_target = np.zeros((3, self.row_length), np.int64)
        for number, (chat, start, length) in enumerate(self.placed(i), start=1):
            here = slice(start, start + length)
            tokens[here], is_target[here] = self.tokens[chat], self.loss_mask[chat]
            text_ids[here] = number
        return {"tokens": tokens, "text_ids": text_ids, "is_target": is_target}
