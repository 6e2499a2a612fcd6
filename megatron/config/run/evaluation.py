"""Evaluation on held-out data: flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.optimization.batch_size import BatchPlan, plan_batch
from megatron.config.parsing.declaration import range_problems, setting
from megatron.config.run.checkpoint import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data."""

    eval_interval: int = setting(1000, at_least=0, plan="evaluation.interval")
    """Iterations between evaluations on the validation set; 0: only after the last."""

    eval_iters: int = setting(100, at_least=0, plan="evaluation.iters")
    """Global batches per evaluation; 0 turns validation and test off."""

    eval_global_batch_size: int | None = setting(None, at_least=1)
    """Samples per global batch of an evaluation (default: --global-batch-size)."""

    eval_micro_batch_size: int | None = setting(None, at_least=1)
    """Samples per replica and forward pass of an evaluation (default: --micro-batch-size)."""

    eval_only: bool = setting(False, older=("--skip-train", "--no-train"), with_truth=True)
    """Evaluate the checkpoint in --load on the validation and test sets, without training or
    saving."""

    inference: bool = False
    """Like --eval-only, without an optimizer, which takes most of the memory."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """When and how long to evaluate."""

    interval: int  # 0: only after the last iteration
    iters: int  # 0: never
    batch: BatchPlan
    only: bool  # nothing is trained
    optimizer: bool  # whether one is built

    @property
    def samples(self) -> int:
        """Samples of one evaluation of a set, over all replicas."""
        return self.iters * self.batch.global_batch_size

    def number_in(self, train_iters: int) -> int:
        """Return the number of evaluations in a run of `train_iters`, the last one included."""
        if self.only or not self.interval:
            return 1
        return train_iters // self.interval + 1

    def is_due(self, iteration: int) -> bool:
        """Whether to evaluate after `iteration`."""
        return self.interval > 0 and iteration % self.interval == 0


def takes_steps(evaluation: EvaluationConfig) -> bool:
    """Whether the run trains; otherwise it evaluates alone."""
    return not (evaluation.eval_only or evaluation.inference)


def plan_evaluation(evaluation: EvaluationConfig, training: BatchPlan) -> EvaluationPlan:
    """Return the schedule of evaluation, in a run with such batches of training."""
    batch = plan_batch(
        evaluation.eval_micro_batch_size or training.micro_batch_size,
        None,
        global_batch_size=evaluation.eval_global_batch_size or training.global_batch_size,
        data_parallel_size=training.data_parallel_size,
    )
    return EvaluationPlan(
        interval=evaluation.eval_interval,
        iters=evaluation.eval_iters,
        batch=batch,
        only=not takes_steps(evaluation),
        optimizer=not evaluation.inference,
    )


def evaluation_problems(
    evaluation: EvaluationConfig, checkpoint: CheckpointConfig, *, zero_stage: int
) -> Iterator[str]:
    """Yield every problem of the flags of evaluation."""
    yield from range_problems(evaluation)
    flag = "--inference" if evaluation.inference else "--eval-only"
    if not takes_steps(evaluation):
        if not evaluation.eval_iters:
            yield f"{flag} with --eval-iters 0 leaves nothing to do"
        if not checkpoint.load:
            yield f"{flag} needs --load: the directory of a trained model"
    if evaluation.inference and zero_stage == 3:
        yield "--inference: at ZeRO stage 3 the weights are the optimizer's: write --eval-only instead"
