"""Token counts of texts, exact or as a lower bound that needs no vocabulary."""

from collections.abc import Callable
from functools import cache

import regex

TokenCounter = Callable[[str], int]
"""Returns the number of tokens of a text, or a lower bound of it."""

_PIECE = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def piece_counter() -> TokenCounter:
    """Return a counter of the pieces GPT-2 cuts a text into; each becomes one token or more.

    Source: the pattern of GPT-2's encoder (Radford et al., 2019).
    """
    return lambda text: sum(1 for _ in _PIECE.finditer(text))


@cache
def gpt2_counter(vocab_file: str, merge_file: str) -> TokenCounter:
    """Return a counter of the tokens of a text.

    Raises:
        DataError: a file is missing or damaged.
    """
    from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    return lambda text: len(tokenizer.encode(text))
