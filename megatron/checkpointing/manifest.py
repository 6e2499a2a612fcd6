"""Folders of checkpoints (`global_stepN`, `latest`) and their manifests (`manifest.json`).

The manifest holds the plan, the config and the progress, and lists files with sizes and hashes. It
is written last: a folder without one is no checkpoint. Read without torch. The hashes find damage
by disks and networks, not manipulation.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import IO, Any, TypeVar, get_args, get_origin, get_type_hints

import xxhash

from megatron.checkpointing.train_state import TrainState
from megatron.checkpointing.upgrades import UPGRADES
from megatron.common.atomic_files import NotRegularError, open_regular, sync_folder
from megatron.common.errors import (
    CheckpointError,
    NewerCheckpointError,
    UnreadableCheckpointError,
    WrongCheckpointError,
    near,
)
from megatron.common.version import CHECKPOINT_FORMAT
from megatron.config.data.corpora import DataPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.network.experts import ExpertConfig
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_spec import ModelSpec, spec_of
from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.config.optimization.training import TrainingPlan
from megatron.config.parallelism.layout import ParallelPlan
from megatron.config.parallelism.precision import PrecisionPlan
from megatron.config.run.checkpoint import CheckpointPlan

Part = TypeVar("Part")

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MANIFEST = "manifest.json"
KEEP = "keep"
STAGING = "staging-"
REPLACED = "replaced-"
PRUNED = "pruned-"
ASIDE = "aside-"
LOCK = "lock.json"
CONVERTED_FROM = "converted from"
"""Key among the versions of a manifest whose checkpoint another program saved: where that was."""

_TAG = re.compile(r"global_step(\d+)")


def tag_of(iteration: int) -> str:
    """Return the folder name of the checkpoint of `iteration`."""
    return f"global_step{iteration}"


def staging_tag_of(iteration: int) -> str:
    """Return the folder name under which the checkpoint of `iteration` is written."""
    return f"{STAGING}{tag_of(iteration)}"


def iteration_of(tag: str) -> int | None:
    """Return the iteration in a checkpoint's folder name; None for other folders."""
    match = _TAG.fullmatch(tag)
    return int(match.group(1)) if match else None


def published_tags(directory: Path) -> list[str]:
    """List the checkpoints of `directory` that have a manifest, newest first.

    Raises:
        UnreadableCheckpointError: the directory cannot be read.
    """
    try:
        iterations = [i for name in os.listdir(directory) if (i := iteration_of(name)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableCheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    tags = (tag_of(i) for i in sorted(iterations, reverse=True))
    return [tag for tag in tags if has_manifest(directory / tag)]


def has_manifest(folder: Path) -> bool:
    """Whether `folder` is a complete checkpoint.

    Raises:
        UnreadableCheckpointError: the disk or its permissions do not allow reading it.
    """
    file = folder / MANIFEST
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return True


_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
_WRITTEN = "xxh3_128"  # at the speed of memory on one core

_BLOCK = 1 << 20  # bytes: just hashed, or read, they are still in the core's cache


class FileHash:
    """Incremental hash of a file."""

    def __init__(self, algorithm: str = _WRITTEN):
        self._algorithm = algorithm
        self._digest = _ALGORITHMS[algorithm]()

    def update(self, block: memoryview) -> None:
        """Add the next bytes."""
        self._digest.update(block)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def hash_of(stream: IO[bytes], algorithm: str = _WRITTEN) -> str:
    """Hash an unbuffered `stream` from its current position on."""
    found, memory = FileHash(algorithm), memoryview(bytearray(_BLOCK))
    # Not mapped: a disk error would kill the process (SIGBUS) instead of being raised.
    while size := stream.readinto(memory):  # type: ignore[attr-defined]
        found.update(memory[:size])
    return str(found)


def algorithm_of(digest: str) -> str:
    """Return the algorithm named in a hash.

    Raises:
        ValueError: the algorithm is unknown.
    """
    algorithm, _, _ = digest.partition(":")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown hash {algorithm!r}; known: {', '.join(_ALGORITHMS)}")
    return algorithm


def blocks(view: memoryview) -> Iterator[memoryview]:
    """Split `view` into blocks that fit the CPU cache."""
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]


_SEAL = "sha256"
_SEALED_SINCE = 2
"""Key of the manifest's hash, and the first format that has it."""

_ALWAYS_SHA256_UNTIL = 2  # the last format whose records do not name the algorithm

_THREADS = 4  # hash files of one checkpoint in parallel


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Args:
        size: in bytes.
        hash: algorithm, colon, digits.
    """

    name: str
    size: int
    hash: str


def _section(kind: type[Part], tree: str, name: str) -> cached_property[Part]:
    """Return a property that parses the section `name` of an object's nested dictionaries `tree`.

    Reading it raises CheckpointError if the section lacks a field that has no default.
    """

    def parse(owner: Any) -> Part:
        try:
            return parse_fields(kind, getattr(owner, tree).get(name, {}))
        except TypeError as error:
            problem = f"the checkpoint's {tree}.{name} is not understood: {error}"
            raise CheckpointError(problem) from error

    return cached_property(parse)


def parse_fields(kind: type[Part], saved: Mapping[str, Any]) -> Part:
    """Return the dataclass `kind` with saved fields; those that it does not have are left out.

    Raises:
        TypeError: a field without a default is missing.
    """
    hints = get_type_hints(kind)
    return kind(
        **{name: _parse_value(hints[name], v) for name, v in saved.items() if name in hints}
    )


def _parse_value(hint: Any, value: Any) -> Any:
    """Return a value from JSON in the type of its field: nested dataclasses, and tuples for lists."""
    if is_dataclass(hint) and isinstance(value, Mapping):
        return parse_fields(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        args = get_args(hint)
        return tuple(map(_parse_value, repeat(args[0]) if args[1:] == (...,) else args, value))
    return value


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json.

    It also has the network, and sections of the plan and the config as the dataclasses of this
    version, parsed when they are read. Properties raise CheckpointError if they are not understood.

    Args:
        plan: the Plan of the run that saved it, as nested dictionaries, for comparisons.
        config: its Config, likewise, for parsers of flags.
        versions: of the libraries that wrote it; see also CONVERTED_FROM.
        partition_dims: parameter name -> the dimension that its shards are laid along.
        files: everything else in the folder.
    """

    state: TrainState
    plan: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    partition_dims: dict[str, int]
    files: tuple[FileRecord, ...]
    format: int = CHECKPOINT_FORMAT

    batch = _section(BatchPlan, "plan", "batch")
    checkpoint = _section(CheckpointPlan, "plan", "checkpoint")
    data = _section(DataPlan, "plan", "data")
    objective = _section(ObjectivePlan, "plan", "objective")
    optimizer = _section(OptimizerPlan, "plan", "optimizer")
    parallel = _section(ParallelPlan, "plan", "parallel")
    precision = _section(PrecisionPlan, "plan", "precision")
    schedule = _section(SchedulePlan, "plan", "schedule")
    training = _section(TrainingPlan, "plan", "training")
    expert_flags = _section(ExpertConfig, "config", "experts")
    network_flags = _section(ModelConfig, "config", "model")
    tokenizer = _section(TokenizerConfig, "config", "tokenizer")

    @cached_property
    def spec(self) -> ModelSpec:
        """The network; if its plugin is missing, the plugin's fields are kept as they are."""
        return spec_of(self.plan.get("model", {}))

    @property
    def converted_from(self) -> str:
        """The checkpoint of another program that this one was converted from; "" if of none.

        Only the network, the dtype and the progress then come from the run that saved it.
        """
        return self.versions.get(CONVERTED_FROM, "")

    @property
    def flag_sections(self) -> dict[str, Any]:
        """Flags by section, including extensions' flags."""
        return {**self.config, **self.config.get("extensions", {})}


def record_file(file: Path, name: str = "") -> FileRecord:
    """Flush `file` to disk and return its name, size and hash.

    Args:
        name: the name in the record; default: the file name.
    """
    with file.open("rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        found = hash_of(stream)
        return FileRecord(name or file.name, stream.tell(), found)


def names_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in `folder` and below, relative to it."""
    for path, _, names in os.walk(folder):
        yield from (str((Path(path) / name).relative_to(folder)) for name in names)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder` and flush it and all directory entries to disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(seal_json(asdict(manifest)))
        stream.flush()
        os.fsync(stream.fileno())
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def seal_json(content: Mapping[str, Any]) -> str:
    """Serialize `content` as JSON; its first entry is the hash of the text with that entry empty."""
    text = json.dumps({_SEAL: "", **content}, indent=1)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return text.replace('""', f'"{seal}"', 1)


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest of the checkpoint in `folder`.

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
        # Before the format is read: a damaged number must not pass for a newer format.
        _require_sealed(text, content)
        # Next: the other contents of a newer format are unknown.
        _require_known(written := int(content["format"]), file)
        files = tuple(_record(written, **record) for record in content.pop("files"))
        for upgrade in UPGRADES:
            content = upgrade(content)
        content["format"] = CHECKPOINT_FORMAT
        state = parse_fields(TrainState, content.pop("state"))
        return Manifest(state=state, files=files, **content)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.exists(folder):
            raise WrongCheckpointError(f"{folder} does not exist{near(folder)}") from error
        problem = f"{file}: {error.strerror}; {folder} is no checkpoint"
        raise WrongCheckpointError(problem) from error
    except NotRegularError as error:
        raise CheckpointError(f"{file} is damaged: {error.strerror}") from error
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _require_sealed(text: bytes, content: dict[str, Any]) -> None:
    """Remove the manifest's hash from `content` after comparing it with `text`."""
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


def _record(written: int, **entries: Any) -> FileRecord:
    """Parse the record of one file in a manifest of the format `written`."""
    if written <= _ALWAYS_SHA256_UNTIL:
        entries["hash"] = f"sha256:{entries.pop('sha256')}"
    record = FileRecord(**entries)
    algorithm_of(record.hash)
    return record


UNREAD = "cannot be read"
"""In a message on a file that may be undamaged: of a machine without descriptors or memory, too."""


def damage(
    folder: Path, records: Iterable[FileRecord], *, forgets_cached: bool = False
) -> list[str]:
    """Compare files with their records; return one message for each that is missing or damaged.

    Args:
        forgets_cached: whether to drop the files from the page cache first, where the platform
            can, so that the disk is read.
    """
    # Hashing releases the GIL.
    check = partial(_damage, folder, forgets_cached=forgets_cached)
    with ThreadPoolExecutor(_THREADS) as threads:
        return [problem for problem in threads.map(check, records) if problem]


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
        return f"{file} {UNREAD}: {error.strerror}"
    if found != record.hash:
        return f"{file} is damaged: its hash is not that of the manifest"
    return None
