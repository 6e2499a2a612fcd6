"""Results of steps, for what looks at them."""

from megatron.training.loop.loop import StepResult


def step(loss: float, norm: float = 1.0, *, skipped: bool = False) -> StepResult:
    return StepResult(
        loss=loss,
        lr=0.1,
        batch_size=4,
        seq_length=8,
        seconds=1.0,
        grad_norm=norm,
        loss_scale=1.0,
        skipped=skipped,
    )
