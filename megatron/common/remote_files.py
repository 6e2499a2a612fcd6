"""Files at URLs (s3://, gs://, hf://, file://, memory://) through fsspec, with bounded retries.

Credentials come from the usual places of each service (environment variables, files, instance
roles). Errors are OSErrors, whose messages name the URL without anything secret.
"""

import errno
import io
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron.common.atomic_files import replacing
from megatron.common.errors import ConfigError, DataError, needed_for
from megatron.common.progress import Progress

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 10
FIRST_PAUSE_S = 0.25
MOST_PAUSE_S = 8.0
"""Attempts of one request, and the pause after the first failure, doubled after each further one."""

SILENCE_S = 60.0
"""Time of one attempt, and attempts, after which a message says that the store is slow or fails."""

_SILENT_ATTEMPTS = 3

PART_BYTES = 8 << 20  # of one request
_THREADS = 8  # parts of a file on their way at once
_UPLOADS = 2  # files on their way at once: libraries of the services hold up to 500 MB of each

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]+://)[^\s/@'\"]*@", re.IGNORECASE), r"\1"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]+://[^\s?'\"]*)\?[^\s'\"]*", re.IGNORECASE), r"\1"),
    (re.compile(r"\b(Bearer|Basic) [A-Za-z0-9._~+/=-]{16,}"), r"\1 ***"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{16,}\b"), "***"),
)
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}
"""Errors that another attempt would meet again, with their numbers."""

_WEB_IDENTITY = ("ETag", "Content-MD5", "Digest", "Last-Modified")  # as fsspec names them
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}


class RemoteError(OSError):
    """A request to a URL that failed at every attempt."""


def is_url(path: object) -> bool:
    """Whether `path` is a URL and not a path of this machine."""
    return isinstance(path, str) and bool(_URL.match(path))


def without_secrets(text: str) -> str:
    """Remove user information and queries of URLs, and keys of services, from a message."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def url_problems(flag: str, url: str) -> Iterator[str]:
    """Yield a message if `url`, which logs and checkpoints record, holds credentials."""
    if is_url(url) and url != without_secrets(url):
        yield (
            f"{flag} {without_secrets(url)}: leave user, password and query (what follows a ?) out "
            "of the URL, which logs and checkpoints record; credentials come from environment variables or files of "
            "the service"
        )


def join(url: str, name: str) -> str:
    """Return the URL of `name` below `url`."""
    return f"{url.rstrip('/')}/{name}"


def local_path(url: str, cache: Path) -> Path:
    """Return the path below `cache` that stands for `url`."""
    scheme, _, rest = without_secrets(url).partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    return cache.joinpath(scheme, *parts)


def exists(url: str) -> bool:
    """Whether there is a file or a folder at `url`."""
    return bool(kind_of(url))


def kind_of(url: str) -> str:
    """Return "file" or "directory", what is at `url`; "" for nothing."""
    try:
        # Not `exists` of fsspec, which takes any error of some services for "no".
        return str(_info(url)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return ""


def size_of(url: str) -> int:
    """Return the bytes of the file at `url`.

    Raises:
        RemoteError: the server does not report them.
    """
    size = _info(url).get("size")
    if size is None:
        raise RemoteError(errno.EINVAL, "the server does not report its size", without_secrets(url))
    return int(size)


def identity_of(url: str) -> str:
    """Return what changes when another file takes the place of the one at `url`.

    Of web servers that is the size, and what they report of ETag, digest and Last-Modified.
    """

    def identify(files: Any, path: str) -> str:
        if "https" not in files.protocol:
            return f"{files.ukey(path)}"
        info = files.info(path)
        return json.dumps([info.get(name) for name in ("size", *_WEB_IDENTITY)])

    return _request(url, identify)


def find_files(url: str, levels: float = math.inf) -> dict[str, int]:
    """Return the names of all files below the folder `url`, relative to it, and their bytes.

    {} where there is no such folder.

    Args:
        levels: of folders to list; 1: `url` alone.
    """
    names: dict[str, int] = {}
    for name, entry in list_folder(url).items():
        if entry["type"] != "directory":
            names[name] = int(entry["size"] or 0)
        elif levels > 1:
            below = find_files(join(url, name), levels - 1)
            names |= {f"{name}/{each}": size for each, size in below.items()}
    return names


def list_folder(url: str) -> dict[str, dict[str, Any]]:
    """Return the entries of the folder `url`, by name; {} where there is no such folder.

    `find` and `glob` of fsspec list folders with this, but leave out folders whose listing failed.
    """

    def entries(files: Any, path: str) -> dict[str, dict[str, Any]]:
        folder = path.rstrip("/") + "/"
        try:
            found = {entry["name"].rstrip("/"): entry for entry in files.ls(folder, detail=True)}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {name[len(folder) :]: e for name, e in found.items() if name.startswith(folder)}

    listed = _request(url, entries)
    # Copies of the files have these names below a local folder.
    if outside := [name for name in listed if ".." in name.split("/")]:
        raise DataError(f"{url} has a file whose name leaves the folder: {outside[0]}")
    return listed


def glob_urls(pattern: str) -> list[str]:
    """Return the URLs of the files that match `pattern`, sorted."""
    # A query of the web begins with a question mark.
    wildcard = re.search(r"[*[]" if pattern.startswith("http") else r"[*?[]", pattern)
    if wildcard is None:
        return [pattern] if exists(pattern) else []
    folder = pattern[: wildcard.start()].rpartition("/")[0]
    levels = math.inf if "**" in pattern else pattern.count("/", len(folder))
    urls = [join(folder, name) for name in find_files(folder, levels)]
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(pattern)).match
    return sorted(url for url in urls if matches(url))


def read_range(url: str, start: int, count: int) -> bytes:
    """Return `count` bytes of the file at `url` from byte `start` on.

    Raises:
        OSError: it is missing or shorter, or the connection fails at every attempt.
    """

    def read(files: Any, path: str) -> bytes:
        content: bytes = files.cat_file(path, start=start, end=start + count)
        if len(content) != count:
            raise ConnectionError(f"{len(content)} bytes came of the {count} from byte {start} on")
        return content

    return _request(url, read) if count else b""


def read_bytes(url: str) -> bytes:
    """Return the content of a small file."""
    return _request(url, lambda files, path: bytes(files.cat_file(path)))


def open_input(path: str, buffer_bytes: int = PART_BYTES) -> BinaryIO:
    """Open a file for reading, on this machine or at a URL, where a cut connection is resumed.

    Args:
        buffer_bytes: of one request to a URL.
    """
    if not is_url(path):
        return Path(path).open("rb")
    (files, name), size = _file_system(path), size_of(path)
    from fsspec.spec import AbstractBufferedFile

    def fetch(start: int, stop: int) -> bytes:
        return read_range(path, start, min(stop - start, size - start, PART_BYTES))

    raw = AbstractBufferedFile(files, name, cache_type="none", size=size)
    raw.cache.fetcher = fetch
    return io.BufferedReader(raw, max(min(buffer_bytes, size), 1))


def size_of_input(path: str) -> int:
    """Return the bytes of a file on this machine or at a URL."""
    return size_of(path) if is_url(path) else os.path.getsize(path)


def state_of_input(path: str) -> int | str:
    """Return what changes when the file is written again: the time of that, or its identity at a URL."""
    return identity_of(path) if is_url(path) else os.stat(path).st_mtime_ns


def download(url: str, file: Path) -> None:
    """Copy the file at `url` to `file`, which appears complete or not at all."""
    size = size_of(url)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.touch()
        with Progress(f"download of {without_secrets(url)}", size, "B") as progress:

            def copy(start: int) -> None:
                part = read_range(url, start, min(PART_BYTES, size - start))
                write_at(temporary, start, part)
                progress.add(len(part))

            in_threads(copy, range(0, size, PART_BYTES))


def write_at(file: Path, start: int, content: bytes) -> None:
    """Write a part of a file that exists, from byte `start` on."""
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(content)


def upload(file: Path, url: str) -> None:
    """Copy `file` to `url`; object stores show it complete or not at all.

    Raises:
        OSError: `file` cannot be read, or the connection fails at every attempt.
    """
    size = file.stat().st_size

    def put(files: Any, path: str) -> None:
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.put_file(str(file), path)
        if (found := files.info(path)["size"]) != size:
            raise ConnectionError(f"{found} bytes arrived of {size}")

    _request(url, put)


def upload_all(
    files: Iterable[tuple[str | Path, str]], last: Iterable[tuple[str | Path, str]] = ()
) -> None:
    """Upload pairs of a file and its URL, two at a time; then the pairs in `last`, in their order.

    Raises:
        OSError: as `upload`; nothing of `last` is uploaded before all of `files`.
    """
    in_threads(lambda each: upload(Path(each[0]), each[1]), files, _UPLOADS)
    for file, url in last:
        upload(Path(file), url)


def write_text(url: str, text: str) -> None:
    """Write a small file."""

    def put(files: Any, path: str) -> None:
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, text.encode())

    _request(url, put)


def rename(old: str, new: str) -> None:
    """Rename a small file; object stores copy it, then remove the older."""
    write_text(new, read_bytes(old).decode())
    remove(old)


def remove(url: str) -> None:
    """Remove the file at `url`, if there is one."""
    if exists(url):
        _request(url, lambda files, path: files.rm_file(path))


def in_threads(
    work: Callable[[Any], None], items: Iterable[Any], threads_at_once: int = _THREADS
) -> None:
    """Call `work` for each of `items` in a few threads; raise the first error."""
    with ThreadPoolExecutor(threads_at_once) as threads:
        for _ in threads.map(work, items):  # an error cancels what has not begun
            pass


def _info(url: str) -> dict[str, Any]:
    return _request(url, lambda files, path: dict(files.info(path)))


def _request(url: str, work: Callable[[Any, str], T]) -> T:
    """Call `work` with the file system and the path of `url`; failures are retried.

    Raises:
        OSError: the file is missing, access is denied, or every attempt has failed.
        ConfigError: the URL holds a password, or a package for its scheme is missing.
    """
    files, path = _file_system(url)
    shown, pause, attempt = without_secrets(url), FIRST_PAUSE_S, 0
    while True:
        attempt += 1
        try:
            with _reporting(shown):
                return work(files, path)
        except tuple(_NUMBERS) as error:
            kind = next(kind for kind in _NUMBERS if isinstance(error, kind))
            raise kind(_NUMBERS[kind], os.strerror(_NUMBERS[kind]), shown) from None
        except Exception as error:
            # The services' libraries raise errors that have no common base.
            words = without_secrets(f"{type(error).__name__}: {error}")
            if type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(errno.EACCES, words, shown) from None
            if attempt == ATTEMPTS:
                raise RemoteError(
                    errno.ETIMEDOUT, f"{words} (after {ATTEMPTS} attempts)", shown
                ) from None
            if attempt == _SILENT_ATTEMPTS:
                log.warning(
                    "%s: %d attempts have failed, and others follow: %s", shown, attempt, words
                )
        time.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_S)


@contextmanager
def _reporting(shown: str) -> Iterator[None]:
    """Log a warning when the `with` block takes long: the store may be stalled."""
    message = "%s has not completed a request for %g s: the store or the network is slow or stalled"
    timer = threading.Timer(SILENCE_S, log.warning, (message, shown, SILENCE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _options(scheme: str) -> dict[str, Any]:
    """Return options of fsspec for file systems of `scheme`.

    Listings are never cached: other processes write meanwhile. S3's library makes one attempt, unless
    fsspec's configuration sets `retries`: its pauses are drawn from Python's `random`, a stream that
    checkpoints save, and `_request` repeats failures itself.
    """
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme.lower() in ("s3", "s3a"):
        from fsspec.config import conf

        set_by_user = conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **set_by_user}
    return options


def _file_system(url: str) -> tuple[Any, str]:
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(*url_problems("URL", url))
    with needed_for(f"the URL {without_secrets(url)}", "fsspec"):
        import fsspec
    try:
        files, path = fsspec.core.url_to_fs(url, **_options(scheme))
    except (ImportError, ValueError) as error:  # an ImportError names the package to install
        raise ConfigError(f"{without_secrets(url)}: {error}") from error
    return files, path
