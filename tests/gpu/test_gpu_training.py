"""Training steps on a GPU: against the CPU, in every precision and ZeRO stage, without waiting."""

from contextlib import contextmanager

import pytest
import torch
from test_gpu_runs import write_corpus
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import Training, cpu_losses

FULL = ("--checkpoint-activations",)
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
OFFLOAD = ("--zero-stage", "2", "--cpu-optimizer", "--cpu_torch_adam")


@pytest.fixture(scope="module")
def steps(device):
    return 20 if device.type == "cuda" else 4


@pytest.fixture(scope="module")
def fp32(device, steps):
    """Losses of the CPU in fp32."""
    return cpu_losses(device, steps)


@pytest.mark.parametrize(
    "flags",
    [
        ("--kernels", "reference"),
        ("--kernels", "auto"),
        ("--attention-impl", "fused-softmax"),
        ("--attention-impl", "reference"),
    ],
    ids=" ".join,
)
def test_fp32_is_that_of_the_cpu(flags, device, steps, fp32, record_property):
    training = Training(device, *flags)
    record_property("kernels", ", ".join({one.implementation for one in training.choices}))
    losses = training.losses(steps)
    assert_close(losses, fp32, rtol=1e-4, atol=0)
    assert losses != [losses[0]] * steps


def test_bf16_is_that_of_the_cpu(device, steps, fp32, record_property):
    losses = Training(device, "--bf16").losses(steps)
    reference = cpu_losses(device, steps, "--bf16")
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    record_property("largest difference", max(differences))
    assert_close(losses, reference, rtol=2e-2, atol=0)
    assert_close(losses, fp32, rtol=2e-2, atol=0)


@pytest.mark.parametrize("stage", ["0", "1"])
def test_an_fp16_overflow_skips_one_step_and_halves_the_scale(stage, gpu, steps, fp32):
    flags = ("--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1")
    training = Training(gpu, *flags, "--zero-stage", stage)
    engine, seen = training.engine, {}
    first = next(engine.module.parameters())

    def before(step):
        seen[step] = engine.loss_scale, engine.skipped_steps, first.detach().clone()
        if step == 5:
            seen["hook"] = first.register_hook(lambda grad: grad * float("inf"))
        if step == 6:
            seen["hook"].remove()

    losses = training.losses(steps, before=before)
    assert [seen[step][0] for step in (0, 5, 6, 7)] == [65536, 65536, 32768, 32768]
    assert [seen[step][1] for step in (0, 5, 6, steps - 1)] == [0, 0, 1, 1]
    assert torch.equal(seen[5][2], seen[6][2])
    assert not torch.equal(seen[6][2], seen[7][2])
    assert_close(losses[:6], fp32[:6], rtol=2e-2, atol=0)
    assert all(loss == loss and loss < 2 * fp32[0] for loss in losses)


@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_zero_stages_and_offload_train_the_same(bits, device, steps):
    common = ("--bf16",) if bits == "bf16" else ()
    losses = {
        name: Training(device, *common, *flags).losses(steps)
        for name, flags in {
            "0": ("--zero-stage", "0"),
            "1": ("--zero-stage", "1"),
            "2": ("--zero-stage", "2"),
            "3": ("--zero-stage", "3"),
            "offload": OFFLOAD,
        }.items()
    }
    for name in losses:
        assert_close(losses[name], losses["0"], rtol=2e-2 if common else 1e-4, atol=0, msg=name)


def test_recomputation_draws_the_same_dropout(device, steps):
    """Bit for bit where the backward pass is deterministic; in the first step everywhere."""
    plain, selective, full = (
        Training(device, *DROPOUT, *flags).losses(steps)
        for flags in ((), ("--recompute-activations",), FULL)
    )
    without = Training(device).losses(1)
    assert plain[0] == selective[0] == full[0] != without[0]
    rtol = 0 if device.type == "cpu" else 1e-3
    assert_close(selective, plain, rtol=rtol, atol=0)
    assert_close(full, plain, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "flags",
    [
        ("--loss-chunk-tokens", "100"),
        ("--compile",),
        ("--compile", "--compile-mode", "reduce-overhead"),
    ],
    ids=" ".join,
)
def test_faster_ways_train_the_same(flags, device, steps):
    """With several micro-batches in a step, whose gradients CUDA graphs must not overwrite."""
    if device.type == "cpu" and "--compile" in flags:
        pytest.skip("needs a GPU: other tests compile for CPUs")
    common = ("--bf16", "--global-batch-size", "8")
    expected = Training(device, *common).losses(steps)
    assert_close(Training(device, *common, *flags).losses(steps), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    "flags",
    [("--position-embedding-type", "alibi"), ("--window-size", "100,0")],
    ids=" ".join,
)
def test_flex_attention_is_sdpa(flags, gpu, steps):
    """`auto` takes it, and its block masks give the losses of dense ones."""
    chosen = Training(gpu, "--bf16", *flags)
    assert chosen.choices[0].implementation == "flex", chosen.choices[0]
    dense = Training(gpu, "--bf16", *flags, "--attention-impl", "sdpa").losses(steps)
    assert_close(chosen.losses(steps), dense, rtol=2e-2, atol=0)


@pytest.mark.parametrize("flags", [("hybrid",), ("e4m3", "--fp8-recipe", "rowwise")], ids=" ".join)
def test_fp8_trains_as_32_bits_do(flags, gpu, steps, fp32):
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    losses = Training(gpu, "--bf16", "--fp8-format", *flags).losses(steps)
    assert_close(losses, fp32, rtol=5e-2, atol=0)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@contextmanager
def forbidden_waits(device):
    """Let a wait of the host for the GPU raise; on a CPU, count what would be one."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with Reads() as reads:
        yield
    assert reads.count == 0, f"{reads.count} numbers were read on the host"


@pytest.mark.parametrize(
    "flags",
    [
        ("--bf16",),
        (),
        ("--bf16", "--zero-stage", "2"),
        ("--bf16", "--loss-chunk-tokens", "100"),
        ("--bf16", "--data-path", "files"),
    ],
    ids=" ".join,
)
def test_micro_batches_do_not_wait_for_the_gpu(flags, device, monkeypatch, tmp_path):
    """From the second micro-batch of a step to the last but one, and no `synchronize` in a step."""
    samples = 32 if device.type == "cuda" else 16  # 8 micro-batches
    flags = [write_corpus(tmp_path) if word == "files" else word for word in flags]
    training = Training(device, *flags, "--global-batch-size", str(samples), "--split", "1,0,0")
    engine, source = training.engine, training.batches
    if "--data-path" in flags:
        source = training.batches_of_files(device)
    for _ in range(2):
        float(engine.train_batch(source))
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *words: calls.append(words))

    def watched():
        yield next(source)
        with forbidden_waits(device):
            for _ in range(6):
                yield next(source)
        yield next(source)

    engine.train_batch(watched())
    assert not calls
