"""Build a tokenizer from the flags of tokenizers."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
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
from megatron.tokenizer.types.fast import FastTokenizer
from megatron.tokenizer.types.options import Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import Tokenizer

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
            f"--tokenizer-kwargs {' '.join(options.tokenizer_kwargs or ())}: give "
            "alternating names and values, such as pad_token <pad>"
        )
    if options.tokenizer_backend == "fast" and not may_be_fast:
        takes = {name: TOKENIZERS.about(name) for name in TOKENIZERS}
        names = [name for name, each in takes.items() if each and each.may_be_fast]
        fast = f"{', '.join(names[:-1])} and {names[-1]}"
        yield (
            f"--tokenizer-backend fast: only {fast} have a fast backend, and not "
            f"{options.tokenizer_type}"
        )


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
        return tokenizer, _compare(tokenizer, describe(tokenizer, options), record, prefix)
    if record is None:
        return None, f"{record_path(prefix)} is missing; {_flags_for({})}"
    return _rebuild(record)


def _compare(
    tokenizer: Tokenizer, current: TokenizerRecord, record: TokenizerRecord | None, prefix: str
) -> str:
    if record is None:
        return f"{tokenizer.name}; {record_path(prefix)}, to compare it with, is missing"
    if found := differences(record, current):
        return f"{tokenizer.name} is ANOTHER than made these tokens ({record.name}): " + "; ".join(
            found
        )
    return f"{tokenizer.name}, which made these tokens"


def _rebuild(record: TokenizerRecord) -> tuple[Tokenizer | None, str]:
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
