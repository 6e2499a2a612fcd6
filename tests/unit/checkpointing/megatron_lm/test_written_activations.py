"""Gated activations keep their gates in the files written for Megatron-LM, with experts and without."""

import pytest
import torch
from checkpoints import random_weights, whole_weights, write_checkpoint
from tiny import tiny_plan

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.megatron_lm.convert import Conversion, convert
from megatron.config.config import Config

VOCAB = 100


def converted(source, output, **how):
    """Convert a checkpoint; return its folder."""
    needed = {"micro_batch_size": 1, "lr": 1, "train_iters": 1, "data_path": ["none"]}
    needed |= {"true_vocab_size": VOCAB}
    conversion = Conversion(source=source, output=output, flags=("--t", "--p"), **how)
    list(convert(conversion, lambda found: Config.of(**{**found, **needed})))
    return output / "global_step3"


@pytest.mark.parametrize("experts", [(), ("--num-experts", "4", "--topk", "2")])
@pytest.mark.parametrize(
    "activation",
    ["--swiglu", *(f"--glu-activation {name}" for name in ("geglu", "liglu", "reglu"))],
)
def test_gates_come_back_as_gates(group, tmp_path, activation, experts):
    flags = (*activation.split(), *experts)
    weights = random_weights(tiny_plan(*flags, vocab_size=VOCAB).model)
    write_checkpoint(tmp_path / "own", weights, *flags, vocab_size=VOCAB)
    how = {"distributed": True} if experts else {"tensor": 2}
    converted(tmp_path / "own", tmp_path / "theirs", saver="megatron", **how)
    back = converted(tmp_path / "theirs", tmp_path / "back", saver="own")
    found = whole_weights(back, read_manifest(back))
    gated = [name for name in weights if ".dense_h_to_4h." in name]
    assert len(gated) >= 2
    for name in gated:
        assert torch.equal(found[name], weights[name]), name
