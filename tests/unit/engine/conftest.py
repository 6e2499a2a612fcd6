"""DeepSpeed engines in this process alone, on the CPU."""

import gc
import importlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from networks import gpt_steps
from tiny import tiny_plan, tiny_spec

from megatron.engine.build import build_engine, core_attention
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.optimizers import engine_optimizer
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.topology import Topology


@pytest.fixture(scope="session", autouse=True)
def imported():
    """Keep what is imported out of searches for garbage: DeepSpeed has seven for a bf16 engine."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # with the first engine
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fp16(monkeypatch):
    """DeepSpeed takes the CPU for a device of 16-bit floats."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


@pytest.fixture
def alone(group, monkeypatch):
    """This process as a grid of one, known to DeepSpeed."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    # ZeRO-3 may put its own function here; other tests want torch's.
    monkeypatch.setattr(F, "linear", F.linear)
    distributed.start("gloo")
    topology = Topology(pipeline=1, data=1, tensor=1)
    return Groups(
        topology=topology,
        rank=0,
        tensor=group,
        sequence=group,
        data=group,
        data_and_sequence=group,
        model=group,
    )


def with_small_buckets(config):
    """Return `config` with less than the gigabytes that ZeRO-3 lays out at once.

    They are never touched, but stay with this process, which could not be forked any more.
    """
    zero = config["zero_optimization"]
    return {**config, "zero_optimization": {"reduce_bucket_size": 1 << 20, **zero}}


@pytest.fixture
def build(alone):
    """Return a function from flags to an engine with layers of some spread."""

    def build_from(
        *flags,
        without=(),
        device="cpu",
        kernels=REFERENCE,
        optimizer=True,
        head=(),
        counts=None,
    ):
        flags = ["--attention-dropout", "0", "--hidden-dropout", "0", *flags]
        plan = tiny_plan("--init-method-std", "0.3", *flags, without=without, device=device)
        rng = start_streams(alone, seed=plan.training.seed, activation_checkpointing={})
        steps = gpt_steps(
            plan.model,
            group=alone.tensor,
            rng=rng,
            mixed=plan.precision.is_mixed,
            kernels=kernels,
            core_attention=core_attention(
                plan.model,
                kernels,
                groups=alone,
                parallel=plan.parallel,
                recompute=plan.recompute,
            ),
        )
        return build_engine(
            [*steps, *head],
            loss=next_token_loss(alone.tensor, mean_count=counts and counts.mean),
            counts=counts,
            groups=alone,
            parallel=plan.parallel,
            recompute=plan.recompute,
            initialise=partial(initialise, seed=1, std=0.3, num_layers=plan.model.num_layers),
            build_optimizer=partial(
                engine_optimizer, plan=plan.optimizer, lr=0.1, tensor_group=alone.tensor
            )
            if optimizer
            else None,
            config=with_small_buckets(plan.deepspeed),
            batch_fields=tuple(CAUSAL_FIELDS),
        )

    return build_from


@pytest.fixture
def plain_model(group):
    """Return the model that engines begin with, for plain PyTorch."""
    spec = tiny_spec()
    steps = gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False)
    model = SequentialModel(steps)
    initialise(model, seed=1, std=0.3, num_layers=spec.num_layers)
    return model


@pytest.fixture
def micro_batch():
    """Return a function from a number to the micro-batch of that number."""

    def numbered(number):
        generator = torch.Generator().manual_seed(number)
        return gpt_batch(torch.randint(11, (2, 7), generator=generator))

    return numbered
