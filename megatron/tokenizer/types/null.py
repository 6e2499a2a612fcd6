"""Null tokenizer, for texts that are token ids already."""

from collections.abc import Sequence

from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary, no_tokens


class NullTokenizer(Tokenizer):
    """A text is numbers with white space between them, and each number is an id.

    Args:
        vocab_size: the largest number, which ends a document; the smallest is 0.
    """

    name = "NullTokenizer"
    hint = "; it has no others"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size + 1
        self.special_ids = {"eod": vocab_size}

    def encode(self, text: str) -> list[int]:
        """Return the numbers of `text`."""
        ids = []
        for word in text.split():
            # Python does not read thousands of digits.
            is_number = word.isascii() and word.isdecimal() and len(word) < 1000
            if not (is_number and int(word) < self.vocab_size):
                reason = f"{word[:80]!r} is not a number from 0 to {self.vocab_size - 1}"
                raise no_tokens(self.name, text, reason)
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers with spaces between them."""
        return " ".join(map(str, ids))

    def vocabulary(self) -> Vocabulary:
        """Return that there are no texts."""
        return Vocabulary((), "numbers")


@TOKENIZERS.register("NullTokenizer", about=Takes((("vocab_size",),)))
def _null(options: TokenizerOptions) -> Tokenizer:
    return NullTokenizer(options.vocab_size or 0)
