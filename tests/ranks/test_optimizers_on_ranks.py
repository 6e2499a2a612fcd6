"""Optimizers, number formats and ZeRO on two ranks against loops of plain PyTorch on one."""

import os

from checkpoints import whole_weights

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import tempfile
import weakref
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from networks import gpt_steps
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_plan, tiny_spec
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.testing import assert_close

from megatron.checkpointing.manifest import Manifest, record_file
from megatron.checkpointing.train_state import TrainState
from megatron.engine.build import GatheredModel, build_engine
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.freezing import freeze
from megatron.engine.optimizers import engine_optimizer
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.optimizer.build import build_optimizer
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import shard_of
from megatron.tensor_parallel.topology import Topology

FLAGS = ["--attention-dropout", "0", "--hidden-dropout", "0", "--pad-vocab-size-to", "12"]
CONSTANTS = ["--clip-grad", "0.5", "--weight-decay", "0.2", "--adam-eps", "1e-3"]
LR, STEPS = 0.02, 3
fill = partial(initialise, seed=1, std=0.3, num_layers=2)


def micro_batch(number):
    generator = torch.Generator().manual_seed(number)
    return gpt_batch(torch.randint(11, (2, 7), generator=generator))


def engine_of(*flags, device="cpu", fill_with=fill, zero=MappingProxyType({}), **axes):
    """Return an engine over two ranks, and its plan; `zero` are further keys of that block."""
    distributed.start("gloo")
    groups = build_groups(Topology(**({"pipeline": 1, "data": 1, "tensor": 1} | axes)))
    layout = [
        *("--tensor-model-parallel-size", str(groups.topology.tensor)),
        *("--pipeline-model-parallel-size", str(groups.topology.pipeline)),
    ]
    words = [*layout, *FLAGS, *CONSTANTS, *flags]
    plan = tiny_plan(*words, world_size=2, device=device)
    rng = start_streams(groups, seed=5, activation_checkpointing={})
    mixed = plan.precision.is_mixed
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    engine = build_engine(
        gpt_steps(plan.model, group=groups.tensor, rng=rng, mixed=mixed),
        loss=next_token_loss(groups.tensor),
        groups=groups,
        parallel=plan.parallel,
        recompute=plan.recompute,
        initialise=fill_with,
        build_optimizer=partial(
            engine_optimizer,
            plan=plan.optimizer,
            lr=LR,
            tensor_group=groups.tensor,
            dtype=dtypes[plan.precision.dtype],
        ),
        batch_fields=tuple(CAUSAL_FIELDS),
        config=plan.deepspeed
        | {"zero_optimization": plan.deepspeed["zero_optimization"] | dict(zero)},
    )
    return engine, plan


def plain_model(dtype=torch.float32):
    steps = gpt_steps(
        tiny_spec(), group=lone_group(), rng=OrdinaryStream(), mixed=dtype != torch.float32
    )
    model = SequentialModel(steps)
    fill(model)
    return model.to(dtype)


def plain_run(plan, numbers, dtype=torch.float32):
    """Return the losses and the model of a plain loop; masters in 32 bits stand behind 16."""
    model = plain_model(dtype)
    masters = plain_model()
    with torch.no_grad():
        for master, p in zip(masters.parameters(), model.parameters(), strict=True):
            master.copy_(p)
    freeze(masters, plan.optimizer)
    optimizer = build_optimizer(masters, plan.optimizer, LR, tensor_group=lone_group(), dtype=dtype)
    loss_of = next_token_loss(lone_group())
    losses = []
    for step in numbers:
        sums = [torch.zeros_like(master) for master in masters.parameters()]
        losses.append(0.0)
        for given in map(micro_batch, step):
            model.zero_grad()
            loss = loss_of(model(given), given)
            (loss / len(step)).backward()
            losses[-1] += float(loss) / len(step)
            for total, p in zip(sums, model.parameters(), strict=True):
                if p.requires_grad:
                    total += p.grad.float()
        for master, total in zip(masters.parameters(), sums, strict=True):
            master.grad = total if master.requires_grad else None
        torch.nn.utils.clip_grad_norm_(masters.parameters(), plan.optimizer.clip_grad)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters.parameters(), model.parameters(), strict=True):
                p.copy_(master)
    return losses, model


def weights(engine):
    """Return copies of all parameters, whole where ZeRO has divided them."""
    return {name: p.detach().clone() for name, p in GatheredModel(engine.module).named_parameters()}


def require_same_path(rank, flags, *, dtype=torch.float32, rel=1e-4, **options):
    """Compare losses, and weights that have a gradient to speak of, with those of a plain loop."""
    engine, plan = engine_of(*flags, **options)
    replicas = plan.parallel.data
    numbers = [[step * replicas + r for r in range(replicas)] for step in range(STEPS)]
    mine = rank if replicas == 2 else 0
    losses = [float(engine.train_batch(iter([micro_batch(step[mine])]))) for step in numbers]
    expected_losses, model = plain_run(plan, numbers, dtype)
    assert losses == pytest.approx(expected_losses, rel=rel), flags
    parameters = dict(engine.module.named_parameters())
    for name, found in weights(engine).items():
        whole = model.get_parameter(name)
        shard = shard_of(parameters[name])
        expected = whole if shard is None else whole.chunk(shard.count, shard.dim)[shard.index]
        # Keys' biases have no gradient but rounding errors, which adam and lion blow up.
        if not name.endswith("query_key_value.bias"):
            far = (found.float() - expected.detach().float()).abs() > 20 * rel * LR
            assert far.float().mean() < 0.02, (flags, name, float(far.float().mean()))


def replicas_step_like_one_process_at_every_stage(rank):
    for stage in range(4):
        for name in ("adam", "lion"):
            flags = ["--zero-stage", str(stage), "--optimizer", name]
            require_same_path(rank, flags, rel=1e-3, data=2)


def secondary_partitions_of_zero_plus_plus_change_no_step(rank):
    flags = ["--zero-stage", "3", "--optimizer", "sgd"]
    require_same_path(rank, flags, data=2, zero={"zero_hpz_partition_size": 2})


def muon_steps_on_whole_matrices_that_zero_has_cut(rank):
    for stage in range(3):
        flags = ["--optimizer", "muon", "--muon-extra-scale-factor", "0.2"]
        require_same_path(rank, [*flags, "--zero-stage", str(stage)], rel=1e-3, data=2)
        require_same_path(
            rank,
            [*flags, "--bf16", "--zero-stage", str(stage)],
            dtype=torch.bfloat16,
            rel=5e-3,
            data=2,
        )


def muon_steps_on_whole_matrices_that_tensor_ranks_share(rank):
    for stage in range(3):
        flags = ["--optimizer", "dist_muon", "--muon-nesterov", "--muon-extra-scale-factor", "0.2"]
        flags += ["--zero-stage", str(stage)]
        require_same_path(rank, flags, rel=1e-3, tensor=2)


def bf16_keeps_32_bit_masters(rank):
    for flags in (["--optimizer", "adam"], ["--zero-stage", "2", "--optimizer", "lion"]):
        require_same_path(rank, ["--bf16", *flags], dtype=torch.bfloat16, rel=2e-2, data=2)


def fp16_steps_like_32_bits_but_for_rounding(rank):
    get_accelerator().is_fp16_supported = lambda: True
    for flags in (
        ["--initial-loss-scale", "256"],
        ["--loss-scale", "128", "--zero-stage", "2"],
        ["--loss-scale", "128", "--accumulate-allreduce-grads-in-fp32"],
    ):
        words = ["--fp16", "--optimizer", "sgd", *flags]
        require_same_path(rank, words, dtype=torch.float16, rel=2e-2, device="cuda", data=2)


def stages_step_like_one_process(rank):
    for flags, dtype, rel in (
        ("--optimizer muon --muon-extra-scale-factor 0.2", torch.float32, 1e-3),
        ("--optimizer lion", torch.float32, 1e-3),
        ("--cpu-optimizer --cpu_torch_adam", torch.float32, 1e-3),
        ("--bitfit --bf16", torch.bfloat16, 2e-2),
    ):
        require_same_path(rank, flags.split(), dtype=dtype, rel=rel, pipeline=2)


def stages_without_some_groups_of_weights_step_like_one_process(rank):
    get_accelerator().is_fp16_supported = lambda: True
    muon = "--optimizer muon --muon-extra-scale-factor 0.2"
    alone = "--pp-partition-method layers:0,2"  # an embedding is on the first stage, without a norm
    for flags, dtype, rel, device in (
        (f"{muon} {alone} --zero-stage 1", torch.float32, 1e-3, "cpu"),
        (f"{muon} {alone} --bf16", torch.bfloat16, 2e-2, "cpu"),
        (f"{alone} --zero-stage 0", torch.float32, 1e-5, "cpu"),
        (f"{alone} --zero-stage 1", torch.float32, 1e-5, "cpu"),
        (f"{alone} --fp16 --loss-scale 128 --optimizer sgd", torch.float16, 2e-2, "cuda"),
    ):
        require_same_path(rank, flags.split(), dtype=dtype, rel=rel, device=device, pipeline=2)


def bitfit_moves_nothing_but_biases(rank):
    for stage in (0, 1, 3):
        engine, plan = engine_of("--bitfit", "--zero-stage", str(stage), data=2)
        before = weights(engine)
        engine.train_batch(iter([micro_batch(rank)]))
        for name, weight in weights(engine).items():
            assert torch.equal(weight, before[name]) != name.endswith("bias"), name
        _, model = plain_run(plan, [[0, 1]])
        found = weights(engine)["3.mlp.dense_h_to_4h.bias"]
        assert_close(found, model.get_parameter("3.mlp.dense_h_to_4h.bias").detach())


def weights_of_stage_3_are_read_back_the_frozen_ones_too(rank):
    for flags in (["--bitfit"], ["--optimizer", "lion"]):
        engine, plan = engine_of(*flags, "--zero-stage", "3", data=2)
        engine.train_batch(iter([micro_batch(rank)]))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        engine.save(Path(folder[0]), "here", {})
        dist.barrier()
        manifest = Manifest(
            state=TrainState(),
            plan=plan.to_dict(),
            config={},
            versions={},
            partition_dims={},
            files=tuple(record_file(file) for file in (Path(folder[0]) / "here").iterdir()),
        )
        expected = weights(engine)
        found = whole_weights(Path(folder[0]) / "here", manifest)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), (flags, name)


def offloading_changes_no_step(rank):
    offload = ["--cpu-optimizer", "--cpu_torch_adam"]
    for stage, flags in (
        (["--zero-stage", "1"], offload),
        (["--zero-stage", "1", "--bf16"], offload),
        (["--zero-stage", "2", "--bf16"], offload),
        (["--zero-stage", "3", "--bf16"], [*offload, "--remote-device", "cpu"]),
    ):
        paths = []
        for words in (stage, [*stage, *flags]):
            engine, _ = engine_of(*words, "--global-batch-size", "8", data=2)
            batches = iter([micro_batch(2 * n + rank) for n in range(2 * STEPS)])
            norms = []
            for _ in range(STEPS):
                engine.train_batch(batches)
                norms.append(engine.grad_norm)
            paths.append((norms, weights(engine)))
        assert paths[1][0] == pytest.approx(paths[0][0], rel=1e-4), (stage, flags)
        for name, weight in paths[0][1].items():
            assert_close(weight, paths[1][1][name], rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")


def initial_weights_do_not_depend_on_the_stage(rank):
    for flags in ([], ["--bf16"]):
        whole, _ = engine_of(*flags, data=2)
        divided, _ = engine_of(*flags, "--zero-stage", "3", data=2)
        assert any(hasattr(p, "ds_tensor") for p in divided.module.parameters())
        expected, found = weights(whole), weights(divided)
        assert expected.keys() == found.keys()
        for name, weight in expected.items():
            assert torch.equal(weight, found[name]), name


class Held:
    """The most parameter bytes that this process ever held at once."""

    def __init__(self):
        self.parameters, self.peak = {}, 0

    def look(self, *registered):
        self.parameters |= {id(p): weakref.ref(p) for p in registered if p is not None}
        living = [p for p in (ref() for ref in self.parameters.values()) if p is not None]
        self.peak = max(self.peak, sum(map(bytes_of, living)))


def bytes_of(parameter):
    tensors = [parameter, getattr(parameter, "ds_tensor", None)]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def no_rank_ever_holds_the_whole_model_at_stage_3(rank):
    peaks = []
    for stage in ("2", "3"):
        held = Held()
        hook = register_module_parameter_registration_hook(
            lambda module, name, p, held=held: held.look(p)
        )
        try:
            engine, _ = engine_of(
                *("--zero-stage", stage, "--num-layers", "8"),
                data=2,
                fill_with=partial(fill_and_look, held),
                zero={"stage3_param_persistence_threshold": 0},
            )
        finally:
            hook.remove()
        held.look()
        peaks.append(held.peak)
    assert peaks[0] == 4 * tiny_spec(num_layers=8).num_parameters
    # Its half, and the largest layer while it is built or filled.
    assert peaks[1] < 0.6 * peaks[0]


def fill_and_look(held, model):
    class Looked(torch.nn.Module):
        def named_parameters(self):
            for name, p in model.named_parameters():
                held.look()
                yield name, p

    fill(Looked())


CHECKS = [
    replicas_step_like_one_process_at_every_stage,
    secondary_partitions_of_zero_plus_plus_change_no_step,
    muon_steps_on_whole_matrices_that_zero_has_cut,
    muon_steps_on_whole_matrices_that_tensor_ranks_share,
    bf16_keeps_32_bit_masters,
    fp16_steps_like_32_bits_but_for_rounding,
    stages_step_like_one_process,
    stages_without_some_groups_of_weights_step_like_one_process,
    bitfit_moves_nothing_but_biases,
    weights_of_stage_3_are_read_back_the_frozen_ones_too,
    offloading_changes_no_step,
    initial_weights_do_not_depend_on_the_stage,
    no_rank_ever_holds_the_whole_model_at_stage_3,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
