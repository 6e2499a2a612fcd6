"""Options of tokenizers: the flags, and which of them each type takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

BackendChoice = Literal["auto", "fast", "reference"]
Pattern = Literal["v1", "v2", "r50k", "cl100k", "o200k"]


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Options of `build_tokenizer`: each field is a flag; its default means "not given"."""

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_model: str | None = None
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_kwargs: Sequence[str] | None = None
    tokenizer_hf_no_include_special_tokens: bool = False
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: Pattern | None = None
    tiktoken_num_special_tokens: int | None = None
    tiktoken_special_tokens: Sequence[str] | None = None
    tokenizer_backend: BackendChoice = "auto"


@dataclass(frozen=True)
class Takes:
    """The flags that a type of tokenizer takes.

    Args:
        needs: of each tuple, one field of `TokenizerOptions` must be given.
        takes: further fields that may be given.
        may_be_fast: whether --tokenizer-backend applies.
    """

    needs: tuple[tuple[str, ...], ...] = ()
    takes: tuple[str, ...] = ()
    may_be_fast: bool = False


def keywords(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the alternating names and values in `words`.

    >>> keywords(["pad_token", "<pad>", "use_fast", "false", "model_max_length", "2048"])
    {'pad_token': '<pad>', 'use_fast': False, 'model_max_length': 2048}
    """
    return dict(zip(words[::2], map(_value, words[1::2]), strict=True))


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    return int(word) if word.isascii() and word.isdecimal() else word
