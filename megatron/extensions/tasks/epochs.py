"""Labels and length of a run from its labelled data: epochs as optimizer steps; needs no torch."""

from dataclasses import replace
from pathlib import Path

from megatron.common.errors import ConfigError
from megatron.config.config import Config
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.optimization.training import samples_of_step
from megatron.config.parallelism.deepspeed_json import read_ds_config
from megatron.config.parallelism.layout import replica_size
from megatron.data.sampling.epoch_plan import EpochPlan
from megatron.extensions.tasks.data.columns import Layout
from megatron.extensions.tasks.data.sentences import sentence_labels
from megatron.extensions.tasks.data.tagging import label_names, read_sentences
from megatron.extensions.tasks.data.tasks import task_of
from megatron.extensions.tasks.data.text_flags import TextTaskConfig
from megatron.extensions.tasks.flags import (
    DownstreamConfig,
    downstream_in,
    is_finetuned,
    objective_of,
)
from megatron.tokenizer.build import build_tokenizer


def with_steps_of_epochs(config: Config, *, world_size: int) -> Config:
    """Return `config` with --train-iters for its --epochs; of 0 epochs a run that only evaluates.

    With both flags the run ends with whichever comes first.

    Values that are refused later count as if they were possible.

    Raises:
        ConfigError: no flag sets the length of the run, another flag sets it in samples or changes
            the batch size, or --deepspeed_config cannot be read.
        WrongDataError: a file of --train-data is missing or malformed.
    """
    config = _with_labels(config)
    downstream, training = config.section(DownstreamConfig), config.training
    epochs, name = downstream.epochs, downstream.task
    if not is_finetuned(name):
        return config
    if epochs is None:
        if (training.train_iters, training.train_samples, training.train_tokens) == (None,) * 3:
            raise ConfigError(
                f"--epochs is missing: how many times --task {name} passes through --train-data; 0 "
                "evaluates"
            )
        return config
    if epochs < 1 or not downstream.train_data:
        checkpoint = config.checkpoint
        load = checkpoint.load or downstream.pretrained_checkpoint
        return replace(
            config,
            training=replace(training, train_iters=1),
            evaluation=replace(config.evaluation, eval_only=load is not None),
            checkpoint=replace(checkpoint, load=load),
        )
    others = ("train_samples", "train_tokens", "rampup_batch_size", "step_batch_size_schedule")
    if given := [f for f in others if getattr(training, f) is not None]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"--epochs {epochs} is a number of steps of one size: leave out {flags}")
    replicas = max(1, world_size // replica_size(config.parallel))
    possible = replace(training, micro_batch_size=max(1, training.micro_batch_size))
    user = read_ds_config(config.deepspeed.deepspeed_config)
    task = task_of(str(name), downstream_in(config).text)
    plan = EpochPlan(
        samples=task.num_samples(
            [*map(Path, downstream.train_data)],
            lambda: build_tokenizer(
                **objective_tokenizer_arguments(config.tokenizer, objective_of(name))
            ),
            config.model.seq_length,
        ),
        micro_batch_size=possible.micro_batch_size,
        replicas=replicas,
        global_batch_size=samples_of_step(possible, user, data=replicas),
        keeps_last=downstream.keep_last_batch,
    )
    steps = max(1, epochs * plan.steps)
    return replace(
        config, training=replace(training, train_iters=min(steps, training.train_iters or steps))
    )


def _with_labels(config: Config) -> Config:
    """Return `config` with --labels of --train-data, if it gives none and the task has such.

    Raises:
        WrongDataError: a file of --train-data is missing or malformed.
    """
    downstream, text_task = config.section(DownstreamConfig), config.section(TextTaskConfig)
    paths = [*map(Path, downstream.train_data or ())]
    if text_task.labels is not None or not paths:
        return config
    layout = Layout.of(downstream_in(config).text)
    match downstream.task:
        case "token-classification":
            sentences = [s for path in paths for s in read_sentences(path, layout=layout)]
            labels = label_names(sentences)
        case "text-classification":
            labels = sentence_labels(paths, text_task.num_labels, layout)
        case _:
            return config
    return config.with_section(replace(text_task, labels=labels))
