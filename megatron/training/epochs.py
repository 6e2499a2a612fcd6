"""Length of a run in epochs of labelled data, converted to optimizer steps; needs no torch."""

from dataclasses import replace
from pathlib import Path

from megatron.config.config import Config
from megatron.config.parallelism.layout import replica_size
from megatron.data.downstream.tasks import TASKS
from megatron.data.sampling.epoch_plan import EpochPlan


def with_steps_of_epochs(config: Config, *, world_size: int) -> Config:
    """Return `config` with --train-iters for its --epochs; of 0 epochs a run that only evaluates.

    Values that are refused later count as if they were possible.

    Raises:
        WrongDataError: a file of --train-data is missing or malformed.
    """
    downstream, training = config.downstream, config.training
    epochs, task = downstream.epochs, TASKS.get(downstream.task or "")
    if epochs is None or task is None:
        return config
    if epochs < 1 or not downstream.train_data:
        checkpoint = config.checkpoint
        load = checkpoint.load or downstream.pretrained_checkpoint
        return replace(
            config,
            training=replace(training, train_iters=1),
            evaluation=replace(config.evaluation, eval_only=True),
            checkpoint=replace(checkpoint, load=load),
        )
    replicas = max(1, world_size // replica_size(config.parallel))
    micro = max(1, training.micro_batch_size)
    plan = EpochPlan(
        samples=sum(len(task.read(Path(path)).examples) for path in downstream.train_data),
        micro_batch_size=micro,
        replicas=replicas,
        global_batch_size=training.global_batch_size or micro * replicas,
        keeps_last=downstream.keep_last_batch,
    )
    return replace(config, training=replace(training, train_iters=max(1, epochs * plan.steps)))
