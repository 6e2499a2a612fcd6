"""Steps: checks of batches, lengths and the learning-rate schedule."""

from collections.abc import Iterator, Sequence

from megatron.config.checks.deepspeed import json_problems, zero_problems
from megatron.config.checks.experts import expert_problems
from megatron.config.checks.pipeline import interleaving_problems
from megatron.config.checks.start import Start
from megatron.config.optimization.batch_size import BatchPlan, plan_batch, size_schedule_problems
from megatron.config.optimization.curriculum import curriculum_problems
from megatron.config.optimization.lr_schedule import schedule_problems, unit_problems
from megatron.config.optimization.training import global_batch_size_of, training_problems
from megatron.config.parallelism.layout import sequence_parts, world_size_problems


def length_problems(start: Start) -> Iterator[str]:
    """Yield why the replicas cannot take such steps, or so many, or not of such sequences."""
    config = start.config
    yield from batch_problems(start)
    yield from training_problems(config.training)
    yield from unit_problems(config.schedule, config.training)
    yield from curriculum_problems(
        start.deepspeed,
        seq_length=config.model.seq_length,
        parts=sequence_parts(config.parallel),
        file=config.deepspeed.deepspeed_config,
    )


def step_problems(start: Start) -> Iterator[str]:
    """Yield problems of steps whose lengths are valid: schedule, ZeRO, experts, the JSON."""
    config, steps = start.config, start.steps
    if steps.training.train_iters < 1:
        yield (
            f"--train-samples {steps.training.train_samples} is less than one global batch of "
            f"{steps.batch.size_at(0)} samples"
        )
        return
    yield from schedule_problems(config.schedule, config.training, start.schedule)
    for check in (zero_problems, expert_problems, json_problems, interleaving_problems):
        yield from check(start)


def elastic_problems(start: Start) -> Iterator[str]:
    """Yield why a run cannot continue with another number of replicas."""
    config = start.config
    yield from world_size_problems(config.parallel, start.world_size)
    if global_batch_size_of(config.training, start.deepspeed) is None:
        yield (
            "--elastic needs --global-batch-size: without it a step has as many samples as the "
            "replicas that there are"
        )
    if start.optimizer.name == "adam8bit":
        yield (
            "--elastic does not work with --use-bnb-optimizer: Adam's 8-bit state loads into its own "
            "layout only; leave --elastic out"
        )


def batch_problems(start: Start) -> Iterator[str]:
    """Yield every reason why micro-batches, global batch and its schedule do not fit together."""
    training, data = start.config.training, start.replicas
    micro, ramp = training.micro_batch_size, training.rampup_batch_size
    global_batch_size = global_batch_size_of(training, start.deepspeed)
    if micro < 1:
        yield f"--micro-batch-size {micro} must be at least 1"
        return
    by_flag = training.global_batch_size is not None
    file = start.config.deepspeed.deepspeed_config
    source = "--global-batch-size" if by_flag else f"--deepspeed_config {file}: train_batch_size"
    if global_batch_size is not None and global_batch_size < 1:
        yield f"{source} {global_batch_size} must be at least 1"
        return
    unit = micro * data
    steps = training.gradient_accumulation_steps
    accumulated = unit * (steps or 1)
    yield from _evaluation_problems(start, global_batch_size or accumulated)
    if training.step_batch_size_schedule is not None:
        yield from _size_schedule_problems(start, unit)
        return
    if steps is not None and global_batch_size not in (None, accumulated):
        yield (
            f"{source} {global_batch_size} is not --micro-batch-size {micro} * {data} replicas * "
            f"--gradient-accumulation-steps {steps} = {accumulated}: leave one of the two out"
        )
        return
    if global_batch_size is not None and global_batch_size % unit:
        elastic = (
            "" if global_batch_size % micro else "; --elastic trains on fewer, which divide it"
        )
        yield (
            f"{source} {global_batch_size} is not a multiple of "
            f"--micro-batch-size {micro} * {data} replicas = {unit}: "
            f"write {_multiple(global_batch_size, unit)}{elastic}"
        )
    if ramp is not None:
        batch = plan_batch(
            micro,
            ramp if len(ramp) == 3 else None,
            global_batch_size=global_batch_size or accumulated,
            data_parallel_size=data,
        )
        yield from _ramp_problems(ramp, batch, unit, start.done.samples)


def _multiple(number: int, unit: int) -> int:
    """Return the multiple of `unit` that is nearest to `number`."""
    return unit * max(1, round(number / unit))


def _evaluation_problems(start: Start, global_batch_size: int) -> Iterator[str]:
    """Yield why the batches of evaluation do not fit together."""
    evaluation, replicas = start.config.evaluation, start.replicas
    micro, size = evaluation.eval_micro_batch_size, evaluation.eval_global_batch_size
    given = {"--eval-micro-batch-size": micro, "--eval-global-batch-size": size}
    flags = [flag for flag, value in given.items() if value is not None]
    if flags and start.declaration.has_epochs:
        yield (
            f"{' and '.join(flags)}: objective {start.objective} evaluates its data sets in batches of "
            "--micro-batch-size; leave it out"
        )
    elif flags:
        micro, size = micro or start.config.training.micro_batch_size, size or global_batch_size
        if micro > 0 and size % (micro * replicas):
            yield (
                f"{' and '.join(flags)}: {size} samples of an evaluated batch are not a multiple of "
                f"{micro} samples * {replicas} replicas = {micro * replicas}"
            )


def _size_schedule_problems(start: Start, unit: int) -> Iterator[str]:
    """Yield problems of --step-batch-size-schedule."""
    training, seq_length = start.config.training, start.config.model.seq_length
    schedule = training.step_batch_size_schedule or ()
    flag = "--step-batch-size-schedule"
    others = {
        "--global-batch-size": training.global_batch_size,
        "--rampup-batch-size": training.rampup_batch_size,
        "--gradient-accumulation-steps": training.gradient_accumulation_steps,
    }
    for other in (name for name, value in others.items() if value is not None):
        yield f"{flag} sets the size of every global batch: leave {other} out"
    wrong = [*size_schedule_problems(schedule, seq_length)]
    yield from wrong
    if not wrong:
        sizes = start.steps.batch.sizes_from(start.done.samples)
        uneven = [size for size in sizes if size % unit]
        if uneven:
            yield (
                f"{flag} {' '.join(schedule)}: batch size {uneven[0]} is not a multiple of "
                f"micro-batch size * replicas = {unit}"
            )


def _ramp_problems(
    ramp: Sequence[int], batch: BatchPlan, unit: int, consumed_samples: int
) -> Iterator[str]:
    words = "--rampup-batch-size " + " ".join(map(str, ramp))
    if len(ramp) != 3:
        yield f"{words}: three numbers are needed: first batch size, increment, samples"
        return
    start, increment, _ = ramp
    final = batch.global_batch_size
    if min(ramp) < 1:
        yield f"{words}: all three numbers must be at least 1"
    elif start > final or (final - start) % increment:
        yield f"{words}: {start} does not reach --global-batch-size {final} in steps of {increment}"
    else:
        sizes = [size for size in batch.sizes_from(consumed_samples) if size % unit]
        if sizes:
            yield (
                f"{words}: batch size {sizes[0]} on the way is not a multiple of "
                f"micro-batch size * replicas = {unit}"
            )
