"""What is told, where and how often, decided."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.config import Config
from megatron.config.parallelism.layout import replica_size
from megatron.config.run.logging import LoggingConfig
from megatron.config.run.profiling import ProfilingConfig


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
    """What is told; an empty path means not at all."""

    interval: int
    format: str  # "auto": depends on what stdout is
    params_norm: bool
    num_zeros: bool
    timing_level: int
    slow_rank_factor: float  # 0: slow ranks are not looked for
    device_peak_tflops: float  # 0: that of its data sheet, if there is one
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
    """Return what is told."""
    return LoggingPlan(
        interval=logging.log_interval,
        format=logging.log_format,
        params_norm=logging.log_params_norm,
        num_zeros=logging.log_num_zeros_in_grad,
        timing_level=logging.timing_log_level,
        slow_rank_factor=logging.slow_rank_factor or 0.0,
        device_peak_tflops=logging.device_peak_tflops or 0.0,
        nvtx=profiling.nvtx_ranges,
        flags_directory=logging.log_path or "",
        tensorboard_dir=logging.tensorboard_dir or "",
        tensorboard_interval=logging.tensorboard_log_interval,
        tensorboard_queue_size=logging.tensorboard_queue_size,
        timers=logging.log_timers_to_tensorboard,
        batch_size=logging.log_batch_size_to_tensorboard,
        validation_ppl=logging.log_validation_ppl_to_tensorboard,
        learning_rate=logging.log_learning_rate_to_tensorboard,
        loss_scale=logging.log_loss_scale_to_tensorboard,
        wandb=WandbPlan(
            project=logging.wandb_project or "",
            name=logging.wandb_exp_name or "",
            entity=logging.wandb_entity or "",
            directory=logging.wandb_save_dir or "",
        ),
        energy=EnergyPlan(
            directory=logging.codecarbon_dir or "", country=logging.codecarbon_country_iso_code
        ),
        profile=ProfilePlan(
            directory=(profiling.profile_dir or logging.tensorboard_dir or "")
            if profiling.profile
            else "",
            start=profiling.profile_step_start,
            stop=profiling.profile_step_end,
            ranks=tuple(profiling.profile_ranks or (0,)),
        ),
    )


def logging_problems(
    config: Config, *, world_size: int, device: str, zero_stage: int
) -> Iterator[str]:
    """Yield every reason why the run cannot be told of as asked."""
    logging, profiling = config.logging, config.profiling
    for flag, value in (
        ("--log-interval", logging.log_interval),
        ("--tensorboard-log-interval", logging.tensorboard_log_interval),
        ("--profile-step-start", profiling.profile_step_start),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
    for flag, text in (
        ("--wandb-exp-name", logging.wandb_exp_name),
        ("--wandb-entity", logging.wandb_entity),
        ("--wandb-save-dir", logging.wandb_save_dir),
    ):
        if text and not logging.wandb_project:
            yield f"{flag} needs --wandb-project"
    yield from _speed_problems(config, world_size, zero_stage)
    country = logging.codecarbon_country_iso_code
    if not (len(country) == 3 and country.isascii() and country.isalpha() and country.isupper()):
        yield f"--codecarbon-country-iso-code {country} is no code of three letters, such as FRA"
    if profiling.nvtx_ranges and device == "cpu":
        yield "--nvtx-ranges needs GPUs, and this run is on CPUs: leave it out"
    if profiling.profile:
        yield from _profile_problems(profiling, logging, world_size)


def _speed_problems(config: Config, world_size: int, zero_stage: int) -> Iterator[str]:
    factor, peak = config.logging.slow_rank_factor, config.logging.device_peak_tflops
    if factor is not None:
        yield from _slow_rank_problems(config, factor, world_size, zero_stage)
    if peak is not None and peak <= 0:
        yield f"--device-peak-tflops {peak:g} must be more than 0"


def _slow_rank_problems(
    config: Config, factor: float, world_size: int, zero_stage: int
) -> Iterator[str]:
    if factor <= 1:
        yield f"--slow-rank-factor {factor:g} must be more than 1, such as 1.2"
    experts = config.experts.moe_expert_parallel_size
    replicas = world_size // replica_size(config.parallel)
    if zero_stage == 3:
        yield (
            "--slow-rank-factor cannot tell ranks apart at ZeRO stage 3, where each layer waits "
            "for the weights of all: leave it out"
        )
    elif replicas <= 1:
        yield (
            "--slow-rank-factor compares replicas, and this run has no second one: start more "
            "processes, or leave it out"
        )
    elif replicas <= experts:
        yield (
            "--slow-rank-factor cannot tell ranks apart that wait for each other's tokens in "
            f"each layer, as all {replicas} replicas do at --moe-expert-parallel-size {experts}: "
            "lower that, or leave it out"
        )


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
