"""The formula of model and hardware FLOPs against what PyTorch counts, product by product."""

from dataclasses import replace

import pytest
from tiny import tiny_plan
from torch.utils.flop_counter import FlopCounterMode

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.training.telemetry.report import flops_per_sample

SAMPLES = 4


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --num-attention-heads 4 --group-query-attention --num-query-groups 2",
        "--kv-channels 6 --untie-embeddings-and-output-weights --disable-bias-linear",
        "--checkpoint-activations",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-activations",
    ],
)
def test_the_formula_is_what_is_computed(build, micro_batch, flags):
    flags = [*flags.split(), "--global-batch-size", str(SAMPLES)]
    # PyTorch counts no product inside its kernels of attention for CPUs.
    engine = build(*flags, kernels=replace(REFERENCE, attention="fused-softmax"))
    plan = tiny_plan(*flags)
    batches = iter([micro_batch(number) for number in range(2)])
    with FlopCounterMode(display=False) as counted:
        engine.train_batch(batches)
    length = plan.model.seq_length
    assert counted.get_total_flops() == SAMPLES * flops_per_sample(plan, length)
    again = counted.get_total_flops() - SAMPLES * flops_per_sample(plan, length, recomputed=False)
    assert (again > 0) == (plan.recompute.granularity != "none")
