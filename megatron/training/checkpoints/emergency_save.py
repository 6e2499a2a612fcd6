"""Emergency save: publish the checkpoint in progress when a run fails, without communication."""

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpointing.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    names_in,
    record_file,
    staging_tag_of,
)
from megatron.checkpointing.publish import publish_written
from megatron.common.errors import CheckpointError, reason

SILENCE_S = 20.0
"""Timeout of ranks that wait for each other while nothing in the folder grows."""

FLUSH_S = 600.0
"""Time for which a rank sends heartbeats although its files do not grow: a disk may flush."""

BEAT_S = 1.0
"""Interval between these heartbeats."""

_PAUSE_S = 0.1

_LOOKS_PER_S = 500
"""Most polls of rank 0's heartbeat by all waiting ranks together."""

_BEAT = ".publishing"
"""File that rank 0 lets grow while files of other ranks grow."""


@dataclass(frozen=True)
class PendingSave:
    """A save that is not published yet, as one rank sees it.

    Args:
        directory: --save.
        manifest: without files.
        files: the files that this rank writes.
        publication: the publishing, on rank 0 once all ranks have written their files.
    """

    directory: Path
    manifest: Manifest
    files: Sequence[Future[FileRecord]]
    publication: Future[None] | None = None


def finish_alone(
    save: PendingSave,
    *,
    rank: int,
    ranks: int,
    silence_s: float = SILENCE_S,
    flush_s: float = FLUSH_S,
    beat_s: float = BEAT_S,
) -> bool:
    """Wait for this rank's writes; on rank 0 publish the save of all ranks; return whether it did.

    A run fails on one rank, and the other ranks notice it when that one has exited: no rank can
    query another. So each rank writes a list of its files to the staging folder, and rank 0 waits
    for the lists. The other ranks wait until it has published: a launcher kills the remaining ranks
    half a minute after the first exit.

    Raises:
        CheckpointError: a rank could not write, or has exited.
    """
    if save.publication:
        save.publication.result()
        return True
    folder = save.directory / staging_tag_of(save.manifest.state.iteration)
    if not folder.is_dir():
        return False  # it is published already
    try:
        _write_list(folder, rank, save.files, max_beats=int(flush_s / beat_s), beat_s=beat_s)
        if rank:
            _follow(folder, ranks, silence_s)
            return False
        lists = _read_lists(folder, ranks, silence_s)
        records = {record.name: record for own in lists for record in own}
        others = [name for name in names_in(folder) if name not in {*records, MANIFEST}]
        found = [record_file(folder / name, name) for name in others]
        publish_written(save.directory, save.manifest, [*records.values(), *found])
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {reason(error, folder)}") from error
    return True


def _write_list(
    folder: Path,
    rank: int,
    files: Sequence[Future[FileRecord]],
    *,
    max_beats: int,
    beat_s: float,
) -> None:
    """Write the list of this rank's files for rank 0, or the error that prevented them.

    Until the files are written, a temporary file grows: the heartbeat for waiting ranks.

    Raises:
        CheckpointError: a file could not be written.
    """
    made = folder / _unfinished_file(rank)
    beats = 0
    while beats < max_beats and wait(files, timeout=beat_s).not_done:
        beats += 1
        with made.open("ab") as stream:
            stream.write(b".")
    errors = [repr(error) for file in files if (error := file.exception())]
    reports = {"error": f"rank {rank}: {'; '.join(errors)}"} if errors else {}
    records = [asdict(file.result()) for file in files] if not errors else []
    made.write_text(json.dumps({"files": records, **reports}), encoding="utf-8")
    os.replace(made, _list_of(folder, rank))
    if errors:
        raise CheckpointError(reports["error"])


def _read_lists(folder: Path, ranks: int, silence_s: float) -> list[list[FileRecord]]:
    """Read the lists of all ranks, and delete them."""
    lists = [_list_of(folder, rank) for rank in range(ranks)]

    def missing() -> list[int]:
        names = set(os.listdir(folder))
        return [rank for rank, file in enumerate(lists) if file.name not in names]

    if not _wait(folder, lambda: not missing(), silence_s):
        raise CheckpointError(f"ranks {missing()} have not reported that their files are written")
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in lists]
    if errors := [own["error"] for own in reports if "error" in own]:
        raise CheckpointError("; ".join(errors))
    for file in lists:
        file.unlink()
    return [[FileRecord(**record) for record in own["files"]] for own in reports]


def _wait(folder: Path, is_over: Callable[[], bool], silence_s: float) -> bool:
    """Wait until `is_over`; return False once no file in `folder` has grown for `silence_s`.

    Only rank 0 polls all files; growth is a heartbeat for the other ranks.
    """
    size, give_up_at = -1, 0.0
    while not is_over():
        began_at = time.monotonic()
        with suppress(FileNotFoundError):  # renamed meanwhile
            files = (f for f in folder.rglob("*") if f.is_file() and f.name != _BEAT)
            grown = sum(file.stat().st_size for file in files)
            if grown != size:
                size, give_up_at = grown, time.monotonic() + silence_s
                with (folder / _BEAT).open("ab") as stream:
                    stream.write(b".")
        if time.monotonic() > give_up_at:
            return False
        # Thousands of files take longer than a pause.
        time.sleep(max(_PAUSE_S, 2 * (time.monotonic() - began_at)))
    (folder / _BEAT).unlink(missing_ok=True)
    return True


def _follow(folder: Path, ranks: int, silence_s: float) -> None:
    """Wait until rank 0 has published `folder`, or has given no heartbeat for `silence_s`."""
    seen, give_up_at = [-1], time.monotonic() + silence_s
    beats = [folder / name for name in (_BEAT, _unfinished_file(0), _list_of(folder, 0).name)]
    while folder.is_dir() and time.monotonic() < give_up_at:
        sizes = [_size(file) for file in beats]
        if sizes != seen:
            seen, give_up_at = sizes, time.monotonic() + silence_s
        time.sleep(max(_PAUSE_S, ranks / _LOOKS_PER_S))


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return -1


def _unfinished_file(rank: int) -> str:
    return f".list-{rank}"


def _list_of(folder: Path, rank: int) -> Path:
    return folder / f"list-{rank}.json"
