"""Objectives of networks with retrieval: pretraining, and instruction tuning on questions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.common.registry import KINDS, OBJECTIVES
from megatron.config.config import Config
from megatron.config.objectives import Declaration
from megatron.config.parsing.declaration import options_of_field
from megatron.extensions.retro.instruct_flags import (
    QUESTIONS,
    InstructConfig,
    InstructPlan,
    context_problems,
    plan_instructions,
)

KINDS.declare(QUESTIONS, "", ())


@dataclass(frozen=True, kw_only=True)
class InstructDeclaration(Declaration):
    """Answers to questions, of a GPT or of a Retro."""

    kind: str = QUESTIONS
    flags: tuple[str, ...] = tuple(options_of_field(each)[0] for each in fields(InstructConfig))

    def plan(self, config: Config) -> InstructPlan:
        """Return how questions are read."""
        return plan_instructions(config.section(InstructConfig))

    def data_problems(self, config: Config) -> Iterator[str]:
        """Yield every reason why the flags do not name files of questions."""
        if config.data.data_path:
            yield from super().data_problems(config)
        else:
            yield "--data-path is missing: a NAME in --data-folder, or weights and names by turns"

    def problems(self, config: Config) -> Iterator[str]:
        """Yield wrong values of the flags of questions."""
        instruct: InstructConfig = config.section(InstructConfig)
        if not instruct.data_folder:
            yield "--data-folder is missing: the directory with NAME/NAME_QA_train.json"
        if config.data.split:
            yield "--split is for token files; questions to evaluate on are in NAME_QA_dev.json"
        yield from context_problems(instruct)

    def upgraded_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan of version 1.0, which had instructions among the parts of every run."""
        objective = plan["objective"]
        return {**plan, "objective": {**objective, "own": objective.get("instruct")}}


OBJECTIVES.declare(
    "retro",
    "megatron.extensions.retro.objective",
    Declaration(
        script="pretrain_retro.py",
        network="retro",
        view="megatron.extensions.retro.data.view_of_neighbors",
        reads_neighbors=True,
    ),
)
_INSTRUCT = InstructDeclaration(script="tools/retro/sft/sft_retro.py")
OBJECTIVES.declare("instruct", "megatron.extensions.retro.objective_instruct", _INSTRUCT)
OBJECTIVES.declare(
    "instruct-retro",
    "megatron.extensions.retro.objective_instruct",
    replace(_INSTRUCT, network="retro"),
)
