"""Patches for the pipeline engine and module: instructions, backward passes, model chunks (virtual stages)."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn


def wrap_instructions(
    engine: Any, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap what the pipeline engine calls for each instruction of its schedule (`_INSTRUCTION_MAP`).

    Args:
        wrap: from the name of an instruction and its function to another function.
    """
    instructions: Mapping[type, Callable[..., Any]] = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {kind: wrap(kind.__name__, f) for kind, f in instructions.items()}


def join_backward_passes(engine: Any) -> None:
    """Run one backward pass for all outputs of a pipeline stage (`pipe_buffers`, `grad_layer`).

    DeepSpeed calls backward for each output in turn. Layers that several of them depend on would
    compute their gradients as often, and recomputed ones have dropped their inputs the second time.
    """

    def join(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name != "BackwardPass":
            return call

        def backward(engine: Any, buffer_id: int) -> None:
            if engine.is_last_stage() or engine.is_pipe_partitioned:
                call(engine, buffer_id)  # of the loss, or of tensors that DeepSpeed has divided
                return
            outputs, gradients = engine.pipe_buffers["outputs"], engine.grad_layer
            made = outputs[buffer_id]
            floating = [x for x in made if x.is_floating_point()] if isinstance(made, tuple) else []
            if len(floating) < 2:
                call(engine, buffer_id)
                return
            outputs[buffer_id] = joined = _Joined.apply(gradients, *floating)
            engine.grad_layer = torch.ones_like(joined)
            call(engine, buffer_id)
            engine.grad_layer = gradients

        return backward

    wrap_instructions(engine, join)


class _Joined(torch.autograd.Function):
    """A scalar whose backward pass gives each of `tensors` its gradient."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


class ChunkedPipelineModule(PipelineModule):
    """A PipelineModule with several model chunks (virtual stages) a rank, and given bounds of stages.

    Rank r of p has the parts r, p + r, 2p + r, ... of the list of layers. One chunk is active: its
    layers are `forward_funcs`. Names and files of layers are those of plain stages.

    Tied weights are broadcast without gradients: otherwise torch warns, at each backward pass, that
    the broadcast has none.

    Args:
        chunks: of a rank.
        bounds: index of the first layer of each part, and the number of layers; empty: where the
            partition method cuts (`_partition_layers`).
    """

    def __init__(self, *, chunks: int = 1, bounds: Sequence[int] = (), **arguments: Any):
        self.chunks, self.given_bounds = chunks, bounds
        self.funcs_of_chunks: list[list[Any]] = []
        super().__init__(**arguments)

    def activate(self, chunk: int) -> None:
        """Make the layers of `chunk` those of the next passes (`_local_start`, `_local_stop`)."""
        self.chunk = chunk
        self.forward_funcs: list[Any] = self.funcs_of_chunks[chunk]
        self._set_bounds(*self.chunk_bounds[chunk])

    def stage_owner(self, layer_idx: int) -> int:
        """Return the rank of a layer."""
        return (bisect_right(self.parts, layer_idx) - 1) % self.num_stages

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Write the files of all layers of this rank."""
        for chunk in range(self.chunks):
            self.activate(chunk)
            super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        """Read the files of all layers of this rank."""
        for chunk in range(self.chunks):
            self.activate(chunk)
            super().load_state_dir(*args, **kwargs)

    def _partition_layers(self, method: str = "uniform") -> None:
        ranks: int = self._topo.get_dim("pipe")
        if self.given_bounds:
            self.parts = [*self.given_bounds]
        else:
            self.num_stages = ranks * self.chunks
            super()._partition_layers(method)
            self.num_stages = ranks
        chunks = slice(self.stage_id, None, ranks)
        self.chunk_bounds: list[tuple[int, int]] = [*pairwise(self.parts)][chunks]

    def _build(self) -> None:
        for bounds in self.chunk_bounds:
            self.forward_funcs = []
            self._set_bounds(*bounds)
            super()._build()
            self.funcs_of_chunks.append(self.forward_funcs)
        self.activate(0)

    def tied_weights(self) -> frozenset[nn.Parameter]:
        """Return the weights that this stage shares with others."""
        return frozenset(weight for weight, _ in self.get_tied_weights_and_groups())

    def share_tied_weights(self) -> None:
        """Copy tied weights from the first stage that has them. Communication: a broadcast for each."""
        self._synchronize_tied_weights()

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


class Activate(schedule.PipeInstruction):
    """Instruction: make a chunk the active one, for passes of the micro-batch in a buffer."""


class Exchange(schedule.PipeInstruction):
    """Instruction: post messages of activations and gradients, all at once."""


class Await(schedule.PipeInstruction):
    """Instruction: wait for the input of a pass."""


class WeightPass(schedule.PipeInstruction):
    """Instruction: compute weight gradients that a backward pass has put aside."""


class Drain(schedule.PipeInstruction):
    """Instruction: wait until all messages have been sent."""


class ChunkedPipelineEngine(PipelineEngine, ABC):
    """DeepSpeed's pipeline engine on ranks with several model chunks; a subclass has the schedule.

    Its instructions are those of DeepSpeed, without their transfers, and those above
    (`_INSTRUCTION_MAP`). What DeepSpeed asks of a stage, such as whether it computes the loss, is
    answered for the active chunk (`_exec_forward_pass`, `_backward_prologue_per_tensor`), and with
    none, outside of a schedule, for the rank.
    """

    active_chunk: int | None = None  # of the class: the parent's constructor asks too

    def is_first_stage(self) -> bool:
        """Whether the active chunk begins the network."""
        return bool(super().is_first_stage()) and self.active_chunk in (None, 0)

    def is_last_stage(self) -> bool:
        """Whether the active chunk ends the network."""
        return bool(super().is_last_stage()) and self.active_chunk in (None, self.module.chunks - 1)

    @abstractmethod
    def schedule_of(self, micro_batches: int, *, trains: bool) -> schedule.PipeSchedule:
        """Return the instructions of this rank for a step or an evaluation."""

    @abstractmethod
    def activate(self, chunk: int, buffer_id: int) -> None:
        """Carry out `Activate`."""

    @abstractmethod
    def exchange(self, sends: Any, receives: Any) -> None:
        """Carry out `Exchange`."""

    @abstractmethod
    def wait_for(self, direction: Any, buffer_id: int) -> None:
        """Carry out `Await`."""

    @abstractmethod
    def weight_pass(self) -> None:
        """Carry out `WeightPass`."""

    @abstractmethod
    def drain(self) -> None:
        """Carry out `Drain`."""

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Add to gradients inside the `with` block as in a backward pass (`_running_engine_backward`).

        Otherwise hooks of DeepSpeed take it for one that the engine has not begun.
        """
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def forward_pass(self, buffer_id: int) -> None:
        """Compute the active chunk, and the loss at the end of the network."""
        self._exec_forward_pass(buffer_id)

    def backward_pass(self, buffer_id: int) -> None:
        """Compute the gradients of the active chunk, from `loss` or `grad_layer`."""
        self._exec_backward_pass(buffer_id)

    def _train_schedule(self) -> schedule.PipeSchedule:
        return self.schedule_of(self.micro_batches, trains=True)

    def _inference_schedule(self, micro_batches: int) -> schedule.PipeSchedule:
        return self.schedule_of(micro_batches, trains=False)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: lambda engine, buffer_id: engine.forward_pass(buffer_id),
        schedule.BackwardPass: lambda engine, buffer_id: engine.backward_pass(buffer_id),
        Activate: lambda engine, **kwargs: engine.activate(**kwargs),
        Exchange: lambda engine, **kwargs: engine.exchange(**kwargs),
        Await: lambda engine, **kwargs: engine.wait_for(**kwargs),
        WeightPass: lambda engine: engine.weight_pass(),
        Drain: lambda engine: engine.drain(),
    }


@contextmanager
def pipeline_engine(engine_class: type[PipelineEngine]) -> Iterator[None]:
    """Let `deepspeed.initialize` build this engine inside the `with` block (`PipelineEngine`)."""
    usual = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = usual
