"""From what was asked for to a tokenizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.errors import raise_if_any
from megatron.tokenizer.fast import BackendWish, FastTokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.hugging_face import PretrainedFromHF
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.sentencepiece import Llama2Tokenizer, SentencePieceTokenizer
from megatron.tokenizer.tiktoken import Pattern, TikTokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tokenizer.wordpiece import WordPieceTokenizer


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What can be asked of `build_tokenizer`: each field is a flag, its default is "not said"."""

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_model: str | None = None
    tokenizer_kwargs: Sequence[str] | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: Pattern | None = None
    tiktoken_num_special_tokens: int | None = None
    tiktoken_special_tokens: Sequence[str] | None = None
    tokenizer_backend: BackendWish = "auto"


@dataclass(frozen=True)
class _Type:
    build: Callable[[Wishes], Tokenizer]
    needs: tuple[tuple[str, ...], ...]  # of each tuple, one field must be said
    takes: tuple[str, ...] = ()
    may_be_fast: bool = False


def _wordpiece(wishes: Wishes, *, lower_case: bool) -> Tokenizer:
    return WordPieceTokenizer(
        str(wishes.vocab_file), lower_case=lower_case, extra_ids=wishes.vocab_extra_ids
    )


def _pretrained(wishes: Wishes) -> Tokenizer:
    return PretrainedFromHF(
        str(wishes.tokenizer_name_or_path),
        extra_ids=wishes.vocab_extra_ids,
        kwargs=keywords(wishes.tokenizer_kwargs or ()),
    )


def _tiktoken(wishes: Wishes) -> Tokenizer:
    return TikTokenizer(
        str(wishes.tokenizer_model or wishes.vocab_file),
        pattern=wishes.tiktoken_pattern,
        vocab_size=wishes.vocab_size,
        num_special_tokens=wishes.tiktoken_num_special_tokens,
        special_tokens=wishes.tiktoken_special_tokens,
    )


_TYPES: dict[str, _Type] = {
    "BertWordPieceLowerCase": _Type(
        lambda w: _wordpiece(w, lower_case=True), (("vocab_file",),), ("vocab_extra_ids",)
    ),
    "BertWordPieceCase": _Type(
        lambda w: _wordpiece(w, lower_case=False), (("vocab_file",),), ("vocab_extra_ids",)
    ),
    "GPT2BPETokenizer": _Type(
        lambda w: GPT2BPETokenizer(str(w.vocab_file), str(w.merge_file)),
        (("vocab_file",), ("merge_file",)),
        may_be_fast=True,
    ),
    "PretrainedFromHF": _Type(
        _pretrained,
        (("tokenizer_name_or_path",),),
        ("tokenizer_kwargs", "vocab_extra_ids"),
        may_be_fast=True,
    ),
    "SentencePieceTokenizer": _Type(
        lambda w: SentencePieceTokenizer(str(w.tokenizer_model), extra_ids=w.vocab_extra_ids),
        (("tokenizer_model",),),
        ("vocab_extra_ids",),
    ),
    "Llama2Tokenizer": _Type(
        lambda w: Llama2Tokenizer(str(w.tokenizer_model)), (("tokenizer_model",),)
    ),
    "TikTokenizer": _Type(
        _tiktoken,
        (("tokenizer_model", "vocab_file"),),
        (
            "vocab_size",
            "tiktoken_pattern",
            "tiktoken_num_special_tokens",
            "tiktoken_special_tokens",
        ),
    ),
    "NullTokenizer": _Type(lambda w: NullTokenizer(w.vocab_size or 0), (("vocab_size",),)),
}


def build_tokenizer(**wishes: Any) -> Tokenizer:
    """Return the tokenizer that the fields of `Wishes` ask for.

    Raises:
        ConfigError: a flag that this type needs is missing, one that it does not know is there,
            or the library it needs is not installed.
        DataError: its files are missing or damaged.
    """
    raise_if_any(tokenizer_problems(**wishes))
    said = Wishes(**wishes)
    kind = _TYPES[str(said.tokenizer_type)]
    tokenizer = kind.build(said)
    if kind.may_be_fast and said.tokenizer_backend != "reference":
        return FastTokenizer(tokenizer, must_be_fast=said.tokenizer_backend == "fast")
    return tokenizer


def tokenizer_problems(**wishes: Any) -> Iterator[str]:
    """Yield one sentence for each thing that keeps `build_tokenizer` from starting."""
    said = Wishes(**wishes)
    kind = _TYPES.get(str(said.tokenizer_type))
    if kind is None:
        known = f"{', '.join([*_TYPES][:-1])} or {[*_TYPES][-1]}"
        yield f"--tokenizer-type {said.tokenizer_type or 'is missing'}: give {known}"
        return
    given = {f.name for f in fields(said) if getattr(said, f.name) != f.default}
    given -= {"tokenizer_type", "tokenizer_backend"}
    needed = [" or ".join(map(_flag, names)) for names in kind.needs]
    missing = [
        flags for flags, names in zip(needed, kind.needs, strict=True) if given.isdisjoint(names)
    ]
    if missing:
        yield (
            f"--tokenizer-type {said.tokenizer_type} needs {' and '.join(needed)}; "
            f"{' and '.join(missing)} missing"
        )
    known_fields = {*kind.takes, *(name for names in kind.needs for name in names)}
    for name in sorted(given - known_fields):
        yield f"{_flag(name)} means nothing to --tokenizer-type {said.tokenizer_type}: leave it out"
    for names in kind.needs:
        if len(both := [name for name in names if name in given]) > 1:
            yield f"{' and '.join(map(_flag, both))} name one file: give one of them"
    yield from _value_problems(said, may_be_fast=kind.may_be_fast)


def _value_problems(said: Wishes, *, may_be_fast: bool) -> Iterator[str]:
    if said.vocab_extra_ids < 0:
        yield f"--vocab-extra-ids {said.vocab_extra_ids} must be at least 0"
    if said.vocab_size is not None and said.vocab_size < 1:
        yield f"--vocab-size {said.vocab_size} must be at least 1"
    if len(said.tokenizer_kwargs or ()) % 2:
        yield (
            f"--tokenizer-kwargs {' '.join(said.tokenizer_kwargs or ())}: give names and values "
            "by turns, such as pad_token <pad>"
        )
    if said.tokenizer_backend == "fast" and not may_be_fast:
        fast = " and ".join(name for name, kind in _TYPES.items() if kind.may_be_fast)
        yield (
            f"--tokenizer-backend fast: only {fast} have a fast backend, and not "
            f"{said.tokenizer_type}"
        )


def keywords(words: Sequence[str]) -> Mapping[str, Any]:
    """Return names and values that stand by turns in `words`.

    >>> keywords(["pad_token", "<pad>", "use_fast", "false", "model_max_length", "2048"])
    {'pad_token': '<pad>', 'use_fast': False, 'model_max_length': 2048}
    """
    return dict(zip(words[::2], map(_value, words[1::2]), strict=True))


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    return int(word) if word.isascii() and word.isdecimal() else word


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
