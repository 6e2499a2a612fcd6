"""Token files at URLs (object storage): a local pair whose .bin is downloaded by blocks on demand.

The local .bin is a sparse file of full length. A block of it counts once it equals its digest, so any
number of processes may fill one cache. Digests come from PREFIX.bin.xxh3 at the URL, or are
computed from downloaded blocks and kept in PREFIX.bin.blocks.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from megatron.common.atomic_files import replacing
from megatron.common.errors import DataError, WrongDataError, raise_if_any, reason
from megatron.common.mirror import first_of, mirror, read_record
from megatron.common.remote_files import (
    download,
    exists,
    is_url,
    local_path,
    read_range,
    remove,
    size_of,
    upload_all,
    url_problems,
    write_at,
)
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.preprocess import MergeConfig, PreprocessConfig
from megatron.data.token_files.block_digests import BLOCK_BYTES, BlockDigests
from megatron.data.token_files.publish import RECORD, write_errors_name

CHUNK_BLOCKS = 64
"""Blocks of a .bin that one request downloads: 4 MiB."""

_ORIGIN = ".url"  # added to the name of a .bin: where its blocks come from
_FETCHED = ".blocks"  # added to the name of a .bin without digests: digests of downloaded blocks


def local_pair(prefix: str, cache: Path) -> str:
    """Return the prefix of local token files for the pair at the URL `prefix`; a path stays itself.

    The .idx, the digests and the tokenizer's record are downloaded, unless `cache` has the same
    files. One process does it while other processes on its machine wait.

    Raises:
        DataError: there is no such pair, or it cannot be read.
    """
    if not is_url(prefix):
        return prefix
    local = str(local_path(prefix, cache))
    try:
        Path(local).parent.mkdir(parents=True, exist_ok=True)
        with first_of(Path(local + ".lock"), "fetched") as is_first:
            if is_first:
                _mirror(prefix, local)
    except FileNotFoundError as error:
        raise WrongDataError(
            f"no token files at {prefix}: {error.filename} is missing; give the URL of a .bin/.idx "
            "pair without its suffix"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read the token files at {prefix}: {reason(error)}") from error
    return local


def _mirror(prefix: str, local: str) -> None:
    """Bring the local pair to the state of the one at `prefix`; no blocks of the .bin are downloaded."""

    def get(url: str, file: Path) -> None:
        if file.suffix != ".bin":
            download(url, file)
            return
        for end in (".bin.xxh3", RECORD):
            Path(local + end).unlink(missing_ok=True)
            if exists(prefix + end):
                download(prefix + end, Path(local + end))
        num_bytes = size_of(url)
        _make_sparse(Path(f"{file}{_FETCHED}"), 8 * -(-num_bytes // BLOCK_BYTES))
        _make_sparse(file, num_bytes)

    origin = Path(f"{local}.bin{_ORIGIN}")
    mirror(prefix, local, (".bin", ".idx"), origin, url=f"{prefix}.bin", get=get)


Output = TypeVar("Output", PreprocessConfig, MergeConfig)


def with_local_output(config: Output, urls: UrlConfig) -> tuple[Output, str]:
    """Return `config` with a local --output-prefix, and the URL that it had; "" for a path.

    Raises:
        ConfigError: the URL holds credentials.
        DataError: the cache cannot be written to.
    """
    url = config.output_prefix or ""
    if not is_url(url):
        return config, ""
    raise_if_any(url_problems("--output-prefix", url))
    local = local_path(url, cache_of(urls))
    with write_errors_name(local.parent):
        local.parent.mkdir(parents=True, exist_ok=True)
    return replace(config, output_prefix=str(local)), url


def deliver(
    files: Sequence[tuple[str, str]],
    last: Sequence[tuple[str, str]] = (),
    *,
    replaced: Sequence[str] = (),
) -> None:
    """Move local files to their URLs, the files of `last` after all other files.

    Args:
        replaced: URLs that are removed first.

    Raises:
        DataError: the connection fails at every attempt; the local files stay.
    """
    try:
        for url in replaced:
            remove(url)
        upload_all(files, last)
    except OSError as error:
        raise DataError(f"cannot upload: {reason(error)}; the local files stay") from error
    for local, _ in (*files, *last):
        Path(local).unlink()


def upload_pair(local: str, prefix: str) -> None:
    """Move the local token files `local` to the URL `prefix`, the .idx last: without it there is no pair.

    Raises:
        DataError: see `deliver`.
    """
    ends = (".bin", ".bin.xxh3", RECORD, ".idx")
    *files, index = [(local + end, prefix + end) for end in ends if os.path.exists(local + end)]
    deliver(files, [index], replaced=[prefix + end for end in (".idx", ".bin.xxh3", RECORD)])


def _make_sparse(path: Path, num_bytes: int) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.truncate(num_bytes)


class FetchedDigests:
    """Digests of downloaded blocks of a .bin without digests at its URL; 0 for other blocks."""

    def __init__(self, bin_path: Path, num_bytes: int):
        path = Path(f"{bin_path}{_FETCHED}")
        self._file = path.open("r+b", buffering=0)
        self._num_blocks = -(-num_bytes // BLOCK_BYTES)

    def __len__(self) -> int:
        return self._num_blocks

    def is_of(self, block: int, content: bytes) -> bool:
        """Whether `content` equals the downloaded block number `block`."""
        written = os.pread(self._file.fileno(), 8, 8 * block)
        return xxh3_64_intdigest(content).to_bytes(8, "little") == written

    def add(self, block: int, content: bytes) -> None:
        """Record a downloaded block, after its content is in the .bin."""
        digest = xxh3_64_intdigest(content).to_bytes(8, "little")
        os.pwrite(self._file.fileno(), digest, 8 * block)


@dataclass(frozen=True)
class Origin:
    """The .bin at a URL, of which a local one has some blocks."""

    url: str
    bin_path: Path
    num_bytes: int

    def fetch(self, block: int, digests: BlockDigests | FetchedDigests) -> list[int]:
        """Download the chunk with `block` into the local .bin; return its undamaged blocks.

        Raises:
            DataError: the connection fails at every attempt, or the disk is full.
        """
        first = block // CHUNK_BLOCKS * CHUNK_BLOCKS
        start = first * BLOCK_BYTES
        count = min(CHUNK_BLOCKS * BLOCK_BYTES, self.num_bytes - start)
        try:
            content = read_range(self.url, start, count)
            write_at(self.bin_path, start, content)
        except OSError as error:
            raise DataError(
                f"cannot read bytes {start} to {start + count} of {self.url} through "
                f"{self.bin_path}: {reason(error)}"
            ) from error
        sound = []
        for offset in range(0, count, BLOCK_BYTES):
            number, part = first + offset // BLOCK_BYTES, content[offset : offset + BLOCK_BYTES]
            if isinstance(digests, FetchedDigests):
                digests.add(number, part)
            elif not digests.is_of(number, part):
                continue
            sound.append(number)
        return sound


def origin_of(bin_path: Path, num_bytes: int) -> Origin | None:
    """Return where the blocks of a local .bin come from; None for a file of this machine."""
    origin = read_record(Path(f"{bin_path}{_ORIGIN}"))
    return Origin(origin["url"], bin_path, num_bytes) if origin else None
