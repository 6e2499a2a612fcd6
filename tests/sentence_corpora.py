"""Token files of sentences, and a WordPiece vocabulary, made by formulas."""

from pathlib import Path

import numpy as np

from megatron.data.token_files.index_files import IndexContent, write_mmap_index
from megatron.data.token_files.indexed_dataset import IndexedDataset

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_sentences(prefix, sizes, document_starts, tokens=None):
    """Write PREFIX.bin and .idx; return them opened. Tokens are 5 to 999 unless given."""
    sizes, starts = np.asarray(sizes, np.int32), np.asarray(document_starts, np.int64)
    if tokens is None:
        tokens = 5 + (7907 * np.arange(sizes.sum(dtype=np.int64))) % 995
    Path(f"{prefix}.bin").write_bytes(np.asarray(tokens).astype("<u2").tobytes())
    content = IndexContent(
        dtype=np.dtype("<u2"),
        num_sequences=len(sizes),
        num_documents=len(starts) - 1,
        sizes=lambda: iter([sizes]),
        document_starts=lambda: iter([starts]),
    )
    with Path(f"{prefix}.idx").open("wb") as file:
        write_mmap_index(file, content)
    return IndexedDataset(str(prefix))


def thousand_documents():
    """Return sizes of 10988 sentences, and the starts of 1000 documents of 0 to 22 of them."""
    starts = np.concatenate([[0], np.cumsum([(7919 * d) % 23 for d in range(1000)])])
    return np.array([3 + (104729 * i) % 61 for i in range(starts[-1])], np.int32), starts


def write_vocabulary(path):
    """Write 1000 tokens, every third of which goes on with a word; return the path."""
    words = [("##" if i % 3 == 2 else "") + f"w{i}" for i in range(5, 1000)]
    Path(path).write_text("\n".join([*SPECIAL, *words]) + "\n", encoding="utf-8")
    return str(path)
