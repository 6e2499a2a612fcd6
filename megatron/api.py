"""Public API for scripts and notebooks: make_config, pretrain, and the registries of plugins.

Imports no torch, so that `--plugin` can import modules that only add flags quickly. docs/api.md lists
what else is public.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.common.errors import ConfigError, ExitCode, MegatronError
from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    EXPORTERS,
    HOOKS,
    METRICS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    SCHEDULES,
    TOKENIZERS,
    Registry,
)
from megatron.config.config import Config, all_sections, parse_config
from megatron.config.parsing.files import flag_words
from megatron.optimizer.schedule import lr_decay
from megatron.training.entry import train
from megatron.training.loop.loop import Hook, StepResult, require_hooks
from megatron.training.loop.state import TrainState
from megatron.training.process.launch import run_rank

if TYPE_CHECKING:
    from megatron.objectives.objective import Objective

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "DATASETS",
    "EXPORTERS",
    "HOOKS",
    "METRICS",
    "NORMS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "POSITION_EMBEDDINGS",
    "SCHEDULES",
    "TOKENIZERS",
    "Config",
    "ConfigError",
    "ExitCode",
    "Hook",
    "MegatronError",
    "Registry",
    "StepResult",
    "TrainState",
    "lr_decay",
    "make_config",
    "pretrain",
    "run_rank",
]


def make_config(**flags: Any) -> Config:
    """Return the Config of keyword arguments, checked as flags are.

    Names are those of flags, with underscores: `make_config(num_layers=2, bf16=True)`. Values follow
    the rules of a `--config` file, which `config="run.yaml"` reads too; a dictionary groups flags
    under a heading. Sections of flags that were registered take part.

    Raises:
        ConfigError: a flag is unknown, missing or malformed; lists every problem.
    """
    return parse_config(flag_words(flags, all_sections()))[0]


def pretrain(
    config: Config, *, objective: "str | Objective" = "", hooks: Sequence[Hook] = ()
) -> ExitCode:
    """Train in this process, which is one rank if a launcher has started several.

    Args:
        objective: an instance, or a name; default: that of the config, else "gpt".
        hooks: act before and after each step, on every rank.

    Raises:
        MegatronError: the config, the data or the checkpoint cannot be used; nothing is lost.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"pretrain: expected a Config, found {type(config).__name__}; "
            "make_config(num_layers=2, ...) makes one"
        )
    require_hooks(hooks, "hooks:")
    return train(config, objective or config.plugins.objective or "gpt", hooks=hooks)
