"""A training run from its command line to its last checkpoint."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.config.config import Config
from megatron.errors import ExitCode
from megatron.fused_kernels.choose import Choice, package_problems
from megatron.plan.check import check
from megatron.plan.plan import Plan, plan
from megatron.plan.tokenizer_plan import gpt_tokenizer_arguments
from megatron.preparation.views import view_of
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.fingerprint import describe, require_same
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training import setup
from megatron.training.choose import choose
from megatron.training.environment import Launch
from megatron.training.failure import FailureFile
from megatron.training.flags_file import write_flags
from megatron.training.objective import GPT, Objective
from megatron.training.replay import quiet, replay
from megatron.training.requests import build_requests
from megatron.training.resume import resume
from megatron.training.run import Run, say_when
from megatron.training.save import sole_writer, warn_of_others
from megatron.training.state import TrainState
from megatron.training.stream import Stream, length_of_next_step
from megatron.training.watchdog import Watchdog
from megatron.training.writers import writer_problems

log = logging.getLogger(__name__)


def pretrain(
    config: Config,
    notices: Sequence[str],
    launch: Launch,
    device: torch.device,
    objective: Objective = GPT,
    watchdog: Watchdog | None = None,
) -> ExitCode:
    """Train what `config` asks for, after telling the `notices` of its flags; return how it ended.

    Args:
        watchdog: is told what the run does; one that looks at nothing when None.

    Raises:
        MegatronError: something that the user can mend.
    """
    started_at = time.perf_counter()
    tokenizer, decided = _decide(config, launch, device, objective)
    kernels, choices = setup.choose(decided, device)
    view = view_of(decided.objective, decided.masks, tokenizer, decided.training.seed)
    watchdog = watchdog or Watchdog(FailureFile(decided.checkpoint.save), rank=launch.rank)
    setup.start_processes(
        config,
        launch,
        device,
        deterministic=decided.training.deterministic,
        timeout_minutes=decided.watch.group_timeout_minutes,
    )
    requests = build_requests(
        decided.training,
        save=decided.checkpoint.save,
        rank=launch.rank,
        started_at=started_at,
        is_launcher_lost=watchdog.is_launcher_lost,
    )
    watchdog.saves_when_lost = decided.training.exits_on_signal
    if wish := requests.agree()[0]:
        log.info(wish.reason())
        dist.barrier()
        return wish.exit_code
    log.info("time to initialize megatron (seconds): %.3f", time.perf_counter() - started_at)
    _tell(decided, notices, choices)
    if launch.rank == 0 and decided.logging.flags_directory:
        write_flags(decided.logging.flags_directory, asdict(config))
    with sole_writer(decided):
        watchdog.failures.own(tidies=launch.rank == 0)
        warn_of_others(decided)
        # Before anything slow: a checkpoint of another run is told at once.
        chosen = choose(decided) if decided.checkpoint.load else None
        groups = setup.build_process_groups(decided)
        sets = setup.read_datasets(decided, view)
        say_when("after dataloaders are built")
        engine = setup.build_gpt_engine(decided, groups, objective, kernels)
        say_when("after model, optimizer, and learning rate scheduler are built")
        setup.watch(watchdog, decided.watch, Path(decided.checkpoint.save))
        state = TrainState()
        if chosen:
            with watchdog.during("loading", longer=True):
                decided = resume(engine, decided, state, chosen)
        batches = partial(
            setup.batches_of,
            plan=decided,
            objective=objective,
            eod=tokenizer.eod if decided.masks.needs_eod else None,
            groups=groups,
            device=device,
        )
        lengths = decided.curriculum
        length = length_of_next_step(lengths.length_at, state) if lengths.schedule else None
        train_batches = partial(batches, sets.train, length=length)
        if decided.guards.replay_step:
            stream = Stream(train_batches, state.samples)
            replay(engine, decided, state, stream, samples=sets.train, tokenizer=tokenizer)
            dist.barrier()
            return ExitCode.FINISHED
        run = Run(
            engine,
            decided,
            config,
            groups,
            state,
            valid={name: partial(batches, dataset) for name, dataset in sets.valid.items()},
            test={name: partial(batches, dataset) for name, dataset in sets.test.items()},
            watchdog=watchdog,
        )
        code = ExitCode.FINISHED
        if decided.evaluation.only:
            run.evaluate()
        else:
            code = run.train(train_batches, launch, requests)
    dist.barrier()
    dist.destroy_process_group()
    return code


def _decide(
    config: Config, launch: Launch, device: torch.device, objective: Objective
) -> tuple[Tokenizer, Plan]:
    """Return the tokenizer of the data and what will be built and run.

    Raises:
        MegatronError: lists all that cannot be done as asked.
    """
    wished = gpt_tokenizer_arguments(config.tokenizer)
    check(
        config,
        world_size=launch.world_size,
        device=device.type,
        objective=objective.name,
        others=chain(
            tokenizer_problems(**wished),
            writer_problems(config.logging),
            package_problems(config.kernels),
        ),
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
    return tokenizer, quiet(decided) if decided.guards.replay_step else decided


def _tell(plan: Plan, notices: Sequence[str], choices: Sequence[Choice]) -> None:
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
    for choice in choices:
        log.info("%s", choice)
    if model.num_experts:
        log.info(
            "estimated model parameters without embeddings that a token passes through: %.6f B",
            model.num_active_parameters_without_embeddings / 1e9,
        )
    log.info("setting training iterations to %d", plan.training.train_iters)
