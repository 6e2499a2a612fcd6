"""Objectives of labelled texts: of a BERT, and of a GPT where a text has one label."""

from megatron.common.registry import FAMILIES, KINDS, OBJECTIVES
from megatron.config.objectives import Declaration
from megatron.extensions.tasks.flags import LABELLED


def classes_of(task: str) -> tuple[str, ...]:
    """Return the names of the classes of a task that has them by its name; () of another one."""
    # Imported here: who reads labels of a checkpoint seldom needs the readers of all tasks.
    from megatron.extensions.tasks.data.tasks import TASKS

    return tuple(TASKS[task].classes) if task in TASKS else ()


KINDS.declare(LABELLED, "", ())
for _name, _module, _script in (
    ("classification", "objective", "tasks/main.py"),
    ("multiple-choice", "objective", "tasks/main.py"),
    ("token-classification", "objective_tokens", "tasks/token_classification.py"),
    ("question-answering", "objective_tokens", "tasks/question_answering.py"),
):
    OBJECTIVES.declare(
        _name,
        f"megatron.extensions.tasks.{_module}",
        Declaration(
            script=_script,
            network="bert",
            kind=LABELLED,
            tokenizer="BertWordPieceLowerCase",
        ),
    )
for _name in ("gpt-classification", "gpt-multiple-choice"):
    OBJECTIVES.declare(
        _name,
        "megatron.extensions.tasks.objective",
        Declaration(script="tasks/main.py", kind=LABELLED),
    )
FAMILIES.declare("labelled-tasks", "megatron.extensions.tasks.checkpoints", None)
