"""The table of objectives, by name."""

from megatron.config.data.objective import ObjectiveName
from megatron.objectives.gpt import GPT
from megatron.objectives.multitask import Multitask
from megatron.objectives.objective import Objective
from megatron.objectives.prefix_lm import PrefixLM
from megatron.objectives.sft import SFT

OBJECTIVES: dict[ObjectiveName, Objective] = {
    objective.name: objective for objective in (GPT(), PrefixLM(), Multitask(), SFT())
}
