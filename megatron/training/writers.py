"""Where scalars go: TensorBoard's event files, Weights & Biases, or both."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from megatron.config.logging import LoggingConfig
from megatron.errors import ConfigError, reason
from megatron.plan.logging_plan import LoggingPlan, WandbPlan


class Writer(Protocol):
    """The part of torch's SummaryWriter that the run uses."""

    def add_scalar(self, tag: str, value: float, x: int, /) -> None:
        """Write `value` at `x` of the curve `tag`."""

    def add_text(self, tag: str, text: str, x: int, /) -> None:
        """Write `text` at `x` under `tag`."""

    def flush(self) -> None:
        """Write what is held back."""

    def close(self) -> None:
        """Write what is held back, and end."""


class Both:
    """Writes everything to each of several writers."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = writers

    def add_scalar(self, tag: str, value: float, x: int) -> None:
        """Write `value` at `x` of the curve `tag`."""
        for writer in self._writers:
            writer.add_scalar(tag, value, x)

    def add_text(self, tag: str, text: str, x: int) -> None:
        """Write `text` at `x` under `tag`."""
        for writer in self._writers:
            writer.add_text(tag, text, x)

    def flush(self) -> None:
        """Write what is held back."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Write what is held back, and end."""
        for writer in self._writers:
            writer.close()


class WandbWriter:
    """Writes the curves over iterations to a run of Weights & Biases.

    Its steps only rise, so curves over samples and tokens are left to its charts: the numbers of
    samples and tokens are logged beside.

    Args:
        run: what wandb.init returned.
    """

    def __init__(self, run: Any):
        self._run = run

    def add_scalar(self, tag: str, value: float, x: int) -> None:
        """Write `value` at iteration `x` of the curve `tag`."""
        if " vs " not in tag and not tag.endswith(("x=samples", "x=tokens")):
            self._run.log({tag: value}, step=x)

    def add_text(self, tag: str, text: str, x: int) -> None:
        """Note the flag `tag` and its value."""
        self._run.config.update({tag: text}, allow_val_change=True)

    def flush(self) -> None:
        """Do nothing: wandb sends by itself."""

    def close(self) -> None:
        """Send what is held back, and end the run."""
        self._run.finish()


def writer_problems(logging: LoggingConfig) -> Iterator[str]:
    """Yield which package is missing for what is asked."""
    for flag, asked, package in (
        ("--wandb-project", logging.wandb_project, "wandb"),
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--codecarbon-dir", logging.codecarbon_dir, "codecarbon"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            yield f"{flag} needs the package {package}: pip install {package}, or leave the flag out"


def build_writer(plan: LoggingPlan) -> Writer | None:
    """Return what writes scalars; None when nobody asked.

    Raises:
        ConfigError: the directory cannot be written to, or wandb refuses.
    """
    writers: list[Writer] = []
    if plan.tensorboard_dir:
        writers.append(_event_files(plan))
    if plan.wandb.project:
        writers.append(WandbWriter(_wandb_run(plan.wandb)))
    return Both(writers) if writers else None


def _event_files(plan: LoggingPlan) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(log_dir=plan.tensorboard_dir, max_queue=plan.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(
            f"--tensorboard-dir {plan.tensorboard_dir}: {reason(error, plan.tensorboard_dir)}"
        ) from error


def _wandb_run(plan: WandbPlan) -> Any:
    import wandb

    try:
        return wandb.init(
            project=plan.project,
            name=plan.name or None,
            entity=plan.entity or None,
            dir=plan.directory or None,
        )
    except (wandb.Error, OSError) as error:
        raise ConfigError(f"--wandb-project {plan.project}: {error}") from error
