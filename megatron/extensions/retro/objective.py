"""Retro: next-token prediction with retrieved neighbors of each chunk of a sample."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.retro.flags import RetroSpec
from megatron.objectives.gpt import CAUSAL_FIELDS, PACKED, gpt_batch
from megatron.objectives.objective import Collate, Objective
from megatron.tensor_parallel.broadcast import Batch, Field, Fields

RETRO_FIELDS: Fields = {
    **CAUSAL_FIELDS,
    "neighbor_tokens": Field("bckr"),
    "neighbor_lengths": Field("bck"),
}
"""A batch with k neighbors of r tokens for each of c chunks; the lengths count real tokens."""


@OBJECTIVES.register("retro")
class Retro(Objective):
    """Next-token prediction by a decoder that attends to retrieved neighbors."""

    name: ObjectiveName = "retro"
    fields = RETRO_FIELDS

    def letters(self, spec: ModelSpec) -> Mapping[str, int]:
        """Return the chunks of a sample, the neighbors of each, and their length."""
        retro = spec.part(RetroSpec)
        return {
            "c": spec.seq_length // retro.retro_chunk_length,
            "k": retro.retro_num_neighbors,
            "r": retro.retro_retrieved_length,
        }

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `retro_batch` for these masks."""
        return partial(retro_batch, masks=masks, eod=eod)


def retro_batch(
    tokens: Tensor,
    neighbor_tokens: Tensor,
    neighbor_lengths: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
) -> Batch:
    """Return a batch of the samples of a RetroDataset.

    Shapes: tokens [b, s + 1], neighbor_tokens [b, c, k, r], neighbor_lengths [b, c, k] ->
        RETRO_FIELDS.
    """
    return {
        **gpt_batch(tokens, masks, eod),
        "neighbor_tokens": neighbor_tokens,
        "neighbor_lengths": neighbor_lengths,
    }
