"""One process with all of the model, against plain PyTorch written out."""

import json

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from problems import problem
from torch.testing import assert_close

from megatron.checkpointing.resharding.unpickle import read_state
from megatron.common.errors import CheckpointError
from megatron.model.layers.layer_list import Layer
from megatron.model.loss import next_token_loss


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def reference_step(model, optimizer, loss, batches, *, max_norm=0.0):
    """Take one step of plain PyTorch on the mean of `batches`; return mean loss and norm."""
    losses = [loss(model(given), given) for given in batches]
    mean = torch.stack(losses).mean()
    optimizer.zero_grad()
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
    optimizer.step()
    return mean.detach(), float(norm)


def plain_sgd(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


# Batch sizes in samples, two per micro-batch. The changes fall at places where the count of
# micro-batches since the start is no multiple of the new number per step.
RAMP = [2, 2, 2, 4, 4, 6, 8, 4]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_of_changing_size_are_those_of_plain_pytorch(
    build, plain_model, group, micro_batch, stage
):
    # Not adam: it would blow up the rounding errors of key biases, whose gradient is zero.
    flags = ["--global-batch-size", "2", "--clip-grad", "0.5", "--optimizer", "sgd"]
    engine = build(*flags, "--zero-stage", str(stage))
    model, loss = plain_model, next_token_loss(group)
    optimizer = plain_sgd(model)
    batches = iter([micro_batch(n) for n in range(100)])
    read = iter([micro_batch(n) for n in range(100)])
    for step, samples in enumerate(RAMP):
        lr = 0.01 * (step + 1)
        engine.set_global_batch_size(samples)
        engine.set_lr(lr)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        expected, norm = reference_step(
            model, optimizer, loss, [next(read) for _ in range(samples // 2)], max_norm=0.5
        )
        assert_close(engine.train_batch(batches), expected)
        assert engine.grad_norm == pytest.approx(norm, rel=1e-4)
    if stage < 3:
        assert_close(weights(engine.module), weights(model), rtol=1e-5, atol=1e-6)


def test_the_norm_of_32_bit_training_without_zero_is_told(build, plain_model, group, micro_batch):
    engine = build("--clip-grad", "0")
    assert engine.grad_norm is None
    next_token_loss(group)(plain_model(micro_batch(0)), micro_batch(0)).backward()
    expected = torch.stack([p.grad.norm() for p in plain_model.parameters()]).norm()
    engine.train_batch(iter([micro_batch(0)]))
    assert engine.grad_norm == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("clip", ["0", "0.01", "1000"])
def test_the_norm_told_is_that_before_clipping(build, micro_batch, clip):
    norms = []
    for flags in (["--clip-grad", "0", "--zero-stage", "1"], ["--clip-grad", clip]):
        engine = build(*flags)
        engine.train_batch(iter([micro_batch(0)]))
        norms.append(engine.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.01, 1000.0])
def test_a_step_is_as_long_as_clipping_says(build, plain_model, group, micro_batch, clip):
    flags = ["--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0"]
    engine = build(*flags, "--clip-grad", str(clip))
    before = weights(plain_model)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    _, norm = reference_step(plain_model, optimizer, next_token_loss(group), [micro_batch(0)])
    assert 0.1 < norm < 100
    factor = clip / norm if 0 < clip < norm else 1.0
    engine.train_batch(iter([micro_batch(0)]))
    for name, unclipped in weights(plain_model).items():
        expected = before[name] + factor * (unclipped - before[name])
        assert_close(engine.module.get_parameter(name).detach(), expected)


def test_bf16_sums_in_32_bits_over_micro_batches(build, plain_model, group, micro_batch):
    """Bit for bit: 32-bit weights, 16-bit copies, and gradients added up in 32 bits."""
    flags = ["--bf16", "--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0"]
    engine = build(*flags, "--clip-grad", "0", "--global-batch-size", "16")
    # A power of two, so that its product with a gradient is exact. Any other product is rounded
    # here but not by a kernel that multiplies and adds in one operation; and where a weight lies
    # halfway between two 16-bit numbers, the last of its 32 bits decides.
    lr = 0.125
    engine.set_lr(lr)
    model, loss = plain_model.bfloat16(), next_token_loss(group)
    masters = {name: weight.float() for name, weight in weights(model).items()}
    batches = [micro_batch(n) for n in range(16)]
    for step in range(2):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for given in batches[8 * step : 8 * step + 8]:
            model.zero_grad()
            (loss(model(given), given) / 8).backward()
            for name, p in model.named_parameters():
                sums[name] += p.grad.float()
        with torch.no_grad():
            for name, p in model.named_parameters():
                masters[name] -= lr * sums[name]
                p.copy_(masters[name])
        engine.train_batch(iter(batches[8 * step : 8 * step + 8]))
        for name, p in engine.module.named_parameters():
            assert p.dtype == torch.bfloat16
            assert torch.equal(p, model.get_parameter(name)), (step, name)


@pytest.mark.parametrize("number", [1, 2])
def test_number_of_threads_is_that_of_this_test_alone(number):
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_evaluation_is_the_mean_and_changes_nothing(build, plain_model, group, micro_batch):
    engine = build("--hidden-dropout", "0.5")
    before = weights(engine.module)
    batches = [micro_batch(n) for n in range(3)]
    losses = [next_token_loss(group)(plain_model(given), given) for given in batches]
    assert_close(engine.evaluate(iter(batches), 3), torch.stack(losses).mean().detach())
    assert_close(weights(engine.module), before, rtol=0, atol=0)
    engine.train_batch(iter(batches))
    assert engine.module.training


def test_nothing_is_skipped_or_scaled_in_32_bits(build, micro_batch):
    engine = build()
    engine.train_batch(iter([micro_batch(0)]))
    assert (engine.skipped_steps, engine.loss_scale) == (0, 1.0)


def test_recomputation_changes_no_loss(build, micro_batch):
    losses = []
    for flags in ([], ["--checkpoint-activations"]):
        engine = build("--hidden-dropout", "0.3", "--attention-dropout", "0.3", *flags)
        losses.append([engine.train_batch(iter([micro_batch(n)])) for n in range(3)])
    assert_close(losses[0], losses[1])


def test_recomputation_trains_the_biases_behind_frozen_weights(build, micro_batch):
    trained = []
    for flags in ([], ["--checkpoint-activations"]):
        engine = build("--hidden-dropout", "0.3", "--bitfit", "--optimizer", "sgd", *flags)
        before = weights(engine.module)
        for n in range(3):
            engine.train_batch(iter([micro_batch(n)]))
        trained.append(weights(engine.module))
        moved = {name for name, w in trained[-1].items() if not torch.equal(w, before[name])}
        assert moved == {name for name in before if name.endswith("bias")}
    assert_close(trained[0], trained[1])


def test_offloading_to_a_disk_names_what_it_needs(build, tmp_path, monkeypatch):
    if AsyncIOBuilder().is_compatible():
        pytest.skip("this machine has libaio")
    # It is compiled first, for most of a minute, and is not what is missing.
    monkeypatch.setattr(PinMemoryBuilder, "load", lambda self, verbose=False: None)
    block = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": block}))
    with problem("nvme … libaio … cpu"):
        build("--deepspeed_config", str(file))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--zero-stage 1",
        "--optimizer muon",
        "--optimizer muon --bf16",
        "--optimizer muon --zero-stage 2 --bf16",
        "--optimizer lion --zero-stage 3 --bf16",
        "--bitfit --bf16",
        "--cpu-optimizer --cpu_torch_adam --zero-stage 2 --bf16",
    ],
)
def test_a_saved_engine_goes_on_bit_for_bit(build, micro_batch, tmp_path, flags):
    flags = [*flags.split(), "--hidden-dropout", "0.3", "--attention-dropout", "0.3"]
    engine = build(*flags)
    for n in range(2):
        engine.train_batch(iter([micro_batch(n)]))
    engine.save(tmp_path, "here", {"iteration": 2})
    expected = [engine.train_batch(iter([micro_batch(n)])) for n in (2, 3)]

    resumed = build(*flags)
    resumed.load(tmp_path, "here", read=read_state)
    assert [resumed.train_batch(iter([micro_batch(n)])) for n in (2, 3)] == expected
    own, theirs = weights(engine.module), weights(resumed.module)
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_what_is_not_there_is_told(build, tmp_path):
    with problem("/nowhere … loaded", CheckpointError):
        build().load(tmp_path, "nowhere", read=read_state)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "rng_rank_00000.pt"])
@pytest.mark.parametrize("content", [None, b"", b"not a file of torch"])
def test_a_damaged_file_is_told(build, tmp_path, name, content):
    build().save(tmp_path, "here", {})
    file = tmp_path / "here" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with problem("/here", CheckpointError):
        build().load(tmp_path, "here", read=read_state)


class Gate(torch.nn.Module):
    """A head whose factor has no initial value."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.empty(1))


@pytest.mark.parametrize("stage", ["0", "3"])
def test_an_uninitialized_parameter_is_named_before_a_step_is_taken(build, stage):
    with problem("8.factor … constructor"):
        build("--global-batch-size", "2", "--zero-stage", stage, head=[Layer(Gate)])
