"""T5: span corruption; the decoder restores the spans that sentinels stand for in the encoder."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.t5.flags import DecoderSpec
from megatron.objectives.objective import Collate, Objective
from megatron.tensor_parallel.broadcast import Batch, Field, Fields

T5_FIELDS: Fields = {
    "tokens": Field("bs"),
    "lengths": Field("b"),
    "decoder_tokens": Field("bd"),
    "labels": Field("bd"),
    "loss_mask": Field("bd", torch.float32),
}
"""A batch of padded texts for the encoder, with their lengths, and for the decoder."""


@OBJECTIVES.register("t5")
class T5(Objective):
    """Next-token prediction of corrupted spans, by a decoder that sees the encoder's output."""

    name: ObjectiveName = "t5"
    token_fields = ("text_enc", "text_dec")
    fields = T5_FIELDS

    def letters(self, spec: ModelSpec) -> Mapping[str, int]:
        """Return the length of the decoder's samples."""
        return {"d": spec.part(DecoderSpec).decoder_seq_length}

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `t5_batch`."""
        return t5_batch


def t5_batch(
    text_enc: Tensor,
    text_dec: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    truncated: Tensor,
    enc_length: Tensor,
    dec_length: Tensor,
) -> Batch:
    """Return a batch of the samples of a T5Dataset.

    Args:
        labels: -1 at padding.
        truncated: whether a sample was cut; not used.
        enc_length: real tokens of the encoder.
        dec_length: real tokens of the decoder; `loss_mask` has them too.

    Shapes: text_enc [b, s]; text_dec, labels, loss_mask [b, d]; others [b] -> T5_FIELDS.
    """
    return {
        "tokens": text_enc,
        "lengths": enc_length,
        "decoder_tokens": text_dec,
        "labels": labels.clamp(min=0),
        "loss_mask": loss_mask.float(),
    }
