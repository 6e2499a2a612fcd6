"""Evaluation tasks of tasks/ (perplexity, LAMBADA, lm_eval): flags and checks."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from megatron.config.config import Config
from megatron.config.parsing.declaration import range_problems, setting
from megatron.extensions.tasks.flags import DownstreamConfig, Task


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Zero-shot evaluation; --micro-batch-size is the number of windows in a batch."""

    overlapping_eval: int | None = None
    """Tokens from one window to the next, at most --seq-length, which is the window's length: fewer
    give every token more context, and take longer (default: 32, or --seq-length if that is less)."""

    strict_lambada: bool = False
    """The full last word must be predicted; without this flag, the last token of the text."""


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    """Predictions of several finetuned models, to be combined."""

    paths: list[str]
    """Directories with a file of predictions each, or such files: predictions_….pt of tasks/main.py
    or of Megatron-LM."""

    outdir: str
    """Directory for the predictions: NAME/PREDICTION_NAME.tsv with id and label of each sample."""

    prediction_name: str = "test_predictions.pt"
    """File of predictions in each of --paths (default: test_predictions.pt, or else the only
    …predictions_….pt in the directory)."""

    eval: bool = False
    """Print the accuracy, or the Pearson correlation of a regression."""

    majority: bool = False
    """Predict the class that most models predict, and of equally many the likelier one (default: that
    with the highest mean of the probabilities)."""

    labels: list[str] | None = None
    """Names of the classes in the order of their numbers (default: the numbers)."""

    threshold: list[float] | None = None
    """Of two classes, predict the second from this mean probability on: one number, or one for each
    file of the predictions."""

    calc_threshold: bool = False
    """Use the --threshold with the highest accuracy, of 0.00 to 0.99, for each file by itself."""

    one_threshold: bool = False
    """Use the same one for all files (with --calc-threshold)."""


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Evaluation on tasks of lm_eval."""

    task_list: str = setting("all", flag="--task_list", older=("--task-list",))
    """Names of tasks, groups or tags of lm_eval, with commas between them."""

    include_path: str | None = setting(None, flag="--include_path", older=("--include-path",))
    """Directory of further tasks: YAML files in lm_eval's format."""

    results_path: str | None = setting(None, flag="--results_path", older=("--results-path",))
    """File for the results, in JSON (default: results-YYYY-MM-DD-HH-MM-SS.json)."""

    intermed_results: bool = setting(
        False, flag="--intermed_results", older=("--intermed-results",)
    )
    """Run one task after the other, and write the results so far after each."""

    num_fewshot: int | None = setting(
        None, at_least=0, flag="--num_fewshot", older=("--num-fewshot",)
    )
    """Solved examples before each question (default: each task's number)."""

    limit: int | None = setting(None, at_least=1)
    """Evaluate only this many documents of each task, for a quick test."""

    bootstrap_iters: int = setting(
        100000, at_least=0, flag="--bootstrap_iters", older=("--bootstrap-iters",)
    )
    """Bootstrap iterations for standard errors; 0 for no standard errors."""

    micro_bs_multiplier: int = setting(
        1, at_least=1, flag="--micro_bs_multiplier", older=("--micro-bs-multiplier",)
    )
    """Multiplier of --micro-batch-size: texts per batch."""

    eval_fp32: bool = setting(False, flag="--eval_fp32", older=("--eval-fp32",))
    """Evaluate in fp32, whatever the training dtype."""

    log_samples: bool = setting(False, flag="--log_samples", older=("--log-samples",))
    """Write each task's documents with the model's answers next to the results, as JSON lines:
    RESULTS_PATH.samples.TASK.jsonl."""

    predict_only: bool = setting(False, flag="--predict_only", older=("--predict-only",))
    """Write the answers as --log_samples does, and compute no metrics."""

    gen_kwargs: str | None = setting(None, flag="--gen_kwargs", older=("--gen-kwargs",))
    """Options of generated answers, instead of the tasks' options: NAME=VALUE,NAME=VALUE with
    max_gen_toks, do_sample, temperature, top_k, top_p, min_p, repetition_penalty or until."""

    apply_chat_template: bool = setting(
        False, flag="--apply_chat_template", older=("--apply-chat-template",)
    )
    """Write contexts as conversations: few-shot examples are earlier turns, and the end of a turn
    ends an answer."""

    chat_template: str | None = setting(None, older=("--chat_template",))
    """File with the Jinja template of --apply_chat_template (default: the checkpoint's, or the
    tokenizer's)."""


_ELSEWHERE = ("ICT-ZEROSHOT-NQ", "RETRIEVER-EVAL", "RET-FINETUNE-NQ")
"""Tasks of Megatron's that are not here."""

_STRIDE = 32

GENERATION_OPTIONS = frozenset(
    (
        *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "until"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    )
)
"""Options that --gen_kwargs may set."""


def name_problems(task: str | None) -> Iterator[str]:
    """Yield why there is no task of this name here."""
    if task in _ELSEWHERE:
        yield (
            f"--task {task} needs a retriever over an index of passages, which is not here: write "
            "WIKITEXT103 or LAMBADA, or evaluate on tasks of lm_eval with "
            "tasks/eval_harness/evaluate.py"
        )
    elif task is not None and task not in get_args(Task):
        by_lower_case = {name.lower(): name for name in get_args(Task)}
        near = difflib.get_close_matches(task.lower(), by_lower_case, n=1)
        hint = f"; did you mean {by_lower_case[near[0]]}?" if near else ""
        names = ", ".join(get_args(Task))
        yield f"--task: invalid choice: {task!r}{hint} (choose from {names})"


def task_problems(config: Config, task: TaskConfig) -> Iterator[str]:
    """Yield every problem of the flags of a task."""
    yield from _shared_problems(config)
    downstream: DownstreamConfig = config.section(DownstreamConfig)
    files, name = downstream.valid_data or [], downstream.task
    if name is None:
        yield "--task is required, such as WIKITEXT103 or MNLI"
    elif len(files) != 1:
        yield f"--valid-data takes one file for {name}; found {len(files)}"
    for flag, value in (
        ("--train-data", downstream.train_data),
        ("--epochs", downstream.epochs),
        ("--pretrained-checkpoint", downstream.pretrained_checkpoint),
    ):
        if value is not None:
            yield f"{flag} is for tasks that a network is finetuned on; of {name} nothing is trained"
    if task.strict_lambada and name != "LAMBADA":
        yield f"--strict-lambada is for --task LAMBADA, not for {name}"
    length, stride = config.model.seq_length, task.overlapping_eval
    if stride is not None and not 1 <= stride <= length:
        yield (
            f"--overlapping-eval {stride} must be between 1 and --seq-length {length}: with more, "
            "tokens between two windows would be left out"
        )


def stride_of(config: Config, task: TaskConfig) -> int:
    """Return the tokens from one window to the next."""
    return task.overlapping_eval or min(_STRIDE, config.model.seq_length)


def ensemble_problems(config: EnsembleConfig) -> Iterator[str]:
    """Yield flags that contradict each other."""
    if config.threshold and config.calc_threshold:
        yield "--threshold and --calc-threshold contradict each other: leave one out"
    if config.one_threshold and not config.calc_threshold:
        yield "--one-threshold is for --calc-threshold"
    if config.majority and (config.threshold or config.calc_threshold):
        yield "--majority has no use for a threshold: leave one out"


def harness_problems(config: Config, harness: HarnessConfig) -> Iterator[str]:
    """Yield every problem of the flags of lm_eval's tasks."""
    yield from _shared_problems(config)
    names = harness.task_list.split(",")
    if "all" in names:
        yield (
            "--task_list all are thousands of tasks, in many languages and for many kinds of "
            "models: name those that are wanted; `lm_eval ls tasks` lists them"
        )
    if not all(names):
        yield f"--task_list {harness.task_list!r} has an empty name"
    yield from range_problems(harness)
    if harness.chat_template is not None and not harness.apply_chat_template:
        yield "--chat-template is for --apply_chat_template"
    for option in harness.gen_kwargs.split(",") if harness.gen_kwargs is not None else ():
        name, equals, _ = option.partition("=")
        if not equals or name.strip() not in GENERATION_OPTIONS:
            yield (
                f"--gen_kwargs {option!r}: write NAME=VALUE, with one of "
                f"{', '.join(sorted(GENERATION_OPTIONS))}"
            )


def _shared_problems(config: Config) -> Iterator[str]:
    length, model = config.model.seq_length, config.model
    for flag, value in (
        ("--micro-batch-size", config.training.micro_batch_size),
        ("--seq-length", length),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
    if model.max_position_embeddings is not None and length > model.max_position_embeddings:
        yield (
            f"--seq-length {length} is more than --max-position-embeddings "
            f"{model.max_position_embeddings}"
        )
