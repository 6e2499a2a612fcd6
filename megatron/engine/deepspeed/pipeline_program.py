"""Interleaved 1F1B and zero bubble (ZB-H1): DeepSpeed's pipeline engine with a schedule of our own.

Transfers are batched: all messages between two iterations of the schedule are posted together, since
blocking ones would deadlock. A pass waits for its own input. Shapes of activations come once, through
the key-value store of the run.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)
from torch import Tensor

from megatron.engine.deepspeed.patches.pipeline import (
    Activate,
    Await,
    ChunkedPipelineEngine,
    Drain,
    Exchange,
    WeightPass,
)
from megatron.engine.deepspeed.patches.runtime import default_store
from megatron.pipeline.schedule import Direction, Grid, Transfer, num_buffers, program_of

_UNFINISHED = 2
"""Exchanges that may still send: a rank waits for those before, and frees what they have sent."""


class ProgramSchedule(PipeSchedule):
    """The program of a rank as instructions for DeepSpeed."""

    def __init__(self, grid: Grid, rank: int, *, trains: bool):
        super().__init__(micro_batches=grid.micro_batches, stages=grid.ranks, stage_id=rank)
        self._sizes, self._trains = grid, trains
        self._program = program_of(grid, rank, trains=trains)

    def num_pipe_buffers(self) -> int:
        """Return the number of slots for activations, each of a chunk."""
        return num_buffers(self._program)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each iteration, then those of the optimizer step."""
        grid, rank = self._sizes, self.stage_id
        for iteration in self._program:
            for each, buffer in iteration.passes:
                if buffer is None:
                    yield [WeightPass()]
                    continue
                if grid.source(rank, each):
                    yield [Await(direction=each.direction, buffer_id=buffer)]
                forward = [ForwardPass(buffer_id=buffer)]
                if grid.is_first(rank, each.chunk) or grid.is_last(rank, each.chunk):
                    forward.insert(0, LoadMicroBatch(buffer_id=buffer))
                backward = [BackwardPass(buffer_id=buffer)]
                yield [
                    Activate(chunk=each.chunk, buffer_id=buffer),
                    *(forward if each.direction == "forward" else backward),
                ]
            if iteration.sends or iteration.receives:
                yield [Exchange(sends=iteration.sends, receives=iteration.receives)]
        yield [Drain()]
        if self._trains:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class ProgramEngine(ChunkedPipelineEngine):
    """Run the program of an interleaved or zero-bubble schedule.

    Losses, received gradients, inputs and outputs are kept by buffer until the backward pass of their
    chunk and micro-batch, and freed there: others come in between.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._losses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        self._arriving: dict[tuple[Direction, int], list[dist.Work]] = {}
        # With its tensors, which have to outlive it.
        self._leaving: deque[tuple[list[dist.Work], list[dist.P2POp]]] = deque()
        self.reset_activation_shape()

    def reset_activation_shape(self) -> None:
        """Expect activations of other shapes from now on."""
        super().reset_activation_shape()
        self._announced: set[int] = set()
        self._shapes: dict[int, tuple[bool, list[tuple[list[int], torch.dtype]]]] = {}

    def schedule_of(self, micro_batches: int, *, trains: bool) -> ProgramSchedule:
        """Return the instructions of this rank for a step or an evaluation."""
        return ProgramSchedule(self.module.grid(micro_batches), self.stage_id, trains=trains)

    def activate(self, chunk: int, buffer_id: int) -> None:
        """Make `chunk` the active one, with the loss or the received gradient of a micro-batch."""
        self.active_chunk = chunk
        self.module.activate(chunk)
        self.loss = self._losses.pop(buffer_id, None)
        self.grad_layer = self._gradients.pop(buffer_id, None)

    def forward_pass(self, buffer_id: int) -> None:
        """Compute the active chunk; without a backward pass nothing of it is kept but its output."""
        super().forward_pass(buffer_id)
        if not torch.is_grad_enabled():
            self._free(buffer_id, "inputs", "labels")
        if self.is_last_stage():
            self._free(buffer_id, "outputs")
            if torch.is_grad_enabled():
                self._losses[buffer_id] = self.loss

    def backward_pass(self, buffer_id: int) -> None:
        """Compute the gradients of the active chunk; of its inputs they are sent later."""
        super().backward_pass(buffer_id)
        self.loss = self.grad_layer = None
        self._free(buffer_id, "outputs", "labels")
        if self.is_first_stage():
            self._free(buffer_id, "inputs")
        if self.module.weight_gradients is not None:
            self.module.weight_gradients.end_pass()

    def weight_pass(self) -> None:
        """Compute the weight gradients that the oldest of the backward passes has put aside."""
        with self.in_backward():
            self.module.weight_gradients.compute()

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Post messages, all at once.

        Only where the shape of what comes is not known yet, the sends are posted before it is.
        """
        self.active_chunk = None
        sending = [each for transfer in sends for each in self._sending(transfer)]
        unknown = any(t.direction == "forward" and t.chunk not in self._shapes for t in receives)
        early = _post(sending) if unknown else []
        coming = [(transfer, self._receiving(transfer)) for transfer in receives]
        receiving = [each for _, own in coming for each in own]
        works = [*early, *_post(receiving if unknown else [*sending, *receiving])]
        if sending:
            self._leaving.append((works[: len(sending)], sending))
        works = works[len(sending) :]
        for transfer, own in coming:
            self._arriving[transfer.direction, transfer.buffer] = works[: len(own)]
            works = works[len(own) :]
        for transfer in sends:
            if transfer.direction == "backward":
                self._free(transfer.buffer, "inputs")
            elif not torch.is_grad_enabled():
                self._free(transfer.buffer, "outputs")
        self._wait_for_sends(_UNFINISHED)

    def wait_for(self, direction: Direction, buffer_id: int) -> None:
        """Wait for the input of a pass."""
        for work in self._arriving.pop((direction, buffer_id)):
            work.wait()
        if direction == "forward" and torch.is_grad_enabled():
            for tensor in _floating(self.pipe_buffers["inputs"][buffer_id]):
                tensor.requires_grad_()

    def drain(self) -> None:
        """Wait for everything that has been sent."""
        self.active_chunk = None
        self._wait_for_sends(0)

    def _wait_for_sends(self, kept: int) -> None:
        """Wait for all exchanges but the last `kept`."""
        while len(self._leaving) > kept:
            works, _ = self._leaving.popleft()
            for work in works:
                work.wait()

    def _sending(self, transfer: Transfer) -> list[dist.P2POp]:
        peer = self._peer(1 if transfer.direction == "forward" else -1)
        if transfer.direction == "backward":
            inputs: list[Any] = _floating(self.pipe_buffers["inputs"][transfer.buffer])
            return [dist.P2POp(dist.isend, tensor.grad, peer) for tensor in inputs]
        outputs = self.pipe_buffers["outputs"][transfer.buffer]
        if transfer.chunk not in self._announced:
            self._announced.add(transfer.chunk)
            chunk = transfer.chunk + (self.stage_id == self.num_stages - 1)
            default_store().set(self._shape_key(peer, chunk), _description(outputs))
        return [dist.P2POp(dist.isend, tensor.detach(), peer) for tensor in _as_tuple(outputs)]

    def _receiving(self, transfer: Transfer) -> list[dist.P2POp]:
        """Allocate what comes: nothing else may be in it, unlike in a buffer of the engine."""
        if transfer.direction == "backward":
            outputs = self.pipe_buffers["outputs"][transfer.buffer]
            received = [torch.empty_like(tensor) for tensor in _floating(outputs)]
            several = isinstance(outputs, tuple)
            self._gradients[transfer.buffer] = received if several else received[0]
            return [dist.P2POp(dist.irecv, tensor, self._peer(1)) for tensor in received]
        if transfer.chunk not in self._shapes:
            store, key = default_store(), self._shape_key(self.global_rank, transfer.chunk)
            several, shapes = json.loads(store.get(key))
            store.delete_key(key)
            self._shapes[transfer.chunk] = several, [(s, getattr(torch, d)) for s, d in shapes]
        several, shapes = self._shapes[transfer.chunk]
        made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        self.pipe_buffers["inputs"][transfer.buffer] = tuple(made) if several else made[0]
        return [dist.P2POp(dist.irecv, tensor, self._peer(-1)) for tensor in made]

    def _peer(self, step: int) -> int:
        return int(self.grid.stage_to_global((self.stage_id + step) % self.num_stages))

    @staticmethod
    def _shape_key(rank: int, chunk: int) -> str:
        """Return where the shapes are that `chunk` of `rank` receives."""
        return f"activation shapes/{rank}/{chunk}"

    def _free(self, buffer_id: int, *names: str) -> None:
        for name in names:
            self.pipe_buffers[name][buffer_id] = None


def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Post messages together; return what to wait for by message, once for each on gloo."""
    works = [*dist.batch_isend_irecv(operations)] if operations else []
    # On NCCL they have one work together.
    return works * len(operations) if len(works) == 1 else works


def _as_tuple(tensors: Any) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _floating(tensors: Any) -> list[Tensor]:
    return [tensor for tensor in _as_tuple(tensors) if tensor.is_floating_point()]


def _description(tensors: Any) -> str:
    """Return number, shapes and dtypes of tensors as JSON."""
    shapes = [(list(x.shape), str(x.dtype).removeprefix("torch.")) for x in _as_tuple(tensors)]
    return json.dumps([isinstance(tensors, tuple), shapes])
