"""A training run: its steps with their hooks, the last save and the last evaluations."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpointing.publish import tidy
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import DataError, ExitCode, TrainingError, before_the_first_step
from megatron.common.registry import FLAG_HOOKS, HOOKS, METRICS
from megatron.common.standard_streams import lost_output
from megatron.config.config import Config
from megatron.config.optimization.lr_schedule import SchedulePlan
from megatron.config.plan.plan import Plan
from megatron.config.plugins import hooks_of_sections
from megatron.engine.engine import Engine
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.evaluate import Evaluation
from megatron.training.guards.loss_spikes import Spike, SpikeGuard, go_back, steps_before
from megatron.training.guards.nan_guard import NanGuard
from megatron.training.guards.replica_check import ReplicaCheck
from megatron.training.guards.skip_samples import Skip
from megatron.training.guards.stop import Requests, Stop
from megatron.training.loop.batch_stream import Batches, Stream
from megatron.training.loop.collectives import from_rank_0
from megatron.training.loop.epochs import EpochHook
from megatron.training.loop.journal import END, Journal
from megatron.training.loop.loop import Hook, Meter, Schedule, StepResult, require_hooks, train
from megatron.training.process.environment import Launch
from megatron.training.process.flags_file import given_flags
from megatron.training.process.watchdog import Watchdog
from megatron.training.telemetry.energy import Energy
from megatron.training.telemetry.meters import build_meters
from megatron.training.telemetry.profile import Profile
from megatron.training.telemetry.report import PluginMetrics, Report, peak_flops_of
from megatron.training.telemetry.slow_ranks import SlowRanks
from megatron.training.telemetry.step_records import StepRecords
from megatron.training.telemetry.tensorboard import TensorBoard
from megatron.training.telemetry.writers import build_writer

log = logging.getLogger(__name__)


class Run:
    """A training run: an engine, its plan and its hooks.

    Args:
        state: where the run resumes.
        valid: validation sets by name.
        test: test sets by name.
        watchdog: notified of the run's progress.
        hooks: act around steps, after the hooks of the run and of --hook.
        epochs: returns what acts after each epoch of this run, if its data have such.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        config: Config,
        groups: Groups,
        state: TrainState,
        *,
        valid: Mapping[str, Batches],
        test: Mapping[str, Batches],
        watchdog: Watchdog,
        hooks: Sequence[Hook] = (),
        epochs: Callable[[Any], EpochHook | None] = lambda run: None,
    ):
        self.engine, self.plan, self.config, self.groups = engine, plan, config, groups
        self.state, self.valid, self.test, self.watchdog = state, valid, test, watchdog
        self._checkpoints: Checkpoints | None = None
        is_rank_0, saves = groups.rank == 0, plan.checkpoint.save
        self.journal = Journal(Path(saves)) if is_rank_0 and saves else None
        plugins = plan.plugins
        plugin_hooks = [HOOKS.get(name, plugins.own_flags)(self) for name in plugins.hooks]
        require_hooks(plugin_hooks, f"--hook {' '.join(plugins.hooks)}:")
        flag_hooks = [FLAG_HOOKS.get(name)(self) for name in hooks_of_sections(config.extensions)]
        self._own_hooks = [*flag_hooks, *plugin_hooks, *hooks]
        writer = build_writer(plan.logging, asdict(config)) if is_rank_0 else None
        self.tensorboard = TensorBoard(writer, plan, asdict(config), state) if writer else None
        self.evaluation = Evaluation(
            engine,
            valid,
            plan,
            journal=self.journal,
            tensorboard=self.tensorboard,
            after_batch=watchdog.record_progress,
        )
        self.epochs = epochs(self)

    def evaluate(self) -> None:
        """Evaluate on the validation and test sets, or as after an epoch, and do nothing else."""
        if self.epochs:
            with self.watchdog.during("evaluation"):
                self.epochs.predict(self.state)
        else:
            self._evaluate_at_end()
        if self.tensorboard:
            self.tensorboard.close()

    def _evaluate_at_end(self) -> None:
        with self.watchdog.during("evaluation"):
            self.evaluation.validate_at_end(self.state)
            self.evaluation.test(self.test, self.state)

    def train(self, batches: Batches, launch: Launch, requests: Requests) -> ExitCode:
        """Train to the end or to a reason to stop, which is logged; save and evaluate.

        A checkpoint that is being written in the background when that fails is finished first.

        Args:
            batches: the training data.
            requests: from outside the process, to save or to stop.
        """
        try:
            return self._train(batches, launch, requests)
        except Exception as error:
            if self._checkpoints:
                # The cause first: what follows may take long.
                self.watchdog.write_down(error)
                with self.watchdog.during("save", longer=True):
                    self._checkpoints.rescue()
            raise

    def _train(self, batches: Batches, launch: Launch, requests: Requests) -> ExitCode:
        plan, state = self.plan, self.state
        started_from = state.iteration
        saved = started_from if plan.checkpoint.load == plan.checkpoint.save else -1
        if saved > 0:
            from_rank_0(lambda: tidy(Path(plan.checkpoint.save), saved))
        if plan.checkpoint.save:
            saving = self.engine
            for hook in self._own_hooks:
                saving = hook.for_saves(saving)
            epoch = self.epochs.steps if self.epochs else 0
            self._checkpoints = Checkpoints(
                saving, plan, self.config, saved=saved or -1, epoch=epoch
            )
            self.watchdog.before_leaving = self._checkpoints.rescue
        checkpoints = self._checkpoints
        stream = Stream(batches, state.samples)
        energy = _build_energy(plan, self.groups.rank, launch)
        profile = _build_profile(plan, self.groups.rank)

        def save(state: TrainState, *, leaves: bool = False) -> bool:
            if not checkpoints or not state.iteration:
                return True
            with self.watchdog.during("save", longer=True):
                is_saved = checkpoints.save(state)
                checkpoints.finish()
                if leaves:
                    checkpoints.verify()
                return is_saved

        stop = Stop(plan.training, started_from=started_from, requests=requests, save=save)
        self.evaluation.stop_when(lambda: requests.agree()[0] is not None)
        if self.journal:
            around = checkpoints.system_info if checkpoints else {}
            self.journal.start(started_from, around, given_flags(self.config))
        if self.epochs and saved > 0:
            with self.watchdog.during("evaluation", longer=True):
                self.epochs.catch_up(state)
        log_phase("before the start of training step")
        meters: list[Meter] = [*build_meters(self.engine, plan), *self._slow_ranks()]
        meters += [energy] if energy else []
        meters.append(self._plugin_metrics())
        reason = self._take_steps(stream, stop, meters, profile, checkpoints)
        if self.epochs and self.epochs.progress:
            self.epochs.progress.close()
        log_phase("after training is done")
        was_done = started_from == state.iteration and stop.is_done(state)
        # Before the evaluations, so that an error in one of them loses no step. What was done before
        # is neither copied to another directory, nor evaluated once more on other samples.
        if not (was_done and saved < 0) and not save(state, leaves=True):
            reason = self._without_save(reason, stop)
        if stop.is_done(state) and not was_done:
            self._evaluate_at_end()
        requests.ignore()
        for closing in (profile, energy):
            if closing:
                closing.close(state)
        if was_done:
            reason += f": it was before; more {self._length_flags()} continue it"
        return self._end(reason, stop.exit_code)

    def _length_flags(self) -> str:
        return "--epochs" if self.epochs else "--train-iters or --train-samples"

    def _end(self, reason: str, code: ExitCode) -> ExitCode:
        """Log and record why the run ends; return its exit code."""
        if self.tensorboard:
            self.tensorboard.close()
        log.info(reason)
        if self.journal:
            ending = {"iteration": self.state.iteration, "reason": reason}
            lost = {"lost_output": output} if (output := lost_output()) else {}
            self.journal.write(END, {**ending, "exit_code": int(code), **lost})
        return code

    def _plugin_metrics(self) -> PluginMetrics:
        plugins = self.plan.plugins
        return PluginMetrics(
            {name: METRICS.get(name, plugins.own_flags)(self) for name in plugins.metrics}
        )

    def _without_save(self, reason: str, stop: Stop) -> str:
        """Return `reason` with the consequence of a newest step that could not be saved.

        Raises:
            TrainingError: the run would say that it is finished.
        """
        assert self._checkpoints  # nothing else refuses to save
        message = f"{reason}, without a save: the loss or gradient of iteration "
        message += f"{self.state.iteration} is not finite{self._checkpoints.advice()}"
        if stop.exit_code == ExitCode.FINISHED:
            raise TrainingError(message)
        return message

    def _take_steps(
        self,
        stream: Stream,
        stop: Stop,
        meters: Sequence[Meter],
        profile: Profile | None,
        checkpoints: Checkpoints | None,
    ) -> str:
        """Take steps, with rollbacks after loss spikes, until `stop` gives a reason; return it.

        Damaged data before the first step would be read again by another attempt.
        """
        started_from = self.state.iteration
        while True:
            try:
                return train(
                    self.engine,
                    stream,
                    schedule=schedule_of(self.plan),
                    state=self.state,
                    hooks=self._hooks(stream, profile, checkpoints),
                    meters=meters,
                    stop=stop,
                )
            except Spike as spike:
                self._go_back(spike, stream, checkpoints)
            except DataError:
                if self.state.iteration != started_from:
                    raise
                with before_the_first_step():
                    raise

    def _go_back(self, spike: Spike, stream: Stream, checkpoints: Checkpoints | None) -> None:
        assert checkpoints  # a policy needs --save
        with self.watchdog.during("going back", longer=True):
            checkpoints.finish()
            go_back(self.engine, self.plan, self.state, spike, self.journal)
            checkpoints.rewind_to(self.state.iteration)
            stream.seek(self.state.samples)

    def _hooks(
        self, stream: Stream, profile: Profile | None, checkpoints: Checkpoints | None
    ) -> list[Hook]:
        plan, watchdog = self.plan, self.watchdog
        hooks: list[Hook | None] = [
            StepProgress(watchdog),
            self.epochs and self.epochs.progress,
            Skip(
                plan.training.skips,
                train_iters=plan.training.train_iters,
                batch_size=plan.batch.size_at,
                stream=stream,
            ),
            profile,
            Report(plan, self.journal, peak_flops=peak_flops_of(plan))
            if self.groups.rank == 0
            else None,
            StepRecords(self.journal) if self.journal else None,
            self.tensorboard,
            # Before a hook evaluates or saves what they refuse.
            *self._guards(checkpoints),
            WatchedHook(self.evaluation, watchdog, "evaluation") if self.valid else None,
            WatchedHook(checkpoints, watchdog, "save", longer=True) if checkpoints else None,
            # After the save of an epoch, so that an error in it loses no step.
            WatchedHook(self.epochs, watchdog, "evaluation", longer=True) if self.epochs else None,
            *self._own_hooks,
        ]
        return [hook for hook in hooks if hook]

    def _slow_ranks(self) -> Iterator[Meter]:
        if factor := self.plan.logging.slow_rank_factor:
            yield SlowRanks(
                factor,
                interval=self.plan.logging.interval,
                take=self.engine.pop_rank_times,
                groups=self.groups,
                journal=self.journal,
            )

    def _guards(self, checkpoints: Checkpoints | None) -> Iterator[Hook]:
        plan = self.plan
        if plan.guards.spikes.is_on:
            before = steps_before(Path(plan.checkpoint.save), plan.guards.spikes)
            yield SpikeGuard(plan.guards.spikes, before)
        if most := plan.training.max_nan_steps:
            advice = checkpoints.advice if checkpoints else lambda: ""
            yield NanGuard(most, seeks_scale=plan.precision.dtype == "fp16", advice=advice)
        if interval := plan.training.replica_check_interval:
            yield ReplicaCheck(
                self.engine,
                self.groups,
                interval=interval,
                streams_per_tensor_rank=plan.parallel.sequence_parallel,
            )


class StepProgress(Hook):
    """Report each step to the watchdog."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog

    def before_step(self, state: TrainState) -> None:
        """Report which step begins."""
        self._watchdog.enter_step(state.iteration + 1)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Report that it is done."""
        self._watchdog.record_progress()


class WatchedHook(Hook):
    """Wrapper of a hook that names its stage to the watchdog.

    Args:
        stage: name of what the hook does.
        longer: whether it may take longer than a step.
    """

    def __init__(self, hook: Hook, watchdog: Watchdog, stage: str, *, longer: bool = False):
        self._hook, self._watchdog, self._stage, self._longer = hook, watchdog, stage, longer

    def before_step(self, state: TrainState) -> None:
        """Call the hook."""
        self._hook.before_step(state)

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Call the hook, as a separate stage."""
        with self._watchdog.during(self._stage, longer=self._longer):
            self._hook.after_step(state, step)


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedules of the run's steps."""

    def rate(schedule: SchedulePlan) -> Callable[[TrainState], float]:
        return lambda state: learning_rate(schedule, samples=state.samples, tokens=state.tokens)

    embedding = plan.schedule.of_embeddings
    return Schedule(
        lr=rate(plan.schedule),
        embedding_lr=rate(embedding) if embedding else None,
        weight_decay=partial(
            weight_decay, plan=plan.optimizer, train_samples=plan.training.train_samples
        ),
        batch_size=plan.batch.size_at,
        seq_length=plan.curriculum.length_at,
    )


def log_phase(stage: str) -> None:
    """Log that `stage` is reached, and when."""
    log.info("[%s] datetime: %s ", stage, datetime.now().strftime("%Y-%m-%d %H:%M:%S"))


def _build_energy(plan: Plan, rank: int, launch: Launch) -> Energy | None:
    if not plan.logging.energy.directory:
        return None
    return Energy(
        plan.logging.energy,
        rank=rank,
        measures=launch.local_rank == 0,
        interval=plan.logging.interval,
    )


def _build_profile(plan: Plan, rank: int) -> Profile | None:
    wanted = plan.logging.profile
    return Profile(wanted, rank=rank) if wanted.directory and rank in wanted.ranks else None
