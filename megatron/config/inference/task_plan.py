"""Whether a trained model can be evaluated as asked."""

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.inference.tasks import HarnessConfig, TaskConfig

_TRAINED = "trains a BERT for it, and here are GPTs that are evaluated as they are"
_RETRIEVAL = "needs a retriever over an index of passages, which is not here"
_ELSEWHERE = {
    **dict.fromkeys(("MNLI", "QQP", "RACE"), _TRAINED),
    **dict.fromkeys(("QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"), _TRAINED),
    "ICT-ZEROSHOT-NQ": _RETRIEVAL,
    "RETRIEVER-EVAL": _RETRIEVAL,
    "RET-FINETUNE-NQ": _RETRIEVAL,
}
"""Tasks of Megatron's."""
_STRIDE = 32
GENERATION_OPTIONS = frozenset(
    (
        *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "until"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    )
)
"""What --gen_kwargs may set."""


def name_problems(task: str | None) -> Iterator[str]:
    """Yield why there is no task of this name here."""
    if task in _ELSEWHERE:
        yield (
            f"--task {task} {_ELSEWHERE[task]}: write WIKITEXT103 or LAMBADA, or evaluate on tasks "
            "of lm_eval with tasks/eval_harness/evaluate.py"
        )


def task_problems(config: Config, wishes: TaskConfig) -> Iterator[str]:
    """Yield every reason why a task cannot be done as asked."""
    yield from _shared_problems(config)
    if len(wishes.valid_data) != 1:
        yield f"--valid-data takes one file for {wishes.task}; found {len(wishes.valid_data)}"
    if wishes.strict_lambada and wishes.task != "LAMBADA":
        yield f"--strict-lambada is for --task LAMBADA, not for {wishes.task}"
    length, stride = config.model.seq_length, wishes.overlapping_eval
    if stride is not None and not 1 <= stride <= length:
        yield (
            f"--overlapping-eval {stride} must be between 1 and --seq-length {length}: with more, "
            "tokens between two windows would be left out"
        )


def stride_of(config: Config, wishes: TaskConfig) -> int:
    """Return the tokens from one window to the next."""
    return wishes.overlapping_eval or min(_STRIDE, config.model.seq_length)


def harness_problems(config: Config, wishes: HarnessConfig) -> Iterator[str]:
    """Yield every reason why tasks of lm_eval cannot be done as asked."""
    yield from _shared_problems(config)
    names = wishes.task_list.split(",")
    if "all" in names:
        yield (
            "--task_list all are thousands of tasks, in many languages and for many kinds of "
            "models: name those that are wanted; `lm_eval ls tasks` lists them"
        )
    if not all(names):
        yield f"--task_list {wishes.task_list!r} has an empty name"
    for flag, value, least in (
        ("--micro_bs_multiplier", wishes.micro_bs_multiplier, 1),
        ("--bootstrap_iters", wishes.bootstrap_iters, 0),
        ("--num_fewshot", wishes.num_fewshot, 0),
        ("--limit", wishes.limit, 1),
    ):
        if value is not None and value < least:
            yield f"{flag} {value} must be at least {least}"
    if wishes.chat_template is not None and not wishes.apply_chat_template:
        yield "--chat-template is for --apply_chat_template"
    for option in wishes.gen_kwargs.split(",") if wishes.gen_kwargs is not None else ():
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
        ("--log-interval", config.logging.log_interval),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
    if model.max_position_embeddings is not None and length > model.max_position_embeddings:
        yield (
            f"--seq-length {length} is more than --max-position-embeddings "
            f"{model.max_position_embeddings}"
        )
