"""Config: every flag of a training run by section, and the command lines that give it."""

import difflib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.extensions import (
    declarations_in,
    extension_names,
    extension_sections,
    extensions_with,
    load_extension,
    owners,
    used_sections,
)
from megatron.common.registry import NETWORKS, OBJECTIVES
from megatron.config.data.corpora import DataConfig
from megatron.config.data.masks import MaskConfig
from megatron.config.data.objective import FimConfig, ObjectiveConfig
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.foreign_flags.run import ANY_RUN
from megatron.config.foreign_flags.trainers import TRAINER_NAMES
from megatron.config.foreign_flags.values import FOREIGN_VALUES
from megatron.config.network.experts import ExpertConfig
from megatron.config.network.kernels import KernelsConfig
from megatron.config.network.lora import LoraConfig
from megatron.config.network.model import ModelConfig
from megatron.config.network.prediction import PredictionConfig
from megatron.config.optimization.lr_schedule import ScheduleConfig
from megatron.config.optimization.optimizer import OptimizerConfig
from megatron.config.optimization.training import TrainingConfig
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parallelism.recompute import RecomputeConfig
from megatron.config.parallelism.zero import DeepSpeedConfig
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.files import Values, flag_words, overridden, with_file_flags
from megatron.config.parsing.flags import HELP, Legacy, Parsed, parse_sections
from megatron.config.parsing.near_misses import plain
from megatron.config.parsing.parser import Given, peek
from megatron.config.parsing.titles import BASICS
from megatron.config.plugins import (
    PluginConfig,
    load_plugins,
    missing_plugins,
    modules_in,
    plugin_sections,
)
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.evaluation import EvaluationConfig
from megatron.config.run.guards import GuardsConfig
from megatron.config.run.logging import LoggingConfig, ProfilingConfig
from megatron.config.run.urls import UrlConfig

log = logging.getLogger(__name__)

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The value of every flag, by section. Flags are flat on the command line and nested here."""

    model: ModelConfig
    experts: ExpertConfig
    lora: LoraConfig
    prediction: PredictionConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    data: DataConfig
    masks: MaskConfig
    objective: ObjectiveConfig
    fim: FimConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    guards: GuardsConfig
    recompute: RecomputeConfig
    kernels: KernelsConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    deepspeed: DeepSpeedConfig
    urls: UrlConfig = field(default_factory=UrlConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    extensions: dict[str, Any] = field(default_factory=dict)
    """The sections of extensions by name, and of plugins by the name of their class."""

    @property
    def ranks_per_expert(self) -> int:
        """Neighbouring ranks that share each expert."""
        given = self.experts.expert_tensor_parallel_size
        has_experts = max(self.experts.num_experts or [1]) > 1
        return given if given and has_experts else self.parallel.tensor_model_parallel_size

    @property
    def ranks_with_all_experts(self) -> int:
        """Neighbouring ranks of a stage that hold all experts of a layer once."""
        return self.experts.moe_expert_parallel_size * self.ranks_per_expert

    def section(self, kind: type[Section]) -> Section:
        """Return the section of an extension; its defaults for a run without that extension."""
        found = (each for each in self.extensions.values() if isinstance(each, kind))
        return next(found, None) or kind()

    def with_section(self, section: Any) -> "Config":
        """Return this config with a section of an extension, in place of its own if it has one."""
        there = extension_sections(owners([type(section)]))
        names = {kind: name for name, kind in there.items()}
        return replace(self, extensions={**self.extensions, names[type(section)]: section})

    @classmethod
    def of(cls, **values: Any) -> "Config":
        """Return the config of values by section and field, as `model={"num_layers": 2}`, or by field.

        Other fields have their defaults. Values follow the rules of a `--config` file.

        Raises:
            ConfigError: a section or field is unknown or missing, or a value not of its type; lists
                every problem.
        """
        raise_if_any(_unknown_fields(values))
        return parse_config(words_of(values))[0]


def _unknown_fields(values: Values) -> Iterator[str]:
    """Yield a message for each section that is unknown, and for each field that its section lacks."""
    groups = {name: group for name, group in values.items() if isinstance(group, Mapping)}
    known = all_sections() if groups else {}
    for section, group in groups.items():
        kind = known.get(section)
        what = f"section {section} has no field" if kind else "there is no section"
        names = [flag.name for flag in flags_of(kind)] if kind else [*known]
        for name in group if kind else [section]:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                yield f"{what} {name}" + (f"; did you mean {near[0]}?" if near else "")


def words_of(values: Values, sections: Mapping[str, type] | None = None) -> list[str]:
    """Return the flags of values by field, which may be grouped by section: the form that users type.

    Args:
        sections: further sections that the values may belong to, in addition to the sections of runs.
    """
    return flag_words(values, {**SECTIONS, **plugin_sections(), **(sections or {})})


SECTIONS: Mapping[str, type] = {
    name: annotation
    for name, annotation in Config.__annotations__.items()
    if isinstance(annotation, type)
}

ANY_NETWORK: Mapping[str, Mapping[str, Any]] = {
    "model": {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1},
    "schedule": {"lr": 0.0},
}
"""Values for the required flags of training that a tool does not need which only looks at data."""


def parse_config(
    argv: Sequence[str],
    *,
    objective: str = "gpt",
    description: str = "",
    defaults: Mapping[str, Any] | None = None,
    saved_sections: Iterable[str] = (),
) -> tuple[Config, tuple[str, ...]]:
    """Parse the command line `argv`; return its Config and the notices that its user should read.

    A `--config` file is read first; flags on the command line override it. Settings of files that an
    extension reads, such as its preprocessing's, are defaults that flags must not contradict.

    Args:
        objective: of the entry script.
        description: the first lines of `--help`.
        defaults: values by field name that replace the fields' own defaults.
        saved_sections: names of extensions' sections that `defaults` are of.

    Raises:
        ConfigError: a flag is unknown, refused, missing or malformed, or contradicts such a setting.
    """
    saved: dict[str, Any] = dict.fromkeys(saved_sections, {})
    sections = load_sections(argv, objective=objective, saved=saved)
    words = with_file_flags(argv, sections)
    readers = declarations_in("flags", "settings_of", owners(sections.values()))
    found = [read({**(defaults or {}), **peek(words)}) for read in readers]
    settings = [each for each in found if each is not None]
    given = {name: value for each in settings for name, value in each.defaults.items()}
    parsed = _parse(words, sections, {**(defaults or {}), **given}, description)
    config = config_of(parsed.sections)
    values = flatten(asdict(config))
    raise_if_any(problem for each in settings for problem in each.contradictions(values))
    parallel, kernels, replaced = _on_cpus(config.parallel, config.kernels)
    config = replace(config, parallel=parallel, kernels=kernels)
    return config, (*overridden(argv, sections), *parsed.notices, *replaced)


def _on_cpus(
    parallel: ParallelConfig, kernels: KernelsConfig
) -> tuple[ParallelConfig, KernelsConfig, list[str]]:
    """Return the settings without NCCL and FlashAttention if --device cpu is given, and notices of that."""
    if parallel.device != "cpu":
        return parallel, kernels, []
    notices = []
    if parallel.distributed_backend == "nccl":
        parallel = replace(parallel, distributed_backend=None)
        notices.append("--distributed-backend nccl: read as gloo, because --device is cpu")
    flash = ["--use-flash-attn"] * kernels.use_flash_attn
    flash += ["--attention-impl flash"] * (kernels.attention_impl == "flash")
    if flash and kernels.attention_impl in ("auto", "flash"):
        kernels = replace(kernels, attention_impl="auto", use_flash_attn=False)
        notices.append(f"{', '.join(flash)}: PyTorch computes attention, because --device is cpu")
    return parallel, kernels, notices


def load_sections(
    argv: Sequence[str],
    *,
    objective: str = "gpt",
    saved: Mapping[str, Any] | None = None,
    extra: Mapping[str, type] | None = None,
) -> dict[str, type]:
    """Import the plugins of `argv`; return the sections of a run, plugins and extensions included.

    An extension takes part in a run that has its objective or network, one of its flags, or a
    checkpoint that has its sections.

    Args:
        objective: of the entry script.
        saved: the config in the checkpoint's manifest.
        extra: further sections, of the tool at hand.

    Raises:
        ConfigError: a plugin cannot be imported.
    """
    load_plugins(plugins_in(argv))
    words = with_file_flags(argv, SECTIONS)
    given = peek(words)
    named = (
        OBJECTIVES.extension_with(objective),
        OBJECTIVES.extension_with(given.get("objective") or objective),
        NETWORKS.extension_with(given.get("network") or "gpt"),
        *extensions_with(used_sections(saved or {}) - SECTIONS.keys()),
    )
    known = {**SECTIONS, **extension_sections(filter(None, named)), **plugin_sections()}
    used = dict.fromkeys([*named, *_extensions_of_flags(words, {**known, **(extra or {})})])
    # An extension declares whose its flags are; the help lists the objectives of all.
    for name in filter(None, used) if HELP.isdisjoint(words) else extension_names():
        load_extension(name)
    return {**SECTIONS, **extension_sections(filter(None, used)), **plugin_sections()}


def _parse(
    words: Sequence[str],
    sections: Mapping[str, type],
    defaults: Mapping[str, Any],
    description: str = "",
    legacy: Sequence[Legacy] = (),
    own: Collection[str] = (),
    basics: Sequence[str] = BASICS,
) -> Parsed:
    return parse_sections(
        words,
        sections,
        description=description,
        legacy=[*LEGACY, *legacy],
        answers={**TRAINER_NAMES, **FOREIGN_VALUES},
        defaults=defaults,
        own=own,
        shared=SECTIONS.keys(),
        basics=basics,
    )


def _extensions_of_flags(words: Sequence[str], known: Mapping[str, type]) -> list[str]:
    """Return the extensions that have flags among `words` which no other section has."""
    given = {plain(word.partition("=")[0]) for word in words if word.startswith("--")}
    unknown = given - _options(known.values()) - {*HELP, "--help-legacy"}
    if unknown:
        unknown -= {plain(flag.option) for flag in LEGACY}
    if not unknown:
        return []
    found = (name for name, each in extension_sections().items() if unknown & _options([each]))
    return extensions_with(found)


def _options(sections: Iterable[type]) -> set[str]:
    """Return all spellings of the flags of several sections, with hyphens for underscores."""
    return {
        plain(option) for each in sections for flag in flags_of(each) for option in flag.options
    }


def sections_in(config: Config) -> dict[str, type]:
    """Return the sections of a config."""
    return {**SECTIONS, **{name: type(each) for name, each in config.extensions.items()}}


def all_sections() -> dict[str, type]:
    """Return the sections of a run, of all extensions, and of the plugins that are loaded."""
    return {**SECTIONS, **extension_sections(), **plugin_sections()}


def options_given(argv: Sequence[str]) -> Given:
    """Return the options in `argv` and in its file of flags, without parsing the rest."""
    return peek(with_file_flags(argv, SECTIONS))


def plugins_in(argv: Sequence[str]) -> list[str]:
    """Return the modules of --plugin in `argv` and in its file of flags."""
    return modules_in(with_file_flags(argv, SECTIONS))


def config_of(sections: Mapping[str, Any]) -> Config:
    """Return the Config of parsed sections; sections of extensions become its `extensions`."""
    core = {name: section for name, section in sections.items() if name in SECTIONS}
    extensions = {name: section for name, section in sections.items() if name not in SECTIONS}
    return Config(**core, extensions=extensions)


def parse_config_for_checkpoint(
    argv: Sequence[str],
    saved: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, type],
    *,
    description: str = "",
    basics: Sequence[str] = BASICS,
) -> tuple[Config, dict[str, Any]]:
    """Parse `argv` for a tool that opens a trained model; flags default to training's values.

    Notices that the user should read are logged as warnings.

    Args:
        saved: the config in the checkpoint's manifest, as nested dictionaries, or a part of one.
        extra: further sections of the tool at hand.
        basics: fields of a run that `--help` lists.

    Raises:
        ConfigError: a flag is unknown, refused or malformed.
    """
    sections = load_sections(argv, saved=saved, extra=extra)
    raise_if_any(missing_plugins(saved, plugins_in(argv)))
    run_sections = {name: section for name, section in saved.items() if name != "plugins"}
    words = with_file_flags(argv, sections)
    defaults, known = flatten(run_sections), {**sections, **extra}
    parsed = _parse(words, known, defaults, description, own=extra, basics=basics)
    for notice in parsed.notices:
        log.warning(notice)
    tool_sections = {name: parsed.sections.pop(name) for name in extra}
    return config_of(parsed.sections), tool_sections


def flag_problems(argv: Sequence[str], extra: Mapping[str, type]) -> Sequence[str]:
    """Return the problems of `argv` for a tool that opens a trained model, whichever it opens.

    Args:
        extra: further sections of the tool.
    """
    try:
        sections = load_sections(argv, extra=extra)
        _parse(with_file_flags(argv, sections), {**sections, **extra}, flatten(ANY_RUN))
    except ConfigError as error:
        return error.problems
    return ()


def flatten(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {field: value} of a Config's dictionary. Names are unique over all sections."""
    sections = {**nested, **nested.get("extensions", {})}
    sections.pop("extensions", None)
    return {name: value for section in sections.values() for name, value in section.items()}


def parse_saved_config(argv: Sequence[str], saved: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the config of the run that saved a checkpoint; of `argv` only --plugin counts.

    Raises:
        ConfigError: a part of the run is of a plugin, and its --plugin is missing.
    """
    words = [word for module in plugins_in(argv) for word in ("--plugin", module)]
    config, _ = parse_config_for_checkpoint(words, saved, {})
    return replace(config, plugins=PluginConfig(**saved.get("plugins", {})))


@dataclass(frozen=True)
class ConversionCommand:
    """Flags of training and of the tool, and the notices that the user should read."""

    config: Config
    own: Any
    notices: Sequence[str]


def parse_conversion(
    found: Values,
    argv: Sequence[str],
    section: type,
    *,
    legacy: Sequence[Legacy] = (),
    description: str | None = None,
) -> ConversionCommand:
    """Parse `argv`; absent flags have the values that were found in the files.

    Args:
        found: settings in the files.
        own: the tool's own section.
        legacy: further flags to refuse or to accept with a notice.

    Raises:
        ConfigError: a flag is unknown, refused or malformed.
    """
    in_files = words_of(found)
    sections = load_sections([*in_files, *argv])
    words = [*in_files, *with_file_flags(argv, sections)]
    tool_sections = {**sections, "own": section}
    defaults = flatten(ANY_RUN)
    parsed = _parse(
        words, tool_sections, defaults, description or "", legacy, own=["own"], basics=()
    )
    tool = parsed.sections.pop("own")
    return ConversionCommand(config_of(parsed.sections), tool, parsed.notices)
