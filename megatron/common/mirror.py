"""Local mirrors of files at URLs: one process downloads each file once, until another takes its place."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.common.atomic_files import replace_text
from megatron.common.remote_files import download, identity_of

log = logging.getLogger(__name__)

_FORMAT = 1


@contextmanager
def first_of(lock: Path, task: str) -> Iterator[bool]:
    """Hold `lock` inside the `with` block; give whether this process is to do `task` there.

    False: another process has done it while this one waited. Only success counts as done.

    Raises:
        OSError: the lock cannot be written.
    """
    started_at, words = time.time(), f"{task}\n".encode()
    with lock.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        written_at = os.fstat(file.fileno()).st_mtime
        # A clock that ran ahead may have left a time that is yet to come.
        is_first = file.read() != words or not started_at < written_at <= time.time()
        yield is_first
        if is_first:
            file.truncate(0)
            file.write(words)


def mirror(
    origin: str,
    local: str,
    names: Iterable[str],
    record: Path,
    *,
    url: str = "",
    get: Callable[[str, Path], None] = download,
) -> None:
    """Synchronize local files with files at URLs: download new and replaced files.

    Args:
        origin, local: what precedes the `names` of the files, at the URL and here.
        record: keeps the identities of the downloaded files; files not in `names` are removed.
        url: is written there too; default: `origin`.
        get: downloads one file.

    Raises:
        OSError: a file is missing, or the connection fails at every attempt.
    """
    head = {"format": _FORMAT, "url": url or origin}
    found = {name: identity_of(origin + name) for name in names}
    written = read_record(record)
    known = written.get("identities", {}) if head.items() <= written.items() else {}
    kept = {
        name: identity
        for name, identity in found.items()
        if known.get(name) == identity and os.path.isfile(local + name)
    }

    def keep() -> None:
        text = json.dumps({**head, "identities": kept})
        replace_text(record, text, has_one_writer=True, is_flushed=True)

    for name in known.keys() - found.keys():
        Path(local + name).unlink(missing_ok=True)
    if kept != known:
        keep()  # without the identities of files that change now
    for name in [name for name in found if name not in kept]:
        log.info("mirroring %s in %s", origin + name, local + name)
        get(origin + name, Path(local + name))
        kept[name] = found[name]
        keep()


def read_record(record: Path) -> dict:
    """Return the record of `mirror`: format, url and identities; {} without one."""
    try:
        return dict(json.loads(record.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}
