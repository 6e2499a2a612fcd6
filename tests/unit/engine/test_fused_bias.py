"""A bias that the activation adds is there when ZeRO has divided all weights."""

from dataclasses import replace

import pytest
from torch.testing import assert_close

from megatron.fused_kernels.reference.dispatch import REFERENCE


@pytest.mark.parametrize("stage", ["0", "3"])
@pytest.mark.parametrize("gate", [[], ["--swiglu"]], ids=["gelu", "swiglu"])
def test_the_activation_adds_the_bias_at_every_stage(build, micro_batch, stage, gate):
    flags = ["--optimizer", "sgd", "--clip-grad", "0", *gate]
    losses = []
    for kernels, requested in (
        (REFERENCE, "0"),
        (replace(REFERENCE, activation_adds_bias=True), stage),
    ):
        engine = build(*flags, "--zero-stage", requested, kernels=kernels)
        batches = iter([micro_batch(n) for n in range(3)])
        losses.append([engine.train_batch(batches) for _ in range(3)])
    assert losses[0][0] != losses[0][2]
    assert_close(losses[1], losses[0])
