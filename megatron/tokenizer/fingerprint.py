"""Tokenizer record (fingerprint) next to token files, and its differences from a tokenizer.

Needs no torch and no token files. The record is `PREFIX.tokenizer.json` next to `PREFIX.bin`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.common.errors import DataError, WrongDataError
from megatron.config.data.tokenizer import with_sentencepiece_form
from megatron.tokenizer.types.tokenizer import Tokenizer

SUFFIX = ".tokenizer.json"
FORMAT = 1

_NOT_IN_HASH = ("arguments", "chat_template")
"""Fields of a record that older files lack, and that the fingerprint does not depend on."""

_KEYS = {"arguments": "wishes"}  # keys in the file of the fields that have another name here

_REMEDY_FLAGS = (
    "vocab_file",
    "merge_file",
    "tokenizer_name_or_path",
    "tokenizer_model",
    "vocab_size",
)
"""Arguments that choose the vocabulary of a type."""

_SENTINEL = re.compile("<extra_id_[0-9]+>")
_SHOWN = 5  # differing tokens that a message names
_WIDTH = 20  # characters of a token in a message

# Plain text, old letters: its ids are the same for every version of Unicode and of the libraries.
_PROBE = (
    "The Quick brown fox's 3 tails, they'LL jump 12345 times!  Two spaces,\ttab\nline\r\n\n"
    "Größe naïve ÉCOLE числа ΟΔΟΣ 日本語 👍 x==1&&y!=2; http://a.b/c_d?e=f%20"
)
_NUMBERS = "0 1 2"  # the probe of a tokenizer whose texts are numbers


@dataclass(frozen=True)
class TokenizerRecord:
    """Properties of a tokenizer, known without its files."""

    fingerprint: str  # hash of all that follows, up to the tokens and without the name
    name: str  # for messages: its file or its name on the hub
    vocab_size: int  # before padding
    special: Mapping[str, int]  # role -> id
    rules_sha256: str  # of the merges in order, or of the scores
    probe: Sequence[int]  # ids of a fixed text, which show how words are cut
    tokens: Sequence[str]  # text of each id; empty where ids have none
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of `build_tokenizer`
    chat_template: str | None = ""  # Jinja template of the messages; "": no messages; None: unknown


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the vocabulary, the merges, the special tokens and how words are cut.

    File names, libraries and backends do not count.
    """
    return describe(tokenizer).fingerprint


def describe(tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None) -> TokenizerRecord:
    """Return the record of `tokenizer`.

    Args:
        arguments: of `build_tokenizer`, to build it again; file names are recorded as absolute
            paths.
    """
    vocabulary = tokenizer.vocabulary()
    content: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "special": dict(sorted(tokenizer.special_ids.items())),
        "rules_sha256": hashlib.sha256(vocabulary.rules.encode()).hexdigest(),
        "probe": _probe(tokenizer),
        "tokens": list(vocabulary.tokens),
    }
    recorded = {
        name: _lasting(value) for name, value in (arguments or {}).items() if value is not None
    }
    return TokenizerRecord(
        fingerprint=_hash(content), name=tokenizer.name, arguments=recorded, **content
    )


def record_path(prefix: str | Path) -> Path:
    """Return the path of the record of the token files `prefix`.bin and .idx."""
    return Path(f"{prefix}{SUFFIX}")


def to_text(record: TokenizerRecord) -> str:
    """Return the content of a record's file."""
    content = {_KEYS.get(name, name): value for name, value in asdict(record).items()}
    return json.dumps({"format": FORMAT} | content)


def read_record(prefix: str | Path) -> TokenizerRecord | None:
    """Return the record next to the token files `prefix`; None if there is none.

    Raises:
        DataError: it cannot be read, is damaged, or is of a later format.
    """
    path = record_path(prefix)
    try:
        content_of_file = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}; delete it, or make the data again"
        ) from error
    names = [each.name for each in fields(TokenizerRecord) if each.name not in _NOT_IN_HASH]
    if (
        not isinstance(content_of_file, dict)
        or content_of_file.get("format") != FORMAT
        or not content_of_file.keys() >= {*names}
    ):
        raise DataError(
            f"{path} is not a record of a tokenizer in format {FORMAT}; another version of this "
            "software may have written it"
        )
    record = TokenizerRecord(**{name: content_of_file[name] for name in names})
    content = {name: content_of_file[name] for name in names if name not in ("fingerprint", "name")}
    if _hash(content) != record.fingerprint:
        raise DataError(f"{path} is damaged: its content does not match its hash")
    arguments = content_of_file.get(_KEYS["arguments"])
    if isinstance(arguments, dict):
        record = replace(record, arguments=with_sentencepiece_form(arguments, is_legacy=True))
    return replace(record, chat_template=content_of_file.get("chat_template"))


def differences(stored: TokenizerRecord, current: TokenizerRecord) -> list[str]:
    """Return the differences that make ids of the one wrong for the other; empty for none.

    A role that only one of them has is no difference, nor are sentinels <extra_id_N> after the
    other tokens: the tokens of the data mean the same.
    """
    if stored.fingerprint == current.fingerprint:
        return []
    stored, current = _without_sentinels(stored), _without_sentinels(current)
    found = []
    if stored.vocab_size != current.vocab_size:
        found.append(f"vocabulary of {stored.vocab_size} tokens, and {current.vocab_size} now")
    differing = list(_differing_tokens(stored.tokens, current.tokens))
    if differing:
        shown = ", ".join(differing[:_SHOWN])
        more = "" if len(differing) <= _SHOWN else ", and so on"
        found.append(f"{len(differing)} tokens differ: {shown}{more}")
    for role in sorted(stored.special.keys() & current.special.keys()):
        if stored.special[role] != current.special[role]:
            found.append(f"{role} was {stored.special[role]} and is {current.special[role]} now")
    if stored.rules_sha256 != current.rules_sha256 and not differing:
        found.append("the same tokens, joined by other merges or scores")
    if list(stored.probe) != list(current.probe) and not found:
        found.append("the same tokens, but texts are cut into words in another way")
    return [*found, *_other_form(stored.arguments, current.arguments)]


def _without_sentinels(record: TokenizerRecord) -> TokenizerRecord:
    """Return `record` without the sentinels that --vocab-extra-ids added after its other tokens."""
    tokens = list(record.tokens)
    while tokens and _SENTINEL.fullmatch(tokens[-1]):
        tokens.pop()
    added = len(record.tokens) - len(tokens)
    return replace(record, tokens=tokens, vocab_size=record.vocab_size - added)


def _other_form(stored: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yield which form of SentencePiece tokens the data have, where it is the other one."""
    flag = "tokenizer_sentencepiece_legacy"
    was_legacy, is_legacy = stored.get(flag), current.get(flag)
    if was_legacy and is_legacy is False:
        yield "the data have the legacy form: write --tokenizer-sentencepiece-legacy"
    if was_legacy is False and is_legacy:
        yield "the data do not have the legacy form: leave --tokenizer-sentencepiece-legacy out"


def require_same(prefix: str | Path, current: TokenizerRecord) -> None:
    """Raise if another tokenizer made the token files `prefix`, by their record.

    Raises:
        WrongDataError: it names the differences. Files without a record pass.
    """
    stored = read_record(prefix)
    if stored is not None and (found := differences(stored, current)):
        raise WrongDataError(
            f"{prefix}.bin was made with another tokenizer ({_name_of(stored)}) than the one of this "
            f"run ({_name_of(current)}): {'; '.join(found)}{_remedy(stored)}"
        )


def _name_of(record: TokenizerRecord) -> str:
    """Return the type, where it is recorded, and the name of a tokenizer."""
    kind = str(record.arguments.get("tokenizer_type", ""))
    return record.name if record.name.startswith(kind) else f"{kind} {record.name}"


def _remedy(record: TokenizerRecord) -> str:
    """Return the flags that build the tokenizer of a record; "" where its type is not recorded."""
    given = record.arguments
    if "tokenizer_type" not in given:
        return ""
    files = (
        f" --{name.replace('_', '-')} {given[name]}" for name in _REMEDY_FLAGS if given.get(name)
    )
    return f"; for these data write --tokenizer-type {given['tokenizer_type']}{''.join(files)}"


def common_chat_template(prefixes: Iterable[str]) -> str:
    """Return the chat template that wrote the messages in token files; "" if none is recorded.

    Raises:
        WrongDataError: two of them were written with different templates.
    """
    found = {
        prefix: record.chat_template
        for prefix in prefixes
        if (record := read_record(prefix)) and record.chat_template
    }
    first = next(iter(found), "")
    for prefix, template in found.items():
        if template != found[first]:
            raise WrongDataError(
                f"{prefix} and {first} hold conversations written with different chat templates; "
                "preprocess both with the same --chat-template"
            )
    return found.get(first, "")


def _lasting(value: Any) -> Any:
    """Return `value`, as an absolute path if it names a file or a directory."""
    if isinstance(value, str) and os.path.exists(value):
        return os.path.abspath(value)
    return value


def _differing_tokens(stored: Sequence[str], current: Sequence[str]) -> Iterator[str]:
    for i in range(max(len(stored), len(current))):
        then = stored[i] if i < len(stored) else None
        now = current[i] if i < len(current) else None
        if then != now:
            yield f"id {i} was {_quoted(then)} and is {_quoted(now)} now"


def _quoted(token: str | None) -> str:
    if token is None:
        return "missing"
    return repr(token if len(token) <= _WIDTH else token[: _WIDTH - 1] + "…")


def _probe(tokenizer: Tokenizer) -> list[int]:
    for text in (_PROBE, _NUMBERS):
        with suppress(DataError):  # of numbers only, or a small vocabulary that lacks some bytes
            return tokenizer.encode(text)
    return []


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
