"""Instruction tuning on questions and answers (InstructRetro): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated

from megatron.config.parsing.flags import Spelling, options_of

QUESTIONS = "questions"
"""Kind of the questions and answers of JSON files, which are no token files."""


@dataclass(frozen=True, kw_only=True)
class InstructConfig:
    """Instruction tuning on questions and answers (tools/retro/sft/sft_retro.py)."""

    data_folder: str | None = None
    """Directory with NAME/NAME_QA_train.json, and NAME/NAME_QA_dev.json to evaluate on, for each NAME
    of --data-path."""

    ft_neighbours: Annotated[int, Spelling("--ft_neighbours", ("--ft-neighbours",))] = 1
    """Contexts of a question in its prompt."""

    use_retrieved_neighbours: bool = False
    """Take the contexts that were retrieved for a question (ctxs, bert_pretrain_corpus_neighbours)
    rather than its own paragraphs."""

    reuse_top: bool = False
    """Let the encoder of neighbors read the first contexts, as the prompt does, rather than those
    behind the prompt's."""

    longform_answer: bool = False
    """The files hold one JSON object a line, with the answer under longform_answer."""

    answer_loss_only: bool = False
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
    return InstructPlan(
        folder=config.data_folder or "",
        num_contexts=config.ft_neighbours,
        is_retrieved=config.use_retrieved_neighbours,
        reuses_top=config.reuse_top,
        is_longform=config.longform_answer,
        answers_only=config.answer_loss_only,
    )


def instruction_problems(config: InstructConfig, *, kind: str, split: str | None) -> Iterator[str]:
    """Yield every problem of the flags of questions.

    Args:
        kind: of the data of the objective.
        split: --split.
    """
    if kind != QUESTIONS:
        options = options_of({"instruct": InstructConfig})
        for field in fields(InstructConfig):
            if getattr(config, field.name) != field.default:
                yield f"{options[field.name]} is for tools/retro/sft/sft_retro.py: leave it out"
        return
    if not config.data_folder:
        yield "--data-folder is missing: the directory with NAME/NAME_QA_train.json"
    if split:
        yield "--split is for token files; questions to evaluate on are in NAME_QA_dev.json"
    yield from context_problems(config)


def context_problems(config: InstructConfig) -> Iterator[str]:
    """Yield why no prompt has such contexts."""
    if config.ft_neighbours < 0:
        yield f"--ft_neighbours {config.ft_neighbours} must be at least 0"
