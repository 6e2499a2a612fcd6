"""Options of preprocessing (text to token files), derived settings, and their differences."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.common.errors import DataError
from megatron.common.remote_files import state_of_input
from megatron.data.preprocessing.block_encoder import EmptyDocuments, Encoder, EncodingRules
from megatron.data.preprocessing.sentences import build_splitter
from megatron.data.readers.documents import Selection, no_key, read_documents
from megatron.data.readers.inputs import Source, columns_of_tables, find_sources, read_blocks
from megatron.data.readers.line_blocks import Limits
from megatron.data.readers.text_formats import TextSeparator
from megatron.data.token_files.indexed_dataset import best_dtype
from megatron.data.token_files.publish import pair_prefix, stage_of

log = logging.getLogger(__name__)

_MEMORY_PER_TEXT = 16  # bytes that one byte of text may need while it is converted
_FALLBACK = re.compile("<0x[0-9A-F]{2}>")
# A letter that byte-level BPE writes a byte as, or a byte of tiktoken's that is no UTF-8.
_MAY_BE_A_BYTE = re.compile(r"[!-\u0143]|\\x[0-9a-f]{2}")
_LENGTHS_OF_BYTES = (1, 4, 6)  # characters; a quicker test than the pattern
_BLOCK_BYTES = 1 << 20  # work that is done once for each block is a small part of the whole
_SMALLEST_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PreprocessSpec:
    """Texts to convert, and how.

    Args:
        inputs: files, globs, or `-`; read in this order.
        output_prefix: the files are {output_prefix}_{key}_document, or _sentence.
        text: separator of documents in plain text; None for JSON lines and tables.
        text_by_name: inputs may be JSON and plain text, as their names say.
        where: documents to convert, by their metadata; None for all.
        make_encoder: called once in every process, so it must be picklable.
        tokenizer: identifies the tokenizer, for the comparison on resuming.
        record: content of {output_prefix}_{key}_document.tokenizer.json; no file if empty.
        empty_documents: treatment of documents without tokens under some key.
        chats: lines are conversations, and `make_encoder` makes a conversation tokenizer; the keys
            are chat_encoder.py's.
        split_sentences: make each sentence a separate sequence.
        workers: processes that tokenize; with 1, this process does.
        chunk_size: lines a worker gets at a time at most; if None, only bytes count.
        max_memory_mb: for text and tokens in process, besides the processes' base memory.
        on_error: "stop" at a bad line, or "skip" it.
        bad_lines_path: file for the skipped lines.
        resume: skip the shards that an interrupted run finished.
        log_interval: documents between two lines of progress.
        shard_bytes: input of a shard, which a killed worker loses (default: by the input's size).
        block_bytes: text that is encoded at a time (default: 1 MiB, or less by `max_memory_mb`).
        join_bytes: tokens that are on disk twice while shards are joined, at most.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    text: TextSeparator | None = None
    text_by_name: bool = False
    where: Selection | None = None
    make_encoder: Callable[[], Encoder]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    record: str = ""
    append_eod: bool = False
    append_bos: bool = False
    prepend_space: bool = False
    empty_documents: EmptyDocuments = "drop"
    chats: bool = False
    split_sentences: bool = False
    lang: str = "english"
    keep_newlines: bool = False
    dataset_impl: str = "mmap"
    workers: int = 1
    chunk_size: int | None = None
    max_memory_mb: int = 1024
    on_error: str = "stop"
    bad_lines_path: str | None = None
    resume: bool = False
    log_interval: int = 10_000
    shard_bytes: int | None = None
    block_bytes: int | None = None
    join_bytes: int = 1 << 30

    @property
    def keys(self) -> tuple[str, ...]:
        """The JSON keys, each once."""
        return tuple(dict.fromkeys(self.json_keys))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of tables that are read."""
        return (*self.keys, *(self.where.columns if self.where else ()))

    @property
    def staging(self) -> Path:
        """Directory of the work in progress, next to the output."""
        return stage_of(self.output_prefix)

    def prefix_of(self, key: str) -> str:
        """Return the path of the token files of `key`, without suffix."""
        return pair_prefix(self.output_prefix, key, split_sentences=self.split_sentences)

    @property
    def prefixes(self) -> list[str]:
        """The paths of all token files, without suffix."""
        return [self.prefix_of(key) for key in self.keys]

    @property
    def max_text_bytes(self) -> int:
        """Bytes of text under way at a time, which is also the longest line."""
        return (self.max_memory_mb << 20) // _MEMORY_PER_TEXT

    def sources(self) -> list[Source]:
        """Return the inputs.

        Raises:
            DataError: one is missing, or of another format.
        """
        return find_sources(self.inputs, self.text, by_name=self.text_by_name)

    def limits(self) -> Limits:
        """Return how the input is cut into blocks."""
        share = self.max_text_bytes // (2 * self.workers)
        default = max(min(_BLOCK_BYTES, share), min(_SMALLEST_BLOCK_BYTES, self.max_text_bytes))
        return Limits(self.block_bytes or default, self.max_text_bytes, self.chunk_size)


def require_columns(spec: PreprocessSpec) -> None:
    """Check that every table has a column for each key: one without fails in no single row.

    Raises:
        DataError: naming all tables that lack one.
    """
    if spec.chats:
        return
    problems = []
    for path, names in columns_of_tables(spec.sources()):
        problems += [f"{path}: {no_key(key, names)}" for key in spec.keys if key not in names]
        if spec.where and not {*spec.where.columns} & {*names}:
            present = ", ".join(map(repr, names))
            problems.append(f"--where {spec.where.key}: {path} has no such column, but {present}")
    if problems:
        raise DataError("\n".join(problems))


def build_rules(spec: PreprocessSpec, encoder: Encoder) -> EncodingRules:
    """Build the encoding rules; a sentence splitter is trained if needed.

    Raises:
        DataError: the tokenizer lacks a token that ends documents.
    """
    suffix = []
    for role, flag, is_wanted in (
        ("eod", "--append-eod", spec.append_eod),
        ("bos", "--append-bos", spec.append_bos),
    ):
        if is_wanted and role not in encoder.special_ids:
            hint = "; samples of sentences need none: leave the flag out" if role == "eod" else ""
            raise DataError(f"{flag}: the tokenizer has no token of the role {role}{hint}")
        if is_wanted:
            suffix.append(encoder.special_ids[role])
    splitter = None
    if spec.split_sentences:
        if num_added := int(encoder.encode_array([""])[1].sum()):
            log.warning(
                "the tokenizer adds %d special tokens to each sentence, where samples of sentences "
                "have none: add --tokenizer-hf-no-include-special-tokens",
                num_added,
            )
        texts = (text for texts in first_documents(spec) for text in texts)
        splitter = build_splitter(spec.lang, spec.keep_newlines, texts)
    return EncodingRules(
        keys=spec.keys,
        dtype=best_dtype(encoder.vocab_size),
        suffix=tuple(suffix),
        empty_documents=spec.empty_documents,
        prepend_space=spec.prepend_space,
        splitter=splitter,
        odd_ids=() if spec.chats else odd_ids(encoder),
        chats=spec.chats,
        max_line_bytes=spec.max_text_bytes,
        where=spec.where,
    )


def odd_ids(encoder: Encoder) -> tuple[int, ...]:
    """Return the ids of the unknown token, of byte fallbacks, and of bytes that are no character.

    Byte-level BPE has tokens of one byte; ASCII bytes are characters like any other.
    """
    found = {encoder.special_ids["unk"]} if "unk" in encoder.special_ids else set()
    for i, token in enumerate(encoder.vocabulary().tokens):
        if len(token) not in _LENGTHS_OF_BYTES:
            continue
        is_odd = _FALLBACK.fullmatch(token) or (
            _MAY_BE_A_BYTE.fullmatch(token) and encoder.decode([i]) == "\ufffd"
        )
        if is_odd:
            found.add(i)
    return tuple(sorted(found))


def fingerprint(
    spec: PreprocessSpec, rules: EncodingRules, sources: list[Source]
) -> dict[str, Any]:
    """Return everything that the tokens depend on, as JSON."""
    inputs = []
    for source in sources:
        changed_at = 0 if source.kind == "stream" else state_of_input(source.path)
        inputs.append([source.path, source.kind, source.num_bytes, changed_at])
    return {
        "--input": inputs,
        "--document-separator": spec.text,
        "--json-keys": spec.keys,
        "--where": [spec.where.key, *spec.where.values] if spec.where else None,
        "the tokenizer": dict(spec.tokenizer),
        "the type of a token": rules.dtype.name,
        "the end of a document": rules.suffix,
        "--empty-documents": rules.empty_documents,
        "--conversations": rules.chats,
        "--prepend-space": rules.prepend_space,
        "--split-sentences": spec.split_sentences,
        "the model that splits sentences": rules.splitter.model if rules.splitter else None,
        "--lang": spec.lang,
        "--keep-newlines": spec.keep_newlines,
        "the longest line that --max-memory-mb allows": rules.max_line_bytes,
        "bytes of a shard": spec.shard_bytes,
    }


def first_documents(spec: PreprocessSpec) -> Iterator[tuple[str, ...]]:
    """Yield the texts, one for each key, of the documents in inputs that can be read twice."""
    sources = [source for source in spec.sources() if source.kind != "stream"]
    for block in read_blocks(sources, spec.limits(), columns=spec.columns):
        documents = read_documents(block, spec.keys, spec.max_text_bytes, spec.where)
        yield from zip(*documents.texts, strict=True)


_NAMED = 3  # files named in a message; further files are counted


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a message for each difference between two results of `preprocess_spec.fingerprint`."""
    ours, theirs = (json.loads(json.dumps(options)) for options in (before, now))
    found: list[str] = []
    for name in {**ours, **theirs}:
        was, wanted = ours.get(name), theirs.get(name)
        if was == wanted:
            continue
        if name == "--input":
            found += _input_changes(was or [], wanted or [])
        elif name == "the end of a document":
            found.append(
                f"each document ended with {_words(was)} and ends with {_words(wanted)} now "
                "(--append-eod, --append-bos)"
            )
        elif isinstance(was, dict) and isinstance(wanted, dict):
            found += differences(
                {f"{name}'s {part}": value for part, value in was.items()},
                {f"{name}'s {part}": value for part, value in wanted.items()},
            )
        else:
            found.append(f"{name} was {_words(was)} and is {_words(wanted)}")
    return found


def _words(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " and ".join(map(repr, value)) or "nothing"
    return repr(value)


def _input_changes(was: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the differences of the files: other names, or other contents.

    Args:
        was: of each file, its path, kind, bytes, and nanoseconds of its last change.
        now: the same.
    """
    paths, paths_now = [entry[0] for entry in was], [entry[0] for entry in now]
    if sorted(paths) != sorted(paths_now):
        gone = _join_names(path for path in dict.fromkeys(paths) if path not in set(paths_now))
        added = _join_names(path for path in dict.fromkeys(paths_now) if path not in set(paths))
        yield (
            f"--input named {_files(len(paths))} and names {_files(len(paths_now))}: "
            f"{added or 'none'} new, {gone or 'none'} gone"
        )
    elif paths != paths_now:
        first = next(pair for pair in zip(paths, paths_now, strict=True) if pair[0] != pair[1])
        yield f"--input has another order: {first[1]} comes where {first[0]} was"
    else:
        changed = (pair for pair in zip(was, now, strict=True) if pair[0] != pair[1])
        yield from map(_file_change, *zip(*islice(changed, _NAMED), strict=True))
        if others := sum(1 for _ in changed):
            yield f"{_files(others)} more of --input {'is' if others == 1 else 'are'} not as then"


def _file_change(was: Sequence[Any], now: Sequence[Any]) -> str:
    path, kind, num_bytes, changed_at = was
    _, kind_now, num_bytes_now, changed_at_now = now
    found = []
    if kind != kind_now:
        found.append(f"was {kind} and is {kind_now}")
    if num_bytes != num_bytes_now:
        found.append(f"had {num_bytes} bytes and has {num_bytes_now}")
    if changed_at != changed_at_now:
        found.append(f"was last changed at {_time(changed_at)}, and now at {_time(changed_at_now)}")
    return f"--input {path} {', '.join(found)}"


def _time(nanoseconds: int) -> str:
    at = datetime.fromtimestamp(nanoseconds // 10**9)
    return f"{at:%Y-%m-%d %H:%M:%S}.{nanoseconds % 10**9:09d}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _join_names(paths: Iterator[str]) -> str:
    first = list(islice(paths, _NAMED))
    others = sum(1 for _ in paths)
    return ", ".join([*first, *([f"{others} others"] if others else [])])
