"""A tokenizer whose ids are the bytes of the text."""

from types import MappingProxyType, SimpleNamespace

import numpy as np


class BytesTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document."""

    vocab_size = 257
    special_ids = MappingProxyType({"eod": 256})

    def encode(self, text):
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_array(self, texts):
        """Return the bytes of all texts, and how many each has."""
        rows = [self.encode(text) for text in texts]
        tokens = [token for row in rows for token in row]
        return np.array(tokens, np.int32), np.array([len(row) for row in rows], np.int64)

    def encode_ended(self, texts, end):
        """Return the same with `end` after each text."""
        tokens, lengths = self.encode_array(texts)
        return np.insert(tokens, lengths.cumsum(), end), lengths + 1

    def gives_back(self, ids, text):
        """Whether `ids` are the bytes of `text`."""
        return bytes(ids.tolist()) == text.encode()

    def vocabulary(self):
        """Return no texts."""
        return SimpleNamespace(tokens=())
