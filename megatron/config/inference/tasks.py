"""What the tools in tasks/ evaluate a trained GPT on."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Zero-shot evaluation, as the user asked for it; --micro-batch-size is how many at once."""

    task: Literal["WIKITEXT103", "LAMBADA"]
    """What is measured: the perplexity of the words of a text, or how often the last word of a
    passage is foretold."""

    valid_data: list[str]
    """The file: raw text of WIKITEXT103, JSON lines with a text each of LAMBADA."""

    overlapping_eval: int | None = None
    """Tokens from one window to the next, at most --seq-length, which is the window's length: fewer
    give every token more text before it, and take longer. 32 when not said, or --seq-length if that
    is less."""

    strict_lambada: bool = False
    """The whole last word has to be foretold; without this flag, the last token of the text."""


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Tasks of lm_eval, as the user asked for them."""

    task_list: Annotated[str, Spelling("--task_list", ("--task-list",))] = "all"
    """Names of tasks, groups or tags of lm_eval, with commas between them."""

    include_path: Annotated[str | None, Spelling("--include_path", ("--include-path",))] = None
    """Directory of further tasks: YAML files in lm_eval's format."""

    results_path: Annotated[str | None, Spelling("--results_path", ("--results-path",))] = None
    """File for the results, in JSON (default: results-YYYY-MM-DD-HH-MM-SS.json)."""

    intermed_results: Annotated[bool, Spelling("--intermed_results", ("--intermed-results",))] = (
        False
    )
    """Take one task after the other, and write what is known after each."""

    num_fewshot: Annotated[int | None, Spelling("--num_fewshot", ("--num-fewshot",))] = None
    """Solved examples before each question (default: as the tasks say)."""

    limit: int | None = None
    """Only so many documents of each task, to try something out."""

    bootstrap_iters: Annotated[int, Spelling("--bootstrap_iters", ("--bootstrap-iters",))] = 100000
    """Drawings from which standard errors are found; 0 for no standard errors."""

    micro_bs_multiplier: Annotated[
        int, Spelling("--micro_bs_multiplier", ("--micro-bs-multiplier",))
    ] = 1
    """So many times --micro-batch-size texts at once."""

    eval_fp32: Annotated[bool, Spelling("--eval_fp32", ("--eval-fp32",))] = False
    """Weights and activations in 32 bits, whatever training had."""

    log_samples: Annotated[bool, Spelling("--log_samples", ("--log-samples",))] = False
    """Write each task's documents with the model's answers beside the results, as JSON lines:
    RESULTS_PATH.samples.TASK.jsonl."""

    predict_only: Annotated[bool, Spelling("--predict_only", ("--predict-only",))] = False
    """Write the answers as --log_samples does, and compute no metrics."""

    gen_kwargs: Annotated[str | None, Spelling("--gen_kwargs", ("--gen-kwargs",))] = None
    """Options of generated answers in place of the tasks' own: NAME=VALUE,NAME=VALUE with
    max_gen_toks, do_sample, temperature, top_k, top_p, min_p, repetition_penalty or until."""

    apply_chat_template: Annotated[
        bool, Spelling("--apply_chat_template", ("--apply-chat-template",))
    ] = False
    """Write contexts as conversations: few-shot examples are earlier turns, and the end of a turn
    ends an answer."""

    chat_template: Annotated[str | None, Spelling("--chat-template", ("--chat_template",))] = None
    """File with the Jinja template of --apply_chat_template (default: the checkpoint's, or the
    tokenizer's)."""
