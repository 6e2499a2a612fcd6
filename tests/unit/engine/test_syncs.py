"""A step waits for its device a fixed number of times, and never between micro-batches."""

import json
from itertools import product

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from syncs import counted_syncs, host_state
from torch.overrides import TorchFunctionMode

from megatron.engine import engine as engine_module
from megatron.engine.deepspeed.grad_stats import HostScalars

STAGES = ("0", "1", "2", "3")


def micro_batches(micro_batch, syncs):
    """Yield four micro-batches; note how often the device was waited for before each."""
    for number in range(4):
        syncs.mark()
        yield micro_batch(number)
    syncs.mark()


def waits_of_a_step(engine, micro_batch):
    """Return the waits between micro-batches, and those of a full step with what the loop reads."""
    for _ in range(3):  # DeepSpeed's timer waits from the third step on
        engine.train_batch(iter([micro_batch(number) for number in range(4)]))
    with counted_syncs(on_host=host_state(engine)) as syncs:
        float(engine.train_batch(micro_batches(micro_batch, syncs)))
        assert isinstance(engine.grad_norm, float)
        assert engine.loss_scale
        assert engine.skipped_steps == 0
    return syncs.marks[-1], syncs.lines


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_waits_once(build, micro_batch, dtype, stage):
    flags = ("--bf16",) if dtype == "bf16" else ()
    engine = build(*flags, "--zero-stage", stage, "--global-batch-size", "8")
    inside, lines = waits_of_a_step(engine, micro_batch)
    assert inside == 0
    # ZeRO 2 in 16 bits looks for overflows before it takes the norm.
    assert sum(lines.values()) == 1 + (dtype == "bf16" and stage == "2"), lines


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_in_fp16_waits_twice(build, micro_batch, fp16, stage):
    flags = ("--fp16", "--loss-scale", "128", "--zero-stage", stage, "--global-batch-size", "8")
    inside, lines = waits_of_a_step(build(*flags, device="cuda"), micro_batch)
    assert (inside, sum(lines.values())) == (0, 2), lines


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, until it is copied."""

    device = torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class SameDevice(TorchFunctionMode):
    """Tensors are joined on one device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.cat:
            assert len({tensor.device for tensor in args[0]}) == 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "norm", [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]).as_subclass(OnGpu)]
)
def test_scalars_of_a_step_come_together_from_wherever_they_are(norm):
    scalars = HostScalars()
    scalars.expect(torch.tensor(0.1).as_subclass(OnGpu), torch.tensor([2.0]).as_subclass(OnGpu))
    with SameDevice():
        assert scalars.to_host(norm).tolist() == [3.0, 4.0]
    loss, auxiliary = scalars.take()
    assert (loss, auxiliary.tolist()) == (torch.tensor(0.1), [2.0])
    assert {loss.device.type, auxiliary.device.type} == {"cpu"}
    assert scalars.take() == []


def test_waits_are_found():
    x = torch.ones(3)
    with counted_syncs(on_host=[torch.ones(2)]) as syncs:
        float(x.sum())
        if x.sum() > 1:
            x.nonzero()
        host = x.cpu()
        host.sum().item()  # no wait: it has been copied
        x.tolist()
        get_accelerator().synchronize()
    assert sum(syncs.lines.values()) == 6, syncs.lines


@pytest.mark.parametrize("clip", ["1", "0.01", "0"])
def test_gradients_added_at_once_give_deepspeed_s_bits(
    build, micro_batch, tmp_path, monkeypatch, clip
):
    flags = ("--bf16", "--global-batch-size", "8", "--clip-grad", clip)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"immediate_grad_update": False}}))
    ours, later = build(*flags), build(*flags, "--deepspeed_config", str(file))
    monkeypatch.setattr(engine_module, "shorten_gradient_path", lambda optimizer: None)
    theirs = build(*flags, "--deepspeed_config", str(file))
    paths = [
        [
            (
                engine.train_batch(iter([micro_batch(4 * step + i) for i in range(4)])),
                engine.grad_norm,
                *(p.detach().clone() for p in engine.module.parameters()),
            )
            for step in range(3)
        ]
        for engine in (ours, later, theirs)
    ]
    for own, other in product(paths[:2], paths[2:]):
        for step, expected in zip(own, other, strict=True):
            assert step[1] == expected[1]
            assert torch.equal(step[0], expected[0])
            assert all(map(torch.equal, step[2:], expected[2:]))
    assert all(p.grad is None for p in ours.module.parameters())
