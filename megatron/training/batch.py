"""From token rows to what the engine takes: the only place that knows this tuple."""

from collections.abc import Iterator

import numpy as np
import torch

from megatron.data.samplers import SampleSource, micro_batches
from megatron.engine.engine import MicroBatch
from megatron.errors import DataError
from megatron.parallel.broadcast import broadcast_tokens
from megatron.parallel.groups import Groups
from megatron.plan.batch_plan import BatchPlan
from megatron.plan.model_spec import ModelSpec


def gpt_batches(
    dataset: SampleSource,
    *,
    consumed_samples: int,
    batch: BatchPlan,
    model: ModelSpec,
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
        yield gpt_micro_batch(broadcast_tokens(read, shape, groups, device))


def gpt_micro_batch(tokens: torch.Tensor) -> MicroBatch:
    """Return ((tokens_bs, positions_bs), (labels_bs, loss_mask_bs)) of [b, s + 1] tokens."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1), device=tokens.device).expand_as(inputs).contiguous()
    loss_mask = torch.ones(labels.shape, dtype=torch.float32, device=tokens.device)
    return (inputs, positions), (labels, loss_mask)


def _read(rows: np.ndarray, vocab_size: int) -> torch.Tensor:
    # Checked here, on the CPU: a foreign token stops a GPU with a message that names nothing.
    if int(rows.max()) >= vocab_size:
        raise DataError(
            f"token {int(rows.max())} is not in the vocabulary of {vocab_size} tokens: the data "
            "were made with another tokenizer than the one of this run"
        )
    return torch.from_numpy(rows)
