"""A training run from its command line to its last checkpoint."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import (
    ExitCode,
    WrongCheckpointError,
    before_the_first_step,
    raise_if_any,
)
from megatron.config.checks.start import Start
from megatron.config.config import Config
from megatron.config.objectives import objective_tokenizer_arguments
from megatron.config.plan.plan import Plan, resolve
from megatron.config.plan.validation import validate
from megatron.data.datasets.datasets import view_of
from megatron.data.datasets.run_datasets import Datasets
from megatron.engine.engine import Engine
from megatron.fused_kernels.reference.dispatch import Kernels
from megatron.fused_kernels.registry import Choice, package_problems
from megatron.objectives.objective import Objective
from megatron.tensor_parallel.process_groups import Groups
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.fingerprint import common_chat_template, describe, require_same
from megatron.tokenizer.types.tokenizer import Tokenizer
from megatron.training import setup
from megatron.training.checkpoints.checkpoint_choice import (
    Chosen,
    choose_checkpoint,
    with_saved_softmax,
    with_weights_of,
)
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save_directory import require_own, sole_writer
from megatron.training.checkpoints.start_in_place import with_start_in_place
from megatron.training.guards.stop import Requests, build_requests
from megatron.training.loop.batch_stream import Batches, Stream, length_of_next_step
from megatron.training.loop.collectives import from_rank_0, post, scatter
from megatron.training.loop.loop import Hook
from megatron.training.process.dead_ranks import Peers, by_host, this_process
from megatron.training.process.environment import Launch
from megatron.training.process.flags_file import write_flags
from megatron.training.process.watchdog import Watchdog
from megatron.training.replay import quiet, replay
from megatron.training.run import Run, log_phase
from megatron.training.telemetry.forecast import memory_warning
from megatron.training.telemetry.writers import writer_problems

log = logging.getLogger(__name__)


def pretrain(
    start: Start,
    launch: Launch,
    device: torch.device,
    objective: Objective,
    watchdog: Watchdog,
    *,
    notices: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
) -> ExitCode:
    """Train by a config, after logging the `notices` of its flags; return the exit code.

    Args:
        start: the config, prepared and validated, perhaps for another device.
        watchdog: notified of the run's progress.
        hooks: act around steps, after the hooks of --hook.

    Raises:
        MegatronError: a user error.
    """
    started_at = time.perf_counter()
    config = start.config
    tokenizer, decided = _decide(start, launch, device)
    setup.use_device(device, launch, deterministic=decided.training.deterministic)
    _meet_others(config, decided, launch, device, watchdog)
    kernels, choices = setup.choose(decided, device)
    requests = build_requests(
        decided.training,
        save=decided.checkpoint.save,
        rank=launch.rank,
        started_at=started_at,
        is_launcher_lost=watchdog.is_launcher_lost,
    )
    if request := requests.agree()[0]:
        log.info(request.reason())
        dist.barrier()
        return request.exit_code
    log.info("time to initialize megatron (seconds): %.3f", time.perf_counter() - started_at)
    _log_plan(decided, notices, choices)
    if warning := memory_warning(decided, device, processes=launch.local_size):
        log.warning(warning)
    if config.parallel.elastic:
        _log_replicas(decided, launch)
    if launch.rank == 0 and decided.logging.flags_directory:
        write_flags(decided.logging.flags_directory, asdict(config))
    code = ExitCode.FINISHED
    watchdog.enter_stage("taking the lock of --save")
    with sole_writer(decided):
        from_rank_0(watchdog.failures.put_stale_away)
        decided = with_start_in_place(decided, config)
        require_own(decided)
        requested = config.tokenizer.padded_vocab_in_softmax
        job = _build(decided, requested, tokenizer, objective, kernels, device, watchdog)
        if job.plan.guards.replay_step:
            job.replay(tokenizer)
        else:
            code = job.run(config, launch, requests, watchdog, hooks)
    dist.barrier()
    dist.destroy_process_group()
    return code


def _meet_others(
    config: Config, plan: Plan, launch: Launch, device: torch.device, watchdog: Watchdog
) -> None:
    """Join the other processes, and watch from now on whether one dies or hangs.

    Communication: waits for every rank.
    """
    watchdog.enter_stage("meeting the other processes")
    setup.start_processes(
        config,
        launch,
        device,
        timeout_minutes=plan.watch.group_timeout_minutes,
        look=watchdog.raise_if_over,
    )
    posted = post(this_process(launch.rank))
    (others,) = scatter(by_host(posted.all()) if launch.rank == 0 else None)
    watchdog.set_peers(Peers(*others), world_size=launch.world_size)
    watchdog.follows_peers = launch.world_size > 1
    watchdog.failures.follow(posted.of(0))
    setup.watch(watchdog, plan.watch, Path(plan.checkpoint.save))
    watchdog.saves_when_lost = plan.training.exits_on_signal
    watchdog.enter_stage("choosing kernels")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Objects built from a plan."""

    plan: Plan
    engine: Engine
    groups: Groups
    objective: Objective
    state: TrainState
    sets: Datasets
    batches: Callable[..., Iterator[Any]]  # of a set, from a sample on

    def train_batches(self) -> Batches:
        """Return the micro-batches of the training set, each as long as its step wants it."""
        lengths = self.plan.curriculum
        length = length_of_next_step(lengths.length_at, self.state) if lengths.schedule else None
        return partial(self.batches, self.sets.train, length=length)

    def replay(self, tokenizer: Tokenizer) -> None:
        """Take the steps up to --replay-step again, and compare that one with the journal."""
        stream = Stream(self.train_batches(), self.state.samples)
        samples = self.sets.train
        replay(self.engine, self.plan, self.state, stream, samples=samples, tokenizer=tokenizer)

    def run(
        self,
        config: Config,
        launch: Launch,
        requests: Requests,
        watchdog: Watchdog,
        hooks: Sequence[Hook],
    ) -> ExitCode:
        """Train, or only evaluate, with a journal, TensorBoard and hooks; return the exit code."""
        run = self._build_run(config, watchdog, hooks)
        if not self.plan.evaluation.only:
            return run.train(self.train_batches(), launch, requests)
        run.evaluate()
        return ExitCode.FINISHED

    def _build_run(self, config: Config, watchdog: Watchdog, hooks: Sequence[Hook]) -> Run:
        valid, test = (
            {
                name: partial(self.batches, dataset, batch=self.plan.evaluation.batch)
                for name, dataset in sets.items()
            }
            for sets in (self.sets.valid, self.sets.test)
        )
        return Run(
            self.engine,
            self.plan,
            config,
            self.groups,
            self.state,
            valid=valid,
            test=test,
            watchdog=watchdog,
            hooks=hooks,
            epochs=partial(self.objective.epochs, sets=self.sets, batches=self.batches),
        )


def _build(
    plan: Plan,
    padding_counts: bool | None,
    tokenizer: Tokenizer,
    objective: Objective,
    kernels: Kernels,
    device: torch.device,
    watchdog: Watchdog,
) -> _Job:
    """Build the objects of `plan`, and resume from a checkpoint if there is one.

    Args:
        padding_counts: --padded-vocab-in-softmax; None: as in the run that is continued.

    Communication: every rank must call this, in step.
    """
    # Before anything slow: a checkpoint of another run is refused at once.
    watchdog.enter_stage("choosing a checkpoint")
    initial = objective.initial_weights(plan.objective)
    chosen, pretrained = _choose_checkpoints(plan, initial)
    plan = _decide_softmax(plan, padding_counts, chosen)
    watchdog.enter_stage("making process groups")
    groups = setup.build_process_groups(plan)
    watchdog.enter_stage("reading index maps")
    sets = _read_sets(plan, objective, tokenizer)
    log_phase("after dataloaders are built")
    watchdog.enter_stage("building the engine")
    engine = setup.build_engine(plan, groups, objective, kernels)
    log_phase("after model, optimizer, and learning rate scheduler are built")
    state = TrainState()
    if chosen:
        watchdog.enter_stage("loading")
        uses = sets.uses["train", plan.data.train.name]
        plan = resume(engine, plan, state, chosen, uses=uses)
    elif pretrained:
        watchdog.enter_stage("loading")
        resume(engine, with_weights_of(plan, initial), TrainState(), pretrained)
    watchdog.enter_stage("starting to train")
    batches = partial(
        setup.batches_of,
        plan=plan,
        objective=objective,
        eod=tokenizer.eod if plan.masks.needs_eod else None,
        groups=groups,
        device=device,
    )
    return _Job(
        plan=plan,
        engine=engine,
        groups=groups,
        objective=objective,
        state=state,
        sets=sets,
        batches=batches,
    )


def _choose_checkpoints(plan: Plan, initial: str) -> tuple[Chosen | None, Chosen | None]:
    """Return the checkpoint that a run resumes from, or whose weights it starts with.

    Args:
        initial: directory of the latter; "": none.

    Raises:
        WrongCheckpointError: there is none to evaluate.

    Communication: every rank must call this, in step.
    """
    chosen = choose_checkpoint(plan) if plan.checkpoint.load else None
    pretrained = None
    if initial and not chosen:
        weights = with_weights_of(plan, initial)
        pretrained = choose_checkpoint(weights, flag="--pretrained-checkpoint")
    if plan.evaluation.only and not (chosen or pretrained):
        raise WrongCheckpointError(
            f"--load {plan.checkpoint.load} holds no checkpoint to evaluate; give the directory that "
            "a run saved to with --save"
        )
    return chosen, pretrained


def _decide_softmax(plan: Plan, padding_counts: bool | None, chosen: Chosen | None) -> Plan:
    """Return the plan whose softmax has padded columns if flags say so, or the run that goes on."""
    if chosen and padding_counts is None and plan.checkpoint.loads_progress:
        plan = with_saved_softmax(plan, chosen.manifest)
    if plan.model.vocabulary.padded_vocab_in_softmax:
        log.info(
            "padded vocabulary columns take part in the softmax, as in Megatron-LM; "
            "--padded-vocab-in-softmax False leaves them out"
        )
    return plan


def _read_sets(plan: Plan, objective: Objective, tokenizer: Tokenizer) -> Datasets:
    """Return the data of `objective`: the data sets that it builds, or views of token files."""
    with before_the_first_step():
        sets = objective.datasets(setup.data_request(plan), tokenizer)
        if sets is not None:
            return sets
        view = view_of(plan.objective, plan.masks, tokenizer, plan.training.seed)
        return setup.read_datasets(plan, view)


def _decide(start: Start, launch: Launch, device: torch.device) -> tuple[Tokenizer, Plan]:
    """Return the tokenizer of the data and the plan of the run.

    Raises:
        MegatronError: lists every option that cannot be met.
    """
    config = start.config
    requested = objective_tokenizer_arguments(config.tokenizer, start.objective)
    others = chain(
        tokenizer_problems(**requested), writer_problems(config.logging), package_problems(config)
    )
    if start.device == device.type:
        raise_if_any(others)
    else:
        start = validate(
            config,
            world_size=launch.world_size,
            device=device.type,
            objective=start.objective,
            done=start.done,
            others=others,
        )
    with before_the_first_step():
        tokenizer = build_tokenizer(**requested)
    decided = resolve(start, vocab_size=tokenizer.vocab_size)
    made_with = describe(tokenizer, requested)
    for prefix in decided.data.prefixes:
        require_same(prefix, made_with)
    template = common_chat_template(decided.data.prefixes)
    decided = replace(decided, data=replace(decided.data, chat_template=template))
    return tokenizer, quiet(decided) if decided.guards.replay_step else decided


def _log_replicas(plan: Plan, launch: Launch) -> None:
    """Log how many replicas train, and which processes are left over."""
    batch, size = plan.batch, launch.world_size
    log.info(
        "elastic: %d processes train as %d replicas, of %d micro-batches of %d a step of %d samples",
        *(size, plan.parallel.data, batch.num_micro_batches(batch.global_batch_size)),
        *(batch.micro_batch_size, batch.global_batch_size),
    )
    if launch.spares:
        log.warning(
            "elastic: the last %d of %d processes (from rank %d on) wait for the end of the run: no "
            "larger number of replicas divides its batches",
            *(launch.spares, launch.processes, size),
        )


def _log_plan(plan: Plan, notices: Sequence[str], choices: Sequence[Choice]) -> None:
    """Log the plan before it is built."""
    model, parallel = plan.model, plan.parallel
    for notice in (*notices, *plan.notices):
        log.info(notice)
    log.info(
        " > padded vocab (size: %d) with %d dummy tokens (new size: %d)",
        model.vocabulary.vocab_size,
        model.vocabulary.padded_vocab_size - model.vocabulary.vocab_size,
        model.vocabulary.padded_vocab_size,
    )
    log.info(
        "using world size: %d, data-parallel-size: %d, tensor-model-parallel size: %d, "
        "pipeline-model-parallel size: %d, ZeRO stage: %d, precision: %s",
        parallel.world_size,
        parallel.data,
        parallel.tensor,
        parallel.pipeline,
        parallel.zero_stage,
        plan.precision.dtype,
    )
    log.info("estimated model parameters: %.6f B", model.num_parameters / 1e9)
    log.info(
        "estimated model parameters without embeddings: %.6f B",
        model.num_parameters_without_embeddings / 1e9,
    )
    for choice in choices:
        log.info("%s", choice)
    if model.moe:
        log.info(
            "estimated model parameters without embeddings that a token passes through: %.6f B",
            model.num_active_parameters_without_embeddings / 1e9,
        )
    log.info("setting training iterations to %d", plan.training.train_iters)
