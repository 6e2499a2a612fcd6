"""Private names of DeepSpeed and torch that are read, wrapped or replaced: one function for each.

No other file touches them. Written for DeepSpeed 0.19 and torch 2.13; tests/unit/engine/test_patches.py
fails for a name that the installed release has no more.
"""

import glob
import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import mappings
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.state_dict_factory import SDLoaderBase
from torch import Tensor, nn

log = logging.getLogger(__name__)

ToHost = Callable[[Tensor], Tensor]
"""Copies a tensor to host memory, which waits for the device."""

Scalar = Callable[[Sequence[tuple[nn.Parameter, Tensor]], torch.device], Tensor]
"""Computes a scalar from parameters and their gradients, on a device."""


def skip_operator_lookup() -> None:
    """Let DeepSpeed load no compiled operator when it starts (`__compatible_ops__`).

    On CPUs it would compile a shared-memory reduction, for minutes, which only its inference kernels
    call; an empty table of operators says that there is none to load.
    """
    deepspeed.ops.__compatible_ops__ = {}


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of every process group of this rank, existing or new (`_world.pg_map`).

    A new group does not inherit the first one's timeout: it has torch's default of 10 or 30 minutes,
    also while an engine is built.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def default_store() -> Any:
    """Return the key-value store through which the ranks of this run met (`_get_default_store`)."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def any_dtype() -> Iterator[None]:
    """Build engines in a dtype that this device can store but not compute in (`is_fp16_supported`)."""
    accelerator = get_accelerator()
    usual = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        accelerator.is_fp16_supported = usual


def foreach_norm(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Compute the L2 norm of each tensor in one kernel launch (`_foreach_norm`)."""
    return torch._foreach_norm(tensors)


def foreach_scale(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place, in one kernel launch (`_foreach_mul_`)."""
    torch._foreach_mul_(tensors, factor)


def has_master_weight(parameter: Any) -> bool:
    """Whether ZeRO stages 1 and 2 or the bf16 optimizer keep `parameter` in fp32 (`_hp_mapping`)."""
    return hasattr(parameter, "_hp_mapping")


def master_weight(parameter: Any) -> Any:
    """Return where this rank keeps its fragment of `parameter` in fp32; None if it has none."""
    return parameter._hp_mapping


def master_gradient(parameter: Any) -> Tensor:
    """Return the reduced gradient of this rank's fragment (`_index_in_param_group`)."""
    return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)


def mark_without_gradient(parameter: Any) -> None:
    """Give a frozen weight the attribute `_hp_grad`.

    DeepSpeed's pipeline engine reads it from a weight that stages share, frozen or not.
    """
    parameter._hp_grad = None


def copy_to_weights(zero: Any, group: int) -> None:
    """Copy a group's flat weights to its parameters (`_unflatten_partitioned_parameters`)."""
    zero._unflatten_partitioned_parameters(group)


def wrap_step(optimizer: Any, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(step, ...)` where DeepSpeed calls `optimizer.step(...)`."""
    step = optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(step, *args, **kwargs)

    optimizer.step = wrapped


def grad_norm_of_step(engine: Any) -> Any:
    """Return the global gradient norm of the step being taken (`_global_grad_norm`).

    ZeRO and the bf16 optimizer keep it themselves; `get_global_grad_norm` is set after the step.
    """
    optimizer = engine.optimizer
    holder = optimizer if hasattr(optimizer, "_global_grad_norm") else engine
    return holder._global_grad_norm


def read_norm_once(optimizer: Any, to_host: ToHost) -> None:
    """Move the gradient norm to the host before DeepSpeed looks at it, clips by it and keeps it.

    On a GPU each look at the device's norm would wait for all work launched so far.

    Args:
        optimizer: DeepSpeed's; wrapped are ZeRO's `scaled_global_norm` or `_get_norm_groups`, and
            during a step of the bf16 optimizer the function `get_global_norm_of_tensors`.
    """
    if isinstance(optimizer, BF16_Optimizer):
        wrap_step(optimizer, partial(_with_host_norm, to_host))
    elif hasattr(optimizer, "_get_norm_groups"):
        of_groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [*to_host(torch.stack(of_groups()))]
    elif hasattr(optimizer, "scaled_global_norm"):
        of_all = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda: to_host(of_all())


def _with_host_norm(to_host: ToHost, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    usual = bf16_optimizer.get_global_norm_of_tensors
    bf16_optimizer.get_global_norm_of_tensors = lambda *a, **k: to_host(usual(*a, **k))
    try:
        return step(*args, **kwargs)
    finally:
        bf16_optimizer.get_global_norm_of_tensors = usual


def skip_lone_all_reduce(engine: Any) -> None:
    """Leave gradients in place where the group that would sum them is one rank.

    DeepSpeed copies all of them into a buffer and back there (`allreduce_no_retain`). Experts that
    one rank has are divided by the number of replicas all the same.
    """
    reduce = engine.allreduce_no_retain

    def reduce_over_ranks(bucket: Sequence[Tensor], dp_group: Any, **sizes: Any) -> None:
        ranks, replicas = dist.get_world_size(dp_group), sizes.get("dp_world_size") or 1
        is_alone = ranks == replicas == engine.gradient_predivide_factor() == 1
        if not is_alone or any(x.dtype != engine.communication_data_type for x in bucket):
            reduce(bucket, dp_group, **sizes)

    engine.allreduce_no_retain = reduce_over_ranks


def shorten_gradient_path(optimizer: Any) -> None:
    """Read and write each gradient of the bf16 optimizer less often, with the same results.

    A 16-bit gradient is added to its fp32 sum in one operation instead of through an fp32 copy
    (`_update_hp_grad`); of the sums this rank clips those of its partition, in one operation, as it
    steps on no others (`get_grads_for_norm`); and they are zeroed once (`clear_hp_grads`).
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    usual, clear = optimizer.get_grads_for_norm, optimizer.clear_hp_grads

    @torch.no_grad()
    def add(weight: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if weight.grad is None:
            return
        weight._hp_grad = total = optimizer.fp32_groups_gradients[group][index]
        total.add_(weight.grad.reshape(total.shape))
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            weight.grad.zero_()

    def gradients(for_clipping: bool = False) -> Any:
        return optimizer.fp32_groups_gradient_flat_partition if for_clipping else usual()

    def clear_if_any() -> None:
        if any(map(any, optimizer.fp32_groups_has_gradients)):
            clear()

    optimizer._update_hp_grad = add
    optimizer.get_grads_for_norm = gradients
    optimizer.clear_hp_grads = clear_if_any


def reduces_in_fp32_at_once(engine: Any) -> bool:
    """Whether the bf16 optimizer has each gradient in its sum as it comes, and plain sums are reduced."""
    optimizer = engine.optimizer
    return (
        isinstance(optimizer, BF16_Optimizer)
        and optimizer.immediate_grad_update
        and not optimizer.has_moe_layers
        and engine.communication_data_type == optimizer.grad_acc_dtype
        and engine.gradient_predivide_factor() == 1
        and engine.postscale_gradients()
    )


def replace_bf16_reduction(
    engine: Any,
    *,
    ready: Callable[[nn.Parameter], None],
    finish: Callable[[], None],
    norm_gradients: Callable[[], list[Tensor]],
    backward_begins: Callable[[], None],
) -> None:
    """Reduce the gradients of the bf16 optimizer in another way (`accumulate_hp_grads_and_remove_lp`).

    Args:
        ready: called with each parameter whose gradient has been added to its sum.
        finish: called where DeepSpeed would reduce all of them (`buffered_allreduce_fallback`).
        norm_gradients: returns the gradients of which all ranks together make the norm.
        backward_begins: called before each backward pass of a pipeline stage (`_INSTRUCTION_MAP`).
    """
    optimizer = engine.optimizer
    accumulate, of_clipping = (
        optimizer.accumulate_hp_grads_and_remove_lp,
        optimizer.get_grads_for_norm,
    )

    def accumulate_and_reduce(parameter: nn.Parameter, group: int, index: int) -> None:
        accumulate(parameter, group, index)
        ready(parameter)

    def gradients(for_clipping: bool = False) -> Any:
        return of_clipping(for_clipping=True) if for_clipping else (norm_gradients(), {})

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name != "BackwardPass":
            return call

        def backward(*args: Any, **kwargs: Any) -> Any:
            backward_begins()
            return call(*args, **kwargs)

        return backward

    optimizer.accumulate_hp_grads_and_remove_lp = accumulate_and_reduce
    engine.buffered_allreduce_fallback = lambda grads=None, elements_per_buffer=0: finish()
    optimizer.get_grads_for_norm = gradients
    optimizer.mpu = _AllRanks
    if hasattr(engine, "_INSTRUCTION_MAP"):
        wrap_instructions(engine, count)


def replace_weight_gather(optimizer: Any, gather: Callable[[], None]) -> None:
    """Gather the stepped weights of the bf16 optimizer with `gather` (`update_lp_params`)."""

    @torch.no_grad()
    def copy_and_gather() -> None:
        owned = zip(
            optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition, strict=True
        )
        for partitions, own in owned:
            partitions[optimizer.dp_rank].copy_(own)
        gather()

    optimizer.update_lp_params = copy_and_gather


class _AllRanks:
    """Model-parallel unit over whose ranks the bf16 optimizer sums the norm."""

    @staticmethod
    def get_model_parallel_group() -> Any:
        return dist.group.WORLD


def replace_fp32_clipping(engine: Any, clip: Callable[[], float]) -> None:
    """Clip with `clip`, which returns the norm, in fp32 without ZeRO (`clip_fp32_gradients`).

    DeepSpeed keeps the norm of its own optimizers only, and counts a weight that two pipeline stages
    share twice.
    """

    def clip_and_keep_norm() -> None:
        engine._global_grad_norm = clip()

    engine.clip_fp32_gradients = clip_and_keep_norm


def skip_allreduce(engine: Any) -> None:
    """Reduce no gradients where there is one replica (`enable_backward_allreduce`).

    DeepSpeed would still copy every gradient into a buffer and back.
    """
    engine.enable_backward_allreduce = False
    engine.pipeline_enable_backward_allreduce = False


def drop_refused_gradients(optimizer: Any) -> None:
    """Drop the gradients of a refused step with CPU offload (`reset_cpu_buffers`).

    ZeRO stages 1 and 2 keep them in their buffers and add those of the next step, so that a NaN
    stays and every further step is refused.
    """
    if not hasattr(optimizer, "_release_preflattened_grad_buffers"):
        return
    reset = optimizer.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None

    optimizer.reset_cpu_buffers = reset_all


def add_to_grad_norm(optimizer: Any, scalar: Scalar) -> None:
    """Add a scalar to the gradients of which DeepSpeed's optimizer takes the global norm.

    In fp16 DeepSpeed looks at all gradients itself (`get_grads_for_norm`, `get_grad_norm_direct`).
    """
    if hasattr(optimizer, "get_grads_for_norm"):
        _add_to_bf16_norm(optimizer, scalar)
    elif hasattr(optimizer, "get_grad_norm_direct"):
        marker = _Marker()
        _add_to_zero_norm(optimizer, scalar, marker)
        _add_to_offload_norm(optimizer, scalar, marker)


class _Marker:
    """Stands for the scalar among parameters: DeepSpeed counts it on every rank."""

    tensor_model_parallel = True
    ds_id = -1


def _add_to_bf16_norm(optimizer: Any, scalar: Scalar) -> None:
    usual = optimizer.get_grads_for_norm

    def grads_and_scalar(for_clipping: bool = False) -> Any:
        found = usual(for_clipping=for_clipping)
        if for_clipping:
            return found
        dense, of_experts = found
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        pairs = [pair for params, grads in groups for pair in zip(params, grads, strict=True)]
        device = next(grad for _, grad in pairs).device
        return [*dense, scalar(pairs, device)], of_experts

    optimizer.get_grads_for_norm = grads_and_scalar


def _add_to_zero_norm(optimizer: Any, scalar: Scalar, marker: _Marker) -> None:
    """Change the norm of gradients that ZeRO has partitioned over the replicas."""
    usual = optimizer.get_grad_norm_direct

    def norm(gradients: Sequence[Tensor], params: Sequence[Any], **options: Any) -> Tensor:
        kept = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
        extra = scalar([*zip(params, kept, strict=False)], optimizer.device)
        return usual([extra, *kept], [_like(params, marker), *params], **options)

    optimizer.get_grad_norm_direct = norm


def _add_to_offload_norm(optimizer: Any, scalar: Scalar, marker: _Marker) -> None:
    """Change the norm of gradients on the CPU, whose own norms DeepSpeed keeps by parameter."""
    usual = optimizer.complete_grad_norm_calculation_for_cpu_offload

    def norm(params: Sequence[Any]) -> Tensor:
        norms = optimizer.norm_for_param_grads
        pairs = [
            (param, torch.as_tensor(norms[number]))
            for param in params
            if (number := optimizer.get_param_id(param)) in norms
        ]
        if hasattr(optimizer, "param_id"):
            optimizer.param_id[id(marker)] = marker.ds_id
        norms[marker.ds_id] = scalar(pairs, torch.device("cpu"))
        return usual([_like(params, marker), *params])

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm


def _like(params: Sequence[Any], marker: _Marker) -> _Marker:
    """Give the marker the process group over which ZeRO stage 3 partitions `params`."""
    if params and hasattr(params[0], "ds_process_group"):
        marker.ds_process_group = params[0].ds_process_group  # type: ignore[attr-defined]
    return marker


@contextmanager
def one_read_per_file() -> Iterator[None]:
    """Read each file of a checkpoint once inside the `with` block (`check_ckpt_list`).

    DeepSpeed has every rank read the first file of each list as well, to compare one number in it
    with the length of the list. Our manifest lists all files.
    """
    usual = SDLoaderBase.check_ckpt_list
    SDLoaderBase.check_ckpt_list = _require_files
    try:
        yield
    finally:
        SDLoaderBase.check_ckpt_list = usual


def _require_files(loader: SDLoaderBase) -> None:
    assert loader.ckpt_list, "no file for this part of the network"


@contextmanager
def literal_paths() -> Iterator[None]:
    """Find checkpoint files in folders of any name inside the `with` block.

    DeepSpeed takes the full path for a glob pattern, in which brackets and stars are no letters
    (`_get_all_ckpt_names`, `ckpt_layer_path_list`).
    """
    finders = (DeepSpeedEngine, "_get_all_ckpt_names"), (PipelineModule, "ckpt_layer_path_list")
    usual = [getattr(owner, name) for owner, name in finders]
    for (owner, name), find in zip(finders, usual, strict=True):
        setattr(owner, name, _escaped(find))
    try:
        yield
    finally:
        for (owner, name), find in zip(finders, usual, strict=True):
            setattr(owner, name, find)


def _escaped(find: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def find_in(holder: Any, directory: str, *args: Any) -> list[str]:
        return find(holder, glob.escape(directory), *args)

    return find_in


def log_failed_script_copies(engine: Any) -> None:
    """Warn where `zero_to_fp32.py` cannot be copied beside a checkpoint (`_copy_recovery_script`).

    Only rank 0 copies it, while the other ranks wait: a full disk must not end that rank alone.
    """
    copy = engine._copy_recovery_script

    def copy_or_log(directory: str) -> None:
        try:
            copy(directory)
        except OSError as error:
            log.warning("%s: DeepSpeed's zero_to_fp32.py cannot be put there: %s", directory, error)

    engine._copy_recovery_script = copy_or_log


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
        own = slice(self.stage_id, None, ranks)
        self.chunk_bounds: list[tuple[int, int]] = [*pairwise(self.parts)][own]

    def _build(self) -> None:
        for bounds in self.chunk_bounds:
            self.forward_funcs = []
            self._set_bounds(*bounds)
            super()._build()
            self.funcs_of_chunks.append(self.forward_funcs)
        self.activate(0)

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


def replace_token_gather(gather: Callable[..., Tensor]) -> None:
    """All-gather the tokens of experts with `gather(x, dim)` (`mappings._gather_tokens`).

    DeepSpeed gathers into a flat tensor, which gloo refuses.
    """
    mappings._gather_tokens = gather


class Activate(schedule.PipeInstruction):
    """Instruction: make a chunk the active one, for passes of the micro-batch in a buffer."""


class Exchange(schedule.PipeInstruction):
    """Instruction: send and receive activations and gradients, all at once."""


class ChunkedPipelineEngine(PipelineEngine, ABC):
    """DeepSpeed's pipeline engine on ranks with several model chunks; a subclass has the schedule.

    Its instructions are those of DeepSpeed, without their transfers, and the two above
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
