"""DeepSpeed's own optimizers: which one, with which constants, and when it cannot be compiled.

Their steps are not taken here: a compiler would need a minute for each.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from engines import deepspeed_of
from problems import problem
from tiny import tiny_plan
from torch import nn

from megatron.engine import optimizers
from megatron.engine.optimizers import engine_optimizer


class Theirs:
    def __init__(self, groups, **constants):
        self.groups, self.constants = groups, constants


@pytest.mark.parametrize(
    ("flags", "name", "constants"),
    [
        ("--optimizer-impl deepspeed", "FusedAdam", {"betas": (0.9, 0.7), "eps": 1e-8}),
        ("--cpu-optimizer", "DeepSpeedCPUAdam", {"betas": (0.9, 0.7), "eps": 1e-8}),
        ("--optimizer lion --optimizer-impl deepspeed", "FusedLion", {"betas": (0.95, 0.98)}),
        ("--optimizer lion --cpu-optimizer", "DeepSpeedCPULion", {"betas": (0.95, 0.98)}),
    ],
)
def test_the_optimizer_is_that_of_the_device_it_steps_on(flags, name, constants, monkeypatch):
    monkeypatch.setattr(optimizers, name, Theirs)
    plan = tiny_plan(*flags.split(), "--adam-beta2", "0.7", "--weight-decay", "0.2").optimizer
    built = engine_optimizer(nn.Linear(3, 2), plan, 0.3, tensor_group=None)
    assert built.constants == {"lr": 0.3} | constants
    assert [group["weight_decay"] for group in built.groups] == [0.2, 0.0]


def test_torchs_is_taken_where_deepspeeds_is_not_asked_for(group):
    for flags in ("", "--cpu-optimizer --cpu_torch_adam", "--zero-stage 1"):
        plan = tiny_plan(*flags.split()).optimizer
        built = engine_optimizer(nn.Linear(3, 2), plan, 0.3, tensor_group=group)
        assert type(built) is torch.optim.AdamW


def test_one_that_cannot_be_compiled_names_the_other(monkeypatch):
    def fail(groups, **constants):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(optimizers, "DeepSpeedCPUAdam", fail)
    plan = tiny_plan("--cpu-optimizer").optimizer
    with problem("no compiler … --optimizer-impl torch"):
        engine_optimizer(nn.Linear(3, 2), plan, 0.3, tensor_group=None)


def test_the_embedding_alone_takes_its_learning_rate(build):
    engine = build("--decoupled-lr", "0.5")
    engine.set_lr(0.1)
    engine.set_embedding_lr(0.3)
    rates = {bool(g.get("embedding")): g["lr"] for g in deepspeed_of(engine).optimizer.param_groups}
    assert rates == {False: 0.1, True: 0.3}
