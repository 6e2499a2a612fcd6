"""A NaN gradient leaves weights and optimizer as they were."""

import itertools

import pytest
import torch
from tiny import VOCAB_SIZE

from megatron.objectives.gpt import PACKED, gpt_batch

OFFLOAD = ("--cpu-optimizer", "--cpu_torch_adam")


def micro_batch(seed):
    rows = torch.randint(VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(seed))
    return gpt_batch(rows, PACKED, 0)


def weights(engine):
    # At ZeRO stage 3 a weight lies in its own piece.
    named = engine.module.named_parameters()
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in named}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--bf16",),
        ("--bf16", "--zero-stage", "0"),
        ("--bf16", "--zero-stage", "2"),
        ("--zero-stage", "1"),
        ("--bf16", "--zero-stage", "1", *OFFLOAD),
        ("--bf16", "--zero-stage", "2", *OFFLOAD),
        ("--zero-stage", "3", *OFFLOAD),
        ("--clip-grad", "0"),
        ("--bf16", "--clip-grad", "0"),
        ("--zero-stage", "2", "--clip-grad", "0"),
        ("--bf16", "--zero-stage", "3"),
        ("--optimizer", "muon"),
        ("--bf16", "--optimizer", "lion"),
        ("--optimizer", "sgd"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_numbers_does_not_reach_the_weights(build, flags, value):
    spoilt, clean = build(*flags), build(*flags)
    engines = (spoilt, clean)
    for engine in engines:
        engine.train_batch(iter([micro_batch(0)]))
    before, skipped = weights(spoilt), spoilt.skipped_steps
    parameter = next(p for name, p in spoilt.module.named_parameters() if "dense" in name)
    hook = parameter.register_hook(lambda grad: torch.full_like(grad, value))
    spoilt.train_batch(iter([micro_batch(1)]))
    hook.remove()
    assert spoilt.skipped_steps == skipped + 1
    assert spoilt.grad_norm == float("inf")
    assert all(torch.equal(p, before[name]) for name, p in weights(spoilt).items())
    # The moments too: both go on alike, one of them without having seen that batch.
    for seed in (2, 3):
        for engine in engines:
            engine.train_batch(iter([micro_batch(seed)]))
    assert all(
        itertools.starmap(torch.equal, zip(*(weights(e).values() for e in engines), strict=True))
    )
    assert spoilt.skipped_steps == skipped + 1
