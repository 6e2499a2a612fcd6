"""Static shapes and CUDA graphs of decode steps: a few shapes, each captured once and replayed."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.process_groups import Groups

log = logging.getLogger(__name__)

_WARM_UPS = 2
"""Runs before a capture: libraries allocate workspaces, and nccl connects, at the first ones."""

Replay = Callable[[], Tensor]
"""Runs a captured function again; the result is in the same memory each time."""

Capture = Callable[[Callable[[], Tensor]], Replay]
"""Captures a function that has all its inputs in tensors whose memory stays."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a decode step: all that its operations depend on besides device tensors' values.

    Args:
        rows: of the KV cache, from the first on; padding follows the running sequences.
        start: no sequence has a lower position.
        stop: no sequence has this position or a higher one.
        is_even: whether all rows have the position `start`.
    """

    rows: int
    start: int
    stop: int
    is_even: bool = False


def step_shape(
    positions: Sequence[int], *, rounding: int, rows: int, max_length: int, has_windows: bool
) -> StepShape:
    """Return the shape of a decode step with these positions.

    Args:
        rounding: static shapes: `start` and `stop` are multiples of this, and the number of rows is
            1, 2, 4 or a multiple of 8; 1: exact shapes.
        rows: of the KV cache.
        max_length: of the KV cache.
        has_windows: whether a layer has a sliding window; else `start` of static shapes is 0.

    >>> step_shape([3, 5, 300], rounding=256, rows=64, max_length=2048, has_windows=False)
    StepShape(rows=4, start=0, stop=512, is_even=False)
    """
    low, high, count = min(positions), max(positions), len(positions)
    if rounding == 1:
        return StepShape(count, low, high + 1, is_even=low == high)
    padded = 1 << (count - 1).bit_length() if count <= 4 else -(-count // 8) * 8
    return StepShape(
        min(rows, padded),
        low // rounding * rounding if has_windows else 0,
        min(max_length, (high // rounding + 1) * rounding),
    )


class DecodeGraphs:
    """Decode steps that are captured at the first step of each shape, and replayed from then on.

    Args:
        step: runs a decode step: tokens and positions [2, b] and a shape -> hidden states. It reads
            nothing else that changes but device memory.
        rows: of the KV cache.
        capture: captures a step. If that fails, steps run uncaptured from then on.
        keeping: context in which a step is captured, which runs it several times: restores the
            layers' decode states.
    """

    def __init__(
        self,
        step: Callable[[Tensor, StepShape], Tensor],
        *,
        rows: int,
        device: torch.device,
        capture: Capture,
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._step, self._keeping = step, keeping
        self._capture: Capture | None = capture
        self._inputs_2r = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._replays: dict[StepShape, Replay] = {}

    def __call__(self, inputs_2b: Tensor, shape: StepShape) -> Tensor:
        """Run a decode step. The next step overwrites the result."""
        static_2b = self._inputs_2r[:, : shape.rows]
        static_2b.copy_(inputs_2b, non_blocking=True)
        if shape not in self._replays:
            self._replays[shape] = self._record(partial(self._step, static_2b, shape))
        return self._replays[shape]()

    def _record(self, step: Replay) -> Replay:
        if self._capture:
            try:
                with self._keeping():
                    return self._capture(step)
            except RuntimeError as error:
                self._capture = None
                log.warning("decode steps run without CUDA graphs: %s", error)
        return step


def decode_capture(spec: ModelSpec, groups: Groups, device: torch.device) -> Capture | None:
    """Return the CUDA graph capture of a network's decode steps; None if it is not possible."""
    if device.type != "cuda":
        return None
    if obstacle := _obstacle(spec, groups):
        log.warning("decode steps run without CUDA graphs: %s", obstacle)
        return None
    return _cuda_graphs(device)


def _cuda_graphs(device: torch.device) -> Capture:
    """Return a function that captures steps as CUDA graphs, which share a memory pool."""
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], Tensor]) -> Replay:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: nccl's watchdog and other threads may call CUDA meanwhile.
        recording = torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        try:
            with recording:
                output = function()
        except RuntimeError:
            torch.cuda.set_stream(current)  # which torch leaves to the capture's if that is invalid
            raise

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture


def _obstacle(spec: ModelSpec, groups: Groups) -> str | None:
    """Return why decode steps on a GPU cannot be captured; None if they can."""
    if groups.topology.pipeline > 1:
        return "pipeline stages exchange activations"
    if groups.topology.tensor > 1 and "nccl" not in dist.get_backend(groups.tensor):
        return "tensor-parallel ranks communicate over gloo"
    if spec.attention.attention:
        return f"the core attention {spec.attention.attention} is a plugin's"
    return None
