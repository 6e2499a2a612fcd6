"""What a run tells, where, and how often."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs, as the user asked for them."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_format: Literal["auto", "full", "compact"] = "auto"
    """The log line: full is BigScience's, which tools parse, compact one that fits a terminal; auto
    is compact where stdout is a terminal and full elsewhere."""

    log_params_norm: bool = False
    """Log the norm of all weights, each counted once."""

    log_num_zeros_in_grad: bool = False
    """Log how many numbers of the gradient are zero, each weight counted once."""

    timing_log_level: Literal[0, 1, 2] = 0
    """What is timed inside a step and logged: 0 nothing; 1 data, forward, backward and optimizer;
    2 what a pipeline sends, receives and reduces, too. On GPUs each time waits for the device."""

    slow_rank_factor: float | None = None
    """Tell at each log line which rank takes longest for its data and forward passes, and warn of
    one that at three in a row takes more than so many times the median of the other ranks of its
    stage (default: not looked for)."""

    device_peak_tflops: float | None = None
    """What one device can do at most in the run's number format, in TFLOPs, for MFU and HFU
    (default: that of its data sheet, where the device is known)."""

    log_path: str | None = None
    """Directory for a file of all flags and their values, one per start."""

    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Least level of the messages of rank 0, DeepSpeed's included (default: what
    MEGATRON_DEEPSPEED_VERBOSITY says, or info; DeepSpeed: warning)."""

    log_level_replica: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """The same for the other ranks (default: error)."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard event files."""

    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard scalars."""

    tensorboard_queue_size: int = 1000
    """Events that TensorBoard's writer holds before it writes."""

    log_timers_to_tensorboard: bool = False
    """Write the iteration's time, its parts by --timing-log-level, and throughput to TensorBoard."""

    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity to TensorBoard."""

    log_learning_rate_to_tensorboard: Annotated[
        bool,
        Spelling(
            "--no-log-learning-rate-to-tensorboard", ("--no-log-learnig-rate-to-tensorboard",)
        ),
    ] = True
    """Write the learning rate to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = True
    """Write fp16's loss scale to TensorBoard."""

    wandb_project: str | None = None
    """Project of Weights & Biases to log to, under the tags of TensorBoard; needs the package
    wandb."""

    wandb_exp_name: str | None = None
    """Name of the run in --wandb-project (default: its own choice)."""

    wandb_entity: str | None = None
    """User or team of --wandb-project (default: the one logged in)."""

    wandb_save_dir: str | None = None
    """Directory for wandb's local files (default: ./wandb)."""

    codecarbon_dir: str | None = None
    """Directory for a CSV of energy and CO2 per node, measured by the package codecarbon and
    continued over restarts."""

    codecarbon_country_iso_code: str = "FRA"
    """Country whose electricity the CO2 is estimated for, as three letters."""
