"""Validation of a config: every problem at once, and notices, before anything is built."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from megatron.common.errors import ConfigError
from megatron.config.checks.latent import latent_problems
from megatron.config.checks.lora import lora_problems
from megatron.config.checks.network import (
    implementation_problems,
    layout_problems,
    loss_problems,
    network_problems,
    own_flag_problems,
    sample_problems,
)
from megatron.config.checks.prediction import prediction_problems
from megatron.config.checks.run import run_problems
from megatron.config.checks.sequence import padding_problems, sequence_problems
from megatron.config.checks.start import Start
from megatron.config.checks.steps import elastic_problems, length_problems, step_problems
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.data.tokenizer import vocab_notices
from megatron.config.network.kernels import plan_kernels
from megatron.config.network_contract import option_problems
from megatron.config.objectives import objective_notices, objective_problems
from megatron.config.optimization.batch_size import NO_PROGRESS, Progress
from megatron.config.optimization.lr_schedule import warmup_notices
from megatron.config.optimization.optimizer import optimizer_problems
from megatron.config.parallelism.deepspeed_json import checked_ds_config
from megatron.config.parallelism.deepspeed_keys import key_notices
from megatron.config.parallelism.layout import parallel_notices, replica_size, uses_ring
from megatron.config.parallelism.precision import precision_notices
from megatron.config.parallelism.recompute import (
    plan_recompute,
    recompute_notices,
    recompute_problems,
)
from megatron.config.parallelism.zero import zero_notices
from megatron.config.plugins import plugin_problems
from megatron.config.run.checkpoint import checkpoint_notices

Check = Callable[[Start], Iterable[str]]

CHECKS: tuple[Check, ...] = (
    network_problems,
    latent_problems,
    lora_problems,
    layout_problems,
    implementation_problems,
    lambda start: optimizer_problems(start.config.optimizer, device=start.device),
    lambda start: start.declaration.data_problems(start.config),
    run_problems,
    lambda start: recompute_problems(start.config.recompute),
    lambda start: start.storage.problems,
)
"""Checks of every config."""

CHECKS_OF_OBJECTIVE: tuple[Check, ...] = (
    lambda start: plugin_problems(partial(_value_of, start), start.config.extensions),
    lambda start: objective_problems(start.config, start.objective),
    loss_problems,
    prediction_problems,
    sequence_problems,
    padding_problems,
    own_flag_problems,
    sample_problems,
)
"""Checks of what the objective and its network take; their problems are listed last."""


def validate(
    config: Config,
    *,
    world_size: int,
    device: str,
    objective: ObjectiveName = "gpt",
    done: Progress = NO_PROGRESS,
    others: Iterable[str] = (),
) -> Start:
    """Refuse a config that no vocabulary can make valid, before anything slow is started.

    A GPU accepts whatever a CPU accepts: what is wrong with "cuda" is wrong on every device.

    Args:
        world_size: processes that are started; under --elastic perhaps not all of them train.
        objective: what the entry script trains.
        done: of the checkpoint that the run resumes from.
        others: problems found elsewhere, to be listed with these.

    Raises:
        ConfigError: lists every problem.
    """
    user, problems = checked_ds_config(config.deepspeed.deepspeed_config)
    start = Start(
        config=config,
        deepspeed=user,
        world_size=world_size,
        device=device,
        objective=objective,
        done=done,
    )
    if config.parallel.elastic:
        problems += elastic_problems(start)
        start = _elastic_start(start)
    problems += chain(_problems(start), others)
    if not problems:
        problems += option_problems(start.network, config)
    if problems:
        raise ConfigError(*problems)
    return start


def _problems(start: Start) -> Iterator[str]:
    wrong_lengths = [*length_problems(start)]
    for check in CHECKS:
        yield from check(start)
    # A schedule counted in wrong units has no path that could be checked.
    yield from wrong_lengths or step_problems(start)
    for check in CHECKS_OF_OBJECTIVE:
        yield from check(start)


def _elastic_start(start: Start) -> Start:
    """Return the start on as many processes as can train under --elastic: the most that are possible.

    If none can, on the most that divide the batches: then only the other problems are listed.
    """
    replica = replica_size(start.config.parallel)
    counts = range(start.world_size // replica, 0, -1)
    smaller = [replace(start, world_size=count * replica) for count in counts]
    fitting = [each for each in smaller if not any(length_problems(each))]
    parallel = replace(start.config.parallel, elastic=False, world_size=None)
    for each in fitting:
        fixed = replace(each, config=replace(start.config, parallel=parallel))
        if not any(chain(_problems(fixed), option_problems(fixed.network, fixed.config))):
            return each
    return next(iter(fitting), start)


def _value_of(start: Start, section: str, field: str) -> Any:
    if (section, field) == ("plugins", "objective"):
        return start.objective
    return getattr(getattr(start.config, section), field)


def plan_notices(start: Start, padded_vocab_size: int, objective: ObjectivePlan) -> Iterator[str]:
    """Yield notices about the interpretation of a valid config."""
    config = start.config
    yield from parallel_notices(config.parallel, seq_length=config.model.seq_length)
    yield from _other_effect_notices(config)
    if not start.declaration.has_epochs:
        yield from checkpoint_notices(config.checkpoint)
    if config.data.mock_data and config.data.split:
        yield "--split has no effect with --mock-data: each set has random tokens of its own"
    yield from precision_notices(config.precision, start.deepspeed, compiles=config.kernels.compile)
    yield from zero_notices(start.zero, config.optimizer)
    yield from recompute_notices(
        plan_recompute(config.recompute, num_layers=1, pipeline=1),
        attention=plan_kernels(config.kernels, config.model, config.precision).attention,
        device=start.device,
        ring=uses_ring(config.parallel),
    )
    yield from key_notices(start.deepspeed)
    if "optimizer" in start.deepspeed:
        yield "the optimizer block of the DeepSpeed JSON is not used: --optimizer and its flags decide"
    yield from vocab_notices(config.tokenizer, padded=padded_vocab_size)
    yield from objective_notices(objective)
    if start.trains:
        unit = config.model.seq_length if start.schedule.unit == "tokens" else 1
        length = start.steps.training.train_samples * unit
        yield from warmup_notices(config.schedule, config.training, start.schedule, length)


def _other_effect_notices(config: Config) -> Iterator[str]:
    """Yield a notice for every flag that has no effect, or another one, because of other flags."""
    per_expert = config.experts.expert_tensor_parallel_size
    if per_expert and not config.experts.num_experts:
        yield (
            f"--expert-tensor-parallel-size {per_expert} has no effect: the network has no experts "
            "(--num-experts)"
        )
    if config.schedule.decoupled_lr and config.lora.lora_rank:
        yield "--decoupled-lr has no effect with --lora-rank: no embedding is trained"
    if config.optimizer.apply_wd_to_qk_layernorm and not config.model.qk_layernorm:
        yield "--apply-wd-to-qk-layernorm has no effect without --qk-layernorm"
