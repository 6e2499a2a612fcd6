"""Build a tokenizer from the flags of tokenizers."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.common.errors import MegatronError, raise_if_any
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.fingerprint import (
    TokenizerRecord,
    describe,
    differences,
    read_record,
    record_path,
)
from megatron.tokenizer.types.fast import BackendChoice, FastTokenizer
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.null import NullTokenizer
from megatron.tokenizer.types.sentencepiece import (
    LegacyLlama2Tokenizer,
    LegacySentencePieceTokenizer,
    SentencePieceTokenizer,
)
from megatron.tokenizer.types.tiktoken import Pattern, TikTokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer


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


@TOKENIZERS.register(
    "BertWordPieceLowerCase", about=Takes((("vocab_file",),), ("vocab_extra_ids",))
)
def _wordpiece_lower_case(options: TokenizerOptions) -> Tokenizer:
    return WordPieceTokenizer(
        str(options.vocab_file), lower_case=True, extra_ids=options.vocab_extra_ids
    )


@TOKENIZERS.register("BertWordPieceCase", about=Takes((("vocab_file",),), ("vocab_extra_ids",)))
def _wordpiece(options: TokenizerOptions) -> Tokenizer:
    return WordPieceTokenizer(
        str(options.vocab_file), lower_case=False, extra_ids=options.vocab_extra_ids
    )


@TOKENIZERS.register(
    "GPT2BPETokenizer", about=Takes((("vocab_file",), ("merge_file",)), may_be_fast=True)
)
def _gpt2(options: TokenizerOptions) -> Tokenizer:
    return GPT2BPETokenizer(str(options.vocab_file), str(options.merge_file))


_OF_PRETRAINED = (
    "tokenizer_kwargs",
    "vocab_extra_ids",
    "tokenizer_hf_no_include_special_tokens",
)


@TOKENIZERS.register(
    "PretrainedFromHF", about=Takes((("tokenizer_name_or_path",),), _OF_PRETRAINED, True)
)
@TOKENIZERS.register(
    "HuggingFaceTokenizer",
    about=Takes((("tokenizer_model", "tokenizer_name_or_path"),), _OF_PRETRAINED, True),
)
def _pretrained(options: TokenizerOptions) -> Tokenizer:
    return PretrainedFromHF(
        str(options.tokenizer_name_or_path or options.tokenizer_model),
        extra_ids=options.vocab_extra_ids,
        adds_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        kwargs=keywords(options.tokenizer_kwargs or ()),
    )


@TOKENIZERS.register(
    "SentencePieceTokenizer",
    about=Takes((("tokenizer_model",),), ("vocab_extra_ids", "tokenizer_sentencepiece_legacy")),
)
def _sentencepiece(options: TokenizerOptions) -> Tokenizer:
    model = str(options.tokenizer_model)
    if options.tokenizer_sentencepiece_legacy:
        return LegacySentencePieceTokenizer(model, extra_ids=options.vocab_extra_ids)
    return SentencePieceTokenizer(model)


_LEGACY_OR_NOT = Takes((("tokenizer_model",),), ("tokenizer_sentencepiece_legacy",))


@TOKENIZERS.register("GPTSentencePieceTokenizer", about=_LEGACY_OR_NOT)
def _gpt_sentencepiece(options: TokenizerOptions) -> Tokenizer:
    return SentencePieceTokenizer(str(options.tokenizer_model))


@TOKENIZERS.register("Llama2Tokenizer", about=_LEGACY_OR_NOT)
def _llama(options: TokenizerOptions) -> Tokenizer:
    model = str(options.tokenizer_model)
    if options.tokenizer_sentencepiece_legacy:
        return LegacyLlama2Tokenizer(model)
    return SentencePieceTokenizer(model)


@TOKENIZERS.register(
    "TikTokenizer",
    about=Takes(
        (("tokenizer_model", "vocab_file"),),
        (
            *("vocab_size", "tiktoken_pattern"),
            *("tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        ),
    ),
)
def _tiktoken(options: TokenizerOptions) -> Tokenizer:
    return TikTokenizer(
        str(options.tokenizer_model or options.vocab_file),
        pattern=options.tiktoken_pattern,
        vocab_size=options.vocab_size,
        num_special_tokens=options.tiktoken_num_special_tokens,
        special_tokens=options.tiktoken_special_tokens,
    )


@TOKENIZERS.register("NullTokenizer", about=Takes((("vocab_size",),)))
def _null(options: TokenizerOptions) -> Tokenizer:
    return NullTokenizer(options.vocab_size or 0)


_REFUSED = {
    "SFTTokenizer": (
        "conversations become token files first: tools/preprocess_data.py --conversations "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR, then finetune_sft.py"
    ),
    "MultimodalTokenizer": (
        "models are trained on text alone; write HuggingFaceTokenizer with the --tokenizer-model of "
        "the text model"
    ),
    "NullMultimodalTokenizer": "models are trained on text alone; write NullTokenizer",
    "HFTokenizer": "write HuggingFaceTokenizer, with the same --tokenizer-model",
}
"""Types of other systems, and what to write instead."""


def build_tokenizer(**arguments: Any) -> Tokenizer:
    """Return the tokenizer that the fields of `TokenizerOptions` describe.

    Raises:
        ConfigError: a flag that this type needs is missing, one that it does not take is given,
            or the library it needs is not installed.
        DataError: its files are missing or damaged.
    """
    raise_if_any(tokenizer_problems(**arguments))
    options = TokenizerOptions(**arguments)
    kind = str(options.tokenizer_type)
    tokenizer: Tokenizer = TOKENIZERS.get(kind)(options)
    takes: Takes | None = TOKENIZERS.about(kind)
    if takes and takes.may_be_fast and options.tokenizer_backend != "reference":
        return FastTokenizer(tokenizer, must_be_fast=options.tokenizer_backend == "fast")
    return tokenizer


def tokenizer_problems(**arguments: Any) -> Iterator[str]:
    """Yield one sentence for each thing that keeps `build_tokenizer` from starting."""
    options = TokenizerOptions(**arguments)
    if options.tokenizer_type not in TOKENIZERS:
        yield f"--tokenizer-type {_unknown(options.tokenizer_type)}"
        return
    kind: Takes | None = TOKENIZERS.about(str(options.tokenizer_type))
    if kind is None:
        return
    given = {f.name for f in fields(options) if getattr(options, f.name) != f.default}
    given -= {"tokenizer_type", "tokenizer_backend"}
    needed = [" or ".join(map(_flag, names)) for names in kind.needs]
    missing = [
        flags for flags, names in zip(needed, kind.needs, strict=True) if given.isdisjoint(names)
    ]
    if missing:
        yield (
            f"--tokenizer-type {options.tokenizer_type} needs {' and '.join(needed)}; "
            f"{' and '.join(missing)} missing"
        )
    known_fields = {*kind.takes, *(name for names in kind.needs for name in names)}
    for name in sorted(given - known_fields):
        hint = _sentinels_hint() if name == "vocab_extra_ids" else ""
        yield (
            f"{_flag(name)} means nothing to --tokenizer-type {options.tokenizer_type}: "
            f"leave it out{hint}"
        )
    for names in kind.needs:
        if len(both := [name for name in names if name in given]) > 1:
            yield f"{' and '.join(map(_flag, both))} name one file: give one of them"
    yield from _value_problems(options, may_be_fast=kind.may_be_fast)


def _sentinels_hint() -> str:
    """Return which types have such tokens, for whose sake the flag has a default."""
    abouts = {name: TOKENIZERS.about(name) for name in TOKENIZERS}
    names = [name for name, each in abouts.items() if each and "vocab_extra_ids" in each.takes]
    return (
        f", or where the objective needs these tokens, give --tokenizer-type {', '.join(names[:-1])} "
        f"or {names[-1]}"
    )


def _unknown(name: str | None) -> str:
    """Return an unknown tokenizer type and the known ones, for a message."""
    if name in _REFUSED:
        return f"{name}: {_REFUSED[name]}"
    names = [*TOKENIZERS]
    known = f"{', '.join(names[:-1])} or {names[-1]}"
    nearest = difflib.get_close_matches(name or "", names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{name or 'is missing'}: give {known}, or --plugin MODULE for others{hint}"


def _value_problems(options: TokenizerOptions, *, may_be_fast: bool) -> Iterator[str]:
    if options.vocab_extra_ids < 0:
        yield f"--vocab-extra-ids {options.vocab_extra_ids} must be at least 0"
    has_legacy_form = options.tokenizer_type == "SentencePieceTokenizer"
    if has_legacy_form and options.vocab_extra_ids and not options.tokenizer_sentencepiece_legacy:
        yield (
            f"--vocab-extra-ids {options.vocab_extra_ids}: SentencePieceTokenizer adds tokens to its "
            "model only with --tokenizer-sentencepiece-legacy; add that flag, or leave this one out"
        )
    if options.vocab_size is not None and options.vocab_size < 1:
        yield f"--vocab-size {options.vocab_size} must be at least 1"
    if len(options.tokenizer_kwargs or ()) % 2:
        yield (
            f"--tokenizer-kwargs {' '.join(options.tokenizer_kwargs or ())}: give names and values "
            "by turns, such as pad_token <pad>"
        )
    if options.tokenizer_backend == "fast" and not may_be_fast:
        takes = {name: TOKENIZERS.about(name) for name in TOKENIZERS}
        names = [name for name, each in takes.items() if each and each.may_be_fast]
        fast = f"{', '.join(names[:-1])} and {names[-1]}"
        yield (
            f"--tokenizer-backend fast: only {fast} have a fast backend, and not "
            f"{options.tokenizer_type}"
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


def tokenizer_for(prefix: str, options: Mapping[str, Any] | None) -> tuple[Tokenizer | None, str]:
    """Return a tokenizer for the token files `prefix`, if there is one, and a line about it.

    Args:
        options: arguments of `build_tokenizer`; None to build the tokenizer of the record.

    Raises:
        ConfigError: the options are not valid.
        DataError: a file of the tokenizer, or the record, is missing or damaged.
    """
    record = read_record(prefix)
    if options is not None:
        tokenizer = build_tokenizer(**options)
        return tokenizer, _compared(tokenizer, describe(tokenizer, options), record, prefix)
    if record is None:
        return None, f"{record_path(prefix)} is missing; {_flags_for({})}"
    return _built_again(record)


def _compared(
    tokenizer: Tokenizer, current: TokenizerRecord, record: TokenizerRecord | None, prefix: str
) -> str:
    if record is None:
        return f"{tokenizer.name}; {record_path(prefix)}, to compare it with, is missing"
    if found := differences(record, current):
        return f"{tokenizer.name} is ANOTHER than made these tokens ({record.name}): " + "; ".join(
            found
        )
    return f"{tokenizer.name}, which made these tokens"


def _built_again(record: TokenizerRecord) -> tuple[Tokenizer | None, str]:
    if not record.arguments:
        return None, f"{record.name}; {_flags_for({})}"
    try:
        tokenizer = build_tokenizer(**record.arguments)
        found = differences(record, describe(tokenizer))
    except (MegatronError, TypeError) as error:
        found = [str(error)]
    if found:
        reasons = "; ".join(found)
        return (
            None,
            f"{record.name}, cannot be built again ({reasons}); {_flags_for(record.arguments)}",
        )
    return tokenizer, f"{record.name}, as recorded"


def _flags_for(options: Mapping[str, Any]) -> str:
    """Return the tokenizer flags that show text."""
    if not options:
        return "text needs --tokenizer-type and its files"
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        if value is not False:
            words += ["--" + name.replace("_", "-"), *map(str, values)]
    return f"text needs {' '.join(words)}, with its files where they are"
