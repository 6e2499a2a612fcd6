"""Multi-token prediction (MTP): flags, the layers that predict later tokens, and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """Multi-token prediction: more layers, which learn to predict the tokens after the next one."""

    mtp_num_layers: int = setting(0, at_least=0, plan="model.prediction_depths")
    """Multi-token prediction: number of depths, each a layer behind the network that predicts one
    token further ahead; 0 for none. Generation does without them."""

    mtp_loss_scaling_factor: float = setting(
        0.1, at_least=0, matters=False, plan="model.prediction_loss_scale", in_weights=False
    )
    """Weight of the mean loss of all depths, which is added to the loss of the next token."""

    mtp_use_repeated_layer: bool = setting(False, plan="model.prediction_repeated")
    """Use one layer for all depths of multi-token prediction instead of a layer each."""


@dataclass(frozen=True, kw_only=True)
class PredictionSpec:
    """Multi-token prediction. The defaults, on disk, stand for a network without it."""

    prediction_depths: int = 0  # tokens that are predicted after the next one
    prediction_loss_scale: float = 0.0  # of the mean of the losses of all depths
    prediction_repeated: bool = False  # one layer is all depths

    @property
    def num_layers(self) -> int:
        """Layers with weights of their own."""
        return (
            min(self.prediction_depths, 1) if self.prediction_repeated else self.prediction_depths
        )


MTP_LOSS = "mtp loss"
"""Name of the mean loss of all depths in the log."""


def prediction_spec(prediction: PredictionConfig) -> PredictionSpec | None:
    """Return the layers that predict later tokens; None without."""
    depths = prediction.mtp_num_layers
    if not depths:
        return None
    return PredictionSpec(
        prediction_depths=depths,
        prediction_loss_scale=prediction.mtp_loss_scaling_factor,
        prediction_repeated=prediction.mtp_use_repeated_layer and depths > 1,
    )


def prediction_problems(
    prediction: PredictionConfig, *, unbuilt: Mapping[str, bool]
) -> Iterator[str]:
    """Yield every problem of the flags of multi-token prediction.

    Args:
        unbuilt: by what a run has and multi-token prediction is not built for, whether it has it.
    """
    yield from range_problems(prediction)
    if prediction.mtp_num_layers < 1:
        defaults = PredictionConfig()
        given = {
            "--mtp-loss-scaling-factor": prediction.mtp_loss_scaling_factor
            != defaults.mtp_loss_scaling_factor,
            "--mtp-use-repeated-layer": prediction.mtp_use_repeated_layer,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield f"{flag} is of multi-token prediction: give --mtp-num-layers"
        return
    yield from range_problems(prediction, "mtp_loss_scaling_factor")
    for what in (what for what, is_given in unbuilt.items() if is_given):
        yield (
            f"--mtp-num-layers {prediction.mtp_num_layers}: multi-token prediction is not built for "
            f"{what}: leave one of them out"
        )
