"""From a list of layers to a DeepSpeed engine."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from torch import nn

from megatron.common.errors import ConfigError
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelPlan
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.engine.data_parallel_engine import DataParallelEngine
from megatron.engine.deepspeed.mpu import Mpu
from megatron.engine.deepspeed.patches.experts import with_experts
from megatron.engine.deepspeed.patches.grad_reduction import without_memory_reports
from megatron.engine.deepspeed.patches.pipeline import pipeline_engine
from megatron.engine.deepspeed.pipeline_program import ProgramEngine
from megatron.engine.deepspeed.recompute import recomputation, recomputed_attention
from megatron.engine.deepspeed.timers import Timers
from megatron.engine.engine import Engine
from megatron.engine.experts import register_experts
from megatron.engine.loss_terms import LossTerms
from megatron.engine.optimizers import cut_into_buckets, lay_out_matrices
from megatron.engine.pipeline_engine import PipelineEngine
from megatron.engine.pipeline_module import StageModule, pipeline_module
from megatron.engine.token_counts import TokenCounts
from megatron.fused_kernels.reference.dispatch import Kernels
from megatron.model.compiled_blocks import Compiler
from megatron.model.initialization import nan_in_empty_tensors
from megatron.model.layers.attention_kernels import Attend, CoreAttention, attention_of
from megatron.model.layers.experts import MixtureOfExperts
from megatron.model.layers.layer_input import INTEGERS, LayerInput
from megatron.model.layers.layer_list import Layer, SequentialModel, Step
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss
from megatron.model.layers.sequence_attention import RingAttention, UlyssesAttention
from megatron.model.loss import Loss
from megatron.optimizer.muon import Muon
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import is_expert, mark_replicated_gradients


@contextlib.contextmanager
def _refusals_as_config_errors() -> Iterator[None]:
    try:
        yield
    except DeepSpeedConfigError as error:
        raise ConfigError(f"DeepSpeed refuses its JSON: {error}") from error
    except RuntimeError as error:
        if "JIT load" not in str(error):
            raise
        raise ConfigError(
            f"an operator of DeepSpeed that this run needs cannot be compiled here ({error}); "
            "offloading to nvme needs libaio: write cpu instead"
        ) from error


@_refusals_as_config_errors()
def build_engine(
    steps: Sequence[Step],
    *,
    loss: Loss,
    groups: Groups,
    parallel: ParallelPlan,
    recompute: RecomputePlan,
    initialise: Callable[[nn.Module], None],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    config: dict[str, Any],
    batch_fields: Sequence[str],
    timers: Timers | None = None,
    counts_zeros: bool = False,
    num_padding: int = 0,
    auxiliary: AuxiliaryLoss | None = None,
    loss_terms: Sequence[str] = (),
    compiler: Compiler | None = None,
    counts: TokenCounts | None = None,
) -> Engine:
    """Build this rank's part of the model, its optimizer, and the engine around them.

    Args:
        initialise: fills the weights in place.
        build_optimizer: None for a model that is only evaluated.
        config: DeepSpeed's JSON.
        batch_fields: the fields of a batch, for pipeline stages.
        timers: measures the parts of a step.
        counts_zeros: whether `Engine.num_zeros` is counted.
        num_padding: trained weights whose gradient is always zero, which it leaves out.
        auxiliary: what the layers of `steps` add to the loss, if they have experts.
        loss_terms: names of the terms that `loss` returns in addition to its total.
        compiler: compiles transformer layers and the loss; None for none.
        counts: counts the tokens of a step for `loss`; None for a loss that counts its own.

    Communication: every rank must call this, in step.
    """
    terms = LossTerms(compiler.compile_loss(loss) if compiler else loss, loss_terms)
    watching: dict[str, Any] = {
        "auxiliary": auxiliary,
        "sequence_parallel": parallel.sequence_parallel,
        "timers": timers or Timers(),
        "counts_zeros": counts_zeros,
        "num_padding": num_padding,
        "counts": counts,
    }
    if parallel.pipeline > 1:
        model = _pipeline_model(steps, terms, groups, parallel, recompute, batch_fields)
        _prepare(model, groups, parallel, compiler)
        config = _with_full_activations(config, steps, always=parallel.has_own_schedule)
        # Here DeepSpeed counts the ranks that divide a sample as replicas.
        config = config | {"train_batch_size": config["train_batch_size"] * parallel.sequence}
        with pipeline_engine(ProgramEngine) if parallel.has_own_schedule else nullcontext():
            engine = _deepspeed(model, None, initialise, build_optimizer, config, parallel)
        return PipelineEngine(engine, groups, terms=terms, **watching)
    again = recomputation(recompute)
    with nan_in_empty_tensors(), _zero_init(groups, config, stage=parallel.zero_stage):
        model = SequentialModel(steps, recomputation=again, links=parallel.zero_stage < 3)
    _prepare(model, groups, parallel, compiler)
    engine = _deepspeed(model, Mpu(groups), initialise, build_optimizer, config, parallel)
    return DataParallelEngine(engine, groups, terms, **watching)


def _pipeline_model(
    steps: Sequence[Step],
    loss: LossTerms,
    groups: Groups,
    parallel: ParallelPlan,
    recompute: RecomputePlan,
    batch_fields: Sequence[str],
) -> nn.Module:
    """Build the layers of this rank's pipeline stage."""
    with nan_in_empty_tensors():
        return pipeline_module(
            steps,
            topology=groups.topology,
            loss=loss,
            partition_method=parallel.partition_method,
            recompute=recompute,
            batch_fields=batch_fields,
            split_rank=parallel.split_rank,
            chunks=parallel.chunks,
            splits_backward=parallel.splits_backward,
        )


def _zero_init(
    groups: Groups, config: dict[str, Any], *, stage: int
) -> AbstractContextManager[None]:
    """Partition the weights of every layer that is built inside the `with` block, with ZeRO-3.

    Args:
        config: DeepSpeed's JSON.

    Communication: within it, every data-parallel rank must build the same layers in step.
    """
    if stage < 3:
        return nullcontext()
    return deepspeed.zero.Init(
        data_parallel_group=groups.data_and_sequence, config_dict_or_path=config, mpu=Mpu(groups)
    )


def _prepare(
    model: nn.Module, groups: Groups, parallel: ParallelPlan, compiler: Compiler | None
) -> None:
    """Compile the transformer layers, and mark the gradients that other ranks have parts of."""
    if compiler:
        compiler.compile_blocks(model)
    if parallel.sequence_parallel:
        mark_replicated_gradients(model, groups.tensor)
    register_experts(model, groups)


def _with_full_activations(
    config: dict[str, Any], steps: Sequence[Step], *, always: bool
) -> dict[str, Any]:
    """Return DeepSpeed's JSON for stages that send more than one tensor with a gradient, or for all.

    Of the tensors that tensor ranks send in parts, its default, only the first may have one.
    """
    with_gradient = {*LayerInput._fields} - INTEGERS
    carried = [{*(step.carried or ())} for step in steps if isinstance(step, Layer)]
    if not always and all(len(names & with_gradient) < 2 for names in carried):
        return config
    full = {"pipe_partitioned": False, "grad_partitioned": False}
    return {**config, "pipeline": config.get("pipeline", {}) | full}


def core_attention(
    spec: ModelSpec,
    kernels: Kernels,
    *,
    groups: Groups,
    parallel: ParallelPlan,
    recompute: RecomputePlan,
) -> CoreAttention:
    """Build the core attention of every layer: with selective recompute, Ulysses or ring if planned."""
    attend: Attend
    if parallel.ring:
        sinks = spec.attention.has_sinks
        attend = RingAttention.of(groups.sequence, kernels.attention, sinks=sinks)
    else:
        attend = attention_of(spec, kernels)
    if recompute.granularity == "selective":
        attend = recomputed_attention(attend)
    if parallel.sequence > 1 and not parallel.ring:
        attend = UlyssesAttention(attend, groups.sequence)
    return lambda number: attend


def _deepspeed(
    model: nn.Module,
    mpu: Mpu | None,
    initialise: Callable[[nn.Module], None],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    config: dict[str, Any],
    parallel: ParallelPlan,
) -> Any:
    initialise(GatheredModel(model))
    optimizer = build_optimizer(model) if build_optimizer else None
    if optimizer and parallel.bucket_size:
        alone = model.tied_weights() if isinstance(model, StageModule) else frozenset()
        cut_into_buckets(optimizer, parallel.bucket_size, alone=alone)
    if optimizer is None:
        # ZeRO is a way to keep an optimizer.
        config = {k: v for k, v in config.items() if k != "zero_optimization"}
    # DeepSpeed asks for the norm only when there is a limit, and takes no limit for one of 1.0.
    limit = config["gradient_clipping"] or math.inf
    # Some of DeepSpeed's optimizers print memory figures to stdout; warnings go through its log.
    divides_experts = any(map(is_expert, model.parameters()))
    own = with_experts(MixtureOfExperts if divides_experts else None)
    with contextlib.redirect_stdout(io.StringIO()), own, without_memory_reports():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={**config, "gradient_clipping": limit},
            mpu=mpu,
            dist_init_required=False,
        )
    if isinstance(optimizer, Muon):
        lay_out_matrices(optimizer, engine)
    return engine


class GatheredModel(nn.Module):
    """`model` whose `named_parameters` gathers one partitioned parameter at a time.

    What is written into a gathered parameter is kept; parameters that are not partitioned are
    yielded as they are.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and gathered parameter; the next one partitions it again.

        Communication: every data-parallel rank must do this in step; one all-gather of each
        partitioned parameter.
        """
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                yield name, parameter
