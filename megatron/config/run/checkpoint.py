"""Checkpoints: what is saved and loaded, where and how often; flags, resolution and checks."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.parsing.declaration import range_problems, resolve, setting

INITIAL = "initial"
"""Folder in --save of the initial checkpoints of a run that restarted from them in place."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: saving, retention, loading."""

    save: str | None = None
    """Directory to save checkpoints in."""

    save_interval: int | None = setting(
        None, at_least=1, older=("--persistent-save-interval",), plan="checkpoint.interval"
    )
    """Iterations between checkpoints; the run's last state is always saved (default: only that)."""

    async_save: bool = setting(False, plan="checkpoint.in_background")
    """Async checkpointing: training continues while a checkpoint is written; a step waits only until the
    state is copied to host memory, which must hold it once more."""

    keep_last: int | None = setting(None, at_least=1)
    """Number of newest checkpoints in --save to keep; older ones are removed once a new one is
    verified and a finite step has followed it (default: all are kept, unless --keep-every is
    given)."""

    keep_every: int | None = setting(None, at_least=1, older=("--save-retain-interval",))
    """Keep the checkpoints of iterations that are multiples of this, too; --keep-last then
    defaults to 1."""

    load: str | None = None
    """Directory to resume from. When it is also --save and holds no checkpoint yet, training
    starts from the beginning."""

    ckpt_step: int | None = setting(None, at_least=1, plan="checkpoint.step")
    """Resume from the checkpoint of this iteration in --load instead of the newest. If --load is also
    --save, later checkpoints get names that begin with aside-."""

    use_checkpoint_args: bool = setting(False, older=("--use-checkpoint-config",))
    """Take the flags of network, experts and tokenizer from the checkpoint in --load; flags that are
    given override it, and differences are logged."""

    universal_checkpoint: bool = setting(False, plan="checkpoint.universal")
    """Also search --load for checkpoints of tools/convert_checkpoint/ds_to_universal.py, and resume
    from the newest. A run in another layout than the saved one needs no such step."""

    reshape_buffer_mb: int = setting(64, at_least=1)
    """Memory of each rank, in MB, for resharding: the buffers while a checkpoint of another layout is
    loaded, besides the state itself."""

    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, also when it is --save."""

    finetune: bool = False
    """Load only the weights of --load: new optimizer, new RNG states, iteration 0."""

    reset_progress: bool = False
    """Load weights and optimizer states from --load, but start at iteration 0 and sample 0."""

    no_load_optim: bool = False
    """Reset the optimizer instead of loading its state."""

    no_load_rng: bool = False
    """Seed the random number generators instead of loading the RNG states."""

    no_save_optim: bool = setting(False, plan="not checkpoint.saves_optimizer")
    """Leave the optimizer's state out of checkpoints: smaller, and only for --finetune or
    --no-load-optim."""

    no_save_rng: bool = setting(False, plan="not checkpoint.saves_streams")
    """Leave the RNG states out of checkpoints: only for --finetune or --no-load-rng."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Saving, retention and loading, resolved; an empty path means none."""

    save: str
    interval: int  # iterations; 0: only when the run ends
    in_background: bool  # whether training continues while a checkpoint is written
    saves_optimizer: bool
    saves_streams: bool
    keep_last: int  # the newest checkpoints; 0: all
    keep_every: int  # iterations; 0: none besides the newest
    load: str  # the text of `save` where it is the same directory
    step: int  # iteration whose checkpoint is loaded; 0: the newest
    universal: bool  # whether checkpoints without a layout count, too
    reshape_buffer_bytes: int  # for what is on its way from another layout
    must_exist: bool  # whether --load has to hold a checkpoint
    loads_optimizer: bool
    loads_streams: bool
    loads_progress: bool  # iteration, samples and tokens so far


def plan_checkpoint(checkpoint: CheckpointConfig, *, trains: bool) -> CheckpointPlan:
    """Return the checkpoint settings: paths, intervals and formats.

    Args:
        trains: whether the run takes steps; otherwise the weights are all it needs.
    """
    finetune = checkpoint.finetune
    return resolve(
        CheckpointPlan,
        "checkpoint",
        checkpoint,
        save=_directory(checkpoint.save),
        keep_last=checkpoint.keep_last or int(checkpoint.keep_every is not None),
        load=_directory(checkpoint.save if goes_on(checkpoint) else checkpoint.load),
        reshape_buffer_bytes=checkpoint.reshape_buffer_mb << 20,
        must_exist=checkpoint.exit_on_missing_checkpoint or not goes_on(checkpoint),
        loads_optimizer=trains and not (finetune or checkpoint.no_load_optim),
        loads_streams=trains and not (finetune or checkpoint.no_load_rng),
        loads_progress=not (finetune or checkpoint.reset_progress),
    )


def goes_on(checkpoint: CheckpointConfig) -> bool:
    """Whether --load is the directory of --save, however the two are written."""
    if not (checkpoint.save and checkpoint.load):
        return False
    return os.path.realpath(checkpoint.save) == os.path.realpath(checkpoint.load)


def starts_in_place(checkpoint: CheckpointConfig) -> bool:
    """Whether a run restarts at iteration 0 from the checkpoints of the directory that it saves to."""
    return (checkpoint.finetune or checkpoint.reset_progress) and goes_on(checkpoint)


def replacement_problems(checkpoint: CheckpointPlan, tags: Sequence[str]) -> Iterator[str]:
    """Yield that a run would replace the checkpoints of --save, if it does not resume from there.

    It would replace those of the same iterations, --keep-last would remove older ones, and a resume
    from the newest would mix two runs.

    Args:
        tags: names of the checkpoints in --save, newest first.
    """
    if tags and checkpoint.load != checkpoint.save:
        without = "" if checkpoint.loads_progress else " without --finetune or --reset-progress"
        yield (
            f"--save {checkpoint.save} holds checkpoints already (the newest is {tags[0]}), and this "
            f"run does not resume from them but would replace them: write --load {checkpoint.save}"
            f"{without} to resume, give another --save, or move them away"
        )


def checkpoint_notices(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield notices about the times at which checkpoints are saved."""
    if checkpoint.save_interval and not checkpoint.save:
        yield (
            f"--save-interval {checkpoint.save_interval} has no effect without --save: nothing is "
            "saved"
        )
    if checkpoint.save and not checkpoint.save_interval:
        yield (
            f"--save {checkpoint.save} without --save-interval: the run is saved once, when it ends"
        )


def _directory(path: str | None) -> str:
    """Normalise `path`; "" without one."""
    return str(Path(path)) if path else ""


def checkpoint_problems(
    checkpoint: CheckpointConfig, user: Mapping[str, Any], *, zero_stage: int
) -> Iterator[str]:
    """Yield every problem of the flags of checkpoints.

    Args:
        user: DeepSpeed's JSON.
    """
    settings = user.get("checkpoint")
    for key in ("writer", "checkpoint_serialization"):
        if isinstance(settings, Mapping) and key in settings:
            yield (
                f"checkpoint.{key} in DeepSpeed's JSON: the files of a checkpoint are not written by "
                "DeepSpeed; take it out, and write --async-save to continue training meanwhile"
            )
    if "datastates_ckpt" in user:
        yield "datastates_ckpt in DeepSpeed's JSON: take it out, and write --async-save"
    yield from range_problems(checkpoint)
    for flag, number in (
        ("--keep-last", checkpoint.keep_last),
        ("--keep-every", checkpoint.keep_every),
    ):
        if number is not None and not checkpoint.save:
            yield f"{flag} needs --save"
    yield from _step_problems(checkpoint)
    yield from _missing_directories(checkpoint)
    if checkpoint.no_save_optim and zero_stage == 3:
        yield (
            "--no-save-optim: at ZeRO stage 3 the weights are in the optimizer's files; leave the "
            "flag out, or use a lower stage"
        )


def _missing_directories(checkpoint: CheckpointConfig) -> Iterator[str]:
    needs_load = {
        "--finetune": checkpoint.finetune,
        "--universal-checkpoint": checkpoint.universal_checkpoint,
        "--reset-progress": checkpoint.reset_progress,
        "--use-checkpoint-args": checkpoint.use_checkpoint_args,
        "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
    }
    needs_save = {
        "--async-save": checkpoint.async_save,
        "--no-save-optim": checkpoint.no_save_optim,
        "--no-save-rng": checkpoint.no_save_rng,
    }
    if not checkpoint.load:
        yield from (f"{flag} needs --load" for flag, is_given in needs_load.items() if is_given)
    if not checkpoint.save:
        yield from (f"{flag} needs --save" for flag, is_given in needs_save.items() if is_given)


def _step_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    if checkpoint.ckpt_step is None:
        return
    if not checkpoint.load:
        yield "--ckpt-step needs --load"
    if checkpoint.universal_checkpoint:
        yield (
            "--ckpt-step does not go with --universal-checkpoint, which takes the folder that "
            "latest_universal names"
        )
