"""The table of objectives, by name, and those of plugins."""

from collections.abc import Iterable
from typing import Any

from megatron.common import registry
from megatron.common.errors import ConfigError
from megatron.config.data.objective import ObjectiveName
from megatron.objectives.gpt import GPT
from megatron.objectives.multitask import Multitask
from megatron.objectives.objective import Objective
from megatron.objectives.prefix_lm import PrefixLM
from megatron.objectives.sft import SFT

OBJECTIVES: dict[ObjectiveName, Objective] = {
    objective.name: objective for objective in (GPT(), PrefixLM(), Multitask(), SFT())
}


def build_objective(name: ObjectiveName, own_flags: Iterable[tuple[str, Any]] = ()) -> Objective:
    """Return the objective of that name, of this table or of a plugin.

    Args:
        own_flags: those of a plugin's objective.

    Raises:
        ConfigError: there is none; perhaps its --plugin is missing.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if name not in registry.OBJECTIVES:
        raise ConfigError(registry.OBJECTIVES.unknown(name, OBJECTIVES))
    objective: Objective = registry.OBJECTIVES.get(name, own_flags)()
    return objective
