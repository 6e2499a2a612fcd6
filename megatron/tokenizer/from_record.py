"""Tokenizer that decodes token files: the one of the flags, or the recorded one."""

from collections.abc import Mapping
from typing import Any

from megatron.common.errors import MegatronError
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.fingerprint import (
    TokenizerRecord,
    describe,
    differences,
    read_record,
    record_path,
)
from megatron.tokenizer.types.tokenizer import Tokenizer


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
    if not record.wishes:
        return None, f"{record.name}; {_flags_for({})}"
    try:
        tokenizer = build_tokenizer(**record.wishes)
        found = differences(record, describe(tokenizer))
    except (MegatronError, TypeError) as error:
        found = [str(error)]
    if found:
        reasons = "; ".join(found)
        return (
            None,
            f"{record.name}, cannot be built again ({reasons}); {_flags_for(record.wishes)}",
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
