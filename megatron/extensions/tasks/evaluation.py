"""Downstream tasks in a run: metrics of each validation file after every epoch, best checkpoint, predictions."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.checkpointing.manifest import published_tags, tag_of
from megatron.checkpointing.publish import prune
from megatron.checkpointing.train_state import TrainState
from megatron.common.atomic_files import replace_text
from megatron.common.errors import CheckpointError, TrainingError, reason
from megatron.common.progress import with_progress
from megatron.config.config import Config
from megatron.config.plan.plan import Plan
from megatron.data.datasets.epoch_order import EachOnce
from megatron.engine.engine import Engine
from megatron.extensions.tasks.data.task import LabelledData, Predicted, Task
from megatron.objectives.predictions import Predictions
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.loop.collectives import all_gather_items, from_rank_0
from megatron.training.loop.epochs import EpochHook, Progress
from megatron.training.loop.journal import Journal, read_journal
from megatron.training.loop.loop import StepResult
from megatron.training.telemetry.tensorboard import TensorBoard

log = logging.getLogger(__name__)

BEST = "best"
"""Folder in --save of the checkpoint with the best score so far."""

LABELS = "label_ids.csv"
"""File in --save with the names of the labels, in the order of their ids."""

TASK, OVERALL = "task", "overall"
"""Event of the journal with the metrics of a file, and the name of all files together."""

_RECORD = "best.json"

_CALL = 16  # micro-batches between two signs of life for the watchdog


@dataclass(frozen=True)
class TaskSets:
    """Labelled data of a run, and the task that reads and predicts them.

    Args:
        task: the downstream task.
        steps: optimizer steps of an epoch.
        sets: validation files by name.
        batches: yields this replica's micro-batches of samples.
        predictions: records logits of the engine's evaluations.
    """

    task: Task
    steps: int
    sets: Mapping[str, LabelledData]
    batches: Callable[[EachOnce, int], Iterator[Any]]
    predictions: Predictions


class TaskEvaluation(EpochHook):
    """Evaluate a downstream task after every epoch, and keep the best checkpoint. For all ranks.

    Args:
        journal: rank 0's, None elsewhere.
        tensorboard: rank 0's, None elsewhere.
        after_call: called now and then, as a sign of life.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        config: Config,
        groups: Groups,
        tasks: TaskSets,
        *,
        journal: Journal | None,
        tensorboard: TensorBoard | None,
        after_call: Callable[[], None],
    ):
        self._engine, self._plan, self._groups, self._tasks = engine, plan, groups, tasks
        self._journal, self._tensorboard, self._after_call = journal, tensorboard, after_call
        self.steps = tasks.steps
        self.progress = EpochProgress(tasks.steps) if groups.rank == 0 else None
        saves = plan.checkpoint.save and not plan.evaluation.only
        self._best = BestCheckpoint(engine, plan, config) if saves else None
        if saves and journal and tasks.task.labels:  # the journal has made the directory
            names = "".join(f"{label}\n" for label in tasks.task.labels)
            replace_text(Path(plan.checkpoint.save) / LABELS, names, has_one_writer=True)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Evaluate at the end of an epoch, and of the run.

        Communication: every rank must call this, in step.
        """
        if self._ends_epoch(state):
            self._after_epoch(state)

    def catch_up(self, state: TrainState) -> None:
        """Evaluate the epoch that was just saved when the run was killed.

        Communication: every rank must call this, in step.
        """
        if self._ends_epoch(state) and not from_rank_0(lambda: self._is_evaluated(state.iteration)):
            log.info("the epoch that ends with iteration %d is evaluated first", state.iteration)
            self._after_epoch(state)

    def _ends_epoch(self, state: TrainState) -> bool:
        is_last = state.iteration == self._plan.training.train_iters
        return is_last or state.iteration % self.steps == 0

    def _is_evaluated(self, iteration: int) -> bool:
        """Whether the journal has the metrics of all files together after an iteration."""
        records = read_journal(Path(self._plan.checkpoint.save), warns=False)
        return any(
            record["event"] == TASK and record["set"] == OVERALL
            for record in records
            if record["iteration"] == iteration
        )

    def _after_epoch(self, state: TrainState) -> None:
        is_last = state.iteration == self._plan.training.train_iters
        epoch = (state.iteration - 1) // self.steps
        predicted = self._evaluate(epoch, state)
        labelled = [each for each in predicted if each.data.has_labels]
        if labelled and self._best:
            task = self._tasks.task
            self._best.offer(state, epoch, task.score(task.metrics(labelled)))
        if is_last:
            self._log_table(labelled)
            self._write_requested(predicted)

    def predict(self, state: TrainState) -> None:
        """Evaluate without training, and write the predictions to files.

        Communication: every rank must call this, in step.
        """
        predicted = self._evaluate(-1, state)
        self._log_table([each for each in predicted if each.data.has_labels])
        self._write(predicted)

    def _write_requested(self, predicted: list[Predicted]) -> None:
        """Write the predictions of the last epoch, if flags name files for them."""
        text = self._plan.objective.own.text
        if text.prediction_file or text.nbest_file:
            self._write(predicted)

    def _write(self, predicted: list[Predicted]) -> None:
        directory = Path(self._plan.checkpoint.save or self._plan.checkpoint.load)
        from_rank_0(lambda: write_predictions(self._tasks.task, directory, predicted))

    def _evaluate(self, epoch: int, state: TrainState) -> list[Predicted]:
        """Predict all files and log their metrics."""
        started_at = time.perf_counter()
        self._engine.set_seq_length(self._plan.model.seq_length)
        predicted = []
        for name, data in self._tasks.sets.items():
            file_started_at = time.perf_counter()
            predicted.append(Predicted(data, self._outputs(data)))
            if data.has_labels:
                self._report(epoch, state, f"metrics for {name}", predicted[-1:], file_started_at)
        labelled = [each for each in predicted if each.data.has_labels]
        if labelled:
            self._report(epoch, state, OVERALL, labelled, started_at)
        return predicted

    def _outputs(self, data: LabelledData) -> NDArray[np.float64]:
        """Return the logits of all samples, each predicted once by one of the replicas.

        Communication: the engine's, and one all-gather.
        """
        batch = self._plan.batch
        turn = batch.micro_batch_size * batch.data_parallel_size
        source = EachOnce(data, turn=turn)
        batches = self._tasks.batches(source, 0)
        self._tasks.predictions.start()
        micro_batches = len(source) // turn
        counts = [min(_CALL, micro_batches - i) for i in range(0, micro_batches, _CALL)]
        is_shown = self._groups.rank == 0
        for count in with_progress(counts, data.name, len(counts), "steps") if is_shown else counts:
            self._engine.evaluate(batches, count)
            self._after_call()
        rows = self._tasks.predictions.stop()
        # Tensor-parallel ranks have the same; of other pipeline stages there are none.
        rank_rows = rows if self._groups.tensor_rank == 0 else []
        outputs = dict(all_gather_items(rank_rows))
        if sorted(outputs) != list(range(len(data))):
            raise TrainingError(f"{len(outputs)} of {len(data)} samples were predicted")
        return np.array([outputs[i] for i in range(len(data))])

    def _report(
        self,
        epoch: int,
        state: TrainState,
        what: str,
        predicted: list[Predicted],
        started_at: float,
    ) -> None:
        sign = ">>" if what == OVERALL else ">"
        head = f" {sign} |epoch: {epoch}| {what}"
        metrics = self._tasks.task.metrics(predicted)
        if counts := self._tasks.task.correct(predicted):
            correct, total = counts
            seconds = time.perf_counter() - started_at
            line = f"{head}: correct / total = {correct} / {total} = {100 * correct / total:.4f} %"
            log.info("%s, elapsed time (sec): %.3f", line, seconds)
        others = [f"{name} = {value:.6f}" for name, value in metrics.items() if name != "accuracy"]
        if others:
            log.info("%s: %s", head, ", ".join(others))
        name = what.removeprefix("metrics for ")
        if self._journal:
            record = {"iteration": state.iteration, "epoch": epoch, "set": name, **metrics}
            self._journal.write(TASK, record)
        if self._tensorboard:
            self._tensorboard.after_task(self._tasks.task.name, name, metrics, state)

    def _log_table(self, predicted: list[Predicted]) -> None:
        """Log the scores of each class."""
        table = self._tasks.task.table(predicted) if predicted else ""
        if table:
            log.info("%s", table)


class EpochProgress(Progress):
    """Progress bar of the steps of an epoch with the loss, if stderr is a terminal.

    Args:
        steps: of an epoch.
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._bar: tqdm[Any] | None = None

    def before_step(self, state: TrainState) -> None:
        """Draw the bar of the epoch that the next step belongs to."""
        if self._bar is None:
            epoch, done = divmod(state.iteration, self._steps)
            # disable=None: only on a terminal. Steps have log lines of their own.
            self._bar = tqdm(
                total=self._steps,
                desc=f"epoch {epoch}",
                unit="step",
                initial=done,
                leave=False,
                disable=None,
            )

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Count the step; the bar of a finished epoch is removed."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {step.loss:.4f}", refresh=False)
            self._bar.update()
            if state.iteration % self._steps == 0:
                self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


class BestCheckpoint:
    """The weights with the best score so far, as a checkpoint in --save/best. For all ranks."""

    def __init__(self, engine: Engine, plan: Plan, config: Config):
        self._directory = Path(plan.checkpoint.save) / BEST
        needs_optimizer = plan.parallel.zero_stage == 3  # which has the weights
        checkpoint = replace(
            plan.checkpoint,
            save=str(self._directory),
            keep_last=0,
            in_background=False,
            saves_optimizer=needs_optimizer,
            saves_streams=False,
        )
        self._engine, self._config = engine, config
        self._plan = replace(plan, checkpoint=checkpoint)

    def offer(self, state: TrainState, epoch: int, value: float) -> None:
        """Save `state` in place of the one before if its score is better.

        Raises:
            CheckpointError: it cannot be written.

        Communication: every rank must call this, in step.
        """
        best = from_rank_0(lambda: self._read(state.iteration))
        # Correlations are NaN where all predictions are equal.
        if math.isnan(value) or (best is not None and value <= best):
            return
        if not Checkpoints(self._engine, self._plan, self._config).save(state):
            return
        from_rank_0(lambda: self._replace(state.iteration, epoch, value))
        log.info("best score so far: %.6f; its weights are in %s", value, self._directory)

    def _read(self, iteration: int) -> float | None:
        """Return the best score of the iterations before; None if there is none."""
        try:
            record = json.loads((self._directory / _RECORD).read_text(encoding="utf-8"))
            return float(record["score"]) if record["iteration"] < iteration else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _replace(self, iteration: int, epoch: int, value: float) -> None:
        """Record the best score, and remove the checkpoint before."""
        record = {"iteration": iteration, "epoch": epoch, "score": value}
        try:
            replace_text(self._directory / _RECORD, json.dumps(record) + "\n", has_one_writer=True)
        except OSError as error:
            raise CheckpointError(f"{self._directory}: {reason(error)}") from error
        tags = [tag for tag in published_tags(self._directory) if tag != tag_of(iteration)]
        prune(self._directory, tags)


def write_predictions(task: Task, directory: Path, predicted: list[Predicted]) -> None:
    """Write all predictions to files.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = task.write(directory, predicted)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: the predictions cannot be written ({reason(error)}); give another --save"
        ) from error
    log.info("predictions are in %s", " and ".join(map(str, written)))
