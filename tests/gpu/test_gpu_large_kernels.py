"""Triton's kernels at the sizes of real networks, where they have more warps, rows and elements."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    check_bias_add,
    check_bias_gelu,
    check_cross_entropy,
    check_glu,
    check_layer_norm,
    check_rms_norm,
)
from torch.testing import assert_close

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1024, 2560, 12288, 14336, 32768)
WITHOUT_SPILLS = 16384  # features up to which no kernel keeps registers in memory


@pytest.fixture
def triton(gpu):
    """The kernels of Triton."""
    pytest.importorskip("triton")
    from megatron.fused_kernels.triton.all import TRITON

    return TRITON


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [check_layer_norm, check_rms_norm, check_bias_gelu, check_glu, check_bias_add],
    ids=lambda check: check.__name__,
)
def test_wide_rows(check, dtype, gpu, triton):
    for width in WIDTHS:
        check(triton, gpu, dtype, width)


@pytest.mark.parametrize("vocabulary", [50304, 250880])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies(vocabulary, dtype, gpu, triton):
    check_cross_entropy(triton, gpu, dtype, vocabulary)


def test_more_logits_than_32_bits_count(gpu, triton):
    rows, columns = 40_000, 65_536
    assert rows * columns > 2**31
    generator = torch.Generator(gpu).manual_seed(0)
    logits = torch.randn(rows, columns, device=gpu, dtype=torch.bfloat16, generator=generator)
    target = torch.randint(columns, (rows,), device=gpu, generator=generator)
    chosen = torch.tensor([0, 1, 2**31 // columns - 1, 2**31 // columns, rows - 1], device=gpu)
    kept = logits[chosen].float().requires_grad_()
    exact = F.cross_entropy(kept, target[chosen], reduction="none")
    exact.sum().backward()
    # Times 1: the kernel may write the gradient into its input.
    logits.requires_grad_()
    losses = triton.cross_entropy.full(logits * 1, target, columns)
    losses.sum().backward()
    assert_close(losses[chosen].float(), exact, rtol=1e-3, atol=1e-3)
    assert_close(logits.grad[chosen].float(), kept.grad, rtol=1e-2, atol=1e-5)


def test_registers_suffice(gpu, triton, record_property):
    """Norms and activations up to WITHOUT_SPILLS features, by what Triton has compiled for them."""
    from triton.runtime.jit import JITFunction

    from megatron.fused_kernels.triton import activations, norms

    kernels = [
        value
        for module in (activations, norms)
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    ]
    for kernel in kernels:
        kernel.device_caches.clear()
    for check in (check_layer_norm, check_rms_norm, check_bias_gelu, check_glu):
        check(triton, gpu, torch.bfloat16, WITHOUT_SPILLS)
    spills = {
        kernel.fn.__name__: compiled.n_spills
        for kernel in kernels
        for cache, *_ in kernel.device_caches.values()
        for compiled in cache.values()
    }
    record_property("bytes spilled", spills)
    assert spills and not any(spills.values()), spills
