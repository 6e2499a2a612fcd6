"""Universal checkpoint: no layout, one folder for each parameter, as DeepSpeed's universal format."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import (
    LATEST_UNIVERSAL,
    STAGING,
    FileRecord,
    Manifest,
    damage,
    iteration_of,
    read_manifest,
    record_file,
    tag_of,
    write_manifest,
)
from megatron.checkpointing.publish import clear_staging, publish
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.unpickle import read_tensors
from megatron.common.atomic_files import replace_text, staged_folder
from megatron.common.errors import CheckpointError, reason
from megatron.common.process_pool import map_in_processes
from megatron.common.progress import with_progress

_PARAMETERS = "zero"
_PROGRESS = "progress.pt"


def read_checkpoint(
    folder: Path, manifest: Manifest, *, optimizer: bool = True, verify: bool = True
) -> FullCheckpoint:
    """Read a checkpoint of any layout, or a universal one, without its layout.

    Args:
        optimizer: whether to read optimizer states and fp32 weights, if saved; see read_sharded.
        verify: whether to compare the files with the manifest first.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    if is_universal(manifest):
        if verify and (problems := damage(folder, manifest.files)):
            raise CheckpointError("; ".join(problems))
        return universal_index(folder, manifest).checkpoint(folder)
    saved = manifest.checkpoint.saves_optimizer
    return read_sharded(folder, manifest, optimizer=optimizer and saved, verify=verify)


def is_universal(manifest: Manifest) -> bool:
    """Whether the checkpoint is universal."""
    return any(record.name == _PROGRESS for record in manifest.files)


def with_universal(directory: Path, tags: list[str]) -> list[str]:
    """Insert the universal checkpoint named by `latest_universal` into `tags`, which are newest first.

    Raises:
        CheckpointError: that folder is not a checkpoint.
    """
    hint = directory / LATEST_UNIVERSAL
    if not hint.is_file():
        return tags
    folder_name = hint.read_text(encoding="utf-8").strip()
    iteration = read_manifest(directory / folder_name).state.iteration
    newer = [tag for tag in tags if (iteration_of(tag) or 0) > iteration]
    return [*newer, folder_name, *tags[len(newer) :]]


def write_universal(source: Path, output: Path, *, workers: int) -> None:
    """Convert the checkpoint in `source` to a universal one in `output`, a new folder.

    Written to a staging folder, hashed, flushed and renamed; then `latest_universal` next to it
    names it.

    Memory: one tensor in each of the `workers` processes.

    Raises:
        CheckpointError: `source` is incomplete or damaged, or `output` is another checkpoint.
    """
    manifest = read_manifest(source)
    if problems := damage(source, manifest.files):
        raise CheckpointError("; ".join(problems))
    try:
        if output.exists():
            _require_copy(output, manifest)
        else:
            with staged_folder(output.with_name(f"{STAGING}{output.name}"), output) as staging:
                records = _write_files(source, manifest, staging, workers)
                write_manifest(staging, replace(manifest, files=tuple(records)))
        replace_text(output.with_name(LATEST_UNIVERSAL), output.name, has_one_writer=True)
    except OSError as error:
        raise CheckpointError(f"{output}: {reason(error, output)}") from error


def publish_full(directory: Path, manifest: Manifest, checkpoint: FullCheckpoint) -> Path:
    """Publish an unsharded training state as a universal checkpoint of `directory`; return its folder.

    A run of any layout resumes from it.

    Memory: one parameter.

    Args:
        manifest: without files.

    Raises:
        CheckpointError: `directory` holds a checkpoint of this iteration, cannot be written to, or
            a run writes there.
    """
    iteration = manifest.state.iteration
    folder = directory / tag_of(iteration)
    with hold_lock(directory):
        if folder.exists():
            raise CheckpointError(f"{folder} exists: move it away, or write to another directory")
        staging = clear_staging(directory, iteration)
        try:
            records = [_write_progress(staging, checkpoint)]
            parameters, title = checkpoint.parameters, f"writing of {folder}"
            for name in with_progress(parameters, title, len(parameters), "parameters"):
                records += _write_parameter(staging, name, parameters[name])
            write_manifest(staging, replace(manifest, files=tuple(records)))
        except OSError as error:
            raise CheckpointError(f"{staging}: {reason(error, staging)}") from error
        publish(directory, iteration)
    return folder


@dataclass(frozen=True, kw_only=True)
class UniversalIndex:
    """Index of a universal checkpoint, without its tensors.

    Args:
        states: names of the files of each parameter.
        counters: DeepSpeed's.
        loss_scaler: attributes of DeepSpeed's loss scaler.
    """

    states: Mapping[str, Sequence[str]]
    counters: Mapping[str, int]
    loss_scaler: Mapping[str, Any]

    def checkpoint(self, folder: Path) -> FullCheckpoint:
        """Return the checkpoint in `folder`; a parameter is read when it is needed."""
        return FullCheckpoint(
            parameters=LazyParameters(
                {
                    name: partial(_read_parameter, folder / _PARAMETERS / name, states)
                    for name, states in self.states.items()
                }
            ),
            counters=self.counters,
            loss_scaler=self.loss_scaler,
        )


def universal_index(folder: Path, manifest: Manifest) -> UniversalIndex:
    """Return the index of the universal checkpoint in `folder`.

    Args:
        manifest: with its list of files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    states: dict[str, list[str]] = {}
    for record in manifest.files:
        if record.name.startswith(f"{_PARAMETERS}/"):
            _, name, file = record.name.split("/")
            states.setdefault(name, []).append(file.removesuffix(".pt"))
    with _universal(folder):
        progress = read_tensors(folder / _PROGRESS)
        return UniversalIndex(
            states=states,
            counters=progress["counters"],
            loss_scaler={
                name: value
                for name, value in progress["loss_scaler"].items()
                if isinstance(value, int | float)
            },
        )


@contextmanager
def _universal(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder} is no universal checkpoint: {error!r}") from error


def _require_copy(output: Path, manifest: Manifest) -> None:
    """Refuse to replace a checkpoint other than this one."""
    found = read_manifest(output)
    is_same = replace(found, files=()) == replace(manifest, files=()) and is_universal(found)
    if not is_same or damage(output, found.files):
        raise CheckpointError(f"{output} exists and is another checkpoint: move it away")


def _write_files(
    source: Path, manifest: Manifest, folder: Path, workers: int
) -> Iterator[FileRecord]:
    checkpoint = read_sharded(source, manifest, verify=False)
    yield _write_progress(folder, checkpoint)
    for record in manifest.files:
        if record.name.startswith("mp_rank_"):
            shutil.copy(source / record.name, folder / record.name)
            yield record_file(folder / record.name)
    names = list(checkpoint.parameters)
    written = map_in_processes(partial(_ParameterWriter, source, manifest, folder), names, workers)
    for records in with_progress(written, "universal checkpoint", len(names), "parameters"):
        yield from records


def _write_progress(folder: Path, checkpoint: FullCheckpoint) -> FileRecord:
    progress = folder / _PROGRESS
    torch.save(
        {"counters": dict(checkpoint.counters), "loss_scaler": dict(checkpoint.loss_scaler)},
        progress,
    )
    return record_file(progress)


class _ParameterWriter:
    """Writes a parameter of a checkpoint by its name; returns records of its files."""

    def __init__(self, source: Path, manifest: Manifest, folder: Path):
        self._parameters = read_sharded(source, manifest, verify=False).parameters
        self._folder = folder

    def __call__(self, name: str) -> list[FileRecord]:
        return [*_write_parameter(self._folder, name, self._parameters[name])]


def _write_parameter(folder: Path, name: str, parameter: ParameterState) -> Iterator[FileRecord]:
    parameter_folder = folder / _PARAMETERS / name
    parameter_folder.mkdir(parents=True)
    contents = {
        state: {"param": tensor.all().clone(), "cat_dim": tensor.dim}
        for state, tensor in parameter.tensors.items()
    }
    if parameter.steps is not None:
        contents["step"] = {"param": torch.tensor(parameter.steps), "cat_dim": None}
    for state, content in contents.items():
        file = parameter_folder / f"{state}.pt"
        torch.save(content, file)
        yield replace(record_file(file), name=f"{_PARAMETERS}/{name}/{file.name}")


def _read_parameter(folder: Path, states: Sequence[str]) -> ParameterState:
    """Read a parameter; its tensors are memory-mapped."""
    tensors, steps = {}, None
    with _universal(folder):
        for state in states:
            content = read_tensors(folder / f"{state}.pt")["param"]
            if state == "step":
                steps = float(content)
            else:
                tensors[state] = wrap_full_tensor(content)
        return ParameterState(weight=tensors.pop("fp32"), states=tensors, steps=steps)
