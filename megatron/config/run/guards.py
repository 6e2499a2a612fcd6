"""Guards of a run (loss spikes, replay of a step): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting
from megatron.config.parsing.flags import finite_or_none
from megatron.config.run.checkpoint import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Guards against loss spikes, and replay of a step."""

    spike_policy: str | None = None
    """Rollback after a loss spike: going back to a checkpoint in --save and
    passing over the samples. Words KEY=NUMBER with commas between: zscore (6) and norm (0: not
    looked at) for loss and gradient norm, window (50) steps they are compared with, rollback (1:
    to the newest checkpoint), skip (1) iterations up to the spike and after (0) it, max (3)
    times in the run."""

    replay_step: int | None = setting(None, at_least=1)
    """Repeat this step of the run in --load, from the nearest earlier checkpoint, without writing
    anything, and compare it with the journal."""


_DEFAULTS = {
    "zscore": 6.0,
    "norm": 0.0,
    "window": 50,
    "rollback": 1,
    "skip": 1,
    "after": 0,
    "max": 3,
}

_LEAST = {"zscore": 0, "norm": 0, "window": 2, "rollback": 1, "skip": 1, "after": 0, "max": 1}


@dataclass(frozen=True, kw_only=True)
class SpikePlan:
    """Loss spikes: their definition, and the rollback after one."""

    zscore: float  # of the loss; 0: not looked at
    norm: float  # of the gradient's norm; 0: not looked at
    window: int  # steps before, that a step is compared with
    rollback: int  # which checkpoint is gone back to: 1 is the newest
    skip: int  # iterations skipped, up to the spike
    after: int  # iterations skipped after it
    most: int  # times in a run; the next spike ends it

    @property
    def is_on(self) -> bool:
        """Whether spikes are looked for."""
        return self.zscore > 0 or self.norm > 0


@dataclass(frozen=True, kw_only=True)
class GuardsPlan:
    """Guards of a run, resolved."""

    spikes: SpikePlan
    replay_step: int  # taken again instead of training; 0: none


def plan_guards(guards: GuardsConfig) -> GuardsPlan:
    """Return the guards of the run."""
    given = {"zscore": 0} if guards.spike_policy is None else _numbers(guards.spike_policy)
    values = _DEFAULTS | given
    return GuardsPlan(
        spikes=SpikePlan(
            zscore=values["zscore"],
            norm=values["norm"],
            window=int(values["window"]),
            rollback=int(values["rollback"]),
            skip=int(values["skip"]),
            after=int(values["after"]),
            most=int(values["max"]),
        ),
        replay_step=guards.replay_step or 0,
    )


def guards_problems(guards: GuardsConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield every problem of the guards' flags."""
    yield from _policy_problems(guards, checkpoint)
    if guards.replay_step is None:
        return
    yield from range_problems(guards)
    if not checkpoint.load:
        yield "--replay-step needs --load: the directory that the run saved to"
    for flag, given in (
        ("--finetune", checkpoint.finetune),
        ("--reset-progress", checkpoint.reset_progress),
        ("--no-load-optim", checkpoint.no_load_optim),
        ("--no-load-rng", checkpoint.no_load_rng),
        ("--ckpt-step", checkpoint.ckpt_step is not None),
    ):
        if given:
            yield f"--replay-step resumes from the checkpoint before the step: leave {flag} out"


def _policy_problems(guards: GuardsConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    text = guards.spike_policy
    if text is None:
        return
    for word in text.split(","):
        key, _, number = word.partition("=")
        if key not in _DEFAULTS:
            yield f"--spike-policy {text}: {word} has none of the keys {', '.join(_DEFAULTS)}"
        elif (value := finite_or_none(number)) is None or value < _LEAST[key]:
            yield f"--spike-policy {text}: {key} is a number from {_LEAST[key]} on"
        elif isinstance(_DEFAULTS[key], int) and value != int(value):
            yield f"--spike-policy {text}: {key} is a count, and {number} is not an integer"
    if not checkpoint.save:
        yield "--spike-policy needs --save: it goes back to the run's own checkpoints"
    elif not checkpoint.save_interval:
        yield "--spike-policy needs --save-interval: it goes back to checkpoints before the spike"
    for flag, given in (
        ("--no-save-optim", checkpoint.no_save_optim),
        ("--no-save-rng", checkpoint.no_save_rng),
    ):
        if given:
            yield f"--spike-policy goes back to complete checkpoints: leave {flag} out"


def _numbers(text: str) -> dict[str, float]:
    words = (word.partition("=") for word in text.split(","))
    return {key: finite_or_none(number) or 0 for key, _, number in words}
