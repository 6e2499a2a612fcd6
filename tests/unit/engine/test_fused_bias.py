"""Biases that other operations add, or sum the gradient of: with ZeRO, which divides all weights, too."""

from dataclasses import replace

import pytest
from torch.testing import assert_close

from megatron.fused_kernels.reference.dispatch import REFERENCE


@pytest.mark.parametrize("stage", ["0", "3"])
@pytest.mark.parametrize("gate", [[], ["--swiglu"]], ids=["gelu", "swiglu"])
def test_the_activation_adds_the_bias_at_every_stage(build, micro_batch, stage, gate):
    require_same_losses(build, micro_batch, stage, *gate, activation_adds_bias=True)


@pytest.mark.parametrize("stage", ["0", "3"])
@pytest.mark.parametrize(
    "flags",
    [[], ["--position-embedding-type", "rotary"], ["--qk-layernorm"], ["--bitfit"]],
    ids=["plain", "rotary", "norms of queries and keys", "bitfit"],
)
def test_heads_sum_the_gradient_of_the_bias_at_every_stage(build, micro_batch, stage, flags):
    require_same_losses(build, micro_batch, stage, *flags, split_sums_bias=True)


def require_same_losses(build, micro_batch, stage, *flags, **changes):
    """Compare three steps with those of the references without ZeRO."""
    flags = ["--optimizer", "sgd", "--clip-grad", "0", *flags]
    losses = []
    for kernels, requested in ((REFERENCE, "0"), (replace(REFERENCE, **changes), stage)):
        engine = build(*flags, "--zero-stage", requested, kernels=kernels)
        batches = iter([micro_batch(n) for n in range(3)])
        losses.append([engine.train_batch(batches) for _ in range(3)])
    assert losses[0][0] != losses[0][2]
    assert_close(losses[1], losses[0])
