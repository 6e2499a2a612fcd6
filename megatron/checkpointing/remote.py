"""Checkpoints at URLs (object storage): download to a local directory, upload with the manifest last.

A local directory stands for the one at a URL, which its file `url.json` names. Runs and tools work
there as anywhere; a checkpoint counts at the URL from the moment its manifest is there.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.checkpointing.manifest import (
    KEEP,
    LATEST,
    MANIFEST,
    damage,
    iteration_of,
    names_in,
    published_tags,
    read_manifest,
    tag_of,
)
from megatron.checkpointing.publish import point_latest, tags_to_delete
from megatron.checkpointing.publish import set_aside as set_aside_here
from megatron.common.atomic_files import replace_text, sync_folder
from megatron.common.errors import (
    CheckpointError,
    NewerCheckpointError,
    UnreadableCheckpointError,
    WrongCheckpointError,
    raise_if_any,
    reason,
)
from megatron.common.mirror import first_of, mirror
from megatron.common.remote_files import (
    download,
    exists,
    find_files,
    in_threads,
    is_url,
    join,
    kind_of,
    list_folder,
    local_path,
    read_bytes,
    remove,
    rename,
    upload_all,
    url_problems,
    write_text,
)
from megatron.config.run.checkpoint import CheckpointPlan

log = logging.getLogger(__name__)

ORIGIN = "url.json"
_FETCHING = "fetching-"
_FETCHED = "fetched.json"  # identities of the files of a folder that was downloaded, by name
_LOCK = "fetch.lock"  # written at the end of a download
_ASIDE_MANIFEST = f"aside-{MANIFEST}"
_HINTS = ("latest_checkpointed_iteration.txt", LATEST)  # name the newest checkpoint of a folder
_LAST = (MANIFEST, "config.json", *_HINTS)  # in this order
_ONE_OF_SEVERAL = re.compile(r"(iter_|global_step)\d+")
_TRIES = 2  # downloads of a file that arrives damaged


def local_directory(path: str, cache: Path, *, flag: str) -> str:
    """Map the URL `path` to its local mirror; return a local path unchanged.

    Nothing is downloaded; see `fetch`.

    Raises:
        ConfigError: the URL holds credentials.
        WrongCheckpointError: the directory cannot be written to.
    """
    if not is_url(path):
        return path
    raise_if_any(url_problems(flag, path))
    directory = local_path(path, cache)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if url_of(directory) != path:
            replace_text(directory / ORIGIN, json.dumps({"url": path.rstrip("/")}))
    except OSError as error:
        raise WrongCheckpointError(f"{flag} {path}: {reason(error)}") from error
    return str(directory)


def url_of(directory: Path) -> str:
    """Return the URL that a local directory stands for; "" for any other directory."""
    with suppress(OSError, ValueError, KeyError), (directory / ORIGIN).open("rb") as file:
        return str(json.load(file)["url"])
    return ""


def remote_tags(url: str) -> list[str]:
    """List the checkpoints at `url` that have a manifest, newest first.

    Raises:
        OSError: the connection fails at every attempt.
    """
    iterations = [i for name in list_folder(url) if (i := iteration_of(name)) is not None]
    tags = (tag_of(i) for i in sorted(iterations, reverse=True))
    return [tag for tag in tags if exists(_manifest_url(url, tag))]


@contextmanager
def local_folder(path: str, cache: Path, *, flag: str = "--save") -> Iterator[Path]:
    """Give a folder to write an export to: `path`, or one that is uploaded to the URL `path` afterwards.

    The files by which readers know a model or a checkpoint are uploaded last.

    Raises:
        CheckpointError: there are files at the URL already, or the connection fails.
    """
    if not is_url(path):
        yield Path(path)
        return
    raise_if_any(url_problems(flag, path))
    try:
        if find_files(path):
            raise WrongCheckpointError(
                f"{flag} {path} holds files already; give a new or empty one, or remove what an "
                "export that was killed has left there"
            )
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix="export-") as folder:
            output = Path(folder, "model")
            yield output
            files = [(output / name, join(path, name)) for name in sorted(names_in(output))]
            last = [each for name in _LAST for each in files if each[0].name == name]
            upload_all((each for each in files if each not in last), last)
    except OSError as error:
        raise CheckpointError(f"{flag} {path}: {reason(error, path)}") from error


def local_checkpoint(
    path: str, cache: Path, *, flag: str = "--load", foreign: bool = False
) -> Path:
    """Return the local directory of the checkpoints at the path or URL `path`, downloaded if needed.

    Args:
        foreign: whether checkpoints of other systems, maybe single files, are downloaded too.

    Raises:
        WrongCheckpointError: there is no checkpoint and no model at the URL.
        UnreadableCheckpointError: the connection fails at every attempt, or the disk is full.
    """
    directory = Path(local_directory(path, cache, flag=flag))
    if is_url(path):
        fetch(directory, foreign=foreign)
        copies = (MANIFEST, "config.json", *([_FETCHED] if foreign else ()))
        if not any((directory / name).exists() for name in copies):
            require_published(directory, path, flag=flag)
    return downloaded(directory)


def downloaded(directory: Path) -> Path:
    """Return the file in the local mirror of a file's URL; any other directory unchanged."""
    file = directory / url_of(directory).rpartition("/")[2]
    return file if file.is_file() else directory


def require_published(directory: Path, url: str, *, flag: str) -> None:
    """Refuse a URL without a complete checkpoint.

    Raises:
        WrongCheckpointError: there is none.
    """
    if not published_tags(directory):
        raise WrongCheckpointError(
            f"{flag} {url} holds no complete checkpoint; give the URL that a run saved to with "
            "--save, or convert a checkpoint of another system with tools/checkpoint/util.py "
            "--load-dir"
        )


def published_at_url(directory: Path) -> list[str]:
    """List the checkpoints at the URL of `directory`, newest first; [] for any other directory.

    Raises:
        UnreadableCheckpointError: the connection fails at every attempt.
    """
    if not (url := url_of(directory)):
        return []
    try:
        return remote_tags(url)
    except OSError as error:
        raise UnreadableCheckpointError(f"{url} cannot be read: {reason(error, url)}") from error


def fetch(directory: Path, *, step: int = 0, foreign: bool = False) -> None:
    """Download the newest undamaged checkpoint to a directory that stands for a URL, unless it is there.

    A folder at the URL that is one checkpoint, or a model of another format, is downloaded with all
    files. Nothing happens in other directories. One process per machine downloads; the rest wait.

    Args:
        step: iteration of the checkpoint; 0: the newest.
        foreign: whether the newest checkpoint of another system is downloaded too.

    Raises:
        UnreadableCheckpointError: the connection fails at every attempt, or the disk is full.
    """
    if not (url := url_of(directory)):
        return
    task = f"fetched {step} {'any' if foreign else 'own'}"
    try:
        with first_of(directory / _LOCK, task) as is_first:
            if is_first:
                _fetch(url, directory, step, foreign=foreign)
    except OSError as error:
        problem = f"{url} cannot be downloaded to {directory}: {reason(error, url)}"
        raise UnreadableCheckpointError(problem) from error


def _fetch(url: str, directory: Path, step: int, *, foreign: bool) -> None:
    names: Iterable[str] = ()
    if exists(join(url, MANIFEST)):
        _fetch_checkpoint(url, directory)
    elif tags := remote_tags(url):
        _fetch_newest(url, directory, tags, step)
    elif exists(join(url, "config.json")):
        names = find_files(url)
    elif foreign and kind_of(url) == "file":
        url, _, name = url.rpartition("/")
        names = [name]
    elif foreign:
        names = _newest_foreign(url)
    if names:
        mirror(f"{url}/", f"{directory}/", names, directory / _FETCHED)


def _fetch_newest(url: str, directory: Path, tags: Sequence[str], step: int) -> None:
    newest = iteration_of(tags[0]) or 0
    for tag in published_tags(directory):
        # Later ones wait for their upload; others were removed or set aside at the URL.
        if tag not in tags and (iteration_of(tag) or 0) < newest:
            shutil.rmtree(directory / tag)
    for tag in [tag_of(step)] if step else tags:
        if tag in tags and _fetch_checkpoint(join(url, tag), directory / tag):
            point_latest(directory, published_tags(directory)[0])
            return


def _fetch_checkpoint(url: str, folder: Path) -> bool:
    """Download one checkpoint, unless `folder` holds it undamaged; return whether it is undamaged."""
    text = read_bytes(join(url, MANIFEST))
    with suppress(FileNotFoundError):
        if (folder / MANIFEST).read_bytes() == text and not damage(
            folder, read_manifest(folder).files
        ):
            return True
    staging = folder.parent / f"{_FETCHING}{folder.name}"
    staging.mkdir(exist_ok=True)
    (staging / MANIFEST).write_bytes(text)
    try:
        broken = list(read_manifest(staging).files)
        log.info("downloading %s (%d bytes) to %s", url, sum(r.size for r in broken), folder)
        for _ in range(_TRIES):
            # Files of a download that was interrupted stay.
            broken = [record for record in broken if damage(staging, [record])]
            for record in broken:
                with suppress(FileNotFoundError):
                    download(join(url, record.name), staging / record.name)
        if problems := damage(staging, broken):
            raise CheckpointError("; ".join(problems))
    except NewerCheckpointError:
        raise
    except CheckpointError as error:
        log.warning("%s is skipped: %s", url, error)
        shutil.rmtree(staging)
        return False
    if (origin := folder / ORIGIN).exists():
        shutil.copy(origin, staging)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staging, folder)
    sync_folder(folder.parent)
    return True


def _newest_foreign(url: str) -> list[str]:
    """Return the files in a folder of another system, without checkpoints before the newest.

    The folder names the newest one: an iteration of Megatron-LM's, or a folder of DeepSpeed's.
    """
    names = find_files(url)
    found = [name for name in _HINTS if name in names]
    hints = [read_bytes(join(url, name)).decode(errors="replace").strip() for name in found]
    # A damaged hint names no folder, and then all of them are downloaded.
    newest = {folder for hint in hints for folder in (hint, f"iter_{hint:0>7}")}
    newest &= {name.partition("/")[0] for name in names}

    def is_older(name: str) -> bool:
        folder = name.partition("/")[0]
        return bool(_ONE_OF_SEVERAL.fullmatch(folder)) and folder not in newest

    return [name for name in names if not (newest and is_older(name))]


def pending_uploads(directory: Path) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """List the local files of checkpoints that the URL lacks, with their URLs; see `upload_all`.

    The second list is of the manifests and `latest`, which are uploaded after all others. These
    checkpoints are the newest ones: a run that was killed may have left some. A different checkpoint
    of the same iteration at the URL is invalidated.

    Raises:
        OSError: the connection fails at every attempt.
    """
    url = url_of(directory)
    tags = remote_tags(url)
    newest = (iteration_of(tags[0]) or 0) if tags else -1
    files, last = [], [(directory / LATEST, join(url, LATEST))]
    for tag in published_tags(directory):
        if (iteration_of(tag) or 0) < newest:
            break
        folder, there = directory / tag, join(url, tag)
        if tag in tags:
            if read_bytes(join(there, MANIFEST)) == (folder / MANIFEST).read_bytes():
                continue
            remove(join(there, MANIFEST))
        names = (record.name for record in read_manifest(folder).files)
        files += [(folder / name, join(there, name)) for name in names]
        last.insert(0, (folder / MANIFEST, join(there, MANIFEST)))  # the oldest first
    return files, last if files else []


def upload_checkpoints(directory: Path) -> None:
    """Upload the checkpoints that the URL of `directory` lacks, if it stands for one.

    Raises:
        CheckpointError: the connection fails at every attempt.
    """
    try:
        if url_of(directory):
            upload_all(*pending_uploads(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} is not uploaded: {reason(error)}") from error


def prune_remote(
    directory: Path, plan: CheckpointPlan, *, newest: int, in_use: int, proven: int
) -> None:
    """Remove the outdated checkpoints at the URL (checkpoint retention); see `tags_to_delete`.

    The manifest goes first. One with a file `keep` stays. Errors are logged, not raised.
    """
    url = url_of(directory)
    try:
        tags = tags_to_delete(remote_tags(url), plan, newest=newest, in_use=in_use, proven=proven)
        for tag in tags:
            folder = join(url, tag)
            if exists(join(folder, KEEP)):
                continue
            remove(join(folder, MANIFEST))
            in_threads(remove, [join(folder, name) for name in find_files(folder)])
            log.info("  removed the outdated checkpoint %s", folder)
    except OSError as error:
        log.warning("outdated checkpoints at %s cannot be removed: %s", url, reason(error))


def set_aside(directory: Path, iteration: int) -> None:
    """Rename the checkpoints newer than `iteration`, and their manifests at a URL: they do not count.

    Raises:
        CheckpointError: the directory cannot be written to, or the connection fails.
    """
    set_aside_here(directory, iteration)
    if not (url := url_of(directory)):
        return
    try:
        for tag in remote_tags(url):
            if (iteration_of(tag) or 0) > iteration:
                rename(_manifest_url(url, tag), join(join(url, tag), _ASIDE_MANIFEST))
                log.warning("%s: its manifest is %s now", join(url, tag), _ASIDE_MANIFEST)
        if exists(join(url, LATEST)):
            write_text(join(url, LATEST), tag_of(iteration))
    except OSError as error:
        raise CheckpointError(f"--save {url}: {reason(error)}") from error


def _manifest_url(url: str, tag: str) -> str:
    return join(join(url, tag), MANIFEST)
