"""Objectives of networks with retrieval: pretraining, and instruction tuning on questions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.common.errors import ConfigError
from megatron.common.registry import KINDS, OBJECTIVES
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.objectives import Declaration
from megatron.config.parsing.declaration import flags_of
from megatron.extensions.retro.flags import RetroConfig, neighbor_problems, plan_retro
from megatron.extensions.retro.instruct_flags import (
    QUESTIONS,
    InstructConfig,
    InstructPlan,
    context_problems,
    plan_instructions,
)
from megatron.extensions.retro.project_settings import RetroPlan

KINDS.declare(QUESTIONS, "", ())


@dataclass(frozen=True, kw_only=True)
class RetrievalDeclaration(Declaration):
    """Common base of the objectives of networks with retrieval."""

    baseline: str  # objective of a GPT on the same samples, which is trained without retrieval

    def objective_to_train(self, config: Config, name: ObjectiveName) -> ObjectiveName:
        """Return `name`, or a GPT's objective without --retro-add-retriever."""
        retro: RetroConfig = config.section(RetroConfig)
        return name if retro.retro_add_retriever else self.baseline


@dataclass(frozen=True, kw_only=True)
class RetroDeclaration(RetrievalDeclaration):
    """Pretraining on the samples of a project, whose chunks have stored neighbors."""

    def plan(self, config: Config) -> RetroPlan:
        """Return how neighbors are read."""
        return plan_retro(config.section(RetroConfig), seq_length=config.model.seq_length)

    def path_problems(self, config: Config) -> Iterator[str]:
        """Yield that there is no project."""
        if not config.section(RetroConfig).retro_project_dir:
            yield "--retro-project-dir is missing: the directory of Retro preprocessing"

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why the samples are not those whose chunks have stored neighbors."""
        retro, order = config.section(RetroConfig), config.data.dataloader_type
        return neighbor_problems(retro, config.model, order=order)

    def upgrade_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan of version 1.0, which had retrieval among the parts of every run."""
        objective = plan["objective"]
        return {**plan, "objective": {**objective, "own": objective.get("retro")}}


@dataclass(frozen=True, kw_only=True)
class InstructDeclaration(RetrievalDeclaration):
    """Answers to questions, of a GPT or of a Retro."""

    baseline: str = "instruct"
    kind: str = QUESTIONS
    flags: tuple[str, ...] = tuple(each.options[0] for each in flags_of(InstructConfig))

    def plan(self, config: Config) -> InstructPlan:
        """Return how questions are read."""
        return plan_instructions(config.section(InstructConfig))

    def data_problems(self, config: Config) -> Iterator[str]:
        """Yield every reason why the flags do not name files of questions."""
        if config.data.data_path:
            yield from super().data_problems(config)
        else:
            yield "--data-path is missing: a NAME in --data-folder, or alternating weights and names"

    def problems(self, config: Config) -> Iterator[str]:
        """Yield wrong values of the flags of questions."""
        instruct: InstructConfig = config.section(InstructConfig)
        if not instruct.data_folder:
            yield "--data-folder is missing: the directory with NAME/NAME_QA_train.json"
        if config.data.split:
            yield "--split is for token files; questions to evaluate on are in NAME_QA_dev.json"
        yield from context_problems(instruct)

    def saved_flags(self, given: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the flags of a checkpoint without its project, which holds pretraining samples.

        Raises:
            ConfigError: a project is given.
        """
        if given.get("retro_project_dir"):
            raise ConfigError(
                "--retro-project-dir is for pretrain_retro.py: questions are in --data-folder, and "
                "--retro-chunk-length is a flag here"
            )
        return {name: value for name, value in saved.items() if name != "retro_project_dir"}

    def upgrade_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan of version 1.0, which had instructions among the parts of every run."""
        objective = plan["objective"]
        return {**plan, "objective": {**objective, "own": objective.get("instruct")}}


OBJECTIVES.declare(
    "retro",
    "megatron.extensions.retro.objective",
    RetroDeclaration(
        script="pretrain_retro.py",
        network="retro",
        view="megatron.extensions.retro.data.view_of_neighbors",
        weighs_tokens=True,
        baseline="gpt",
    ),
)
_INSTRUCT = InstructDeclaration(script="tools/retro/sft/sft_retro.py", weighs_tokens=True)
OBJECTIVES.declare("instruct", "megatron.extensions.retro.objective_instruct", _INSTRUCT)
OBJECTIVES.declare(
    "instruct-retro",
    "megatron.extensions.retro.objective_instruct",
    replace(_INSTRUCT, network="retro"),
)
