"""From token rows to what the engine takes."""

from collections.abc import Iterator

import numpy as np
import torch

from megatron.data.samplers import SampleSource, micro_batches
from megatron.engine.engine import MicroBatch
from megatron.errors import DataError
from megatron.parallel.broadcast import broadcast_tokens
from megatron.parallel.groups import Groups
from megatron.plan.batch_plan import BatchPlan
from megatron.plan.mask_plan import MaskPlan
from megatron.plan.model_spec import ModelSpec

PACKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
"""Documents of a sample see each other, as in Megatron-LM by default."""


def gpt_batches(
    dataset: SampleSource,
    *,
    consumed_samples: int,
    batch: BatchPlan,
    model: ModelSpec,
    masks: MaskPlan,
    eod: int | None,
    groups: Groups,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Yield this replica's micro-batches from `consumed_samples` on.

    Tensor rank 0 reads; the ranks that share its layers receive.

    Raises:
        DataError: the samples have run out, or a token is not in the vocabulary.

    Communication: one broadcast of [b, s + 1] over the tensor group per micro-batch.
    """
    shape = (batch.micro_batch_size, model.seq_length + 1)
    rows = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=batch.micro_batch_size,
        data_rank=groups.data_rank,
        data_size=groups.topology.data,
    )
    while True:
        read = _read(next(rows), model.vocab_size) if groups.tensor_rank == 0 else None
        yield gpt_micro_batch(broadcast_tokens(read, shape, groups, device), masks, eod)


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


def _read(rows: np.ndarray, vocab_size: int) -> torch.Tensor:
    # Checked here, on the CPU: a foreign token stops a GPU with a message that names nothing.
    if int(rows.max()) >= vocab_size:
        raise DataError(
            f"token {int(rows.max())} is not in the vocabulary of {vocab_size} tokens: the data "
            "were made with another tokenizer than the one of this run"
        )
    return torch.from_numpy(rows)
