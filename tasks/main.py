#!/usr/bin/env python
"""Downstream tasks: finetune a BERT or GPT on RACE or GLUE; evaluate a GPT on WikiText or LAMBADA.

Of WikiText and LAMBADA the network's sizes and the tokenizer are those of the checkpoint; flags that
repeat them must agree.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.errors import ConfigError, raise_if_any
from megatron.config.config import SECTIONS, options_given
from megatron.config.inference.generation import GenerationConfig
from megatron.config.parsing.files import with_file_flags
from megatron.config.parsing.parser import peek
from megatron.extensions.tasks.entry import objective_in, with_pretrained_network
from megatron.extensions.tasks.flags import DownstreamConfig, is_finetuned
from megatron.extensions.tasks.inference_flags import (
    TaskConfig,
    name_problems,
    stride_of,
    task_problems,
)
from megatron.inference.loading.model_source import (
    PRINTS_AND_EXITS,
    ModelSource,
    read_model_source,
)
from megatron.training.entry import train_from
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_rank, run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
    from megatron.tokenizer.types.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> int:
    """Finetune or evaluate on the task of the command line `argv`; return the exit code."""
    if is_finetuned(task_in(argv)):
        return finetune(argv)
    evaluate(argv)
    return 0


def finetune(argv: Sequence[str]) -> int:
    """Finetune a network on a task, or evaluate it with 0 epochs; return the exit code."""
    words = with_file_flags(with_kept_batch(argv), SECTIONS)
    given = peek(words)
    if given.get("epochs") == "0" and given.get("lr") is None:
        words += ["--lr", "0"]  # which training needs
    words = with_pretrained_network(words, is_first=read_launch(None).rank == 0)
    objective = objective_in(words, str(peek(words)["task"]))
    return train_from(words, objective, description=__doc__)


def task_in(argv: Sequence[str]) -> str | None:
    """Return the --task of a command line and its --config; None without one."""
    try:
        return options_given(argv).get("task")
    except ConfigError:
        return peek(argv).get("task")  # the file is reported when all flags are read


def with_kept_batch(argv: Sequence[str]) -> list[str]:
    """Return `argv` with --keep-last-batch for Megatron's --keep-last, a switch."""
    return [
        "--keep-last-batch" if word == "--keep-last" and not number.isdecimal() else word
        for word, number in zip(argv, [*argv[1:], ""], strict=True)
    ]


def evaluate(argv: Sequence[str]) -> None:
    """Evaluate a GPT on a text."""
    log.configure(read_launch(None).rank)
    task = task_in(argv)
    raise_if_any(name_problems(task))
    if task is None and peek(argv).get("load") is None and not PRINTS_AND_EXITS & {*argv}:
        raise ConfigError(
            "--task is required: a dataset to finetune on, such as MNLI, or to evaluate on, such as "
            "WIKITEXT103"
        )
    source = read_model_source(argv, {"task": TaskConfig}, description=__doc__)
    options: TaskConfig = source.own["task"]
    raise_if_any(task_problems(source.config, options))

    from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
    from megatron.inference.loading.loaded_model import load_model

    rows = source.config.training.micro_batch_size
    loaded = load_model(source, GenerationConfig(recompute=True), rows=rows, with_replicas=True)
    evaluator = DistributedEvaluator(loaded.engine.runner, rows=rows)
    if not loaded.is_first:
        evaluator.follow()
        return
    measure = measure_passages if task == "LAMBADA" else measure_text
    result = measure(source, options, loaded.tokenizer, evaluator)
    evaluator.close()
    print(f"validation results on {task} | {result}")


def measure_text(
    source: ModelSource,
    options: TaskConfig,
    tokenizer: "Tokenizer",
    evaluator: "DistributedEvaluator",
) -> str:
    """Return the result line of a text's perplexity."""
    from megatron.extensions.tasks.zeroshot import perplexity, read_text
    from megatron.inference.evaluation.scoring import sliding_windows

    text = read_text(_valid_file(source), tokenizer)
    windows = sliding_windows(
        text.tokens,
        length=source.config.model.seq_length,
        stride=stride_of(source.config, options),
    )
    found = perplexity(text, evaluator.scores(windows, num_targets=len(text.tokens) - 1))
    return (
        f"avg loss: {found.loss:.4E} | ppl: {found.by_token:.4E} | "
        f"adjusted ppl: {found.by_word:.4E} | token ratio: {found.token_ratio} |"
    )


def measure_passages(
    source: ModelSource,
    options: TaskConfig,
    tokenizer: "Tokenizer",
    evaluator: "DistributedEvaluator",
) -> str:
    """Return the result line of the accuracy of predicted last words."""
    from megatron.extensions.tasks.zeroshot import passage_windows, read_passages

    texts = read_passages(_valid_file(source))
    length = source.config.model.seq_length
    windows = [*passage_windows(texts, tokenizer, length=length, strict=options.strict_lambada)]
    num_targets = sum(window.num_targets for window in windows)
    scores = evaluator.scores(windows, num_targets=num_targets)
    correct = sum(score.is_greedy for score in scores)
    return (
        f"number correct: {correct:.4E} | total examples: {len(texts):.4E} | "
        f"avg accuracy: {correct / len(texts):.4E}"
    )


def _valid_file(source: ModelSource) -> Path:
    return Path((source.config.section(DownstreamConfig).valid_data or [""])[0])


if __name__ == "__main__":
    if is_finetuned(task_in(sys.argv[1:])):
        run_rank(finetune, sys.argv[1:])
    run_tool_or_rank(evaluate)
