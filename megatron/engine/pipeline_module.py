"""The list of layers as DeepSpeed's pipeline: every rank builds the stage that it owns."""

import contextlib
import io
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.common.errors import ConfigError
from megatron.config.architecture.architecture import Entry
from megatron.config.architecture.partition import split_bounds, stage_bounds
from megatron.config.parallelism.pipeline import LAYERS
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.engine.deepspeed.patches.pipeline import ChunkedPipelineModule
from megatron.engine.deepspeed.recompute import recomputation
from megatron.engine.deepspeed.timers import Timers
from megatron.model.layers.layer_input import LayerInput, Tensors
from megatron.model.layers.layer_list import (
    Block,
    Layer,
    Recomputation,
    Step,
    carried_names,
    in_turn,
    link_blocks,
)
from megatron.pipeline.schedule import Grid
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.sharding import shard_of
from megatron.tensor_parallel.topology import Topology

log = logging.getLogger(__name__)

_PARTS = {
    "OptimizerStep": "optimizer",
    "ReduceGrads": "backward-params-all-reduce",
    "ReduceTiedGrads": "backward-embedding-all-reduce",
    "LoadMicroBatch": "batch-generator",
    "ForwardPass": "forward-compute",
    "BackwardPass": "backward-compute",
    "SendActivation": "forward-send",
    "RecvActivation": "forward-recv",
    "SendGrad": "backward-send",
    "RecvGrad": "backward-recv",
    "WeightPass": "backward-compute",
    "Exchange": "forward-backward-send-forward-backward-recv",
    "Await": "forward-backward-send-forward-backward-recv",
    "Drain": "forward-backward-send-forward-backward-recv",
}
"""Megatron-LM's names for what the instructions of a pipeline do."""


def pipeline_module(
    steps: Sequence[Step],
    *,
    topology: Topology,
    loss: Callable[..., Any],
    partition_method: str,
    recompute: RecomputePlan,
    batch_fields: Sequence[str],
    split_rank: int = 0,
    chunks: int = 1,
    splits_backward: bool = False,
) -> PipelineModule:
    """Return DeepSpeed's view of `steps`: this rank's stage, with its weights allocated.

    Args:
        loss: called with the last layer's output and a batch.
        batch_fields: the fields of a batch, in the order in which the engine hands them over.
        split_rank: first stage of the decoder after an encoder; 0: where the method cuts.
        chunks: of the model on each rank (virtual stages).
        splits_backward: whether weight gradients of linear layers are computed in passes of their own.

    Raises:
        ConfigError: the partition leaves a stage without a transformer layer, or matches none.

    Communication: creates process groups; every rank must call this, in step.
    """
    entries = [_entry(step) for step in steps]
    bounds: Sequence[int] = ()
    if split_rank:
        bounds = split_bounds(entries, topology.pipeline, split_rank)
    elif partition_method.startswith(("type:", LAYERS)):
        bounds = stage_bounds(partition_method, entries, topology.pipeline * chunks)
    # DeepSpeed prints the partition to stdout; ours is a line of the log.
    with contextlib.redirect_stdout(io.StringIO()):
        module = StageModule(
            steps,
            recomputation(recompute),
            batch_fields,
            splits_backward=splits_backward,
            chunks=chunks,
            bounds=bounds,
            layers=[_spec(step) for step in steps],
            topology=PipeModelDataParallelTopology(
                num_pp=topology.pipeline,
                # Ranks that divide a sample have the same weights and reduce their gradients too.
                num_dp=topology.data * topology.sequence,
                num_mp=topology.tensor,
            ),
            loss_fn=_loss_of_batch(loss, batch_fields),
            partition_method=partition_method,
        )
    _require_work(steps, module.parts, topology.pipeline, partition_method)
    _log_stages(steps, module, topology)
    return module


def _log_stages(steps: Sequence[Step], module: PipelineModule, topology: Topology) -> None:
    """Log which layers each stage has, and how many weights.

    Communication: one all-reduce of a number per stage.
    """
    rank = dist.get_rank()
    weights = torch.zeros(topology.pipeline, dtype=torch.int64)
    if topology.data_rank_of(rank) == topology.sequence_rank_of(rank) == 0:
        for parameter in module.parameters():
            if shard_of(parameter) is not None or topology.tensor_rank_of(rank) == 0:
                weights[topology.stage_of(rank)] += parameter.numel()
    weights = weights.to(get_accelerator().current_device_name())
    dist.all_reduce(weights)
    for stage in range(topology.pipeline):
        chunks = [*pairwise(module.parts)][stage :: topology.pipeline]
        held = [step for start, stop in chunks for step in steps[start:stop]]
        names = [step.cls.__name__ for step in held if isinstance(step, Layer)]
        layers = ", ".join(f"{count} {name}" for name, count in Counter(names).items())
        entries = ", ".join(f"{start} to {stop - 1}" for start, stop in chunks)
        log.info(
            "stage %d: entries %s | %s | parameters: %d", stage, entries, layers, weights[stage]
        )


class StageModule(ChunkedPipelineModule):
    """DeepSpeed's stage: named tensors inside, tuples at its edges, recomputation as without stages.

    The first stage gets the fields of a batch. Between stages travel the tensors of a `LayerInput`
    that the layers before the edge declare (`Layer.carried`), each with its own shape. One
    of floating point must get a gradient from what follows.

    DeepSpeed's own recomputation cuts a stage into chunks of so many entries and leaves those out that begin
    with something else than a transformer layer; it knows no "block".
    """

    def __init__(
        self,
        steps: Sequence[Step],
        recomputation: Recomputation,
        batch_fields: Sequence[str],
        *,
        splits_backward: bool = False,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.batch_fields = batch_fields
        self.weight_gradients: WeightGradients | None = None
        if splits_backward:
            self.weight_gradients = WeightGradients()
            for layer in self.modules():
                if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                    layer.defer_gradient = self.weight_gradients.defer
        carried = [carried_names(steps, bound) for bound in self.parts]
        edges = [*pairwise(carried)][self.stage_id :: self.num_stages]
        calls = [recomputation.apply(chunk) for chunk in self.funcs_of_chunks]
        for chunk in calls:
            link_blocks(chunk)
        self._chunks = [(*names, own) for names, own in zip(edges, calls, strict=True)]
        _require_whole_ties(self)

    def grid(self, micro_batches: int) -> Grid:
        """Return the schedule of a step of so many micro-batches."""
        return Grid(
            ranks=self.num_stages,
            chunks=self.chunks,
            micro_batches=micro_batches,
            splits_backward=self.weight_gradients is not None,
        )

    def forward(self, forward_input: Tensors) -> Tensors:
        """Pass the input through the layers of the active chunk."""
        received, sent, calls = self._chunks[self.chunk]
        inputs: Any
        if self.stage_id == self.chunk == 0:
            inputs = dict(zip(self.batch_fields, forward_input, strict=True))
        else:
            inputs = LayerInput.unpack(received, forward_input).replace(shared={})
        output = in_turn(calls, inputs)
        if not isinstance(output, LayerInput):
            return output
        if tuple(output.tensors()) != sent:
            raise ValueError(
                f"stage {self.stage_id} ends with the tensors {', '.join(output.tensors())}; its "
                f"layers declare {', '.join(sent)}: see Layer.carried"
            )
        return output.pack()


def _loss_of_batch(loss: Callable[..., Any], fields: Sequence[str]) -> Callable[..., Any]:
    """Adapt `loss` to the tensors of a batch, which DeepSpeed passes without their names."""
    return lambda output, tensors: loss(output, dict(zip(fields, tensors, strict=True)))


def timed_instruction(
    timers: Timers, instruction: str, call: Callable[..., Any]
) -> Callable[..., Any]:
    """Measure the time of what the pipeline engine calls for an instruction of its schedule."""
    if instruction not in _PARTS:
        return call
    part = _PARTS[instruction]

    def timed(*args: Any, **kwargs: Any) -> Any:
        with timers.part(part):
            return call(*args, **kwargs)

    return timed


def _require_whole_ties(stage: PipelineModule) -> None:
    """Refuse a tied layer with a weight of its own: each stage would train another copy of it."""
    for key, module in stage.tied_modules.items():
        if key not in stage.tied_comms or stage.tied_comms[key]["ranks"][0] == stage.global_rank:
            continue
        untied = {name for name, _ in module.named_parameters()} - {*stage.tied_weight_attrs[key]}
        if untied:
            raise ValueError(
                f"{type(module).__name__} on stage {stage.stage_id} shares the weight of {key} and "
                f"has its own {', '.join(sorted(untied))}; make two layers of it"
            )


def _require_work(steps: Sequence[Step], bounds: Sequence[int], stages: int, method: str) -> None:
    """Refuse a stage without weights, which an optimizer needs.

    Stages exchange a `LayerInput`, so none begins later than directly after the last transformer layer.
    """
    head = max(i for i, step in enumerate(steps) if _entry(step).kind == "block") + 1
    spans = [*pairwise(bounds)]
    for stage in range(stages):
        parts = spans[stage::stages]
        layers = [s for start, stop in parts for s in steps[start:stop] if isinstance(s, Layer)]
        if not layers or any(start > head for start, _ in parts):
            entries = ", ".join(f"{start} to {stop - 1}" for start, stop in parts)
            raise ConfigError(
                f"--pp-partition-method {method} leaves stage {stage} (entries {entries}) without "
                "weights, or without all of the final norm and the head; write type:transformer, or "
                "fewer stages or chunks"
            )


def _entry(step: Step) -> Entry:
    """Return an entry of the list of layers as the partition sees it."""
    if not isinstance(step, Layer):
        return Entry(name=step.__name__)
    return Entry(name=step.cls.__name__, kind="block" if issubclass(step.cls, Block) else "")


def _spec(step: Step) -> Any:
    if not isinstance(step, Layer):
        return step
    if step.tie is None:
        return LayerSpec(step.cls, **step.kwargs)
    tie = step.tie
    return TiedLayerSpec(
        tie.key, step.cls, forward_fn=tie.forward, tied_weight_attr=tie.weight, **step.kwargs
    )


Product = Callable[[], Tensor]
"""Computes a weight gradient from what it keeps: rows of an output gradient and of an input."""


class WeightGradients:
    """Deferred weight gradients by pass, oldest first: second half of a backward pass (zero bubble).

    They reach the weights through autograd, so that hooks run as in any backward pass.

    Source: arXiv:2401.10241, section 2.
    """

    def __init__(self) -> None:
        self._passes: deque[list[tuple[nn.Parameter, Product]]] = deque()
        self._current: list[tuple[nn.Parameter, Product]] = []

    def __len__(self) -> int:
        """Return the number of passes whose weight gradients are still to be computed."""
        return len(self._passes)

    def defer(self, weight: nn.Parameter, product: Product) -> None:
        """Put aside the product that the backward pass in hand adds to the gradient of `weight`."""
        self._current.append((weight, product))

    def end_pass(self) -> None:
        """End a backward pass; what has been put aside since the last one belongs to it."""
        self._passes.append(self._current)
        self._current = []

    def compute(self) -> None:
        """Compute the weight gradients of the oldest pass, and let go of what they are computed from."""
        products = self._passes.popleft()
        products.reverse()
        while products:
            weight, product = products.pop()
            with torch.no_grad():
                gradient = product()
            with torch.enable_grad():
                used = weight.view_as(weight)
            used.backward(gradient)
