"""Downstream tasks by name."""

from dataclasses import replace
from functools import partial

from megatron.extensions.tasks.data.columns import Layout
from megatron.extensions.tasks.data.glue import GLUE
from megatron.extensions.tasks.data.race import RACE
from megatron.extensions.tasks.data.sentences import SentenceTask, read_labelled_sentences
from megatron.extensions.tasks.data.task import Task
from megatron.extensions.tasks.data.text_flags import TextTaskPlan
from megatron.extensions.tasks.data.text_tasks import AnswerTask, TaggingTask

TASKS = {task.name: task for task in (RACE, *GLUE)}


def task_of(name: str, plan: TextTaskPlan, *, causal: bool = False) -> Task:
    """Return a task by its name, with the labels and options of a plan.

    Args:
        causal: whether tokens of the network that learns it see only those before them.
    """
    match name:
        case "token-classification":
            return TaggingTask(plan)
        case "question-answering":
            return AnswerTask(plan)
        case "text-classification":
            return SentenceTask(
                name=name,
                classes=plan.labels,
                metric_names=("accuracy",),
                read=partial(read_labelled_sentences, labels=plan.labels, layout=Layout.of(plan)),
                macro_average=plan.macro_average,
                causal=causal,
                negative_label=plan.negative_label,
                balances=plan.balances_classes,
            )
    return replace(TASKS[name], causal=causal, macro_average=plan.macro_average)
