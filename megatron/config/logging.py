"""What a run tells, where, and how often."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs, as the user asked for them."""

    log_interval: int = 100
    """Iterations between log lines."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard event files."""

    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard scalars."""

    tensorboard_queue_size: int = 1000
    """Events that TensorBoard's writer holds before it writes."""

    log_timers_to_tensorboard: bool = False
    """Write the iteration's time and throughput to TensorBoard."""

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
