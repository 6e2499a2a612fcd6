"""Plugins: modules of the user that register parts of a run, and the flags that name them."""

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from megatron.common.errors import ConfigError
from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    HOOKS,
    METRICS,
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
from megatron.config.parsing.flags import Names, Spelling

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """Modules of your own, and which of their parts act on a run."""

    plugin: Annotated[list[str] | None, Spelling("--plugin", repeats=True)] = None
    """Import these modules before flags are parsed; they register parts of a run by name, and add
    the flags of these parts (docs/extending.md). Can be given several times."""

    objective: Annotated[str | None, Names(OBJECTIVES)] = None
    """Train another objective than that of the script (gpt is pretrain_gpt.py's, prefix-lm
    pretrain_prefix_lm.py's, multitask finetune_t0_non_causal_decoder.py's, sft finetune_sft.py's),
    or one of a plugin; default in tools: that of the checkpoint in --load, or gpt."""

    dataset: Annotated[str | None, Names(DATASETS)] = None
    """Cut documents into samples with a dataset of a plugin, by name."""

    hook: Annotated[list[str] | None, Names(HOOKS), Spelling("--hook", repeats=True)] = None
    """Hooks of plugins that act before and after each step, by name."""

    metric: Annotated[list[str] | None, Names(METRICS), Spelling("--metric", repeats=True)] = None
    """Metrics of plugins that the journal records with each log line, by name."""


@dataclass(frozen=True, kw_only=True)
class PluginModulesConfig:
    """Modules of your own that a checkpoint needs."""

    plugin: Annotated[list[str] | None, Spelling("--plugin", repeats=True)] = None
    """Import these modules, which register parts of the network, the optimizer or the tokenizer
    (docs/extending.md). Can be given several times."""


@dataclass(frozen=True, kw_only=True)
class PluginPlan:
    """The modules of a run's plugins, and what acts of them beside network and optimizer."""

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
    own = [
        flag
        for registry, names in ((HOOKS, hooks), (METRICS, metrics))
        for name in names
        for flag in registry.flags_of(name, extensions)
    ]
    return PluginPlan(
        modules=tuple(plugins.plugin or ()),
        hooks=hooks,
        metrics=metrics,
        own_flags=tuple(dict.fromkeys(own)),
    )


def load_plugins(modules: Sequence[str]) -> None:
    """Import the modules of --plugin.

    Raises:
        ConfigError: a module is missing or cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"--plugin {module}: there is no module {error.name}; put the directory that "
                    "holds it on PYTHONPATH, or install its package"
                ) from error
            raise ConfigError(f"--plugin {module} cannot be imported: {error}") from error
        except Exception as error:
            log.debug("--plugin %s", module, exc_info=True)
            raise ConfigError(
                f"--plugin {module} cannot be imported: {type(error).__name__}: {error}"
            ) from error


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


def missing_plugins(saved: Mapping[str, Any], given: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each plugin of a saved run that `given` lacks.

    A checkpoint that names a module is no reason to import it: its code would run. Hooks and metrics
    are not in the checkpoint, so a run with no other part of a plugin opens without them.

    Args:
        saved: the config in the manifest.
    """
    chosen = (
        (registry, saved.get(section, {}).get(name)) for (section, name), registry in _SAVED.items()
    )
    own = [f"{registry.option} {part}" for registry, part in chosen if part not in _known(registry)]
    for module in (saved.get("plugins", {}).get("plugin") or ()) if own else ():
        if module not in given:
            yield (
                f"the checkpoint was trained with --plugin {module}: give that flag again "
                f"(it has {', '.join(own)})"
            )


def _known(registry: Registry[Any]) -> tuple[str | None, ...]:
    return (None, "", *registry.built_in)


_SAVED: Mapping[tuple[str, str], Registry[Any]] = {
    ("model", "position_embedding_type"): POSITION_EMBEDDINGS,
    ("model", "activation"): ACTIVATIONS,
    ("model", "normalization"): NORMS,
    ("kernels", "attention_impl"): ATTENTIONS,
    ("optimizer", "optimizer"): OPTIMIZERS,
    ("schedule", "lr_decay_style"): SCHEDULES,
    ("tokenizer", "tokenizer_type"): TOKENIZERS,
    ("plugins", "objective"): OBJECTIVES,
    ("plugins", "dataset"): DATASETS,
}
"""Fields of a saved config that can name parts of plugins which the checkpoint depends on."""
