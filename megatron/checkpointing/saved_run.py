"""Config of the run that saved a checkpoint, for `--use-checkpoint-args` and for tools."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.checkpointing.manifest import STAGING, Manifest, published_tags, read_manifest, tag_of
from megatron.checkpointing.remote import fetch, local_directory
from megatron.common.errors import (
    CheckpointError,
    ConfigError,
    MegatronError,
    UnreadableCheckpointError,
)
from megatron.common.extensions import (
    declarations_in,
    extension_sections,
    extensions_with,
    used_sections,
)
from megatron.config.config import (
    ANY_NETWORK,
    SECTIONS,
    Config,
    flatten,
    options_given,
    plugins_in,
    sections_in,
)
from megatron.config.data.objective import ObjectiveName
from megatron.config.network_contract import is_chosen_by_flag
from megatron.config.optimization.batch_size import NO_PROGRESS, Progress
from megatron.config.parsing.flags import options_of
from megatron.config.parsing.parser import OFF, Given
from megatron.config.plugins import missing_plugins
from megatron.config.run.checkpoint import INITIAL, CheckpointConfig, plan_checkpoint
from megatron.config.run.urls import cache_of, urls_in

_NETWORK_SECTIONS = ("model", "experts", "lora", "prediction", "tokenizer")
_SIZES = {"num_layers", "hidden_size", "num_attention_heads"}
_FLAGS = {"use_checkpoint_args", "use_checkpoint_config"}


@dataclass(frozen=True)
class SavedRun:
    """Config of the run that saved a checkpoint, or placeholder values if there is none."""

    config: Mapping[str, Mapping[str, Any]]
    world_size: int | None
    objective: ObjectiveName


def read_saved_run(directory: str | None) -> SavedRun:
    """Read the config of the run that saved to `directory`.

    Raises:
        CheckpointError: the manifest of the newest checkpoint is damaged.
    """
    tags = published_tags(Path(directory)) if directory else []
    if not directory or not tags:
        return SavedRun(ANY_NETWORK, None, "gpt")
    manifest = read_manifest(Path(directory) / tags[0])
    return SavedRun(manifest.config, manifest.parallel.world_size, manifest.objective.name)


def saved_progress(checkpoint: CheckpointConfig) -> Progress:
    """Return the progress of the checkpoint that a run resumes from; none if it starts anew."""
    found = manifest_to_load(checkpoint)
    if found is None or not plan_checkpoint(checkpoint, trains=True).loads_progress:
        return NO_PROGRESS
    state = found[1].state
    return Progress(state.iteration, state.samples, state.tokens)


def manifest_to_load(checkpoint: CheckpointConfig) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint of --load, or that of --ckpt-step, and its manifest.

    The checkpoint is chosen later, when damaged ones are passed over: None for an unreadable manifest.
    """
    planned = plan_checkpoint(checkpoint, trains=True)
    if not planned.load:
        return None
    try:
        tags = [tag_of(planned.step)] if planned.step else published_tags(Path(planned.load))
        folder = Path(planned.load) / tags[0] if tags else None
        return (folder, read_manifest(folder)) if folder else None
    except CheckpointError:
        return None


def saved_architecture(directory: Path) -> str | None:
    """Return the architecture of the network in `directory`; None if no manifest can be read."""
    for tag in published_tags(directory):
        try:
            return read_manifest(directory / tag).spec.architecture
        except CheckpointError:
            continue  # a run passes over it too, or names what is wrong
    return None


@dataclass(frozen=True)
class SavedNetwork:
    """Flags of network, experts and tokenizer saved in a checkpoint (`--use-checkpoint-args`).

    Args:
        flags: by field.
        sections: names of the extensions' sections among them that are not at their defaults.
    """

    folder: Path
    flags: Mapping[str, Any]
    sections: tuple[str, ...] = ()

    def describe(self, config: Config) -> tuple[str, ...]:
        """Return log lines: the flags from the checkpoint, and those that the command line overrides."""
        sections, now = sections_in(config), flatten(asdict(config))
        options = options_of(sections)
        initial = {f.name: f.default for section in sections.values() for f in fields(section)}
        differ = [name for name in self.flags if name in now and now[name] != self.flags[name]]
        taken = [
            f"{options[name]}" + ("" if isinstance(value, bool) else f" {value}")
            for name, value in self.flags.items()
            if name in now and name in initial and name not in differ and value != initial[name]
        ]
        lines = [f"settings from {self.folder}: {' '.join(taken)}"]
        if differ:
            differing = (f"{options[name]} {now[name]} (not {self.flags[name]})" for name in differ)
            lines.append(
                f"overridden by this command line, unlike {self.folder}: {', '.join(differing)}"
            )
        return tuple(lines)


def _is_used(saved: Mapping[str, Any], section: str) -> bool:
    """Whether a saved section of an extension has values that are not the defaults."""
    known = {field.name: field.default for field in fields(extension_sections()[section])}
    return any(name in known and value != known[name] for name, value in saved.items())


def lost_plugins(argv: Sequence[str]) -> list[str]:
    """Return a sentence for each plugin of the checkpoint in --load that `argv` lacks.

    For the message of flags that only a plugin knows: [] where nothing can be read.
    """
    try:
        saved = read_saved_run(options_given(argv).get("load"))
    except MegatronError:
        return []
    return [*missing_plugins(saved.config, plugins_in(argv))]


def checkpoint_flags(argv: Sequence[str], objective: ObjectiveName = "gpt") -> SavedNetwork | None:
    """Read the flags for `--use-checkpoint-args`; None without that flag or without a checkpoint.

    Finetuning reads them without the flag if the command line has no size of the network.

    Raises:
        ConfigError: a `--config` file cannot be read, or --ckpt-step is not an integer.
        CheckpointError: no manifest can be read.
    """
    given = options_given(argv)
    load, step = given.get("load"), given.get("ckpt_step")
    finetunes = given.get("finetune", OFF) != OFF or objective == "sft"
    is_asked = not _FLAGS.isdisjoint(given) or (finetunes and _SIZES.isdisjoint(given))
    if not load or not is_asked:
        return None
    if step and not step.isdigit():
        raise ConfigError(f"--ckpt-step {step} is no iteration")
    folder = Path(local_directory(load, cache_of(urls_in(given)), flag="--load"))
    fetch(folder, step=int(step or 0))
    return saved_network(folder, int(step) if step else None)


def saved_network(load: Path, step: int | None = None) -> SavedNetwork | None:
    """Read the flags of the network in `load`; None without a checkpoint.

    Args:
        step: of the checkpoint; None for the newest that can be read.

    Raises:
        CheckpointError: no manifest can be read.
    """
    if not published_tags(load) and (load / INITIAL).exists():
        load = load / INITIAL
    tags = published_tags(load) if step is None else [tag_of(step)]
    errors = []
    for tag in tags:
        try:
            manifest = read_manifest(load / tag)
            spec = manifest.spec
        except UnreadableCheckpointError:
            raise
        except CheckpointError as error:
            errors.append(str(error))
            continue
        saved = manifest.flag_sections
        extensions = extensions_with(used_sections(manifest.config) - SECTIONS.keys())
        network_sections = chain.from_iterable(declarations_in("flags", "OF_NETWORK", extensions))
        sections = [name for name in network_sections if _is_used(saved.get(name, {}), name)]
        flags = {
            name: value
            for section in (*_NETWORK_SECTIONS, *sections)
            for name, value in saved.get(section, {}).items()
        }
        flags |= dict(spec.own_flags)  # of plugins' parts
        if is_chosen_by_flag(spec.architecture):
            flags["network"] = spec.architecture
        if spec.attention.attention:
            flags["attention_impl"] = spec.attention.attention
        return SavedNetwork(load / tag, flags, tuple(sections))
    if errors:
        raise CheckpointError("--use-checkpoint-args: " + "; ".join(errors))
    # The first job of a chain: its flags have to be complete.
    return None


def source_of_sizes(given: Given, problems: Sequence[str]) -> Iterator[str]:
    """Yield where the missing sizes of the network may come from."""
    load = given.get("load")
    if load and any("required" in each and "--num-layers" in each for each in problems):
        if published_tags(Path(load)):
            yield f"--use-checkpoint-args takes the sizes of the network from --load {load}"
        yield from model_to_import(load)


def model_to_import(load: str) -> Iterator[str]:
    """Yield how --load is imported, if it is a model of Hugging Face."""
    if is_model_of_transformers(Path(load)):
        yield (
            f"--load {load} is in Hugging Face's format: import it with tools/convert_checkpoint/from_hf.py "
            f"--load {load} --save NEW, and write --load NEW --finetune"
        )


def is_model_of_transformers(folder: Path) -> bool:
    """Whether `folder` holds a model, and no checkpoint of a run that was exported into it."""
    checkpoints = ("global_step*", f"{INITIAL}/global_step*", f"{STAGING}*")
    if not (folder / "config.json").is_file() or any(map(any, map(folder.glob, checkpoints))):
        return False
    return any(chain(folder.glob("*.safetensors"), folder.glob("pytorch_model*.bin")))
