"""Steps of a network on ranks of any layout, against plain PyTorch in one process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from shared_groups import end_engines
from tiny import tiny_plan
from torch.testing import assert_close

from megatron.config.plan.plan import Plan
from megatron.engine.deepspeed import distributed
from megatron.engine.freezing import freeze
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.model.loss import Losses
from megatron.objectives.objective import Objective
from megatron.optimizer.param_groups import plan_groups
from megatron.tensor_parallel.broadcast import Fields, sequence_shard
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.training.setup import build_engine, build_process_groups, choose

MICRO_BATCHES = 4  # of two samples in a step
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_FLAGS = (
    *("--global-batch-size", "8", "--init-method-std", "0.3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "0.1", "--lr", "0.1"),
)

Steps = list[tuple[float, dict[str, float], float]]
"""Of each step its loss, the terms of the loss and the gradient norm."""


@dataclass(frozen=True)
class Network:
    """A network that is trained with SGD and momentum, on ranks and in one process.

    Args:
        fields: of a batch.
        micro_batches: yields those of all steps.
        loss: of the group and vocab_size.
    """

    name: str
    objective: Objective
    fields: Fields
    flags: Sequence[str]
    micro_batches: Callable[[], Iterator[dict[str, torch.Tensor]]]
    loss: Callable[..., Any]
    steps: int

    def plan(self, *flags: str) -> Plan:
        device = "cuda" if "--fp16" in flags else "cpu"
        ranks = dist.get_world_size()
        flags = (*_FLAGS, *self.flags, *flags)
        return tiny_plan(*flags, world_size=ranks, objective=self.name, device=device)

    def plainly_trained(self, *flags: str) -> tuple[Steps, dict[str, torch.Tensor]]:
        """Return the steps and the weights of the run in this process alone."""
        plan = self.plan(*flags)
        spec = plan.model
        model = SequentialModel(
            self.objective.layers(
                spec,
                LayerParts(
                    group=lone_group(),
                    rng=OrdinaryStream(),
                    mixed=False,
                    core_attention=core_attention_of(spec),
                    batch_fields=tuple(self.fields),
                ),
            )
        )
        initialise(model, seed=1234, std=0.3, num_layers=spec.num_layers, vocab_size=11)
        freeze(model, plan.optimizer, adapters_only=spec.lora is not None)
        optimizer = torch.optim.SGD(plan_groups(model, plan.optimizer), lr=0.1, momentum=0.9)
        loss_of, batches = self.loss(lone_group(), vocab_size=11), self.micro_batches()
        steps = []
        for _ in range(self.steps):
            found = [loss_of(model(batch), batch) for batch in islice(batches, MICRO_BATCHES)]
            every = [one if isinstance(one, Losses) else Losses(one, {}) for one in found]
            loss = torch.stack([one.total for one in every]).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            terms = {
                name: float(torch.stack([one.terms[name] for one in every]).mean())
                for name in self.objective.loss_terms(spec)
            }
            steps.append((float(loss), terms, float(norm)))
        return steps, dict(model.named_parameters())

    def trained(self, *flags: str) -> tuple[Steps, dict[str, torch.Tensor]]:
        """Return the same of the run over all ranks, of weights this rank's."""
        end_engines()
        plan = self.plan(*flags)
        groups = build_process_groups(plan)
        kernels, _ = choose(plan, torch.device("cpu"))
        engine = build_engine(plan, groups, self.objective, kernels)

        def own() -> Iterator[dict[str, torch.Tensor]]:
            for number, batch in enumerate(self.micro_batches()):
                if number % groups.topology.data == groups.data_rank:
                    yield sequence_shard(batch, self.fields, groups)

        batches, steps = own(), []
        for _ in range(self.steps):
            loss = float(engine.train_batch(batches))
            steps.append((loss, engine.pop_loss_terms(), engine.grad_norm))
        return steps, dict(engine.module.named_parameters())


class Layout:
    """A check that ranks of a layout take the steps of one process.

    Args:
        network: flags of the network itself, which one process has too.
    """

    def __init__(self, trained: Network, *flags: str, network: Sequence[str] = ()):
        self.__name__ = " ".join((*flags, *network))
        self._trained, self._flags, self._network = trained, flags, network

    def __call__(self, rank: int) -> None:
        distributed.start("gloo")
        get_accelerator().is_fp16_supported = lambda: True
        rel = 3e-2 if "--fp16" in self._flags else 1e-3
        want, weights = self._trained.plainly_trained(*self._network)
        got, own = self._trained.trained(*self._flags, *self._network)
        for (loss, terms, norm), (found, found_terms, found_norm) in zip(want, got, strict=True):
            assert found == pytest.approx(loss, rel=rel / 10)
            assert found_norm == pytest.approx(norm, rel=rel)
            assert found_terms == pytest.approx(terms, rel=rel / 10)
        assert {*own} <= {*weights}
        for name, parameter in own.items():
            if parameter.shape == weights[name].shape:
                assert_close(parameter.float(), weights[name], rtol=rel, atol=rel / 100)
