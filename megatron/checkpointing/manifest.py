"""What makes a checkpoint count: a list of its files, their sizes and their hashes.

Written last and read first, without torch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import xxhash

from megatron.checkpointing.names import MANIFEST
from megatron.common.atomic_files import NotRegularError, open_regular, sync_folder
from megatron.common.errors import (
    CheckpointError,
    NewerCheckpointError,
    UnreadableCheckpointError,
    WrongCheckpointError,
    near,
)
from megatron.common.version import CHECKPOINT_FORMAT
from megatron.config.data.tokenizer import with_sentencepiece_form

_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
_WRITTEN = "xxh3_128"  # at the speed of memory on one core

_BLOCK = 1 << 20  # bytes: what has just been hashed, or read, is still in the core's cache


class FileHash:
    """The hash of bytes that come one after the other.

    Args:
        algorithm: one that `algorithm_of` returns.
    """

    def __init__(self, algorithm: str = _WRITTEN):
        self._algorithm = algorithm
        self._digest = _ALGORITHMS[algorithm]()

    def update(self, block: memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(block)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def hash_of(stream: IO[bytes], algorithm: str = _WRITTEN) -> str:
    """Return the hash of what an unbuffered `stream` holds from here on."""
    found, memory = FileHash(algorithm), memoryview(bytearray(_BLOCK))
    # Not mapped: an error of the disk would end the process instead of being raised here.
    while size := stream.readinto(memory):  # type: ignore[attr-defined]
        found.update(memory[:size])
    return str(found)


def algorithm_of(told: str) -> str:
    """Return which algorithm made a hash.

    Raises:
        ValueError: it is not known here.
    """
    algorithm, _, _ = told.partition(":")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"a hash of {algorithm!r}, and known are {', '.join(_ALGORITHMS)}")
    return algorithm


def blocks(view: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of `view` in blocks that are best hashed and passed on one by one."""
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]


_SEAL = "sha256"
_SEALED_SINCE = 2
"""The entry with the manifest's own hash, and the first format that has it."""

_ALWAYS_SHA256_UNTIL = 2  # the last format whose records do not say what made their hash

_THREADS = 4  # that hash files of one checkpoint at the same time


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Args:
        size: in bytes.
        hash: what made it, a colon, and its digits; see checkpoint/hashes.py.
    """

    name: str
    size: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Args:
        state: the fields of TrainState.
        plan: the decisions of the run that saved it, as nested dictionaries.
        config: its wishes, likewise.
        versions: of the libraries that wrote it.
        partition_dims: parameter name -> the dimension that its shards are laid along.
        files: everything else in the folder.
    """

    state: dict[str, Any]
    plan: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    partition_dims: dict[str, int]
    files: tuple[FileRecord, ...]
    format: int = CHECKPOINT_FORMAT


def record_file(file: Path, name: str = "") -> FileRecord:
    """Return name, size and hash of `file`, after making sure that it is on disk.

    Args:
        name: what it is called in the record; as the file if not said.
    """
    with file.open("rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        found = hash_of(stream)
        return FileRecord(name or file.name, stream.tell(), found)


def names_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in `folder` and below, relative to it."""
    for place, _, names in os.walk(folder):
        yield from (str((Path(place) / name).relative_to(folder)) for name in names)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`; make sure that it and all names there are on disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(sealed(asdict(manifest)))
        stream.flush()
        os.fsync(stream.fileno())
    for place, _, _ in os.walk(folder):
        sync_folder(Path(place))


def sealed(content: Mapping[str, Any]) -> str:
    """Return `content` as JSON whose first entry is the hash of the text with that entry empty."""
    text = json.dumps({_SEAL: "", **content}, indent=1)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return text.replace('""', f'"{seal}"', 1)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        WrongCheckpointError: there is none, or a newer version wrote it.
        UnreadableCheckpointError: the disk or its permissions do not let it be read.
        CheckpointError: it is damaged.
    """
    file = folder / MANIFEST
    try:
        with open_regular(file) as stream:
            text = stream.read()
        content = dict(json.loads(text))
        # Before the format is looked at: a damaged number must not pass for a newer one.
        _require_sealed(text, content)
        # Then: what else a newer format holds is not known here.
        _require_known(written := int(content["format"]), file)
        files = tuple(_record(written, **record) for record in content.pop("files"))
        return Manifest(files=files, **_with_softmax(_with_sentencepiece_form(content)))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.exists(folder):
            raise WrongCheckpointError(f"{folder} does not exist{near(folder)}") from error
        told = f"{file}: {error.strerror}; {folder} is no checkpoint"
        raise WrongCheckpointError(told) from error
    except NotRegularError as error:
        raise CheckpointError(f"{file} is damaged: {error.strerror}") from error
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _require_sealed(text: bytes, content: dict[str, Any]) -> None:
    """Take the seal out of `content`, which `text` says, after comparing it with `text`."""
    seal = content.pop(_SEAL, None)
    if seal is None and int(content["format"]) < _SEALED_SINCE:
        return
    if hashlib.sha256(text.replace(str(seal).encode(), b"", 1)).hexdigest() != seal:
        raise ValueError("its hash is not the one that it carries")


def _require_known(written: int, file: Path) -> None:
    if written > CHECKPOINT_FORMAT:
        raise NewerCheckpointError(
            f"{file} has format {written} and this version reads up to {CHECKPOINT_FORMAT}: update it"
        )


def _with_sentencepiece_form(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the form of SentencePiece tokens, which older manifests do not state."""
    config = content["config"]
    if "tokenizer" not in config:
        return content
    tokenizer = with_sentencepiece_form(config["tokenizer"], is_legacy=True)
    return {**content, "config": {**config, "tokenizer": tokenizer}}


def _with_softmax(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the softmax of older runs, in which padded columns took part."""
    plan = content["plan"]
    model = plan.get("model", {})
    if not {"vocab_size", "padded_vocab_size"} <= {*model}:
        return content
    has_padding = model["padded_vocab_size"] > model["vocab_size"]
    model = {"padded_vocab_in_softmax": has_padding, **model}
    return {**content, "plan": {**plan, "model": model}}


def _record(written: int, **entries: Any) -> FileRecord:
    """Return the record of one file that a manifest of the format `written` holds."""
    if written <= _ALWAYS_SHA256_UNTIL:
        entries["hash"] = f"sha256:{entries.pop('sha256')}"
    record = FileRecord(**entries)
    algorithm_of(record.hash)
    return record


def damage(
    folder: Path, records: Iterable[FileRecord], *, forgets_cached: bool = False
) -> list[str]:
    """Return what is wrong with the files on disk: missing, of another size, or other bytes.

    Args:
        forgets_cached: whether the kernel drops first what it keeps of the files in memory, so that
            it is the disk which is read, where the platform can do that.
    """
    # Hashing is done outside Python's lock.
    look = partial(_damage, folder, forgets_cached=forgets_cached)
    with ThreadPoolExecutor(_THREADS) as threads:
        return [told for told in threads.map(look, records) if told]


def _damage(folder: Path, record: FileRecord, *, forgets_cached: bool) -> str | None:
    file = folder / record.name
    try:
        if not file.is_file():
            return f"{file} is missing"
        if (size := file.stat().st_size) != record.size:
            return f"{file} has {size} bytes instead of {record.size}"
        with file.open("rb", buffering=0) as stream:
            if forgets_cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = hash_of(stream, algorithm_of(record.hash))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if found != record.hash:
        return f"{file} is damaged: its hash is not that of the manifest"
    return None
