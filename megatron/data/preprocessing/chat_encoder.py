"""Tokenizes conversations: tokens and their loss mask."""

from io import BytesIO
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import BlockEncoder, Encoder, EncodingRules
from megatron.data.preprocessing.quality import Tally
from megatron.data.readers.documents import BadLine, Documents, problem_of, read_documents
from megatron.data.readers.inputs import Block, read_range

KEYS = ("tokens", "loss_mask")
"""What token files are made of conversations: 1 in the second where the token counts, else 0."""


class ChatEncoder(Encoder, Protocol):
    """The part of a tokenizer of conversations that is needed here."""

    def encode_conversation(self, line: Any) -> tuple[NDArray, NDArray]:
        """Return the tokens of a conversation, and which of them count."""


class ConversationEncoder(BlockEncoder):
    """Turns blocks of conversations into the two keys of `KEYS`."""

    def __init__(self, encoder: ChatEncoder, rules: EncodingRules):
        super().__init__(encoder, rules)
        self._conversations = encoder

    def _read(self, block: Block) -> tuple[Documents, list[tuple[NDArray, NDArray, NDArray]]]:
        if block.rows:
            raise DataError(f"--input {block.path}: conversations are read from JSON lines")
        if block.too_long is not None:
            documents = read_documents(block, KEYS, self._rules.max_line_bytes)
        else:
            documents = Documents([], [[], []], 0)
        rows: list[tuple[NDArray, NDArray]] = []
        data = block.data
        if data is None and block.too_long is None:
            data = read_range(block.path, block.start, block.end)
        for number, line in enumerate(BytesIO(data or b"")):
            documents.num_lines = number + 1
            if line.isspace():
                continue
            try:
                rows.append(self._encode_line(line))
                documents.lines.append(number)
            except (DataError, ValueError) as error:
                excerpt = line[:80].decode("utf-8", "replace").strip()
                problem = f"{error}" if isinstance(error, DataError) else problem_of(line, error)
                documents.bad.append(BadLine(number, problem, excerpt))
        sizes = np.array([len(tokens) for tokens, _ in rows], np.int64)
        columns = [
            (np.concatenate([row[k] for row in rows] or [np.zeros(0)]).astype(np.int32), sizes)
            for k in range(2)
        ]
        documents.texts = [[""] * len(rows)] * 2  # texts of conversations are not used
        return documents, [(*column, np.arange(len(rows))) for column in columns]

    def _encode_line(self, line: bytes) -> tuple[NDArray, NDArray]:
        tokens, counts = self._conversations.encode_conversation(orjson.loads(line))
        suffix = self._rules.suffix
        return np.append(tokens, suffix), np.append(counts, np.ones(len(suffix), np.bool_))

    def _tally(
        self, tokens: NDArray, ends: NDArray, hashes: NDArray[np.uint64], texts: object
    ) -> Tally:
        # Tokens of a template are not decoded to the text of the line.
        return Tally()
