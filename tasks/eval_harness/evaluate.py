#!/usr/bin/env python
"""Evaluate a trained GPT on tasks of EleutherAI's lm_eval, or on own ones in its format.

The network's sizes and the tokenizer are those of the checkpoint; flags that repeat them must
agree, and -1 in the place of a size stands for that of the checkpoint.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.atomic_files import replace_text
from megatron.common.errors import ConfigError, DataError, raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.extensions.tasks.inference_flags import HarnessConfig, harness_problems
from megatron.inference.loading.model_source import ModelSource, read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # both take seconds to import, and wrong flags are reported at once
    from lm_eval.tasks import TaskManager

    from megatron.inference.evaluation.lm_eval_harness import HarnessModel

_SIZES = (
    *("--num-layers", "--hidden-size", "--num-attention-heads"),
    *("--seq-length", "--max-position-embeddings"),
)


def main(argv: Sequence[str]) -> None:
    """Evaluate the model on the tasks of the command line `argv`."""
    log.configure(read_launch(None).rank)
    source = read_model_source(
        [*with_harness_flags(argv)], {"harness": HarnessConfig}, description=__doc__
    )
    options: HarnessConfig = source.own["harness"]
    raise_if_any(harness_problems(source.config, options))
    if options.results_path is not None:
        require_folder_of(options.results_path)
    if not find_spec("lm_eval"):
        raise ConfigError(
            "tasks/eval_harness/evaluate.py needs the package lm_eval, which is not installed: "
            "python -m pip install -r requirements-eval.txt"
        )
    is_first = read_launch(None).rank == 0
    tasks = known_tasks(options) if is_first else None

    from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
    from megatron.inference.loading.loaded_model import chat_prompts_of, load_model

    rows = source.config.training.micro_batch_size * options.micro_bs_multiplier
    generation = GenerationConfig(
        inference_dtype="fp32" if options.eval_fp32 else "auto",
        inference_max_seq_length=source.config.model.seq_length,
    )
    loaded = load_model(source, generation, rows=rows, with_replicas=True)
    evaluator = DistributedEvaluator(loaded.engine.runner, rows=rows, tokenizer=loaded.tokenizer)
    if tasks is None:
        evaluator.follow()
        return

    from megatron.inference.evaluation.lm_eval_harness import HarnessModel

    model = HarnessModel(
        evaluator,
        loaded.tokenizer,
        length=source.config.model.seq_length,
        seed=source.config.training.seed,
        chat=chat_prompts_of(source, loaded.tokenizer, options.chat_template)
        if options.apply_chat_template
        else None,
    )
    if options.apply_chat_template and model.chat is None:
        raise ConfigError(
            "--apply_chat_template: the model has no chat template; give a file with --chat-template"
        )
    evaluate(source, options, model, tasks)
    evaluator.close()


def with_harness_flags(argv: Sequence[str]) -> Iterator[str]:
    """Yield the words of `argv` without the sizes that are -1."""
    words = iter(argv)
    for word in words:
        if word not in _SIZES:
            yield word
        elif (value := next(words, "")) != "-1":
            yield from (word, value)


def require_folder_of(results: str) -> None:
    """Raise ConfigError when there is none: at the end of an evaluation it would be too late."""
    folder = Path(results).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--results_path {results}: there is no directory {folder}")


def known_tasks(options: HarnessConfig) -> "TaskManager":
    """Return lm_eval's tasks, and those of --include_path.

    Raises:
        ConfigError: a requested task is none of them.
    """
    from lm_eval.tasks import TaskManager

    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--include_path {folder} is no directory")
    names = options.task_list.split(",")
    if folder is not None:
        # Looking through lm_eval's own takes many seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    tasks = TaskManager(include_path=folder)
    raise_if_any(
        f"--task_list: there is no task, group or tag {name}; `lm_eval ls tasks` lists them, and "
        "--include_path adds others"
        for name in names
        if not tasks.match_tasks([name])
    )
    return tasks


def evaluate(
    source: ModelSource, options: HarnessConfig, model: "HarnessModel", tasks: "TaskManager"
) -> None:
    """Evaluate on the tasks, print what was found, and write it to --results_path."""
    from lm_eval.utils import make_table

    file = Path(options.results_path or time.strftime("results-%Y-%m-%d-%H-%M-%S.json"))
    names = options.task_list.split(",")
    found: dict[str, Any] = {}
    for part in [[name] for name in names] if options.intermed_results else [names]:
        results = results_of(part, options, model, tasks)
        print(make_table(results), flush=True)
        for task, samples in results.pop("samples", {}).items():
            write_samples(samples, Path(f"{file}.samples.{task}.jsonl"))
        for key, value in results.items():
            found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
        found["model"] = {
            "folder": str(source.folder),
            "iteration": source.manifest.state.iteration,
        }
        write(found, file)
    print(f"wrote the results to {file}")


def results_of(
    names: Sequence[str], options: HarnessConfig, model: "HarnessModel", tasks: "TaskManager"
) -> dict[str, Any]:
    """Return lm_eval's results of some tasks.

    Raises:
        DataError: their questions cannot be downloaded.
    """
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(
            model=model,
            tasks=[*names],
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=options.bootstrap_iters,
            task_manager=tasks,
            log_samples=options.log_samples or options.predict_only,
            predict_only=options.predict_only,
            gen_kwargs=options.gen_kwargs,
            apply_chat_template=options.apply_chat_template,
        )
    except ConnectionError as error:
        raise DataError(
            f"--task_list {','.join(names)}: the questions cannot be downloaded ({error}): run it once "
            "where there is a network, which fills the cache in HF_HOME, and copy that here; or give "
            "tasks of local files with --include_path"
        ) from error
    assert results is not None, "lm_eval returns results where the rank is 0"
    return results


def write(found: dict[str, Any], file: Path) -> None:
    """Replace `file` by the results at once, so that it is never half written."""
    from lm_eval.utils import handle_non_serializable

    replace_text(file, json.dumps(found, indent=2, default=handle_non_serializable))


def write_samples(samples: Sequence[Any], file: Path) -> None:
    """Replace `file` by a task's documents with the model's answers, one JSON object a line."""
    from lm_eval.utils import handle_non_serializable

    lines = (json.dumps(one, default=handle_non_serializable) + "\n" for one in samples)
    replace_text(file, "".join(lines))
    print(f"wrote {len(samples)} samples to {file}")


if __name__ == "__main__":
    run_tool_or_rank(main)
