"""Attention of ranks that divide a sequence: ring attention (context parallelism) and Ulysses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fused_kernels.attention_blocks import (
    TILE,
    Block,
    Scoring,
    block_attention,
    block_gradients,
    takes_flash_in_ring,
)
from megatron.model.layers.attention_kernels import Attend, Mask, ScoreOptions, in_one_width
from megatron.model.layers.layer_input import once
from megatron.tensor_parallel.collectives import all_to_all, start_ring
from megatron.tensor_parallel.topology import zigzag_chunks


class RingAttention:
    """Attend from this rank's positions to the positions of all ranks, one block of keys at a time.

    Of 2 N chunks of the sequence rank r has the chunks r and 2 N - 1 - r, so that with causal
    attention all ranks see as many keys. In step i the keys and values of rank r - i are at rank r,
    which sends them on while it computes; results of the steps are merged by their log-sum-exp.
    Backward sends them around again, followed by the sums of their gradients, which end at their
    owner. A rank computes its own block in two parts, overlapped with the first and the last
    transfer. Attention sinks are merged last, at their rank. Blocks in which nothing is visible are
    skipped. Nothing but queries, keys, values, result and log-sum-exp of this rank's positions is kept
    for backward.

    Args:
        group: the ranks that divide the sequence, two or more.
        flash: whether FlashAttention may compute blocks.

    Shapes: query [b, a, s/N, d], key and value [b, g, s/N, d] -> [b, a, s/N, d]; s/N is even. The
        mask covers all positions.
    Communication: N - 1 sends of keys and values forward, 2 N - 2 of as many bytes backward. With
        masks by spans, one synchronisation with the GPU in each micro-batch.
    Randomness: dropout draws from the stream that is current.
    Source: arXiv:2310.01889, section 3; arXiv:2311.09431, section 3, for the balanced chunks.
    """

    def __init__(self, group: dist.ProcessGroup, *, flash: bool):
        self.group, self.flash = group, flash

    @classmethod
    def of(cls, group: dist.ProcessGroup, attention: str, *, sinks: bool) -> "RingAttention":
        """Return the ring attention of a run; arguments as in `takes_flash_in_ring`."""
        return cls(group, flash=takes_flash_in_ring(attention, sinks=sinks))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Return the mixed values of this rank's positions.

        Raises:
            ValueError: biases of relative positions, which it does not have.
        """
        if key.size(-1) != value.size(-1):
            return in_one_width(self, query, key, value, how)
        if how.bias is not None:
            raise ValueError("ring attention has no biases of relative positions")
        scoring = Scoring(
            scale=how.scale,
            softcap=how.softcap,
            slopes_a=how.slopes_a,
            dropout=how.dropout,
            flash=self.flash,
        )
        tile = query.size(2) // 2
        by_flash = scoring.takes_flash(query.size(-1), query.dtype, query.device)
        if not (how.mask.is_plain and by_flash):
            tile = min(TILE, tile)
        steps = once(
            how.mask.derived,
            ("ring", query.size(2), tile),
            lambda: self.steps(how.mask, query.size(2), tile, query.device),
        )
        mixed: Tensor = _Ring.apply(query, key, value, how.sinks_a, steps, scoring, self.group)
        return mixed

    def steps(
        self, mask: Mask, own_length: int, tile: int, device: torch.device
    ) -> list[list[Block]]:
        """Return the blocks of each step; the last one is the second part of this rank's blocks.

        Args:
            own_length: positions of this rank.
            tile: queries and keys of a block at most.
        """
        ranks, rank = self.group.size(), self.group.rank()
        length = ranks * own_length
        limits = mask.ranges(length, length, device)
        # Without spans the mask follows from the sizes: no need to wait for a GPU.
        on_host = mask.spans_bs2 is None and device.type != "cpu"
        compared = mask.ranges(length, length, torch.device("cpu")) if on_host else limits
        owned = [_tiles(owner, ranks, own_length // 2, tile) for owner in range(ranks)]
        keys = [position for tiles in owned for _, position in tiles]
        touched, covered = _visibility(compared, [p for _, p in owned[rank]], keys)
        steps = []
        for step in range(ranks):
            owner = (rank - step) % ranks
            blocks = []
            for row, (at, positions) in enumerate(owned[rank]):
                for column, (there, seen) in enumerate(owned[owner], sum(map(len, owned[:owner]))):
                    if not touched[row][column]:
                        continue
                    first_bq, stop_bq = (x[:, positions] - seen.start for x in limits)
                    sees_all = covered[row][column]
                    blocks.append(
                        Block(
                            queries=at,
                            keys=there,
                            distance=seen.start - positions.start,
                            first_bq=None if sees_all else first_bq,
                            stop_bq=None if sees_all else stop_bq,
                            sees_all=sees_all,
                            is_causal=mask.causal and mask.is_plain and positions == seen,
                        )
                    )
            steps.append(blocks)
        local = sorted(steps[0], key=lambda block: not block.sees_all)
        half = len(local) // 2
        return [local[:half], *steps[1:], local[half:]]


def _tiles(owner: int, ranks: int, chunk: int, tile: int) -> list[tuple[slice, slice]]:
    """Return the tiles of a rank's two chunks: where they are in its tensors, and in the sequence."""
    tiles = []
    for index, number in enumerate(zigzag_chunks(owner, ranks)):
        for start in range(0, chunk, tile):
            stop = min(start + tile, chunk)
            here, there = index * chunk, number * chunk
            tiles.append((slice(here + start, here + stop), slice(there + start, there + stop)))
    return tiles


def _visibility(
    limits: tuple[Tensor, Tensor], queries: Sequence[slice], keys: Sequence[slice]
) -> tuple[list[list[bool]], list[list[bool]]]:
    """Return for each tile of queries whether they see some of each tile of keys, and whether all."""
    device = limits[0].device
    starts_k, stops_k = (
        torch.tensor([getattr(each, end) for each in keys], device=device)
        for end in ("start", "stop")
    )
    touched, covered = [], []
    for rows in queries:
        first_bq1, stop_bq1 = (x[:, rows, None] for x in limits)
        some = torch.maximum(first_bq1, starts_k) < torch.minimum(stop_bq1, stops_k)
        every = (first_bq1 <= starts_k) & (stops_k <= stop_bq1)
        touched.append(some.flatten(0, 1).any(0))
        covered.append(every.flatten(0, 1).all(0))
    seen: list[list[list[bool]]] = torch.stack([*touched, *covered]).unflatten(0, (2, -1)).tolist()
    return seen[0], seen[1]


class _Ring(torch.autograd.Function):
    """Attention over all steps; see RingAttention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_a: Tensor | None,
        steps: list[list[Block]],
        how: Scoring,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Return the mixed values."""
        ranks = group.size()
        ctx.steps, ctx.how, ctx.group = steps, how, group
        ctx.rng_state = _rng_state(query.device) if how.dropout else None
        wide = torch.promote_types(query.dtype, torch.float32)
        mixed = query.new_zeros(query.shape, dtype=wide)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        local = held = torch.stack([key, value])
        for number, blocks in enumerate(steps):
            arrive = start_ring([held] if number < ranks - 1 else [], group)
            for block in blocks:
                rows = block.queries
                keys, values = (local if number == ranks else held)[:, :, :, block.keys]
                more, its_lse = block_attention(query[:, :, rows], keys, values, block, how)
                _merge(mixed[:, :, rows], lse[:, :, rows], more, its_lse)
            held = next(iter(arrive()), held)
        if sinks_a is not None:
            sinks = sinks_a.to(wide)[:, None].expand_as(lse)
            # Their value is 0. Gradients of blocks follow from the log-sum-exp with them.
            _merge(mixed, lse, torch.zeros_like(mixed), sinks)
        # As the output layer reads it: its transposition to [s, b, a, d] copies nothing.
        laid_out = mixed.permute(2, 0, 1, 3).to(query.dtype, memory_format=torch.contiguous_format)
        result = laid_out.permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key, value, sinks_a, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        query, key, value, sinks_a, mixed, lse = ctx.saved_tensors
        ranks = ctx.group.size()
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        local = held = torch.stack([key, value])
        grad_local = torch.zeros_like(local, dtype=lse.dtype)
        sums = None
        with _rewound(ctx.rng_state, query.device):
            for number, blocks in enumerate(ctx.steps):
                sent = [held] if number < ranks - 1 else []
                arrive = start_ring(sent if sums is None else [*sent, sums], ctx.group)
                is_own = number in (0, ranks)
                found = grad_local if is_own else torch.zeros_like(grad_local)
                for block in blocks:
                    rows, columns = block.queries, block.keys
                    keys, values = (local if is_own else held)[:, :, :, columns]
                    grad, queries, results, its_lse = (
                        x[:, :, rows] for x in (grads[0], query, mixed, lse)
                    )
                    grad_rows, grad_keys, grad_values = block_gradients(
                        grad, queries, keys, values, results, its_lse, block, ctx.how
                    )
                    grad_query[:, :, rows] += grad_rows
                    found[0, :, :, columns] += grad_keys
                    found[1, :, :, columns] += grad_values
                received = arrive()
                if sent:
                    held = received.pop(0)
                if received:
                    found += received[0]
                sums = None if is_own else found.to(key.dtype)
        grad_key, grad_value = grad_local.to(key.dtype)
        grad_sinks = None
        if sinks_a is not None:
            weights = (sinks_a.to(lse.dtype)[:, None] - lse).exp()
            inner = (grads[0].to(lse.dtype) * mixed).sum(-1)
            grad_sinks = -(weights * inner).sum((0, 2)).to(sinks_a.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None, None


def _merge(mixed: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Merge the attention to further keys into `mixed` and `lse`, in place.

    Source: arXiv:2205.14135, section 3.1.
    """
    total = torch.logaddexp(lse, its_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    mixed *= (lse - finite).exp()[..., None]
    mixed += more * (its_lse - finite).exp()[..., None]
    lse.copy_(total)


def _rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _rewound(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw what was drawn from `state` on inside the `with` block; None: nothing is drawn."""
    if state is None:
        yield
        return
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        if is_cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield


class UlyssesAttention:
    """Attend to whole sequences with a part of the heads.

    Args:
        attend: what computes attention.
        group: the ranks that divide the sequence; their number divides the heads of a rank.

    Shapes: query [b, a, s/n, d], key and value [b, g, s/n, d] -> [b, a, s/n, d], n the group's
        size; `attend` gets [b, a/n, s, d] and [b, g/n, s, d].
    Communication: four all-to-alls forward (query, key, value, result), four backward.
    Source: arXiv:2309.14509, section 3.
    """

    def __init__(self, attend: Attend, group: dist.ProcessGroup):
        self.attend, self.group = attend, group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Return the attention output of this rank's positions. The mask covers all positions."""
        query, key, value = (
            all_to_all(x, scatter=1, gather=2, group=self.group) for x in (query, key, value)
        )
        slopes_a, ranks, rank = how.slopes_a, self.group.size(), self.group.rank()
        if how.sinks_a is not None:
            how = replace(how, sinks_a=how.sinks_a.chunk(ranks)[rank])
        if slopes_a is not None:
            own_a = once(how.mask.derived, "own slopes", lambda: slopes_a.chunk(ranks)[rank])
            how = replace(how, slopes_a=own_a)
        mixed = self.attend(query, key, value, how)
        return all_to_all(mixed, scatter=2, gather=1, group=self.group)
