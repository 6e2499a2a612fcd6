"""Loss of multi-token prediction: of the next token, and of later ones by all depths."""

from typing import Any

import torch
from torch import Tensor

from megatron.config.network.prediction import MTP_LOSS, PredictionSpec
from megatron.model.layers.deferred_logits import DeferredLogits
from megatron.model.loss import Loss, Losses
from megatron.tensor_parallel.broadcast import Batch

_LEAST = 1e-6
"""Below any sum of a loss mask that has a token."""


def loss_with_predictions(loss: Loss, prediction: PredictionSpec | None) -> Loss:
    """Return the loss of a network whose output has the logits of all depths stacked as samples.

    The gradient is that of L + (scale / D) (L_1 + ... + L_D), L_j the loss of the tokens j positions
    further ahead. The value is L alone, so that it compares with runs of other scales; the mean of
    the others is a term of its own.

    Args:
        loss: of the logits of one depth; it divides by the sum of the loss mask, or by a number
            near it for which a network without predictions is trained.
        prediction: of the network; without it `loss` itself is returned.

    Source: arXiv:2412.19437, equations 24 and 25.
    """
    if prediction is None:
        return loss
    depths, scale = prediction.prediction_depths, prediction.prediction_loss_scale

    def total_loss(output: Any, batch: Batch) -> Losses:
        samples = len(batch["labels"])
        losses = [
            _total(loss(_samples(output, slice(depth * samples, (depth + 1) * samples)), targets))
            for depth, targets in enumerate([batch, *(ahead(batch, 1 + j) for j in range(depths))])
        ]
        main, *later = losses
        mean = torch.stack(later).mean()
        return Losses(main + scale * (mean - mean.detach()), {MTP_LOSS: mean})

    return total_loss


def ahead(batch: Batch, depth: int) -> Batch:
    """Return the batch with the labels `depth` positions further ahead, and the mask of these.

    A label counts that counts in the loss of the next token, if it is in the same sample and, where
    the batch isolates documents, in the document of the token that predicts it. The mask is scaled to
    the sum of the next token's, because losses may be divided by that.

    Shapes: labels, loss_mask [b, s], attention_span [b, s, 2] -> the same.
    """
    mask_bs = batch["loss_mask"]
    later_bs = mask_bs.roll(-depth, 1)
    later_bs[:, -depth:] = 0
    if (span_bs2 := batch.get("attention_span")) is not None:
        starts_bs = span_bs2[..., 0]
        later_bs = later_bs * (starts_bs.roll(-depth, 1) == starts_bs)
    scaled_bs = later_bs * (mask_bs.sum() / later_bs.sum().clamp(min=_LEAST))
    return batch | {"labels": batch["labels"].roll(-depth, 1), "loss_mask": scaled_bs}


def _total(loss: Tensor | Losses) -> Tensor:
    return loss if isinstance(loss, Tensor) else loss.total


def _samples(output: Tensor | DeferredLogits, which: slice) -> Tensor | DeferredLogits:
    """Return the logits of some samples."""
    if isinstance(output, DeferredLogits):
        return output._replace(hidden=output.hidden[which])
    return output[which]
