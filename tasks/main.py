#!/usr/bin/env python
"""Evaluate a trained GPT: perplexity of WikiText, accuracy on LAMBADA.

The network's sizes and the tokenizer are those of the checkpoint; flags that repeat them must
agree.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.errors import raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.tasks import TaskConfig, name_problems, stride_of, task_problems
from megatron.config.parsing.parser import value_in
from megatron.inference.loading.model_source import ModelSource, read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
    from megatron.inference.evaluation.scoring import Score
    from megatron.tokenizer.types.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> None:
    """Run the evaluation of the command line `argv`."""
    log.configure(read_launch(None).rank)
    raise_if_any(name_problems(value_in(argv, "--task")))
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
    measure = {"WIKITEXT103": measure_text, "LAMBADA": measure_passages}[options.task]
    result = measure(source, options, loaded.tokenizer, evaluator)
    evaluator.close()
    print(f"validation results on {options.task} | {result}")


def measure_text(
    source: ModelSource,
    options: TaskConfig,
    tokenizer: "Tokenizer",
    evaluator: "DistributedEvaluator",
) -> str:
    """Return the result line of a text's perplexity."""
    from megatron.inference.evaluation.perplexity import perplexity, read_text
    from megatron.inference.evaluation.scoring import sliding_windows

    text = read_text(Path(options.valid_data[0]), tokenizer)
    windows = sliding_windows(
        text.tokens,
        length=source.config.model.seq_length,
        stride=stride_of(source.config, options),
    )
    found = perplexity(text, reported(evaluator.scores(windows), source, evaluator))
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
    from megatron.inference.evaluation.cloze import passage_windows, read_passages

    texts = read_passages(Path(options.valid_data[0]))
    windows = passage_windows(
        texts, tokenizer, length=source.config.model.seq_length, strict=options.strict_lambada
    )
    correct = sum(
        score.is_greedy for score in reported(evaluator.scores(windows), source, evaluator)
    )
    return (
        f"number correct: {correct:.4E} | total examples: {len(texts):.4E} | "
        f"avg accuracy: {correct / len(texts):.4E}"
    )


def reported(
    scores: "Iterable[Score]", source: ModelSource, evaluator: "DistributedEvaluator"
) -> "Iterator[Score]":
    """Yield the scores, and log their number every --log-interval batches."""
    interval = source.config.logging.log_interval * evaluator.rows * evaluator.replicas
    for number, score in enumerate(scores, 1):
        if number % interval == 0:
            print(f"evaluated {number} windows", flush=True)
        yield score


if __name__ == "__main__":
    run_tool_or_rank(main)
