"""Config: every flag of a training run by section, and the command lines that give it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import ConfigError
from megatron.config.data.corpora import DataConfig
from megatron.config.data.fim import FimConfig
from megatron.config.data.masks import MaskConfig
from megatron.config.data.objective import ObjectiveConfig
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.foreign_flags.run import ANY_RUN
from megatron.config.network.experts import ExpertConfig
from megatron.config.network.lora import LoraConfig
from megatron.config.network.model import ModelConfig
from megatron.config.optimization.lr_schedule import ScheduleConfig
from megatron.config.optimization.optimizer import OptimizerConfig
from megatron.config.optimization.training import TrainingConfig
from megatron.config.parallelism.kernels import KernelsConfig
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parallelism.recompute import RecomputeConfig
from megatron.config.parallelism.zero import DeepSpeedConfig
from megatron.config.parsing.files import with_file_flags
from megatron.config.parsing.flags import Legacy, parse_sections
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.evaluation import EvaluationConfig
from megatron.config.run.guards import GuardsConfig
from megatron.config.run.logging import LoggingConfig, ProfilingConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every wish, by section. Flags are flat on the command line and nested here."""

    model: ModelConfig
    experts: ExpertConfig
    lora: LoraConfig
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
    argv: Sequence[str], *, description: str = "", defaults: Mapping[str, Any] | None = None
) -> tuple[Config, tuple[str, ...]]:
    """Return what the command line `argv` asks for, and the notices its user should read.

    A `--config` file is read first; what the command line says wins over it.

    Args:
        description: the first lines of `--help`.
        defaults: values by field name that replace the fields' own defaults.

    Raises:
        ConfigError: a flag is unknown, refused, missing or malformed.
    """
    parsed = parse_sections(
        with_file_flags(argv, SECTIONS),
        SECTIONS,
        description=description,
        legacy=LEGACY,
        defaults=defaults,
    )
    return Config(**parsed.sections), parsed.notices


def parse_config_for_checkpoint(
    argv: Sequence[str],
    saved: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, type],
    *,
    description: str = "",
) -> tuple[Config, dict[str, Any]]:
    """Return what `argv` asks of a trained model; flags it leaves out are those of training.

    Notices that the user should read are logged as warnings.

    Args:
        saved: the config in the checkpoint's manifest, as nested dictionaries, or a part of one.
        extra: further sections of the tool at hand.

    Raises:
        ConfigError: a flag is unknown, refused or malformed.
    """
    parsed = parse_sections(
        with_file_flags(argv, SECTIONS),
        {**SECTIONS, **extra},
        description=description,
        legacy=LEGACY,
        defaults=flatten(saved),
    )
    for notice in parsed.notices:
        log.warning(notice)
    own = {name: parsed.sections.pop(name) for name in extra}
    return Config(**parsed.sections), own


def flag_problems(argv: Sequence[str], extra: Mapping[str, type]) -> Sequence[str]:
    """Return what is wrong with `argv` for a tool that opens a trained model, whichever it opens.

    Args:
        extra: further sections of the tool.
    """
    try:
        parse_sections(
            with_file_flags(argv, SECTIONS),
            {**SECTIONS, **extra},
            legacy=LEGACY,
            defaults=flatten(ANY_RUN),
        )
    except ConfigError as error:
        return error.problems
    return ()


def flatten(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {field: value} of a Config's dictionary. Names are unique over all sections."""
    return {name: value for section in nested.values() for name, value in section.items()}


@dataclass(frozen=True)
class ConversionCommand:
    """What is asked of training and of the tool, and what the user should read."""

    config: Config
    own: Any
    notices: Sequence[str]


def parse_conversion(
    found: Sequence[str],
    argv: Sequence[str],
    own: type,
    *,
    legacy: Sequence[Legacy] = (),
    description: str | None = None,
) -> ConversionCommand:
    """Return what `argv` asks for; what it does not say is what the files say.

    Args:
        found: words of a command line, for what the files say.
        own: the tool's own section.
        legacy: further flags to refuse or to accept with a notice.

    Raises:
        ConfigError: a flag is unknown, refused or malformed.
    """
    parsed = parse_sections(
        [*found, *with_file_flags(argv, SECTIONS)],
        {**SECTIONS, "own": own},
        description=description or "",
        legacy=[*LEGACY, *legacy],
        defaults=flatten(ANY_RUN),
    )
    said = parsed.sections.pop("own")
    return ConversionCommand(Config(**parsed.sections), said, parsed.notices)
