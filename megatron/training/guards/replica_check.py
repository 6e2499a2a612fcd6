"""Replica check: weights, buffers, optimizer state, RNG states and counters that ranks must share."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict
from itertools import chain

import torch
from torch import Tensor

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError
from megatron.engine.engine import Engine
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import expert_share_of, shard_of
from megatron.training.loop.collectives import from_rank_0, post
from megatron.training.loop.loop import Hook, StepResult

_CHUNK = 1 << 22
_MOST_LISTED = 8
_FACTOR = 2 * 0x2545F4914F6CDD1D  # even, so that one more is odd

Common = tuple[str, Hashable]
"""A name, and a key: ranks with the same key must have equal values."""


class ReplicaCheck(Hook):
    """Compares fingerprints over all ranks every `interval` iterations. For all ranks.

    Args:
        engine: whose weights and optimizer are compared.
        streams_per_tensor_rank: whether tensor ranks draw different numbers outside of
            tensor-parallel regions.
    """

    def __init__(
        self, engine: Engine, groups: Groups, *, interval: int, streams_per_tensor_rank: bool
    ):
        self._engine = engine
        self._groups = groups
        self._interval = interval
        self._streams_per_tensor_rank = streams_per_tensor_rank

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Compare when it is due.

        Raises:
            TrainingError: names what differs and on which ranks.

        Communication: a number per weight of each rank to rank 0, when it is due.
        """
        if state.iteration % self._interval:
            return
        prints = [(self._groups.rank, common, print_) for common, print_ in self._prints(state)]
        posted = post(prints)
        if found := from_rank_0(lambda: [*differences(chain.from_iterable(posted.all()))]):
            more = len(found) - _MOST_LISTED
            raise TrainingError(
                f"at iteration {state.iteration} ranks differ in values that must be equal: "
                + "; ".join(found[:_MOST_LISTED])
                + (f"; and {more} more" if more > 0 else "")
                + ". A rank that is alone with its value has a broken device, host or library; "
                "resume without it from an earlier checkpoint"
            )

    def _prints(self, state: TrainState) -> Iterator[tuple[Common, Hashable]]:
        for name, parameter in self._engine.module.named_parameters():
            # ZeRO-3 holds a weight once, in pieces.
            if hasattr(parameter, "ds_id"):
                continue
            shard = shard_of(parameter)
            experts = expert_share_of(parameter).index
            yield (
                (name, (shard.index if shard else "all", experts)),
                fingerprint(parameter.detach()),
            )
        for name, buffer in self._engine.module.named_buffers():
            yield (name, "all"), fingerprint(buffer)
        groups = self._groups
        part = groups.tensor_rank if self._streams_per_tensor_rank else "all"
        drawing = (groups.stage, groups.data_rank, groups.sequence_rank, part)
        yield ("the ordinary random stream", drawing), fingerprint(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.get_rng_state()
            yield ("the device's random stream", drawing), fingerprint(device)
        for name, numbers in self._engine.counters().items():
            yield (name, "all"), numbers
        for name, value in asdict(state).items():
            yield (f"the counter of {name}", "all"), value


def fingerprint(tensor: Tensor) -> int:
    """Return a number of 64 bits that differs if any one element of `tensor` does.

    The sum, over positions, of an element's bits times an odd number: no single change is lost, as
    an odd number has an inverse modulo 2**64.
    """
    bits = tensor.contiguous().view(-1).view(_AS_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        indices = torch.arange(start, start + len(chunk), device=bits.device)
        # Mixed, or equal changes at two indices could cancel out too easily.
        total += (chunk * (indices * _FACTOR + 1)).sum()
    return int(total)


_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differences(prints: Iterable[tuple[int, Common, Hashable]]) -> Iterator[str]:
    """Yield the differences among (rank, shared name, fingerprint)."""
    found: dict[Common, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, common, value in prints:
        found[common][value].append(rank)
    for (name, _), by_value in found.items():
        if len(by_value) > 1:
            sides = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
            yield f"{name}: ranks {' | '.join(', '.join(map(str, ranks)) for ranks in sides)}"
