"""A training run from its command line to its last checkpoint."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.config import Config
from megatron.engine.engine import Engine
from megatron.optim.schedule import learning_rate, weight_decay
from megatron.parallel.groups import Groups
from megatron.plan.plan import Plan, check, plan
from megatron.plan.tokenizer_plan import gpt_tokenizer_arguments
from megatron.preparation.views import view_of
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.fingerprint import describe, require_same
from megatron.training import setup
from megatron.training.environment import Launch
from megatron.training.evaluate import Batches, Evaluation
from megatron.training.journal import Journal
from megatron.training.loop import Hook, Schedule, train
from megatron.training.objective import GPT, Objective
from megatron.training.report import Report
from megatron.training.resume import resume
from megatron.training.save import Checkpoints, warn_of_others
from megatron.training.state import TrainState
from megatron.training.stop import Stop
from megatron.training.tensorboard import TensorBoard, build_writer

log = logging.getLogger(__name__)


def pretrain(
    config: Config,
    notices: Sequence[str],
    launch: Launch,
    device: torch.device,
    objective: Objective = GPT,
) -> None:
    """Train what `config` asks for, after telling the `notices` of its flags.

    Raises:
        MegatronError: something that the user can mend.
    """
    started_at = time.perf_counter()
    wished = gpt_tokenizer_arguments(config.tokenizer)
    check(
        config,
        world_size=launch.world_size,
        device=device.type,
        objective=objective.name,
        others=tokenizer_problems(**wished),
    )
    tokenizer = build_tokenizer(**wished)
    decided = plan(
        config,
        world_size=launch.world_size,
        vocab_size=tokenizer.vocab_size,
        device=device.type,
        objective=objective.name,
    )
    made_with = describe(tokenizer)
    for prefix in decided.data.prefixes:
        require_same(prefix, made_with)
    view = view_of(decided.objective, decided.masks, tokenizer, decided.training.seed)
    setup.start_processes(config, launch, device)
    log.info("time to initialize megatron (seconds): %.3f", time.perf_counter() - started_at)
    _tell(decided, notices)
    groups = setup.build_process_groups(decided)
    sets = setup.read_datasets(decided, view)
    _say_when("after dataloaders are built")
    engine = setup.build_gpt_engine(decided, groups, objective)
    _say_when("after model, optimizer, and learning rate scheduler are built")

    state = TrainState()
    warn_of_others(decided)
    if decided.checkpoint.load:
        decided = resume(engine, decided, state)
    batches = partial(
        setup.batches_of,
        plan=decided,
        objective=objective,
        eod=tokenizer.eod if decided.masks.needs_eod else None,
        groups=groups,
        device=device,
    )
    run = _Run(engine, decided, config, groups, state)
    run.train(
        batches(sets.train, consumed_samples=state.samples),
        {name: partial(batches, dataset) for name, dataset in sets.valid.items()},
        {name: partial(batches, dataset) for name, dataset in sets.test.items()},
    )


class _Run:
    """The hooks of a run, and what follows its last step."""

    def __init__(
        self, engine: Engine, plan: Plan, config: Config, groups: Groups, state: TrainState
    ):
        self.engine, self.plan, self.config, self.state = engine, plan, config, state
        speaks = groups.rank == 0
        saves = plan.checkpoint.save
        self.journal = Journal(Path(saves)) if speaks and saves else None
        self.tensorboard = (
            TensorBoard(build_writer(plan), plan, asdict(config), state)
            if speaks and plan.logging.tensorboard_dir
            else None
        )
        self.report = Report(plan, self.journal) if speaks else None
        started_from = state.iteration if plan.checkpoint.load == saves else -1
        self.checkpoints = (
            Checkpoints(engine, plan, config, saved=started_from or -1) if saves else None
        )

    def train(
        self, batches: Iterator[Any], valid: Mapping[str, Batches], test: Mapping[str, Batches]
    ) -> None:
        """Train to the end or to the reason to stop; then evaluate and save.

        Args:
            valid: validation sets by name.
            test: test sets by name.
        """
        evaluation = Evaluation(
            self.engine,
            valid,
            self.plan,
            journal=self.journal,
            tensorboard=self.tensorboard,
        )
        hooks: list[Hook | None] = [
            self.report,
            self.tensorboard,
            evaluation if valid else None,
            self.checkpoints,
        ]
        plan, state = self.plan, self.state
        started_from = state.iteration
        if self.journal:
            self.journal.write("start", {"iteration": started_from})
        _say_when("before the start of training step")
        reason = train(
            self.engine,
            batches,
            schedule=Schedule(
                lr=lambda state: learning_rate(getattr(state, plan.schedule.unit), plan.schedule),
                weight_decay=partial(
                    weight_decay, plan=plan.optimizer, train_samples=plan.training.train_samples
                ),
                batch_size=plan.batch.size_at,
                seq_length=plan.model.seq_length,
            ),
            state=state,
            hooks=[hook for hook in hooks if hook],
            stop=Stop(plan.training, started_from=started_from),
        )
        _say_when("after training is done")
        # A run that was done already is not evaluated once more on other samples.
        done_now = started_from < state.iteration >= plan.training.train_iters
        if done_now and valid:
            evaluation.validate(state, "the end of training for val data")
        if self.checkpoints:
            self.checkpoints.save(state)
        if done_now:
            evaluation.test(test, state)
        if self.tensorboard:
            self.tensorboard.close()
        if started_from >= plan.training.train_iters:
            reason += ": it was before; more --train-iters or --train-samples let it go on"
        log.info(reason)
        dist.barrier()
        dist.destroy_process_group()


def _tell(plan: Plan, notices: Sequence[str]) -> None:
    """Log what is about to be built."""
    model, parallel = plan.model, plan.parallel
    for notice in (*notices, *plan.notices):
        log.info(notice)
    log.info(
        " > padded vocab (size: %d) with %d dummy tokens (new size: %d)",
        model.vocab_size,
        model.padded_vocab_size - model.vocab_size,
        model.padded_vocab_size,
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
    log.info("setting training iterations to %d", plan.training.train_iters)


def _say_when(stage: str) -> None:
    log.info("[%s] datetime: %s ", stage, datetime.now().strftime("%Y-%m-%d %H:%M:%S"))
