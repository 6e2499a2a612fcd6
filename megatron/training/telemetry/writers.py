"""Writers of scalars: TensorBoard's event files, which Weights & Biases can follow."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron.common.errors import ConfigError, install, reason
from megatron.config.config import flatten
from megatron.config.run.logging import LoggingConfig, LoggingPlan, WandbPlan

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def writer_problems(logging: LoggingConfig) -> Iterator[str]:
    """Yield each package that a flag needs and that is not installed."""
    for flag, is_given, package in (
        ("--wandb-project", logging.wandb_project, "wandb"),
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--codecarbon-dir", logging.codecarbon_dir, "codecarbon"),
    ):
        if is_given and importlib.util.find_spec(package) is None:
            yield f"{flag} needs the package {package}: {install(package)}, or leave the flag out"


def build_writer(plan: LoggingPlan, config: Mapping[str, Any]) -> "SummaryWriter | None":
    """Return the writer of event files; None without --tensorboard-dir and --wandb-project.

    A run of Weights & Biases uploads what is written to them. Without --tensorboard-dir they lie
    in that run's folder.

    Args:
        config: the user's flags in nested dictionaries, for the run of Weights & Biases.

    Raises:
        ConfigError: the directory cannot be written to, or wandb refuses.
    """
    directory = plan.tensorboard_dir
    if plan.wandb.project:
        # Before the writer: wandb follows those made after it.
        run = _start_wandb(plan.wandb, config)
        directory = directory or run.dir
    if not directory:
        return None
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(log_dir=directory, max_queue=plan.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(f"--tensorboard-dir {directory}: {reason(error, directory)}") from error


def close_writer(writer: "SummaryWriter", plan: LoggingPlan) -> None:
    """Flush the writer, and end the run of Weights & Biases."""
    writer.close()
    if plan.wandb.project:
        import wandb

        wandb.finish()


def _start_wandb(plan: WandbPlan, config: Mapping[str, Any]) -> Any:
    import wandb

    try:
        return wandb.init(
            project=plan.project,
            name=plan.name or None,
            entity=plan.entity or None,
            dir=plan.directory or None,
            config={name: str(value) for name, value in flatten(config).items()},
            sync_tensorboard=True,
        )
    except (wandb.Error, OSError) as error:
        raise ConfigError(f"--wandb-project {plan.project}: {error}") from error
