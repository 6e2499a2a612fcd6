"""Objectives of labelled texts: of a BERT, and of a GPT where a text has one label."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.common.registry import FAMILIES, KINDS, OBJECTIVES
from megatron.config.config import Config
from megatron.config.data.corpora import surplus_problems, token_file_flags
from megatron.config.objectives import Declaration
from megatron.config.parsing.flags import given_options
from megatron.extensions.tasks.data.text_flags import (
    TextTaskConfig,
    flags_of_other_tasks,
    text_task_problems,
)
from megatron.extensions.tasks.flags import (
    LABELLED,
    DownstreamConfig,
    DownstreamPlan,
    downstream_in,
    downstream_problems,
)


def classes_of(task: str) -> tuple[str, ...]:
    """Return the names of the classes of a task that has them by its name; () of another one."""
    # Imported here: who reads labels of a checkpoint seldom needs the readers of all tasks.
    from megatron.extensions.tasks.data.tasks import TASKS

    return tuple(TASKS[task].classes) if task in TASKS else ()


KINDS.declare(LABELLED, "", ())


@dataclass(frozen=True, kw_only=True)
class LabelledDeclaration(Declaration):
    """An objective of labelled texts."""

    name: str
    kind: str = LABELLED
    script: str = "tasks/main.py"
    has_epochs: bool = True

    def plan(self, config: Config) -> DownstreamPlan:
        """Return the files and options of the task."""
        return downstream_in(config)

    def prepare(self, config: Config, *, world_size: int) -> Config:
        """Return `config` with --labels of --train-data, and --train-iters for --epochs."""
        from megatron.extensions.tasks.epochs import with_steps_of_epochs  # reads files with numpy

        return with_steps_of_epochs(config, world_size=world_size)

    def network_with_head(self, network: Any) -> Any:
        """Return the network with the head of a task."""
        return network.classifier()

    def data_problems(self, config: Config) -> Iterator[str]:
        """Yield the flags that name token files."""
        yield from surplus_problems(config.data)
        for flag in token_file_flags(config.data):
            yield f"{flag} is for token files; a downstream task learns from --train-data"

    def problems(self, config: Config) -> Iterator[str]:
        """Yield every problem of the flags of tasks."""
        downstream: DownstreamConfig = config.section(DownstreamConfig)
        checkpoint, task = config.checkpoint, downstream.task
        if config.parallel.elastic:
            yield (
                f"--elastic does not work with --task {task}: an epoch is divided evenly between the "
                "replicas, which decides its steps; leave --elastic out"
            )
        for flag in given_options(config.training):
            if flag in ("--rampup-batch-size", "--step-batch-size-schedule"):
                yield (
                    f"{flag} does not work with --task {task}: all batches of an epoch have the same "
                    f"size; leave {flag} out"
                )
        yield from downstream_problems(downstream, self.name, loads=checkpoint.load is not None)
        yield from text_task_problems(
            config.section(TextTaskConfig),
            task,
            seq_length=config.model.seq_length,
            num_files=len(downstream.valid_data or ()),
            has_folder=bool(checkpoint.save or checkpoint.load),
        )

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield all flags of tasks."""
        for option in given_options(config.section(DownstreamConfig)):
            yield f"{option} is for tasks/main.py; this program has no use for it"
        yield from flags_of_other_tasks(config.section(TextTaskConfig), None)

    def upgrade_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan of version 1.0, which had tasks among the parts of every run."""
        downstream, text = plan.get("downstream", {}), plan.get("text_task", {})
        sections = {"task": "", **downstream, "text": text}
        return {**plan, "objective": {**plan["objective"], "own": sections}}


for _name, _module, _script in (
    ("classification", "objective", "tasks/main.py"),
    ("multiple-choice", "objective", "tasks/main.py"),
    ("token-classification", "objective_tokens", "tasks/token_classification.py"),
    ("question-answering", "objective_tokens", "tasks/question_answering.py"),
):
    OBJECTIVES.declare(
        _name,
        f"megatron.extensions.tasks.{_module}",
        LabelledDeclaration(
            name=_name, script=_script, network="bert", tokenizer="BertWordPieceLowerCase"
        ),
    )
for _name in ("gpt-classification", "gpt-multiple-choice"):
    OBJECTIVES.declare(
        _name, "megatron.extensions.tasks.objective", LabelledDeclaration(name=_name)
    )
FAMILIES.declare("labelled-tasks", "megatron.extensions.tasks.checkpoints", None)
