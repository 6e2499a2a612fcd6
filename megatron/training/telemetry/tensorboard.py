"""TensorBoard scalars, under the tags that dashboards of this field have."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.train_state import TrainState
from megatron.config.config import flatten
from megatron.config.data.objective import LM_LOSS, SOP_LOSS
from megatron.config.network.prediction import MTP_LOSS
from megatron.config.plan.plan import Plan
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.telemetry.memory import ALLOCATED, AVAILABLE, RESERVED, RESIDENT
from megatron.training.telemetry.meters import (
    BUSIEST,
    DROPPED,
    LOAD_ENTROPY,
    MOE_LOSS,
    NUM_ZEROS,
    PARAMS_NORM,
    SEQ_LENGTH,
    times_in,
)
from megatron.training.telemetry.report import flops_per_sample
from megatron.training.telemetry.writers import close_writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Hook):
    """Writes scalars over iterations, samples and tokens. For rank 0.

    Args:
        writer: returned by `build_writer`.
        config: as nested dictionaries, for the text entries.
    """

    def __init__(
        self, writer: "SummaryWriter", plan: Plan, config: dict[str, Any], state: TrainState
    ):
        self._writer = writer
        self._plan = plan
        for name, value in flatten(config).items():
            writer.add_text(name, str(value), state.iteration)
        # A value and then a zero: where the run was started shows as a spike.
        tag = "iteration-time/world_size"
        writer.add_scalar(tag, plan.parallel.world_size, state.iteration)
        writer.add_scalar(tag, 0, state.iteration + 1)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Write the scalars that are due after this step."""
        logging = self._plan.logging
        if state.iteration % logging.tensorboard_interval == 0:
            self._write_step(state, step)
        if logging.timers and state.iteration % logging.interval == 0:
            self._write_speed(state, step)
        for name in (ALLOCATED, RESERVED, RESIDENT, AVAILABLE):
            if name in step.measures:
                self._writer.add_scalar(f"memory/{name}", step.measures[name], state.iteration)

    def after_evaluation(
        self,
        name: str,
        loss: float,
        ppl: float,
        state: TrainState,
        *,
        others: Mapping[str, float] = {},
    ) -> None:
        """Write an evaluation on the data set `name`.

        Args:
            others: further terms of the loss, by their keys in the journal.
        """
        for key, value in others.items():
            series = f"lm-loss-validation/{name}/{key.replace('_', ' ')} validation"
            self._over_all(series, value, state)
        tag = f"lm-loss-validation/{name}/lm loss validation"
        self._over_all(tag, loss, state)
        self._over_flops(tag, loss, state)
        if self._plan.logging.validation_ppl:
            self._over_all(f"{tag} ppl", ppl, state)
            self._over_flops(f"{tag} ppl", ppl, state)
        self._writer.flush()

    def after_task(
        self, task: str, name: str, metrics: Mapping[str, float], state: TrainState
    ) -> None:
        """Write the metrics of a downstream task on its validation file `name`."""
        for metric, value in metrics.items():
            self._over_all(f"{task}-validation/{name}/{metric}", value, state)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the writer."""
        close_writer(self._writer, self._plan.logging)

    def _write_step(self, state: TrainState, step: StepResult) -> None:
        logging, writer = self._plan.logging, self._writer
        writer.add_scalar("steps-vs-samples/y=steps,x=samples", state.iteration, state.samples)
        writer.add_scalar("steps-vs-samples/y=samples,x=steps", state.samples, state.iteration)
        writer.add_scalar("steps-vs-tokens/y=steps,x=tokens", state.iteration, state.tokens)
        writer.add_scalar("steps-vs-tokens/y=tokens,x=steps", state.tokens, state.iteration)
        loss = step.measures.get(LM_LOSS, step.loss)
        self._over_all("lm-loss-training/lm loss", loss, state)
        self._over_flops("lm-loss-training/lm loss", loss, state)
        for name in (SOP_LOSS, MTP_LOSS, MOE_LOSS):
            if name in step.measures:
                self._over_all(f"lm-loss-training/{name}", step.measures[name], state)
        for name in (BUSIEST, LOAD_ENTROPY, DROPPED):
            if name in step.measures:
                self._over_all(f"experts/{name}", step.measures[name], state)
        if logging.learning_rate:
            self._over_all("learning-rate/learning-rate", step.lr, state)
            if step.embedding_lr is not None:
                tag = "learning-rate/decoupled-learning-rate"
                self._over_all(tag, step.embedding_lr, state)
        if logging.batch_size:
            tag = "batch-size/batch-size"
            writer.add_scalar(tag, step.batch_size, state.iteration)
            writer.add_scalar(f"{tag} vs samples", step.batch_size, state.samples)
        if logging.loss_scale and self._plan.precision.dtype == "fp16":
            self._over_all("loss-scale/loss-scale", step.loss_scale, state)
        if step.grad_norm is not None:
            self._over_all("grad-norm/grad-norm", step.grad_norm, state)
        for name in (NUM_ZEROS, PARAMS_NORM):
            if name in step.measures:
                tag = name.replace(" ", "-")
                self._over_all(f"{tag}/{tag}", step.measures[name], state)
        if SEQ_LENGTH in step.measures:
            writer.add_scalar("curriculum_seqlen", step.measures[SEQ_LENGTH], state.iteration)

    def _write_speed(self, state: TrainState, step: StepResult) -> None:
        plan = self._plan
        samples = step.batch_size / step.seconds
        tokens = samples * step.seq_length
        flops = samples * flops_per_sample(plan, step.seq_length)
        self._over_all("iteration-time/iteration-time", step.seconds, state)
        for tag, value in (
            ("samples per second", samples),
            ("samples per second per replica", samples / plan.parallel.data),
            ("tokens per second", tokens),
            ("tokens per second per replica", tokens / plan.parallel.data),
            ("TFLOPs per gpu (estimated)", flops / plan.parallel.world_size / 1e12),
        ):
            self._writer.add_scalar(f"iteration-time/{tag}", value, state.iteration)
        for name, seconds in times_in(step.measures).items():
            self._writer.add_scalar(f"time/{name}-time", seconds, state.iteration)

    def _over_all(self, tag: str, value: float, state: TrainState) -> None:
        self._writer.add_scalar(tag, value, state.iteration)
        self._writer.add_scalar(f"{tag} vs samples", value, state.samples)
        self._writer.add_scalar(f"{tag} vs tokens", value, state.tokens)

    def _over_flops(self, tag: str, value: float, state: TrainState) -> None:
        model = self._plan.model
        gigaflos = 6 * state.tokens * model.num_active_parameters_without_embeddings / 1e9
        self._writer.add_scalar(f"{tag} vs gigaflos (without embeddings)", value, int(gigaflos))
