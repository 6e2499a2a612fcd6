#!/usr/bin/env python
"""Inspect a checkpoint of any system: contents, and the command that opens it: `tools/checkpoint/inspect.py PATH`."""

import os.path
import sys

# This folder last: its inspect.py is not the inspect of the standard library.
sys.path.sort(key=lambda p: os.path.realpath(p) == os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.realpath(__file__).rsplit("/", 3)[0])  # so that it runs from anywhere

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.checkpointing.manifest import Manifest, read_manifest
from megatron.checkpointing.megatron_lm.detect import system_of, title_of
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.remote import local_checkpoint
from megatron.common.cli import run_tool, with_flag
from megatron.common.errors import WrongCheckpointError, near
from megatron.common.installation import in_this_installation
from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import network_named
from megatron.config.config import words_of
from megatron.config.objectives import declaration_of
from megatron.config.parsing.flags import parse_sections
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.checkpoint_tools import LookConfig
from megatron.extensions.tasks.network import Classifier

_COMMANDS = {
    "hugging_face": ("tools/convert_checkpoint/from_hf.py --load {path} --save NEW",),
    "universal": ("no command: load it with the program that wrote it, and save it with layers",),
    "deepspeed": ("no command: only runs with a pipeline of stages leave files for each layer",),
}
"""Advice for formats that util.py does not read."""


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    argv = with_flag(argv, "--path", "the path of a checkpoint")
    parsed = parse_sections(
        argv, {"look": LookConfig, "urls": UrlConfig}, description=__doc__ or ""
    ).sections
    config: LookConfig = parsed["look"]
    path = local_checkpoint(config.path, cache_of(parsed["urls"]), flag="--path", foreign=True)
    system = system_of(path)
    if system is None:
        if not path.exists():
            if Path(f"{path}.idx").exists():
                raise WrongCheckpointError(
                    f"{path} is a pair of token files: tools/inspect_data.py {path} prints them"
                )
            raise WrongCheckpointError(f"{path}: there is no such file or directory{near(path)}")
        raise WrongCheckpointError(f"{path} holds no checkpoint of a known format")
    print(f"checkpoint: {title_of(system)}")
    if system == "own":
        lines = _own(path, each=config.parameters)
    elif system in _COMMANDS:
        lines = (f"to use it: {command.format(path=path)}" for command in _COMMANDS[system])
    else:
        lines = _foreign(path, system, each=config.parameters)
    for line in lines:
        print(in_this_installation(line))


def _own(path: Path, *, each: bool) -> Iterator[str]:
    folder = checkpoint_of(path)
    manifest = read_manifest(folder)
    yield from _summary(folder, manifest)
    yield from _tensors(folder, manifest, each=each)
    directory = folder.parent
    objective = manifest.objective.name
    script = declaration_of(objective).script or f"pretrain_gpt.py --objective {objective}"
    yield f"resume with: {script} --use-checkpoint-args --load {directory} --save {directory} ..."
    name = manifest.spec.architecture
    if name not in NETWORKS:
        yield f"its network, {name}, is that of a plugin"
        return
    usage = Classifier.usage if manifest.spec.head else network_named(name).usage
    if usage:
        yield usage.format(directory=directory, script=script)


def _summary(folder: Path, manifest: Manifest) -> Iterator[str]:
    yield f"folder: {folder}"
    yield " | ".join(f"{name}: {value}" for name, value in vars(manifest.state).items())
    yield " | ".join(f"{name}: {value}" for name, value in vars(manifest.parallel).items())
    yield f"precision: {manifest.precision.dtype} | optimizer: {manifest.optimizer.name}"
    yield " | ".join(f"{name}: {value}" for name, value in manifest.versions.items())
    yield f"files: {len(manifest.files)} | bytes: {sum(record.size for record in manifest.files)}"


def _tensors(folder: Path, manifest: Manifest, *, each: bool) -> Iterator[str]:
    from megatron.checkpointing.resharding.universal import read_checkpoint

    checkpoint = read_checkpoint(folder, manifest)
    sizes = [parameter.weight.size for parameter in checkpoint.parameters.values()]
    yield f"parameters: {len(sizes)} | elements: {sum(sizes)}"
    if each:
        for name, parameter in checkpoint.parameters.items():
            steps = "" if parameter.steps is None else f" | steps: {parameter.steps:g}"
            states = ", ".join(parameter.tensors)
            yield f"{name} {list(parameter.weight.shape)} | {states}{steps}"


def _foreign(path: Path, system: str, *, each: bool) -> Iterator[str]:
    # Imported here: torch takes seconds.
    from megatron.checkpointing.megatron_lm.convert import find

    found = find(path, system)
    known = "unknown" if found.vocab_size is None else found.vocab_size
    yield f"folder: {found.folder}"
    yield (
        " | ".join(f"{name}: {value}" for name, value in found.state.items()) or "progress: unknown"
    )
    yield f"vocabulary: {known} | embedding rows: {found.rows}"
    yield f"optimizer: {'states are read' if found.has_optimizer else 'states are not read'}"
    yield f"parameters: {len(found.checkpoint.parameters)}"
    yield f"flags: {shlex.join(words_of(found.values))}"
    if each:
        for name, parameter in found.checkpoint.parameters.items():
            yield f"{name} {list(parameter.weight.shape)} | {', '.join(parameter.tensors)}"
    unknown = " --true-vocab-size N" if found.vocab_size is None else ""
    yield (
        f"to use it: tools/checkpoint/util.py --model-type {declaration_of(found.objective).network.upper()} --loader {system} --saver own "
        f"--load-dir {path} --save-dir NEW{unknown}"
    )


if __name__ == "__main__":
    run_tool(main)
