"""Downstream tasks (RACE, GLUE; WikiText and LAMBADA): flags of their data, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from megatron.config.config import Config
from megatron.config.parsing.declaration import range_problems, resolve, setting
from megatron.extensions.tasks.data.text_flags import (
    TEXT_TASKS,
    TextTaskConfig,
    TextTaskPlan,
    num_outputs_of,
    plan_text_task,
)

LABELLED = "labelled"
"""Kind of the labelled texts of a downstream task, which are no token files."""

_ZERO_SHOT = ("WIKITEXT103", "LAMBADA")
"""Tasks on which a GPT is evaluated as it is."""

_CHOICES = {"RACE": 4}
"""Rows of a sample of the multiple-choice tasks: the choices of a question."""

_OUTPUTS = {"RACE": 1, "MNLI": 3, "STS-B": 1}
"""Outputs of the head for a row, where it is not 2: the classes; 1 for a choice or a score."""

_OF_ROWS = ("classification", "multiple-choice")
"""Objectives of texts with one label, which a GPT learns too."""

Task = Literal[
    "WIKITEXT103",
    "LAMBADA",
    "RACE",
    "MNLI",
    "QQP",
    "QNLI",
    "RTE",
    "SST-2",
    "CoLA",
    "STS-B",
    "MRPC",
    "token-classification",
    "text-classification",
    "question-answering",
]
"""Tasks of tasks/: of main.py, and those that have a script of their name."""


@dataclass(frozen=True, kw_only=True)
class DownstreamConfig:
    """Labelled texts of a downstream task, to finetune on and to evaluate on (tasks/main.py)."""

    task: Task | None = setting(
        None,
        plan="objective.own.task model.num_outputs model.num_choices model.first_token_head",
    )
    """Perplexity of a text (WIKITEXT103) or accuracy of last words (LAMBADA) of a GPT; reading
    comprehension (RACE) or a task of GLUE to finetune a BERT or GPT on."""

    train_data: list[str] | None = None
    """Files of a GLUE task, or folders of RACE, to finetune on."""

    valid_data: list[str] | None = None
    """Files to evaluate on: the raw text of WIKITEXT103; JSON lines of LAMBADA; of the other tasks
    files or folders, each evaluated by itself after every epoch."""

    epochs: int | None = setting(None, at_least=0)
    """Passes through --train-data, in place of --train-iters (with both, the run ends with the
    earlier); 0 evaluates, and writes the predictions to a file."""

    pretrained_checkpoint: str | None = setting(None, plan="objective.own.pretrained")
    """Directory of a pretrained BERT or GPT, whose weights a run begins with that has no checkpoint in
    --load yet; one of transformers or Megatron-LM is converted to pretrained/ in --save."""

    keep_last_batch: bool = setting(False, plan="objective.own.keeps_last")
    """Train on the last samples of each epoch too where they are less than a global batch (in
    tasks/main.py also --keep-last without a number)."""


@dataclass(frozen=True, kw_only=True)
class DownstreamPlan:
    """Labelled texts of a downstream task, resolved."""

    task: str
    train_data: tuple[str, ...] = ()
    valid_data: tuple[str, ...] = ()
    keeps_last: bool = False
    pretrained: str = ""  # directory of the weights that a run begins with
    text: TextTaskPlan = TextTaskPlan()


SECTIONS = {"downstream": DownstreamConfig, "text_task": TextTaskConfig}
OF_NETWORK = ("text_task",)


def downstream_in(config: Config) -> DownstreamPlan:
    """Return the files and options of the task of a run."""
    return plan_downstream(config.section(DownstreamConfig), config.section(TextTaskConfig))


def plan_downstream(downstream: DownstreamConfig, text_task: TextTaskConfig) -> DownstreamPlan:
    """Return the files and options of the task."""
    text = plan_text_task(text_task, downstream.task)
    return resolve(DownstreamPlan, "objective.own", downstream, text=text)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Head of a downstream task, in place of the pretraining heads."""

    num_outputs: int = 0
    num_choices: int = 1  # rows of a sample, which have a sequence each
    head_layers: int = 0  # of a head on each token; 0: a pooler and one, of a GPT the last token
    first_token_head: bool = False  # whether these are on the first token, not on each
    head_dropout: float = 0.0  # before these layers
    labels: tuple[str, ...] = ()  # names of the classes; (): the task knows them


def head_of(downstream: DownstreamPlan) -> HeadSpec:
    """Return the head of a task."""
    task, text_task = downstream.task, downstream.text
    if task in TEXT_TASKS:
        return HeadSpec(
            num_outputs=num_outputs_of(text_task, task),
            head_layers=text_task.head_layers,
            first_token_head=task == "text-classification" and text_task.head_layers > 0,
            head_dropout=text_task.head_dropout,
            labels=text_task.labels,
        )
    return HeadSpec(num_outputs=_OUTPUTS.get(task, 2), num_choices=_CHOICES.get(task, 1))


def is_finetuned(task: str | None) -> bool:
    """Whether a task is one that a network is finetuned on."""
    return task in get_args(Task) and task not in _ZERO_SHOT


def objective_of(task: str | None, *, causal: bool = False) -> str:
    """Return the name of the objective that a network is finetuned on a task with.

    Args:
        causal: whether its tokens see only those before them.
    """
    name = TEXT_TASKS.get(task or "", "multiple-choice" if task in _CHOICES else "classification")
    return f"gpt-{name}" if causal and name in _OF_ROWS else name


def downstream_problems(
    downstream: DownstreamConfig, objective: str, *, loads: bool
) -> Iterator[str]:
    """Yield every problem of the flags of downstream tasks.

    Args:
        objective: which learns labelled texts.
        loads: whether there is a --load.
    """
    task, epochs = downstream.task, downstream.epochs
    if not is_finetuned(task):
        yield f"--task {task}: write the task whose labelled texts are learned, such as MNLI"
    elif objective not in (objective_of(task), objective_of(task, causal=True)):
        yield f"--task {task} is learned with --objective {objective_of(task)}, not {objective}"
    yield from range_problems(downstream)
    if epochs == 0:
        if not downstream.valid_data:
            yield "--epochs 0 needs --valid-data: the files to evaluate on"
        if not (loads or downstream.pretrained_checkpoint):
            yield "--epochs 0 needs --load: the directory of a finetuned model"
    elif not downstream.train_data:
        yield f"--train-data is missing: the files of {task} to finetune on"
