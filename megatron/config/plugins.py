"""Plugins: modules of the user that register parts of a run, and the flags that name them."""

import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near
from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    FLAG_HOOKS,
    HOOKS,
    METRICS,
    NETWORKS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    REGISTRIES,
    SCHEDULES,
    TOKENIZERS,
    OwnFlags,
    Registry,
)
from megatron.config.parsing.declaration import flags_of, setting

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """Plugin modules, and which of their parts act on a run."""

    plugin: list[str] | None = setting(None, repeats=True, plan="plugins.modules")
    """Import these modules, or .py files, before flags are parsed; they register parts of a run by
    name, and add the flags of these parts (docs/extending.md). Can be given several times."""

    objective: str | None = setting(None, names=OBJECTIVES, plan="model.architecture")
    """Train another objective than the script's (gpt is pretrain_gpt.py's, prefix-lm
    pretrain_prefix_lm.py's, multitask finetune_t0_non_causal_decoder.py's, sft finetune_sft.py's;
    docs/flags.md also names objectives of extensions), or one of a plugin; default in tools: the
    objective of the checkpoint in --load, or gpt."""

    network: str | None = setting(None, names=NETWORKS)
    """Train another network than the objective's, by name: a plugin's or an extension's."""

    dataset: str | None = setting(None, names=DATASETS)
    """Cut documents into samples with a dataset of a plugin, by name."""

    hook: list[str] | None = setting(None, names=HOOKS, repeats=True, plan="plugins.hooks")
    """Hooks of plugins that act before and after each step, by name."""

    metric: list[str] | None = setting(None, names=METRICS, repeats=True, plan="plugins.metrics")
    """Metrics of plugins that the journal records with each log line, by name."""


@dataclass(frozen=True, kw_only=True)
class PluginModulesConfig:
    """Plugin modules that a checkpoint or a tokenizer needs."""

    plugin: list[str] | None = setting(None, repeats=True)
    """Import these modules, or .py files, which register parts of the network, the optimizer or the
    tokenizer (docs/extending.md). Can be given several times."""


@dataclass(frozen=True, kw_only=True)
class PluginPlan:
    """The modules of a run's plugins, and their components other than network and optimizer."""

    modules: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    own_flags: OwnFlags = ()  # of the hooks and metrics


def plan_plugins(plugins: PluginConfig, extensions: Mapping[str, Any]) -> PluginPlan:
    """Return the plugins' part of the plan.

    Args:
        extensions: instances of the plugins' sections of flags, by the name of their class.
    """
    hooks, metrics = tuple(plugins.hook or ()), tuple(plugins.metric or ())
    flags = [
        flag
        for registry, names in ((HOOKS, hooks), (METRICS, metrics))
        for name in names
        for flag in registry.flags_of(name, extensions)
    ]
    return PluginPlan(
        modules=tuple(plugins.plugin or ()),
        hooks=hooks,
        metrics=metrics,
        own_flags=tuple(dict.fromkeys(flags)),
    )


@dataclass(frozen=True)
class RunHook:
    """A hook of an extension, which acts on a run with flags of its section.

    Args:
        section: its name.
        problems: function (config, *, trains) that yields the problems of these flags.
    """

    section: str
    problems: Callable[..., Iterator[str]]


def hooks_of_sections(extensions: Mapping[str, Any]) -> dict[str, RunHook]:
    """Return the hooks of the extensions whose flags a run has, by name.

    Args:
        extensions: instances of sections by name.
    """
    found: dict[str, RunHook] = {name: FLAG_HOOKS.about(name) for name in FLAG_HOOKS}
    return {name: hook for name, hook in found.items() if hook.section in extensions}


def modules_in(words: Sequence[str]) -> list[str]:
    """Return the modules of --plugin in the words of a command line."""
    modules: list[str] = []
    is_value = False
    for word in words:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            is_value = option == "--plugin" and not equals
            modules += [value] if option == "--plugin" and equals else []
        elif is_value:
            modules.append(word)
    return modules


def load_plugins(modules: Sequence[str]) -> None:
    """Import the modules of --plugin, each a module's name or the path of a .py file.

    Raises:
        ConfigError: a module is missing or cannot be imported.
    """
    for module in modules:
        try:
            if module.endswith(".py"):
                _import_file(module)
            elif os.sep in module or module.startswith("."):
                raise ConfigError(
                    f"--plugin {module}: give the name of a module, or the path of a .py file"
                )
            else:
                importlib.import_module(module)
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"--plugin {module}: there is no module {error.name}; put the directory that "
                    "holds it on PYTHONPATH, install its package, or give the path of its .py file"
                ) from error
            raise ConfigError(_import_failed(module, error)) from error
        except (Exception, SystemExit) as error:
            log.debug("--plugin %s", module, exc_info=True)
            raise ConfigError(_import_failed(module, error)) from error


def _import_file(path: str) -> None:
    """Import a .py file as the module of its name, unless it is imported already."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--plugin {path}: there is no such file{near(file)}")
    name, origin = _module_name(path), os.path.realpath(file)
    loaded = sys.modules.get(name)
    found = loaded.__spec__ if loaded else importlib.util.find_spec(name)
    other = found.origin if found else getattr(loaded, "__file__", None)
    # A folder without __init__.py is found as a module too, and has no origin.
    if other and os.path.realpath(other) != origin:
        raise ConfigError(
            f"--plugin {path}: another module is called {name} ({other}): rename the file"
        )
    if loaded and other:
        return
    spec = importlib.util.spec_from_file_location(name, origin)
    assert spec and spec.loader  # of a .py file
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise


def _import_failed(module: str, error: BaseException) -> str:
    """Return the message of a plugin that raises, with the line of it that does."""
    here = f"{os.sep}importlib{os.sep}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if here not in frame.filename
        and not frame.filename.startswith("<frozen")
        and frame.filename != __file__
    ]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"--plugin {module} cannot be imported: {type(error).__name__}: {error}{where}"


def plugin_sections() -> dict[str, type]:
    """Return the dataclasses of flags of all registered parts, by the name of their class.

    Raises:
        ConfigError: two of them have one name.
    """
    found: dict[str, type] = {}
    for section in (section for registry in REGISTRIES for section in registry.sections()):
        there = found.setdefault(section.__name__, section)
        if there.__module__ != section.__module__:
            raise ConfigError(
                f"two plugins have a section of flags {section.__name__}: {there.__module__} and "
                f"{section.__module__}; rename one"
            )
        found[section.__name__] = section
    return found


def plugin_problems(
    value_of: Callable[[str, str], Any], extensions: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the flags of plugins' parts that are given without the part, or missing with it.

    Args:
        value_of: returns the value of a field of the config, by section and name.
        extensions: instances of the plugins' sections of flags, by the name of their class.
    """
    chosen = {*_chosen_parts(value_of)}
    for name, section in plugin_sections().items():
        parts = [
            (registry, part) for registry in REGISTRIES for part in registry.names_with(section)
        ]
        options = {part: f"{part[0].option} {part[1]}" for part in parts}
        used = [option for part, option in options.items() if part in chosen]
        for flag in flags_of(section):
            option, value = flag.options[0], getattr(extensions[name], flag.name)
            if used and flag.default is MISSING and value is None:
                yield f"{used[0]} needs {option}"
            elif not used and value not in (None, flag.default):
                yield (
                    f"{option} is of {' and '.join(options.values())}, which this run does not "
                    f"have: add it, or leave {option} out"
                )


def _chosen_parts(value_of: Callable[[str, str], Any]) -> Iterator[tuple[Registry[Any], str]]:
    """Yield the parts that a config names, each with its registry."""
    for (section, field), registry in _CHOICES.items():
        value = value_of(section, field)
        for name in value if isinstance(value, list | tuple) else (value,):
            if name:
                yield registry, name


def missing_plugins(
    saved: Mapping[str, Any], given: Sequence[str], *, only: Container[str] | None = None
) -> Iterator[str]:
    """Yield a sentence for each plugin of a saved run that `given` lacks.

    A checkpoint that names a module is no reason to import it: its code would run. Hooks and metrics
    are not in the checkpoint, so a run with no other part of a plugin opens without them.

    Args:
        saved: the config in the manifest.
        only: sections of the config whose parts are needed; all if None.
    """
    missing = [
        f"{registry.option} {part}"
        for (section, field), registry in _CHOICES.items()
        if registry not in (HOOKS, METRICS) and (only is None or section in only)
        if (part := saved.get(section, {}).get(field)) and part not in registry
    ]
    names = {_module_name(module) for module in given}
    for module in (saved.get("plugins", {}).get("plugin") or ()) if missing else ():
        if _module_name(module) not in names:
            yield (
                f"the checkpoint was trained with --plugin {module}: give that flag again "
                f"(it has {', '.join(missing)})"
            )


def _module_name(module: str) -> str:
    """Return the name of a module: its file's name, or its folder's for __init__.py."""
    if not module.endswith(".py"):
        return module
    file = Path(module).absolute()
    return file.parent.name if file.name == "__init__.py" else file.stem


_CHOICES: Mapping[tuple[str, str], Registry[Any]] = {
    ("model", "position_embedding_type"): POSITION_EMBEDDINGS,
    ("model", "activation"): ACTIVATIONS,
    ("model", "normalization"): NORMS,
    ("kernels", "attention_impl"): ATTENTIONS,
    ("optimizer", "optimizer"): OPTIMIZERS,
    ("schedule", "lr_decay_style"): SCHEDULES,
    ("tokenizer", "tokenizer_type"): TOKENIZERS,
    ("plugins", "objective"): OBJECTIVES,
    ("plugins", "network"): NETWORKS,
    ("plugins", "dataset"): DATASETS,
    ("plugins", "hook"): HOOKS,
    ("plugins", "metric"): METRICS,
}
"""Fields of a config that can name parts of plugins."""
