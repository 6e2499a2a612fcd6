"""Instruction tuning on questions and answers (InstructRetro): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, resolve, setting

QUESTIONS = "questions"
"""Kind of the questions and answers of JSON files, which are no token files."""


@dataclass(frozen=True, kw_only=True)
class InstructConfig:
    """Instruction tuning on questions and answers (tools/retro/sft/sft_retro.py)."""

    data_folder: str | None = setting(None, plan="objective.own.folder")
    """Directory with NAME/NAME_QA_train.json, and NAME/NAME_QA_dev.json to evaluate on, for each NAME
    of --data-path."""

    ft_neighbours: int = setting(
        1,
        at_least=0,
        flag="--ft_neighbours",
        older=("--ft-neighbours",),
        plan="objective.own.num_contexts",
    )
    """Contexts of a question in its prompt."""

    use_retrieved_neighbours: bool = setting(False, plan="objective.own.is_retrieved")
    """Take the contexts that were retrieved for a question (ctxs, bert_pretrain_corpus_neighbours)
    rather than its paragraphs."""

    reuse_top: bool = setting(False, plan="objective.own.reuses_top")
    """Pass the first contexts, which the prompt has too, to the encoder of neighbors, rather than the
    contexts that follow the prompt's."""

    longform_answer: bool = setting(False, plan="objective.own.is_longform")
    """The files hold one JSON object a line, with the answer under longform_answer."""

    answer_loss_only: bool = setting(False, plan="objective.own.answers_only")
    """Leave the tokens of prompts out of the loss."""


@dataclass(frozen=True, kw_only=True)
class InstructPlan:
    """Instruction tuning, resolved."""

    folder: str = ""
    num_contexts: int = 1  # in a prompt
    is_retrieved: bool = False  # whether contexts are those that were retrieved
    reuses_top: bool = False  # whether the encoder reads contexts from the first on
    is_longform: bool = False
    answers_only: bool = False  # whether prompts do not count in the loss


def plan_instructions(config: InstructConfig) -> InstructPlan:
    """Return how questions are read."""
    return resolve(InstructPlan, "objective.own", config)


def context_problems(config: InstructConfig) -> Iterator[str]:
    """Yield why no prompt has such contexts."""
    yield from range_problems(config)
