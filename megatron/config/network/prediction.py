"""Multi-token prediction (MTP): flags, and the layers that predict later tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.network.spec_part import SpecPart
from megatron.config.parsing.declaration import resolve, setting


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


MTP_LOSS = "mtp loss"
"""Name of the mean loss of all depths in the log."""


@dataclass(frozen=True, kw_only=True)
class PredictionSpec(SpecPart):
    """Multi-token prediction."""

    section: ClassVar[str] = "prediction"
    loss_terms: ClassVar[tuple[str, ...]] = (MTP_LOSS,)

    prediction_depths: int = 0  # tokens that are predicted after the next one
    prediction_loss_scale: float = 0.0  # of the mean of the losses of all depths
    prediction_repeated: bool = False  # one layer is all depths

    @classmethod
    def of(cls, config: Any) -> "PredictionSpec | None":
        """Return the layers that predict later tokens; None without: see `SpecPart`."""
        return prediction_spec(config.prediction)

    @property
    def num_layers(self) -> int:
        """Layers with weights of their own."""
        return (
            min(self.prediction_depths, 1) if self.prediction_repeated else self.prediction_depths
        )


def prediction_spec(prediction: PredictionConfig) -> PredictionSpec | None:
    """Return the layers that predict later tokens; None without."""
    depths = prediction.mtp_num_layers
    if not depths:
        return None
    repeated = prediction.mtp_use_repeated_layer and depths > 1
    return resolve(PredictionSpec, "model", prediction, prediction_repeated=repeated)
