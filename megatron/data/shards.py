"""One conversion by several processes that share nothing but a file system."""

import fcntl
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.data.assemble import (
    Written,
    forget_assembled,
    publish_staged,
    require_assembled_of,
    require_parts_of_one_conversion,
    was_assembled,
)
from megatron.data.conversion import Conversion, build_rules
from megatron.data.inputs import find_sources, split_sources
from megatron.data.preprocess import publish_parts, stage_lock, stage_part
from megatron.data.progress import Progress
from megatron.data.publish import write_errors_name
from megatron.data.stage import STATE, part_directory, remove_stage
from megatron.errors import DataError

log = logging.getLogger(__name__)

_POLL_S = 0.2
_SAY_EVERY_S = 60.0


def stage_shard(conversion: Conversion, index: int, num_shards: int) -> None:
    """Convert part `index` of `num_shards`; `merge_shards` makes the files of all parts.

    On resuming there is nothing to do where a merge has assembled all parts already.

    Raises:
        DataError: an input cannot be read, a line is not as expected, the disk is full, or on
            resuming what is there was made with other wishes.
        MegatronError: a process was killed.
    """
    conversion = replace(conversion, workers=conversion.workers * conversion.partitions)
    conversion = replace(conversion, partitions=1)
    root = conversion.root
    with write_errors_name(root):
        root.mkdir(exist_ok=True)
    with stage_lock(root, fcntl.LOCK_SH):
        rules = build_rules(conversion, conversion.make_encoder())
        if not conversion.resume:
            forget_assembled(root)
        elif was_assembled(root):
            require_assembled_of(conversion, rules, num_shards)
            return
        sources = split_sources(find_sources(conversion.inputs), index, num_shards)
        total_bytes = sum(source.num_bytes for source in sources)
        progress = Progress(total_bytes, log_interval=conversion.log_interval)

        def report(documents: int, tokens: int, num_bytes: int, earlier: bool) -> None:
            count = progress.take_up if earlier else progress.add
            count(documents=documents, tokens=tokens, num_bytes=num_bytes)

        try:
            stage_part(conversion, rules, index, num_shards, report)
        finally:
            progress.close()


def merge_shards(conversion: Conversion, num_shards: int) -> list[Written]:
    """Make the token files of all shards, which are then removed.

    Raises:
        DataError: a shard is missing, not finished, or of other wishes or inputs than these.
    """
    root = conversion.root
    if not root.is_dir():
        raise DataError(f"there are no shards to merge: {root} does not exist")
    with stage_lock(root, fcntl.LOCK_EX):
        rules = build_rules(conversion, conversion.make_encoder())
        if was_assembled(root):
            require_assembled_of(conversion, rules, num_shards)
            written = publish_staged(root)
        else:
            require_parts_of_one_conversion(conversion, rules, num_shards)
            written = publish_parts(conversion, rules, num_shards)
        remove_stage([root])
    return written


def say_done(root: Path, index: int, launch: str) -> None:
    """Tell rank 0 of this launch that shard `index` is finished."""
    with write_errors_name(root):
        _done_file(root, index).write_text(launch)


def take_back_done(root: Path, index: int) -> None:
    """Remove what an earlier launch said."""
    _done_file(root, index).unlink(missing_ok=True)


def wait_for_shards(root: Path, num_shards: int, launch: str, timeout_s: float) -> None:
    """Return when all shards of this launch are finished.

    Communication: waits for every other rank, through files.

    Raises:
        DataError: nothing has happened on the missing shards for `timeout_s`.
    """
    said_at = seen_at = time.monotonic()
    seen: Sequence[float] = ()
    while True:
        missing = [i for i in range(num_shards) if not _is_done(root, i, launch)]
        if not missing:
            return
        changes = [_changed_at(part_directory(root, i, num_shards) / STATE) for i in missing]
        if changes != seen:
            seen, seen_at = changes, time.monotonic()
        if time.monotonic() - seen_at > timeout_s:
            raise DataError(
                f"shards {', '.join(map(str, missing))} of {num_shards} are not finished, and "
                f"nothing has happened there for {timeout_s} s (--timeout-s); look at the "
                "messages of their ranks, and run again with --resume"
            )
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            log.info("waiting for shards %s of %d", ", ".join(map(str, missing)), num_shards)
        time.sleep(_POLL_S)


def _done_file(root: Path, index: int) -> Path:
    return root / f"rank-{index}.done"


def _is_done(root: Path, index: int, launch: str) -> bool:
    try:
        return _done_file(root, index).read_text() == launch
    except OSError:
        return False


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
