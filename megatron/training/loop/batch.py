"""From samples to batches: the fields that GPT's objectives declare, and who reads them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.common.errors import DataError
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective_plan import ObjectivePlan
from megatron.config.optimization.batch_size import BatchPlan
from megatron.data.datasets.sample_origins import described
from megatron.data.sampling.batch_sampler import micro_batches
from megatron.data.sampling.provenance import TracedSource
from megatron.model.loss import position_weights
from megatron.tensor_parallel.broadcast import Batch, Field, Fields, broadcast_batch, sequence_shard
from megatron.tensor_parallel.process_groups import Groups

PACKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
"""Documents of a sample see each other, as in Megatron-LM by default."""

CAUSAL_FIELDS: Fields = {
    "tokens": Field("bs"),
    "positions": Field("bs"),
    "labels": Field("bs"),
    "loss_mask": Field("bs", torch.float32),
}
"""A batch for which attention is causal."""

SPAN_FIELDS: Fields = {**CAUSAL_FIELDS, "attention_span": Field("bS2")}
"""A batch that says what each token sees; attention is over all positions, on every rank."""

Collate = Callable[..., Batch]
"""Makes a batch of the fields of several samples, given by name with a dimension of b in front."""


def read_batches(
    dataset: TracedSource,
    *,
    collate: Collate,
    fields: Fields,
    consumed_samples: int,
    batch: BatchPlan,
    letters: Mapping[str, int],
    vocab_size: int,
    groups: Groups,
    device: torch.device,
    length: Callable[[], int] | None = None,
) -> Iterator[Batch]:
    """Yield this replica's micro-batches from `consumed_samples` on.

    Tensor rank 0 reads and collates; the ranks that share its layers receive. Ranks that divide
    the sequence each take their part of it.

    Args:
        collate: makes the batch of samples.
        fields: what a batch holds.
        letters: sizes of the letters in the shapes of `fields`, without b; s is the length of
            samples.
        length: returns how many positions of the samples of the next batch are taken; all if None.

    Raises:
        DataError: the samples have run out, or a token is not in the vocabulary. Only tensor rank 0
            raises it for a token.

    Communication: one broadcast of a batch over the tensor group per micro-batch.
    """
    rows = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=batch.micro_batch_size,
        data_rank=groups.data_rank,
        data_size=groups.topology.data,
    )
    own = consumed_samples + groups.data_rank * batch.micro_batch_size
    for first in count(own, batch.micro_batch_size * groups.topology.data):
        s = length() if length else letters["s"]
        read = None
        if groups.tensor_rank == 0:
            samples = next(rows)
            _require_vocabulary(samples["tokens"], vocab_size, dataset, first)
            # The token behind the last input is the last label.
            read = collate(**{k: torch.from_numpy(v[..., : s + 1]) for k, v in samples.items()})
        sizes = {**letters, "b": batch.micro_batch_size, "s": s, "S": s}
        whole = broadcast_batch(read, fields, sizes, groups, device)
        yield sequence_shard(whole, fields, groups.sequence_rank, groups.topology.sequence)


def gpt_batch(tokens: Tensor, masks: MaskPlan = PACKED, eod: int | None = None) -> Batch:
    """Return a batch for next-token prediction.

    Args:
        masks: how documents are kept apart.
        eod: the token that ends a document; needed when they are.

    Shapes: tokens [b, s + 1] -> CAUSAL_FIELDS, or SPAN_FIELDS if documents are isolated.
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1), device=tokens.device).expand_as(inputs).contiguous()
    loss_mask = torch.ones(labels.shape, dtype=torch.float32, device=tokens.device)
    batch = {"tokens": inputs, "positions": positions, "labels": labels, "loss_mask": loss_mask}
    if not masks.needs_eod:
        return batch
    if eod is None:
        raise ValueError("documents can be kept apart only when the token that ends one is known")
    ends = inputs.eq(eod)
    if masks.mask_loss:
        batch["loss_mask"] = loss_mask.masked_fill(ends, 0.0)
    # An end belongs to the document that it ends: the next one starts behind it.
    starts = torch.where(ends.roll(1, 1), positions, 0).cummax(1).values
    if masks.reset_positions:
        batch["positions"] = positions - starts
    if masks.isolate_documents:
        batch["attention_span"] = torch.stack([starts, positions + 1], -1)
    return batch


def prefix_batch(
    tokens: Tensor,
    prefix_ends: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for prefix language modelling, of samples of a PrefixDataset.

    The first token that is a target is the first one after the prefix.

    Shapes: tokens, prefix_ends [b, s + 1] -> SPAN_FIELDS.
    """
    batch = gpt_batch(tokens, masks, eod)
    inputs, prefix_ends = batch["tokens"], prefix_ends[:, :-1]
    places = torch.arange(inputs.size(1), device=tokens.device)
    span, weights = batch.get("attention_span"), batch["loss_mask"]
    first = torch.zeros_like(inputs) if span is None else span[..., 0]
    if objective.targets_only:
        weights = weights * (places + 1 >= prefix_ends)
    if objective.reweights:
        weights = weights * position_weights(inputs.size(1)).to(weights)
    seen = torch.stack([first, torch.maximum(places + 1, prefix_ends)], -1)
    return batch | {"loss_mask": weights, "attention_span": seen}


def pair_batch(
    tokens: Tensor,
    text_ids: Tensor,
    target_starts: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for multitask finetuning, of samples of an MTFDataset.

    No token sees another pair; a token counts when it is a target, predicted within its pair.

    Shapes: tokens, text_ids, target_starts [b, s + 1] -> SPAN_FIELDS.
    """
    places = torch.arange(1, tokens.size(1), device=tokens.device)
    return _packed_batch(
        tokens,
        text_ids,
        (text_ids[:, 1:] > 0) & (places >= target_starts[:, 1:]),
        masks,
        eod,
        objective,
        # An input without a target may end with the row, which is one token longer.
        seen=target_starts[:, :-1].clamp(max=len(places)) if objective.sees_prefix else None,
    )


def chat_batch(
    tokens: Tensor,
    text_ids: Tensor,
    is_target: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for supervised finetuning, of samples of a ChatDataset.

    No token sees another conversation; a token counts when it is of an answer.

    Shapes: tokens, text_ids, is_target [b, s + 1] -> SPAN_FIELDS.
    """
    return _packed_batch(tokens, text_ids, is_target[:, 1:] > 0, masks, eod, objective)


def _packed_batch(
    tokens: Tensor,
    text_ids: Tensor,
    is_target: Tensor,
    masks: MaskPlan,
    eod: int | None,
    objective: ObjectivePlan,
    seen: Tensor | None = None,
) -> Batch:
    """Return a batch of texts that do not see each other.

    Args:
        text_ids: number of each token's text, 0 for padding.
        is_target: whether each label counts, if it is predicted within its text.
        seen: up to where each token sees at least; only what is before it if None.

    Shapes: tokens, text_ids [b, s + 1]; is_target, seen [b, s] -> SPAN_FIELDS.
    """
    batch = gpt_batch(tokens, replace(masks, reset_positions=False, isolate_documents=False), eod)
    places, weights = batch["positions"], batch["loss_mask"]
    begins = text_ids[:, :-1].diff(dim=1, prepend=text_ids[:, :1]) != 0
    starts = torch.where(begins, places, 0).cummax(1).values
    stops = places + 1
    if seen is not None:
        stops = torch.maximum(stops, seen)
    weights = weights * (is_target & (text_ids[:, 1:] == text_ids[:, :-1]))
    if objective.equal_targets:
        counts = torch.zeros(weights.size(0), tokens.size(1) + 1, device=tokens.device)
        counts.scatter_add_(1, text_ids[:, 1:], weights)
        weights = weights / counts.gather(1, text_ids[:, 1:]).clamp(min=1)
    return batch | {
        "positions": places - starts if masks.reset_positions else places,
        "loss_mask": weights,
        "attention_span": torch.stack([starts, stops], -1),
    }


def _require_vocabulary(
    tokens: NDArray[np.int64], vocab_size: int, dataset: TracedSource, first: int
) -> None:
    """Refuse token ids outside the vocabulary, on the CPU.

    A GPU would stop with a message that names nothing, and tensor-parallel ranks would take a
    negative id for one of another rank's rows.

    Args:
        first: number of the first row's sample in `dataset`.

    Raises:
        DataError: names the token, and the sample with its file and documents.
    """
    # As unsigned numbers the negative ones are too large as well.
    wrong = tokens.view(np.uint64) >= vocab_size
    if not wrong.any():
        return
    row, column = np.argwhere(wrong)[0]
    where = described(dataset.origin(first + int(row)))
    raise DataError(
        f"token {tokens[row, column]} is not in the vocabulary of {vocab_size} tokens (0 to "
        f"{vocab_size - 1}): {where}; the file is damaged, or was made with another tokenizer than "
        "the one of this run"
    )
