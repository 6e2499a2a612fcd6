"""Instruction tuning on questions and answers, of a GPT or of a Retro (InstructRetro)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.extensions.retro.data_instruct import instruct_datasets
from megatron.extensions.retro.layers import PROMPT_LENGTHS
from megatron.extensions.retro.objective import RETRO_FIELDS, Retro
from megatron.objectives.gpt import GPT, PACKED, gpt_batch
from megatron.objectives.objective import Collate
from megatron.tensor_parallel.broadcast import Batch, Field, Fields
from megatron.tokenizer.types.tokenizer import Tokenizer

PROMPT_FIELDS: Fields = {**RETRO_FIELDS, PROMPT_LENGTHS: Field("b")}
"""A batch with one set of neighbors for each sample: the neighbors of its prompt."""


@OBJECTIVES.register("instruct")
class Instruct(GPT):
    """Next-token prediction of answers to questions, one of them in a sample."""

    name: ObjectiveName = "instruct"

    def datasets(self, request: DataRequest, tokenizer: Tokenizer) -> Datasets | None:
        """Return blends of files of questions."""
        return instruct_datasets(request, tokenizer)

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `instruct_batch` for these masks."""
        return partial(instruct_batch, masks=masks, eod=eod)


@OBJECTIVES.register("instruct-retro")
class InstructRetro(Retro):
    """Next-token prediction of answers, which attend to the contexts of the question."""

    name: ObjectiveName = "instruct-retro"
    fields = PROMPT_FIELDS

    def datasets(self, request: DataRequest, tokenizer: Tokenizer) -> Datasets | None:
        """Return blends of files of questions."""
        return instruct_datasets(request, tokenizer)

    def letters(self, spec: ModelSpec) -> Mapping[str, int]:
        """Return one chunk a sample, its prompt, and the size of its neighbors."""
        return {**super().letters(spec), "c": 1}

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `instruct_batch` for these masks."""
        return partial(instruct_batch, masks=masks, eod=eod)


def instruct_batch(
    tokens: Tensor,
    is_target: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    **retrieved: Any,
) -> Batch:
    """Return a batch of samples of an InstructDataset, with the neighbors retrieved for a Retro.

    Shapes: tokens, is_target [b, s + 1] -> the fields of the objective.
    """
    batch = gpt_batch(tokens, masks, eod)
    return {**batch, **retrieved, "loss_mask": batch["loss_mask"] * is_target[:, 1:]}
