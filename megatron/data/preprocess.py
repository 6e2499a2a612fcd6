"""JSON lines to token files, with many processes and the same bytes for any number of them.

A document is one line. What a line's text becomes is asked of a tokenizer, which is passed in.
"""

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDatasetWriter, best_dtype
from megatron.data.progress import Progress
from megatron.errors import DataError, MegatronError

_MAX_CHUNK_BYTES = 1 << 20  # a chunk ends after this much text, so that memory stays bounded
_CHUNKS_PER_WORKER = 4  # read ahead, so that a slow chunk does not leave the others idle


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""


@dataclass(frozen=True)
class Written:
    """One published .bin/.idx pair."""

    prefix: str
    documents: int
    dropped: int  # documents without a token
    tokens: int
    bytes: int  # of both files


@dataclass(frozen=True)
class _Chunk:
    """Consecutive lines of one file."""

    path: str
    first_line: int
    lines: list[bytes]


@dataclass(frozen=True)
class _Encoded:
    """The documents of one chunk; `tokens` and `sizes` hold one array per JSON key."""

    tokens: list[NDArray]
    sizes: list[NDArray]
    num_lines: int  # blank ones not counted
    num_bytes: int


def preprocess(
    inputs: Sequence[str],
    *,
    output_prefix: str,
    json_keys: Sequence[str],
    make_encoder: Callable[[], Encoder],
    append_eod: bool = False,
    workers: int = 1,
    chunk_size: int = 512,
    log_interval: int = 10_000,
) -> list[Written]:
    """Tokenize the text under each key of each line, into {output_prefix}_{key}_document.

    Documents keep their order. Blank lines are skipped. A document without a token (such as an
    empty text) is left out of its key's files, and gets no end-of-document token either; so the
    files of two keys need not match document by document. The files appear at the end, all of
    them or none.

    Args:
        inputs: files with one JSON object a line, read in this order.
        make_encoder: called once in every process, so it must be picklable.
        workers: processes that tokenize; with 1, this process does.
        chunk_size: lines a worker gets at a time, fewer if they are long.
        log_interval: documents between two lines of progress.

    Raises:
        DataError: an input cannot be read, a line is not as expected, nothing is left to
            write, or the output cannot be written.
        MegatronError: a worker was killed.
    """
    total_bytes = sum(_size(path) for path in inputs)
    keys = tuple(dict.fromkeys(json_keys))
    encoder = make_encoder()
    chunk_encoder = _ChunkEncoder(encoder, keys, encoder.eod if append_eod else None)
    chunks = _chunks(inputs, chunk_size)
    if workers == 1:
        encoded_chunks: Iterator[_Encoded] = map(chunk_encoder, chunks)
    else:
        encoded_chunks = _encoded_by_workers(
            chunks, workers, (make_encoder, keys, chunk_encoder.eod)
        )
    with ExitStack() as stack:
        writers = []
        for key in keys:
            writer = IndexedDatasetWriter(
                f"{output_prefix}_{key}_document", best_dtype(encoder.vocab_size)
            )
            stack.callback(writer.discard)
            writers.append(writer)
        progress = Progress(total_bytes, log_interval=log_interval)
        stack.callback(progress.close)
        for encoded in encoded_chunks:
            for writer, tokens, sizes in zip(writers, encoded.tokens, encoded.sizes, strict=True):
                writer.append(tokens, sizes)
            progress.add(
                documents=encoded.num_lines,
                tokens=sum(tokens.size for tokens in encoded.tokens),
                num_bytes=encoded.num_bytes,
            )
        return _publish(writers, keys, inputs, progress.documents)


def input_problems(inputs: Iterable[str], json_keys: Sequence[str]) -> Iterator[str]:
    """Yield one sentence for each input that is missing or whose first document is not right."""
    for path in inputs:
        try:
            for chunk in _chunks([path], chunk_size=1):
                if documents := list(_documents(chunk)):
                    for key in json_keys:
                        _text(*documents[0], key)
                    break
        except DataError as error:
            yield str(error)


def _publish(
    writers: Sequence[IndexedDatasetWriter],
    keys: Sequence[str],
    inputs: Sequence[str],
    num_lines: int,
) -> list[Written]:
    for key, writer in zip(keys, writers, strict=True):
        if not writer.num_documents:
            raise DataError(
                f"nothing to write for key {key!r}: none of the {num_lines} documents in "
                f"{', '.join(inputs)} has a token"
            )
    for writer in writers:
        writer.finish()
    for writer in writers:
        writer.publish()
    return [
        Written(
            prefix=writer.prefix,
            documents=writer.num_documents,
            dropped=num_lines - writer.num_documents,
            tokens=writer.num_tokens,
            bytes=sum(os.path.getsize(writer.prefix + suffix) for suffix in (".bin", ".idx")),
        )
        for writer in writers
    ]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise DataError(f"cannot read --input {path}: {error.strerror}") from error


def _chunks(paths: Iterable[str], chunk_size: int) -> Iterator[_Chunk]:
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                first_line = 1
                lines: list[bytes] = []
                num_bytes = 0
                for line in file:
                    lines.append(line)
                    num_bytes += len(line)
                    if len(lines) == chunk_size or num_bytes >= _MAX_CHUNK_BYTES:
                        yield _Chunk(path, first_line, lines)
                        first_line += len(lines)
                        lines, num_bytes = [], 0
                if lines:
                    yield _Chunk(path, first_line, lines)
        except OSError as error:
            raise DataError(f"cannot read --input {path}: {error.strerror}") from error


@dataclass(frozen=True)
class _ChunkEncoder:
    encoder: Encoder
    keys: tuple[str, ...]
    eod: int | None  # appended to every document that has a token

    def __call__(self, chunk: _Chunk) -> _Encoded:
        tokens: list[list[int]] = [[] for _ in self.keys]
        sizes: list[list[int]] = [[] for _ in self.keys]
        num_lines = 0
        for place, document in _documents(chunk):
            num_lines += 1
            for k, key in enumerate(self.keys):
                ids = self._encode(place, _text(place, document, key))
                tokens[k] += ids
                if ids:
                    sizes[k].append(len(ids))
        return _Encoded(
            [np.array(ids, np.int32) for ids in tokens],
            [np.array(counts, np.int64) for counts in sizes],
            num_lines,
            sum(map(len, chunk.lines)),
        )

    def _encode(self, place: str, text: str) -> list[int]:
        try:
            ids = self.encoder.encode(text)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if ids and self.eod is not None:
            return [*ids, self.eod]
        return ids


def _documents(chunk: _Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for a message, object) for every line that is not blank."""
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        if line.isspace():
            continue
        place = f"{chunk.path}, line {number}"
        excerpt = line[:80].decode("utf-8", "replace").strip()
        expected = 'each line must be an object such as {"text": "..."}'
        try:
            document = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON: {excerpt!r} ({error}); {expected}") from error
        if not isinstance(document, dict):
            raise DataError(f"{place}: not a JSON object: {excerpt!r}; {expected}")
        yield place, document


def _text(place: str, document: dict[str, Any], key: str) -> str:
    if key not in document:
        present = ", ".join(map(repr, document)) or "none"
        raise DataError(f"{place}: no key {key!r}; it has {present} (--json-keys names the keys)")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{place}: key {key!r} holds {json.dumps(text)[:80]}, which is not a text")
    return text


class _Worker:
    """What a worker process keeps from one chunk to the next."""

    encode: ClassVar[Callable[[_Chunk], _Encoded]]


def _start_worker(
    make_encoder: Callable[[], Encoder], keys: tuple[str, ...], eod: int | None
) -> None:
    # The parent is interrupted as well, and ends the workers in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _Worker.encode = _ChunkEncoder(make_encoder(), keys, eod)


def _exit_with_parent() -> None:
    """End this process when its parent is killed; waiting for the next chunk, it would stay."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: _Chunk) -> _Encoded:
    return _Worker.encode(chunk)


def _encoded_by_workers(
    chunks: Iterable[_Chunk], workers: int, start: tuple[Any, ...]
) -> Iterator[_Encoded]:
    """Yield the encoded chunks in order; only so many are held at a time."""
    # spawn: a fork would copy locks that other threads of this process may hold.
    executor = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=start
    )
    pending: deque[Future[_Encoded]] = deque()
    try:
        for chunk in chunks:
            pending.append(executor.submit(_encode_in_worker, chunk))
            if len(pending) >= workers * _CHUNKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise MegatronError(
            "a worker process was killed, most often because memory ran out; "
            f"use fewer --workers than {workers} or a smaller --chunk-size"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
