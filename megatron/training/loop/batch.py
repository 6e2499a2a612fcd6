"""From token rows to what the engine takes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.config.data.mask_plan import MaskPlan
from megatron.config.data.objective_plan import ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.config.optimization.batch_plan import BatchPlan
from megatron.data.datasets.sample_origins import described
from megatron.data.sampling.batch_sampler import micro_batches
from megatron.data.sampling.provenance import TracedSource
from megatron.engine.engine import MicroBatch
from megatron.model.loss import position_weights
from megatron.tensor_parallel.broadcast import broadcast_tokens
from megatron.tensor_parallel.process_groups import Groups

PACKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
"""Documents of a sample see each other, as in Megatron-LM by default."""


def read_batches(
    dataset: TracedSource,
    *,
    as_micro_batch: Callable[[torch.Tensor], MicroBatch],
    channels: tuple[int, ...] = (),
    consumed_samples: int,
    batch: BatchPlan,
    model: ModelSpec,
    groups: Groups,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Yield this replica's micro-batches from `consumed_samples` on.

    Tensor rank 0 reads; the ranks that share its layers receive. Ranks that divide the sequence
    each take their part of it.

    Args:
        as_micro_batch: makes of samples what the engine takes.
        channels: what a sample holds for each token, the token itself first: (3,) if there are two
            more numbers, () if there is none.

    Raises:
        DataError: the samples have run out, or a token is not in the vocabulary. Only tensor rank 0
            raises it for a token.

    Communication: one broadcast of [b, *channels, s + 1] over the tensor group per micro-batch.
    """
    shape = (batch.micro_batch_size, *channels, model.seq_length + 1)
    rows = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=batch.micro_batch_size,
        data_rank=groups.data_rank,
        data_size=groups.topology.data,
    )
    own = consumed_samples + groups.data_rank * batch.micro_batch_size
    for first in count(own, batch.micro_batch_size * groups.topology.data):
        read = None
        if groups.tensor_rank == 0:
            samples = next(rows)
            _require_vocabulary(samples, model.vocab_size, dataset, first)
            read = torch.from_numpy(samples)
        micro_batch = as_micro_batch(broadcast_tokens(read, shape, groups, device))
        yield own_part(micro_batch, groups.sequence_rank, groups.topology.sequence)


def own_part(micro_batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """Return part number `part` of the positions.

    What tokens see is told of all of them: attention is over whole sequences.
    """
    if parts == 1:
        return micro_batch
    inputs, (labels_bs, weights_bs) = micro_batch
    tokens_bs, positions_bs, *spans_bs2 = inputs

    def own(x_bs: torch.Tensor) -> torch.Tensor:
        return x_bs.chunk(parts, 1)[part].contiguous()

    return (own(tokens_bs), own(positions_bs), *spans_bs2), (own(labels_bs), own(weights_bs))


def gpt_micro_batch(
    tokens: torch.Tensor, masks: MaskPlan = PACKED, eod: int | None = None
) -> MicroBatch:
    """Return what the engine takes of [b, s + 1] tokens.

    Args:
        masks: how documents are kept apart.
        eod: the token that ends a document; needed when they are.

    Shapes: ((tokens_bs, positions_bs[, spans_bs2]), (labels_bs, loss_mask_bs)).
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1), device=tokens.device).expand_as(inputs).contiguous()
    loss_mask = torch.ones(labels.shape, dtype=torch.float32, device=tokens.device)
    if not masks.needs_eod:
        return (inputs, positions), (labels, loss_mask)
    if eod is None:
        raise ValueError("documents can be kept apart only when the token that ends one is known")
    ends = inputs.eq(eod)
    if masks.mask_loss:
        loss_mask = loss_mask.masked_fill(ends, 0.0)
    # An end belongs to the document that it ends: the next one starts behind it.
    starts = torch.where(ends.roll(1, 1), positions, 0).cummax(1).values
    spans = torch.stack([starts, positions + 1], -1)
    if masks.reset_positions:
        positions = positions - starts
    if masks.isolate_documents:
        return (inputs, positions, spans), (labels, loss_mask)
    return (inputs, positions), (labels, loss_mask)


def prefix_micro_batch(
    rows_b2s: torch.Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> MicroBatch:
    """Return what the engine takes of samples of a PrefixDataset.

    The first token that is a target is the first one after the prefix.

    Shapes: rows_b2s [b, 2, s + 1] -> ((tokens_bs, positions_bs, spans_bs2), (labels_bs,
        weights_bs)).
    """
    tokens, prefix_ends = rows_b2s[:, 0], rows_b2s[:, 1, :-1]
    (inputs, positions, *spans), (labels, weights) = gpt_micro_batch(tokens, masks, eod)
    places = torch.arange(inputs.size(1), device=tokens.device)
    first = spans[0][..., 0] if spans else torch.zeros_like(inputs)
    spans_bs2 = torch.stack([first, torch.maximum(places + 1, prefix_ends)], -1)
    if objective.targets_only:
        weights = weights * (places + 1 >= prefix_ends)
    if objective.reweights:
        weights = weights * position_weights(inputs.size(1)).to(weights)
    return (inputs, positions, spans_bs2), (labels, weights)


def pair_micro_batch(
    rows_b3s: torch.Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> MicroBatch:
    """Return what the engine takes of samples of an MTFDataset.

    No token sees another pair; a token counts when it is a target, predicted within its pair.

    Shapes: rows_b3s [b, 3, s + 1] -> ((tokens_bs, positions_bs, spans_bs2), (labels_bs,
        weights_bs)).
    """
    tokens, pairs, targets_start = rows_b3s.unbind(1)
    places = torch.arange(1, tokens.size(1), device=tokens.device)
    return _packed_micro_batch(
        tokens,
        pairs,
        (pairs[:, 1:] > 0) & (places >= targets_start[:, 1:]),
        masks,
        eod,
        objective,
        # An input without a target may end with the row, which is one token longer.
        seen=targets_start[:, :-1].clamp(max=len(places)) if objective.sees_prefix else None,
    )


def chat_micro_batch(
    rows_b3s: torch.Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> MicroBatch:
    """Return what the engine takes of samples of a ChatDataset.

    No token sees another conversation; a token counts when it is of an answer.

    Shapes: rows_b3s [b, 3, s + 1] -> ((tokens_bs, positions_bs, spans_bs2), (labels_bs,
        weights_bs)).
    """
    tokens, chats, counts = rows_b3s.unbind(1)
    return _packed_micro_batch(tokens, chats, counts[:, 1:] > 0, masks, eod, objective)


def _packed_micro_batch(
    tokens: torch.Tensor,
    texts: torch.Tensor,
    is_target: torch.Tensor,
    masks: MaskPlan,
    eod: int | None,
    objective: ObjectivePlan,
    seen: torch.Tensor | None = None,
) -> MicroBatch:
    """Return what the engine takes of texts that do not see each other.

    Args:
        texts: number of each token's text, 0 for padding.
        is_target: whether each label counts, if it is predicted within its text.
        seen: up to where each token sees at least; only what is before it if None.

    Shapes: tokens, texts [b, s + 1]; is_target, seen [b, s].
    """
    (inputs, places, *_), (labels, weights) = gpt_micro_batch(
        tokens, replace(masks, reset_positions=False, isolate_documents=False), eod
    )
    begins = texts[:, :-1].diff(dim=1, prepend=texts[:, :1]) != 0
    starts = torch.where(begins, places, 0).cummax(1).values
    stops = places + 1
    if seen is not None:
        stops = torch.maximum(stops, seen)
    weights = weights * (is_target & (texts[:, 1:] == texts[:, :-1]))
    if objective.equal_targets:
        counts = torch.zeros(weights.size(0), tokens.size(1) + 1, device=tokens.device)
        counts.scatter_add_(1, texts[:, 1:], weights)
        weights = weights / counts.gather(1, texts[:, 1:]).clamp(min=1)
    positions = places - starts if masks.reset_positions else places
    return (inputs, positions, torch.stack([starts, stops], -1)), (labels, weights)


def _require_vocabulary(
    rows: NDArray[np.int64], vocab_size: int, dataset: TracedSource, first: int
) -> None:
    """Refuse token ids outside the vocabulary, on the CPU.

    A GPU would stop with a message that names nothing, and tensor-parallel ranks would take a
    negative id for one of another rank's rows.

    Args:
        first: number of the first row's sample in `dataset`.

    Raises:
        DataError: names the token, and the sample with its file and documents.
    """
    tokens = rows if rows.ndim == 2 else rows[:, 0]
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
