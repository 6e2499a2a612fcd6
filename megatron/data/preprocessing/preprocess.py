"""Texts to token files: the same bytes for any number of processes, whole or not at all.

What a text becomes is asked of a tokenizer, which is passed in. Work is staged beside the output;
when all parts are there, they become the token files in one step.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import BusyError, DataError
from megatron.common.processes import run_in_processes
from megatron.data.preprocessing.assemble import (
    Written,
    assemble,
    forget_assembled,
    publish_staged,
    require_assembled_of,
    was_assembled,
)
from megatron.data.preprocessing.block_encoder import Encoded, EncodingRules
from megatron.data.preprocessing.chat_encoder import block_encoder
from megatron.data.preprocessing.preprocess_spec import (
    Conversion,
    build_rules,
    fingerprint,
    require_columns,
)
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.round_trip import try_first_documents
from megatron.data.preprocessing.shard_writer import (
    STATE,
    Stage,
    part_directory,
    remove_stage,
    require_as_many_parts,
)
from megatron.data.preprocessing.workers import encoded_by_workers
from megatron.data.readers.documents import BadLine, read_documents
from megatron.data.readers.inputs import (
    STDIN,
    Source,
    find_sources,
    read_blocks,
    split_sources,
)
from megatron.data.readers.line_blocks import Limits
from megatron.data.readers.text_formats import TextSeparator
from megatron.data.token_files.publish import staged_record, write_errors_name

log = logging.getLogger(__name__)

_MOST_WARNINGS = 5  # bad lines that are named in the log

Report = Callable[[int, int, int, bool], None]  # documents, tokens, bytes, by an earlier run


@dataclass(frozen=True)
class _Part:
    """What one process of a conversion does."""

    conversion: Conversion
    rules: EncodingRules
    part: int
    num_parts: int

    def __call__(self, report: Report) -> None:
        stage_part(self.conversion, self.rules, self.part, self.num_parts, report)


def preprocess(conversion: Conversion) -> list[Written]:
    """Convert, and return what was written, one entry for each key.

    Raises:
        DataError: an input cannot be read, a line is not as expected, nothing is left to
            write, or the output cannot be written.
        MegatronError: a process was killed.
    """
    num_parts = conversion.partitions
    with _whole_stage(conversion):
        sources = conversion.sources()
        require_columns(conversion)
        rules = build_rules(conversion, conversion.make_encoder())
        if was_assembled(conversion.root):
            require_assembled_of(conversion, rules, num_parts)
            return publish_staged(conversion.root)
        if conversion.resume:
            require_as_many_parts(conversion.root, num_parts)
        total_bytes = sum(source.num_bytes for source in sources)
        progress = Progress(total_bytes, log_interval=conversion.log_interval)

        def report(documents: int, tokens: int, num_bytes: int, earlier: bool) -> None:
            count = progress.take_up if earlier else progress.add
            count(documents=documents, tokens=tokens, num_bytes=num_bytes)

        try:
            if num_parts == 1:
                stage_part(conversion, rules, 0, 1, report)
            else:
                parts = [_Part(conversion, rules, k, num_parts) for k in range(num_parts)]
                run_in_processes(parts, report)
        finally:
            progress.close()
        return publish_parts(conversion, rules, num_parts)


def publish_parts(conversion: Conversion, rules: EncodingRules, num_parts: int) -> list[Written]:
    """Make the token files of all parts, each with the record of the tokenizer.

    Raises:
        DataError: a part is not finished, nothing is left to write, or the disk is full.
    """
    root = conversion.root
    with staged_record(conversion.prefixes, conversion.record, is_kept=lambda: was_assembled(root)):
        return assemble(conversion, rules, num_parts)


def stage_part(
    conversion: Conversion, rules: EncodingRules, part: int, num_parts: int, report: Report
) -> None:
    """Convert part `part` of `num_parts` of the input, into its own stage.

    Raises:
        DataError: as `preprocess`.
        MegatronError: a worker was killed.
    """
    sources = split_sources(conversion.sources(), part, num_parts)
    stage = Stage(
        part_directory(conversion.root, part, num_parts),
        fingerprint(conversion, rules, sources),
        len(rules.keys),
        resume=conversion.resume,
    )
    try:
        position = stage.position
        report(position.documents, position.tokens, position.file_bytes, True)
        if not position.is_done:
            _fill(stage, conversion, rules, sources, report)
            if part == 0 and not rules.chats:
                try_first_documents(conversion, rules, position.tallies)
            stage.commit(is_done=True)
    except BaseException:
        with suppress(DataError):  # closing writes what is buffered, and the disk may be full
            stage.close()
        raise
    stage.close()


def input_problems(
    inputs: Iterable[str], json_keys: Sequence[str], text: TextSeparator | None = None
) -> Iterator[str]:
    """Yield one sentence for each input that is missing or whose first document is not right.

    Args:
        text: what ends a document, if they are plain text.
    """
    limits = Limits(block_bytes=1, line_bytes=1 << 26)
    for pattern in inputs:
        try:
            for source in find_sources([pattern], text):
                if source.path == STDIN or source.kind == "stream":
                    continue
                word, before = "row" if source.kind == "parquet" else "line", 0
                for block in read_blocks([source], limits, columns=json_keys):
                    documents = read_documents(block, json_keys, limits.line_bytes)
                    if documents.bad:
                        bad = documents.bad[0]
                        yield f"{source.path}, {word} {before + bad.line + 1}: {bad.problem}"
                    before += documents.num_lines
                    if documents.bad or documents.lines:
                        break
        except DataError as error:
            yield str(error)


def _fill(
    stage: Stage,
    conversion: Conversion,
    rules: EncodingRules,
    sources: Sequence[Source],
    report: Report,
) -> None:
    position = stage.position
    blocks = read_blocks(
        sources,
        conversion.limits(),
        first=position.source,
        offset=position.offset,
        columns=rules.keys,
    )
    if conversion.workers == 1:
        encoded_blocks: Iterator[Encoded] = map(
            block_encoder(conversion.make_encoder(), rules), blocks
        )
    else:
        encoded_blocks = encoded_by_workers(
            blocks,
            conversion.workers,
            conversion.make_encoder,
            rules,
            max_bytes=conversion.max_text_bytes,
        )
    committed_at = time.monotonic()
    for encoded in encoded_blocks:
        for bad in encoded.bad:
            _take_bad(stage, conversion, sources[encoded.source], encoded, bad)
        tokens, file_bytes = position.tokens, position.file_bytes
        before = sum(source.num_bytes for source in sources[: encoded.source])
        position.file_bytes = before + encoded.file_end - _first_byte(sources[encoded.source])
        stage.append(encoded)
        num_documents = encoded.num_documents + encoded.num_dropped
        report(num_documents, position.tokens - tokens, position.file_bytes - file_bytes, False)
        if time.monotonic() - committed_at >= conversion.commit_interval_s:
            stage.commit()
            committed_at = time.monotonic()


def _first_byte(source: Source) -> int:
    return source.start if source.kind == "plain" else 0


def _take_bad(
    stage: Stage, conversion: Conversion, source: Source, encoded: Encoded, bad: BadLine
) -> None:
    """Stop at a bad line, or remember it."""
    word = "line"
    if source.kind == "parquet":
        word, number = "row", encoded.start + bad.line + 1
    else:
        before = stage.position.lines if encoded.source == stage.position.source else 0
        number = source.lines_before + before + bad.line + 1
    is_document = source.text not in (None, "line")
    name = "document" if is_document else "element" if source.kind == "whole" else word
    place = f"{source.path}, {name} {number}"
    if conversion.on_error == "stop":
        raise DataError(f"{place}: {bad.problem}")
    stage.append_bad(
        {"file": source.path, word: number, "problem": bad.problem, "excerpt": bad.excerpt}
    )
    if stage.position.bad <= _MOST_WARNINGS:
        log.warning("left out %s: %s", place, bad.problem)
    if stage.position.bad == _MOST_WARNINGS:
        log.warning("further bad lines are only counted and, with --on-error collect, written")


@contextmanager
def _whole_stage(conversion: Conversion) -> Iterator[None]:
    """Keep others out of the stage; when this fails, leave only what can be taken up again."""
    root = conversion.root
    with write_errors_name(root):
        root.mkdir(exist_ok=True)
    with stage_lock(root, fcntl.LOCK_EX):
        if not conversion.resume:
            forget_assembled(root)
            remove_stage([path for path in root.iterdir() if path.is_dir()])
        try:
            yield
        except BaseException:
            if was_assembled(root) or any(root.glob(f"*/{STATE}")):
                log.warning("%s keeps what is done; --resume goes on from there", root)
            else:
                remove_stage([root])
            raise
        remove_published(root)


def remove_published(root: Path) -> None:
    """Remove the stage of files that are published.

    While it still says that, its parts may be incomplete: so they go first.
    """
    remove_stage([path for path in root.iterdir() if path.is_dir()])
    remove_stage([root])


@contextmanager
def stage_lock(root: Path, kind: int) -> Iterator[None]:
    """Hold the lock of a stage: alone, or with others that each convert a part.

    Raises:
        BusyError: another process holds it.
    """
    with (root / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"another process writes to {root}; wait for its end, or give another "
                "--output-prefix"
            ) from error
        yield
