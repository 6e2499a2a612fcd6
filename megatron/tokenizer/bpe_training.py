"""Training of a byte-level BPE vocabulary, with the library `tokenizers`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from megatron.tokenizer.types.gpt2 import END_OF_TEXT


def train_byte_level_bpe(texts: Iterable[str], folder: Path, vocab_size: int) -> int:
    """Write vocab.json and merges.txt, GPT-2's two files, to `folder`; return the number of tokens.

    Args:
        vocab_size: tokens at most: EOD, the 256 bytes and merged pairs; few texts have fewer.
    """
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.save_model(str(folder))
    return tokenizer.get_vocab_size()
