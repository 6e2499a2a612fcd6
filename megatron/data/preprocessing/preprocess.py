"""Preprocessing: tokenizes texts into token files, with the same bytes for any number of workers.

Workers convert each shard of the input into separate files; finished shards are joined.
"""

import fcntl
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.common.errors import DataError, MegatronError
from megatron.common.process_pool import LostWorkerError, map_in_processes, share_cores
from megatron.data.preprocessing.assemble import (
    Written,
    assemble,
    forget_assembled,
    publish_assembled,
    require_assembled_of,
    require_no_bad_lines,
    require_same_options,
    was_assembled,
)
from megatron.data.preprocessing.block_encoder import (
    BlockEncoder,
    ConversationEncoder,
    Encoded,
    EncodingRules,
)
from megatron.data.preprocessing.preprocess_spec import (
    PreprocessSpec,
    build_rules,
    fingerprint,
    require_columns,
)
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shard_writer import (
    FINISHED,
    ShardState,
    ShardWriter,
    finished_shards,
    intact_shards,
    record_options,
    remove_folders,
    staging_lock,
)
from megatron.data.preprocessing.shards import (
    Shard,
    default_shard_bytes,
    plan_shards,
    shards_of_rank,
    unpack,
)
from megatron.data.readers.documents import BadLine, read_documents
from megatron.data.readers.inputs import STDIN, Block, Source, find_sources, read_blocks
from megatron.data.readers.line_blocks import Limits
from megatron.data.readers.text_formats import TextSeparator
from megatron.data.token_files.publish import write_errors_name

log = logging.getLogger(__name__)

_MOST_WARNINGS = 5  # bad lines that are named in the log


def preprocess(spec: PreprocessSpec) -> list[Written]:
    """Convert all inputs, and return the written files, one entry for each key.

    Raises:
        DataError: an input cannot be read, a line is not as expected, nothing is left to
            write, or the output cannot be written.
        MegatronError: a process was killed.
    """
    with _work_in_progress(spec):
        rules, options = _begin(spec)
        if was_assembled(spec.staging):
            require_assembled_of(spec, options)
            log.info("--resume: all shards in %s are joined; publishes them", spec.staging)
            return publish_assembled(spec.staging)
        shards = plan_shards(spec.sources(), spec.shard_bytes)
        convert_shards(spec, rules, shards, options)
        return assemble(spec, rules, shards, options, verify=False)


def convert_share(spec: PreprocessSpec, rank: int, num_ranks: int) -> None:
    """Convert the shards of rank `rank` of `num_ranks`; `merge_shards` joins all ranks' shards.

    With `resume` there is nothing to do where a merge has joined all shards already.

    Raises:
        DataError: as `preprocess`, or on resuming shards were made with other options.
        MegatronError: a process was killed.
    """
    staging = spec.staging
    with write_errors_name(staging):
        staging.mkdir(exist_ok=True)
    with staging_lock(staging, fcntl.LOCK_SH):
        rules, options = _begin(spec)
        if not spec.resume:
            forget_assembled(staging)
        elif was_assembled(staging):
            require_assembled_of(spec, options)
            return
        shards = plan_shards(spec.sources(), spec.shard_bytes)
        shards = shards_of_rank(shards, rank, num_ranks)
        if not spec.resume:
            remove_folders(path for shard in shards for path in staging.glob(f"{shard.name}*/"))
        convert_shards(spec, rules, shards, options)


def merge_shards(spec: PreprocessSpec) -> list[Written]:
    """Join the shards of all ranks into token files; the shards are removed.

    Raises:
        DataError: a shard is missing, or was made with other options or from other inputs.
    """
    staging = spec.staging
    if not staging.is_dir():
        raise DataError(f"there are no shards to merge: {staging} does not exist")
    with staging_lock(staging, fcntl.LOCK_EX):
        rules, options = _begin(spec)
        if was_assembled(staging):
            require_assembled_of(spec, options)
            written = publish_assembled(staging)
        else:
            shards = plan_shards(spec.sources(), spec.shard_bytes)
            written = assemble(spec, rules, shards, options, verify=True)
        remove_published(staging)
    return written


def convert_shards(
    spec: PreprocessSpec, rules: EncodingRules, shards: Sequence[Shard], options: Mapping[str, Any]
) -> None:
    """Convert the unfinished shards among `shards`.

    Raises:
        DataError: as `preprocess`, or a finished shard was made with other options.
        MegatronError: a worker was killed.
    """
    finished = finished_shards(spec.staging) if spec.resume else {}
    require_same_options(spec.staging, finished.values(), options)
    require_no_bad_lines(spec, sum(state.bad for state in finished.values()))
    names = {shard.name for shard in shards}
    finished = intact_shards(
        spec.staging,
        {name: state for name, state in finished.items() if name.partition("-")[0] in names},
    )
    convert = _Convert(spec, rules, record_options(spec.staging, options), finished)
    has_streams = any(shard.is_stream for shard in shards)  # of unknown length
    total_bytes = 0 if has_streams else sum(shard.num_bytes for shard in shards)
    progress = Progress(total_bytes, log_interval=spec.log_interval)
    if spec.resume:
        log.info("--resume: skips %d finished shards in %s", len(finished), spec.staging)
    for state in finished.values():
        progress.add_earlier(state.documents + state.dropped, state.tokens, state.file_bytes)
    num_named = 0
    try:
        for done in _convert_shards(convert, shards):
            for problem in done.problems[: _MOST_WARNINGS - num_named]:
                log.warning("left out %s", problem)
                num_named += 1
                if num_named == _MOST_WARNINGS:
                    log.warning(
                        "further bad lines are counted and, with --on-error collect, written"
                    )
            progress.add(done.documents, done.tokens, done.num_bytes)
    except LostWorkerError as error:
        raise MegatronError(
            f"{error}; use fewer --workers than {spec.workers} or a smaller --max-memory-mb"
        ) from error
    finally:
        progress.close()


def input_problems(
    inputs: Iterable[str],
    json_keys: Sequence[str],
    text: TextSeparator | None = None,
    *,
    by_name: bool = False,
) -> Iterator[str]:
    """Yield a message for each input that is missing or whose first document is not as expected.

    Args:
        text: separator of documents, if the inputs are plain text.
        by_name: inputs may be JSON and plain text, as their names say.
    """
    limits = Limits(block_bytes=1, line_bytes=1 << 26)
    for pattern in inputs:
        try:
            for source in find_sources([pattern], text, by_name=by_name):
                if source.path == STDIN or source.kind == "stream":
                    continue
                word, before = "row" if source.is_table else "line", 0
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


@dataclass
class _Done:
    """Counts of a converted shard, for progress and log."""

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)  # the first bad lines


@dataclass(frozen=True)
class _Convert:
    """Conversion of shards, as sent to worker processes.

    Args:
        options: digest of the options and inputs.
        finished: shards of an earlier run, by name.
    """

    spec: PreprocessSpec
    rules: EncodingRules
    options: str
    finished: Mapping[str, ShardState]

    def in_worker(self, num_workers: int) -> Callable[[Shard], _Done]:
        """Return a function that converts shards, a packed one piece by piece, in this process.

        Args:
            num_workers: processes that share the cores.
        """
        if num_workers > 1:
            share_cores(num_workers)
        encoder: Any = self.spec.make_encoder()

        def convert(shard: Shard) -> _Done:
            done = _Done()
            for piece in self.unpack(shard):
                # Created for each shard, so that nothing depends on a process's earlier shards.
                kind = ConversationEncoder if self.rules.chats else BlockEncoder
                self._convert(piece, kind(encoder, self.rules), done)
            return done

        return convert

    def unpack(self, shard: Shard) -> Iterable[Shard]:
        """Return the shards that are not finished of a packed one, or the shard itself."""
        if not shard.is_packed:
            return [shard]
        shard_bytes = self.spec.shard_bytes or default_shard_bytes(self.spec.sources())
        limit = self.spec.max_text_bytes
        sizes = {"shard_bytes": shard_bytes, "line_bytes": limit}
        return unpack(shard, self.spec.staging, self.finished, **sizes)

    def _convert(self, shard: Shard, encode: Callable[[Block], Encoded], done: _Done) -> None:
        sources = shard.sources()
        folder = self.spec.staging / shard.name
        writer = ShardWriter(folder, self.options, len(self.rules.keys))
        state, current, lines = writer.state, 0, 0
        try:
            limits = self.spec.limits()
            for block in read_blocks(sources, limits, columns=self.spec.columns):
                with self._alone_if_large(block, limits):
                    encoded = encode(block)
                if block.source != current:
                    current, lines = block.source, 0
                for bad in encoded.bad:
                    self._take_bad(writer, shard, sources[current], block, lines, bad, done)
                lines += encoded.num_lines
                writer.append(encoded)
            state.file_bytes, state.is_last = shard.num_bytes, shard.is_last
            if shard.unpacked_from:
                state.text_end = sources[0].num_bytes
            writer.finish()
        finally:
            writer.close()
        if shard.unpacked_from:
            Path(sources[0].path).unlink()
        done.documents += state.documents + state.dropped
        done.tokens += state.tokens
        done.num_bytes += state.file_bytes

    @contextmanager
    def _alone_if_large(self, block: Block, limits: Limits) -> Iterator[None]:
        """Have only one process at a time encode a block of one line far over the usual size."""
        if self.spec.workers == 1 or block.num_bytes <= 2 * limits.block_bytes:
            yield
            return
        with (self.spec.staging / "large-line.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _take_bad(
        self,
        writer: ShardWriter,
        shard: Shard,
        source: Source,
        block: Block,
        lines_before: int,
        bad: BadLine,
        done: _Done,
    ) -> None:
        """Stop at a bad line, or count it."""
        word, origin = "line", shard.unpacked_from or source
        if source.is_table:
            word, number = "row", block.start + bad.line + 1
        else:
            before = shard.lines_before if shard.unpacked_from else source.lines_before
            number = before + lines_before + bad.line + 1
        is_document = source.text not in (None, "line")
        name = "document" if is_document else "element" if origin.kind == "whole" else word
        problem = f"{origin.path}, {name} {number}: {bad.problem}"
        if self.spec.on_error == "stop":
            raise DataError(problem)
        writer.append_bad(
            {"file": origin.path, word: number, "problem": bad.problem, "excerpt": bad.excerpt}
        )
        if len(done.problems) < _MOST_WARNINGS:
            done.problems.append(problem)


def _convert_shards(convert: _Convert, shards: Sequence[Shard]) -> Iterator[_Done]:
    """Convert the shards that are not finished, and yield their counts in the order of the input."""
    shards = [shard for shard in shards if shard.name not in convert.finished]
    num_packed = sum(shard.is_packed for shard in shards)
    workers = convert.spec.workers if num_packed else min(convert.spec.workers, len(shards))
    items: Iterable[Shard] = shards
    has_streams = any(shard.is_stream for shard in shards)
    # This process unpacks for the workers, which do not share its stdin and pipes.
    if num_packed < workers or workers == 1 or has_streams:
        items = (piece for shard in shards for piece in convert.unpack(shard))
    if shards:
        yield from map_in_processes(partial(convert.in_worker, workers), items, workers)


def _begin(spec: PreprocessSpec) -> tuple[EncodingRules, dict[str, Any]]:
    """Return the encoding rules, and all options and inputs that finished work depends on."""
    require_columns(spec)
    rules = build_rules(spec, spec.make_encoder())
    options = fingerprint(spec, rules, spec.sources())
    if any(spec.staging.glob("*-of-*/state.json")) and spec.resume:
        raise DataError(
            f"{spec.staging} holds work of an earlier version, which cannot be resumed; run "
            "without --resume to begin again"
        )
    return rules, options


@contextmanager
def _work_in_progress(spec: PreprocessSpec) -> Iterator[None]:
    """Lock the folder of the work in progress; on failure leave only resumable files."""
    staging = spec.staging
    with write_errors_name(staging):
        staging.mkdir(exist_ok=True)
    with staging_lock(staging, fcntl.LOCK_EX):
        if not spec.resume:
            forget_assembled(staging)
            remove_folders(path for path in staging.iterdir() if path.is_dir())
        try:
            yield
        except BaseException:
            if was_assembled(staging) or any(staging.glob(f"*/{FINISHED}")):
                log.warning("%s keeps what is finished; --resume continues from there", staging)
            else:
                remove_folders([staging])
            raise
        remove_published(staging)


def remove_published(staging: Path) -> None:
    """Remove the work in progress of files that are published.

    Its list of assembled files goes last: with it, shards may be incomplete.
    """
    remove_folders(path for path in staging.iterdir() if path.is_dir())
    remove_folders([staging])
