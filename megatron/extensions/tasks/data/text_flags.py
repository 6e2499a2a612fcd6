"""Token and text classification and question answering: labels, heads, windows, answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.common.errors import ConfigError
from megatron.config.data.tag_schemes import TagScheme, tag_scheme_of
from megatron.config.parsing.declaration import range_problems, resolve, setting

TEXT_TASKS = {
    "token-classification": "token-classification",
    "text-classification": "classification",
    "question-answering": "question-answering",
}
"""Objectives of the tasks with user-defined data and labels."""

CLASSIFIED = ("RACE", "MNLI", "QQP", "QNLI", "RTE", "SST-2", "CoLA", "MRPC")
"""Published tasks whose classes are scored in tables."""


@dataclass(frozen=True, kw_only=True)
class TextTaskConfig:
    """Token and text classification, and question answering, on files of your own."""

    labels: list[str] | None = None
    """Names of the labels, in the order of their ids (default: the labels in --train-data; of
    token-classification O and the rest, sorted; of text-classification sorted, or 0, 1 and so on
    if they are numbers)."""

    num_labels: int | None = setting(None, at_least=2)
    """Number of labels (text-classification; default: as in --labels, or in --train-data)."""

    negative_label: str | None = None
    """Label of sentences without a relation. The score is then the micro-averaged F1 of all other
    labels, in place of the accuracy (text-classification)."""

    text_column: int | None = setting(None, at_least=1)
    """Column of the words of token-classification, or of the sentences of text-classification, from
    1 (default: the first, or as a header names them)."""

    label_column: int | None = setting(None, at_least=1)
    """Column of their labels, from 1 (default: the last, or as a header names it)."""

    column_separator: Literal["tab", "space"] | None = None
    """Separator of the columns of a file with a word on each line: a tab, so that words may have
    spaces, or any spaces and tabs (default: tab if all lines of several columns have one;
    token-classification)."""

    header: Literal["yes", "no"] | None = None
    """Whether the first line names the columns (default: by its look; token-classification and
    text-classification)."""

    tag_scheme: TagScheme | None = None
    """Meaning of the prefixes of labels in the scores of entities; types: a label is a type by itself
    (default: by the labels; token-classification)."""

    macro_average: Literal["supported", "all"] = "supported"
    """Classes whose mean is the macro average in tables of scores: those with support, as in NeMo, or
    also those that are only predicted, as in scikit-learn and seqeval."""

    squad_rules: Literal["1.1", "2.0"] | None = None
    """Official evaluation whose rules score answers: they differ for answers of articles and
    punctuation alone (default: 2.0 with --version-2-with-negative, else 1.1; question-answering)."""

    head_layers: int | None = setting(None, at_least=1)
    """Linear layers of the head, with ReLU between them: on each token (default: 2 of
    token-classification, 1 of question-answering), or of text-classification on the first token
    (default: BERT's pooler and one layer)."""

    head_dropout: float | None = setting(None, at_least=0, below=1, in_weights=False)
    """Dropout before these layers (default: 0.5 of token-classification, 0 of
    question-answering, 0.1 of text-classification)."""

    ignore_extra_tokens: bool = False
    """Count only the first token of each word in the loss (token-classification)."""

    ignore_start_end: bool = False
    """Leave [CLS] and [SEP] out of the loss (token-classification)."""

    class_balancing: Literal["weighted_loss"] | None = None
    """Weigh labels in the loss: with the mean number of words or sentences of a label, divided by
    its own (token-classification and text-classification)."""

    version_2_with_negative: bool = setting(False, plan="objective.own.text.has_unanswerable")
    """Some questions have no answer in their context, as in SQuAD 2.0 (question-answering)."""

    doc_stride: int = setting(128, at_least=1)
    """Tokens from one window of a long context to the next (question-answering)."""

    max_query_length: int = setting(64, at_least=1)
    """Tokens of a question; the rest is cut off (question-answering)."""

    max_answer_length: int = setting(30, at_least=1)
    """Most tokens of an answer (question-answering)."""

    n_best_size: int = setting(20, at_least=1, plan="objective.own.text.n_best")
    """Candidates of starts, ends and answers (question-answering)."""

    null_score_diff_threshold: float = setting(0.0, plan="objective.own.text.null_threshold")
    """A question has no answer if this is less than the score of no answer minus the best answer's
    score (question-answering)."""

    output_prediction_file: str | None = setting(None, plan="objective.own.text.prediction_file")
    """File for a further copy of the answers, written after an evaluation, and after the last epoch
    of a training (question-answering)."""

    output_nbest_file: str | None = setting(None, plan="objective.own.text.nbest_file")
    """File for a further copy of the candidates of each answer, likewise (question-answering)."""


@dataclass(frozen=True, kw_only=True)
class TextTaskPlan:
    """Labels and options of a text task, resolved; no labels and no layers of other tasks."""

    labels: tuple[str, ...] = ()
    negative_label: str = ""
    text_column: int = 0  # from 1; 0: by the look of the file
    label_column: int = 0  # likewise
    column_separator: str = ""  # "": by the look of the file
    header: str = ""  # likewise
    tag_scheme: str = "BIOES"
    macro_average: str = "supported"
    squad_rules: str = "1.1"
    head_layers: int = 0
    head_dropout: float = 0.0
    ignore_extra_tokens: bool = False
    ignore_start_end: bool = False
    balances_classes: bool = False
    has_unanswerable: bool = False
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    n_best: int = 20
    null_threshold: float = 0.0
    prediction_file: str = ""
    nbest_file: str = ""


_HEADS = {
    "token-classification": (2, 0.5),
    "question-answering": (1, 0.0),
    "text-classification": (0, 0.1),
}
"""Layers of the head and their dropout; 0 layers: a pooler and a linear layer."""


def plan_text_task(config: TextTaskConfig, task: str | None) -> TextTaskPlan:
    """Return the options of a task."""
    layers, dropout = _HEADS.get(task or "", (0, 0.0))
    layers = layers if config.head_layers is None else config.head_layers
    dropout = dropout if config.head_dropout is None else config.head_dropout
    return resolve(
        TextTaskPlan,
        "objective.own.text",
        config,
        tag_scheme=config.tag_scheme or _scheme(config, task),
        squad_rules=config.squad_rules or ("2.0" if config.version_2_with_negative else "1.1"),
        head_layers=layers,
        head_dropout=dropout if layers else 0.0,
        balances_classes=config.class_balancing is not None,
    )


def _scheme(config: TextTaskConfig, task: str | None) -> str:
    """Return the tag scheme of --labels.

    Raises:
        ConfigError: they do not decide it.
    """
    return tag_scheme_of((task == "token-classification" and config.labels) or [])


def num_outputs_of(plan: TextTaskPlan, task: str) -> int:
    """Return the outputs of the head of a task: scores of start and end, or of each label."""
    return 2 if task == "question-answering" else len(plan.labels)


_OF = {
    **dict.fromkeys(("head_layers", "head_dropout"), tuple(TEXT_TASKS)),
    **dict.fromkeys(
        ("labels", "class_balancing", "text_column", "label_column", "header"),
        ("token-classification", "text-classification"),
    ),
    **dict.fromkeys(("column_separator", "tag_scheme"), ("token-classification",)),
    "macro_average": ("token-classification", "text-classification", *CLASSIFIED),
    **dict.fromkeys(("num_labels", "negative_label"), ("text-classification",)),
    **dict.fromkeys(("ignore_extra_tokens", "ignore_start_end"), ("token-classification",)),
    **dict.fromkeys(
        (
            *("version_2_with_negative", "doc_stride", "max_query_length", "max_answer_length"),
            *("n_best_size", "null_score_diff_threshold"),
            *("output_prediction_file", "output_nbest_file", "squad_rules"),
        ),
        ("question-answering",),
    ),
}
"""Tasks that have a use for a field."""


def flags_of_other_tasks(config: TextTaskConfig, task: str | None) -> Iterator[str]:
    """Yield the flags that a task has no use for."""
    for field, tasks in _OF.items():
        if getattr(config, field) != getattr(TextTaskConfig, field) and task not in tasks:
            yield f"--{field.replace('_', '-')} is for --task {' and '.join(tasks)}"


def text_task_problems(
    config: TextTaskConfig, task: str | None, *, seq_length: int, num_files: int, has_folder: bool
) -> Iterator[str]:
    """Yield the flags of other tasks, and values out of their range.

    Args:
        num_files: of --valid-data.
        has_folder: whether there is a --save or a --load.
    """
    yield from flags_of_other_tasks(config, task)
    if task not in TEXT_TASKS:
        return
    if config.labels is None and task in _OF["labels"]:
        yield f"--labels is missing: the names of the labels that --task {task} predicts"
    if config.labels is not None and len({*config.labels}) < max(2, len(config.labels)):
        yield f"--labels {' '.join(config.labels)}: give at least two different names"
    yield from _class_problems(config)
    if config.tag_scheme is None:
        try:
            _scheme(config, task)
        except ConfigError as error:
            yield f"--labels {' '.join(config.labels or ())}: {error}"
    if config.text_column and config.text_column == config.label_column:
        yield f"--text-column and --label-column are both {config.text_column}"
    for field in ("output_prediction_file", "output_nbest_file"):
        if getattr(config, field) and not (num_files and has_folder):
            missing = "--save" if num_files else "--valid-data"
            yield f"--{field.replace('_', '-')} {getattr(config, field)} needs {missing}"
        elif getattr(config, field) and num_files > 1:
            yield (
                f"--{field.replace('_', '-')} {getattr(config, field)} holds the answers to one file, "
                f"and --valid-data names {num_files}: leave it out, each has a file in --save"
            )
    if task == "text-classification" and config.head_dropout is not None and not config.head_layers:
        yield (
            f"--head-dropout {config.head_dropout} is for the layers of --head-layers, which is "
            "missing; dropout after BERT's pooler is --hidden-dropout"
        )
    yield from range_problems(config)
    if task == "question-answering" and config.max_query_length + 4 > seq_length:
        yield (
            f"--max-query-length {config.max_query_length} leaves no room for a context in "
            f"--seq-length {seq_length}; it must be at most {seq_length - 4}"
        )


def _class_problems(config: TextTaskConfig) -> Iterator[str]:
    """Yield --num-labels and --negative-label that --labels contradicts."""
    labels, count, negative = config.labels or [], config.num_labels, config.negative_label
    if count is not None and labels and count != len(labels):
        yield f"--num-labels {count}: there are {len(labels)} labels, {' '.join(labels)}"
    if negative is not None and labels and negative not in labels:
        yield f"--negative-label {negative} is not one of the labels {' '.join(labels)}"
