"""Special tokens: which ids are special, and texts without those that a tokenizer adds."""

from collections.abc import Callable
from typing import Any

from megatron.tokenizer.types.tokenizer import Tokenizer


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all special tokens, such as those that begin and end texts or turns."""
    backend = _backend(tokenizer)
    added = backend.get_added_tokens_decoder().items() if backend else ()
    marked = (i for i, token in added if token.special)
    return frozenset(tokenizer.special_ids.values()) | frozenset(marked)


def added_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all special tokens and of those that were added to the vocabulary."""
    backend = _backend(tokenizer)
    added = backend.get_added_tokens_decoder() if backend else ()
    return frozenset(tokenizer.special_ids.values()) | frozenset(added)


def encode_alone(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return an encoder of texts without the special tokens that the tokenizer adds to them."""
    around = tokenizer.encode("")
    if not around:
        return tokenizer.encode
    backend = _backend(tokenizer)
    if backend:
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text)
        return tokens[len(around) :] if tokens[: len(around)] == around else tokens

    return encode


def _backend(tokenizer: Tokenizer) -> Any:
    # A fast tokenizer keeps the full one as its reference.
    return getattr(getattr(tokenizer, "reference", tokenizer), "backend", None)
