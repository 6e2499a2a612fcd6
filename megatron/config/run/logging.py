"""Logs, TensorBoard, Weights & Biases, energy and profiles: flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.config.parsing.declaration import range_problems, resolve, setting


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs, TensorBoard, Weights & Biases, energy."""

    log_interval: int = setting(100, at_least=1, plan="logging.interval")
    """Iterations between log lines."""

    log_format: Literal["auto", "full", "compact"] = setting("auto", plan="logging.format")
    """The log line: full is BigScience's, which tools parse, compact one that fits a terminal; auto
    is compact where stdout is a terminal and full elsewhere."""

    log_params_norm: bool = setting(False, plan="logging.params_norm")
    """Log the norm of all weights, each counted once."""

    log_num_zeros_in_grad: bool = setting(False, plan="logging.num_zeros")
    """Log the number of zeros in the gradient, each weight counted once."""

    timing_log_level: Literal[0, 1, 2] = setting(0, plan="logging.timing_level")
    """What is timed inside a step and logged: 0 nothing; 1 data, forward, backward and optimizer;
    2 what a pipeline sends, receives and reduces, too. On GPUs each time waits for the device."""

    slow_rank_factor: float | None = setting(None, above=1, remedy=", such as 1.2")
    """Log with each log line the rank that takes longest for data and forward passes, and warn of one
    that takes more than so many times the median of the other ranks of its stage at three log
    lines in a row (default: off)."""

    device_peak_tflops: float | None = setting(None, above=0)
    """Peak of one device in the run's dtype, in TFLOPs, for MFU and HFU (default: from its data
    sheet, where the device is known)."""

    log_path: str | None = setting(None, plan="logging.flags_directory")
    """Directory for a file of all flags and their values, one per start."""

    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Least level of the messages of rank 0, DeepSpeed's included (default:
    MEGATRON_DEEPSPEED_VERBOSITY, or info; DeepSpeed: warning)."""

    log_level_replica: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """The same for the other ranks (default: error)."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard event files."""

    tensorboard_log_interval: int = setting(1, at_least=1, plan="logging.tensorboard_interval")
    """Iterations between TensorBoard scalars."""

    tensorboard_queue_size: int = 1000
    """Events that TensorBoard's writer holds before it writes."""

    log_timers_to_tensorboard: bool = setting(False, plan="logging.timers")
    """Write the iteration's time, its parts by --timing-log-level, and throughput to TensorBoard."""

    log_batch_size_to_tensorboard: bool = setting(False, plan="logging.batch_size")
    """Write the global batch size to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = setting(False, plan="logging.validation_ppl")
    """Write the validation perplexity to TensorBoard."""

    log_learning_rate_to_tensorboard: bool = setting(
        True, older=("--no-log-learnig-rate-to-tensorboard",), plan="logging.learning_rate"
    )
    """Do not write the learning rate to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = setting(True, plan="logging.loss_scale")
    """Do not write fp16's loss scale to TensorBoard."""

    wandb_project: str | None = setting(None, plan="logging.wandb.project")
    """Project of Weights & Biases to log to, under the tags of TensorBoard; needs the package
    wandb."""

    wandb_exp_name: str | None = setting(None, plan="logging.wandb.name")
    """Name of the run in --wandb-project (default: its own choice)."""

    wandb_entity: str | None = setting(None, plan="logging.wandb.entity")
    """User or team of --wandb-project (default: the one logged in)."""

    wandb_save_dir: str | None = setting(None, plan="logging.wandb.directory")
    """Directory for wandb's local files (default: ./wandb)."""

    codecarbon_dir: str | None = setting(None, plan="logging.energy.directory")
    """Directory for a CSV of energy and CO2 per node, measured by the package codecarbon and
    continued over restarts."""

    codecarbon_country_iso_code: str = setting("FRA", plan="logging.energy.country")
    """Country whose electricity the CO2 is estimated for, as three letters."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of steps."""

    profile: bool = False
    """Record some iterations with PyTorch's profiler, as trace files."""

    profile_step_start: int = setting(10, at_least=1, plan="logging.profile.start")
    """First iteration that is recorded."""

    profile_step_end: int = setting(12, plan="logging.profile.stop")
    """Iteration at which recording ends (exclusive)."""

    profile_ranks: list[int] | None = setting(None, plan="logging.profile.ranks")
    """Ranks that record (default: rank 0)."""

    profile_dir: str | None = setting(None, plan="logging.profile.directory")
    """Directory for the trace files (default: --tensorboard-dir)."""

    nvtx_ranges: bool = setting(False, plan="logging.nvtx")
    """Mark the parts of a step for NVIDIA's tools; needs GPUs."""


@dataclass(frozen=True, kw_only=True)
class WandbPlan:
    """A run of Weights & Biases; an empty text means its own choice."""

    project: str  # "": none
    name: str
    entity: str
    directory: str


@dataclass(frozen=True, kw_only=True)
class EnergyPlan:
    """The measurement of energy."""

    directory: str  # "": none
    country: str  # three letters


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    """The iterations that PyTorch's profiler records."""

    directory: str  # "": none
    start: int  # the first
    stop: int  # the first that is not
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoggingPlan:
    """Logs and profiles; an empty path means none."""

    interval: int
    format: str  # "auto": depends on what stdout is
    params_norm: bool
    num_zeros: bool
    timing_level: int
    slow_rank_factor: float  # 0: slow ranks are not looked for
    device_peak_tflops: float  # 0: from its data sheet, if there is one
    nvtx: bool
    flags_directory: str
    tensorboard_dir: str
    tensorboard_interval: int
    tensorboard_queue_size: int
    timers: bool
    batch_size: bool
    validation_ppl: bool
    learning_rate: bool
    loss_scale: bool
    wandb: WandbPlan
    energy: EnergyPlan
    profile: ProfilePlan


def plan_logging(logging: LoggingConfig, profiling: ProfilingConfig) -> LoggingPlan:
    """Return the logs and profiles."""
    directory = profiling.profile_dir or logging.tensorboard_dir or ""
    return resolve(
        LoggingPlan,
        "logging",
        logging,
        profiling,
        profile=resolve(
            ProfilePlan,
            "logging.profile",
            profiling,
            directory=directory if profiling.profile else "",
            ranks=tuple(profiling.profile_ranks or (0,)),
        ),
    )


def logging_problems(
    logging: LoggingConfig, profiling: ProfilingConfig, *, world_size: int, device: str
) -> Iterator[str]:
    """Yield every problem of the flags of logs and profiles."""
    yield from range_problems(logging)
    yield from range_problems(profiling)
    for flag, text in (
        ("--wandb-exp-name", logging.wandb_exp_name),
        ("--wandb-entity", logging.wandb_entity),
        ("--wandb-save-dir", logging.wandb_save_dir),
    ):
        if text and not logging.wandb_project:
            yield f"{flag} needs --wandb-project"
    country = logging.codecarbon_country_iso_code
    if not (len(country) == 3 and country.isascii() and country.isalpha() and country.isupper()):
        yield f"--codecarbon-country-iso-code {country} is not a code of three letters, such as FRA"
    if profiling.nvtx_ranges and device == "cpu":
        yield "--nvtx-ranges needs GPUs, and this run is on CPUs: leave it out"
    if profiling.profile:
        yield from _profile_problems(profiling, logging, world_size)


def _profile_problems(
    profiling: ProfilingConfig, logging: LoggingConfig, world_size: int
) -> Iterator[str]:
    if not (profiling.profile_dir or logging.tensorboard_dir):
        yield "--profile needs --profile-dir, or --tensorboard-dir: where the traces go"
    if profiling.profile_step_end <= profiling.profile_step_start:
        yield (
            f"--profile-step-end {profiling.profile_step_end} must be more than "
            f"--profile-step-start {profiling.profile_step_start}"
        )
    for rank in profiling.profile_ranks or ():
        if not 0 <= rank < world_size:
            yield f"--profile-ranks {rank}: the run has ranks 0 to {world_size - 1}"
