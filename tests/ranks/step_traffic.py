"""The collectives of one step in each layout, against the bytes that the planner computes."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from communication import (
    Collective,
    hidden_share,
    record_communication,
    ring_passes,
)
from engines import batches_of, engine_of

from megatron.config.plan.plan import Plan
from megatron.planner.stages import stages_of
from megatron.planner.traffic import Traffic, stage_traffic
from megatron.tensor_parallel.process_groups import Groups

TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
STAGES = ("--pipeline-model-parallel-size", "2")

_NETWORK = (
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-layers", "4"),
    *("--hidden-size", "16", "--untie-embeddings-and-output-weights", "--micro-batch-size", "1"),
    *("--zero-reduce-bucket-size", "1000", "--zero-allgather-bucket-size", "1000"),
)
_REPLICAS, _PAIRS = ("--global-batch-size", "8"), ("--global-batch-size", "4")
_LARGE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 1000,
    "stage3_prefetch_bucket_size": 1000,
}
"""Small weights are divided too, and none is kept from the forward to the backward pass."""
_CHUNKS = (*STAGES, "--num-layers-per-virtual-pipeline-stage", "1", *_REPLICAS)


def json_file(content: Any) -> str:
    """Return the path of a file with the JSON of `content`."""
    file = Path(tempfile.mkdtemp()) / "ds.json"
    file.write_text(json.dumps(content))
    return str(file)


def layouts_of_golden_file() -> dict[str, tuple[str, ...]]:
    """Return flags by name: two micro-batches a step, four in pipelines.

    In fp32 only what differs from bf16 by more than the bytes: reductions without and with ZeRO.
    """
    third = ("--zero-stage", "3", "--deepspeed_config", json_file({"zero_optimization": _LARGE}))
    bf16 = ("--bf16", "--zero-stage", "1")
    return {
        "fp32, ZeRO 0, replicas": ("--zero-stage", "0", *_REPLICAS),
        "fp32, ZeRO 1, replicas": ("--zero-stage", "1", *_REPLICAS),
        "fp32, ZeRO 1, sequence parallel": ("--zero-stage", "1", *SEQUENCE, *_PAIRS),
        "bf16, ZeRO 1, replicas": (*bf16, *_REPLICAS),
        "bf16, ZeRO 2, replicas": ("--bf16", "--zero-stage", "2", *_REPLICAS),
        "bf16, ZeRO 3, replicas": ("--bf16", *third, *_REPLICAS),
        "bf16, ZeRO 1, tensor parallel": (*bf16, *TENSOR, *_PAIRS),
        "bf16, ZeRO 1, sequence parallel": (*bf16, *SEQUENCE, *_PAIRS),
        "bf16, ZeRO 1, 1F1B": (*bf16, *STAGES, *_REPLICAS),
        "bf16, ZeRO 1, interleaved 1F1B": (*bf16, *_CHUNKS),
        "bf16, ZeRO 1, Ulysses": (*bf16, "--ds-sequence-parallel-size", "2", *_PAIRS),
        "bf16, ZeRO 1, experts": (
            *(*bf16, *_REPLICAS, "--num-experts", "2", "--moe-expert-parallel-size", "2"),
        ),
        "fp32, ZeRO 0, sequence parallel": ("--zero-stage", "0", *SEQUENCE, *_PAIRS),
        "fp32, ZeRO 1, sequence parallel, one query group": (
            *("--zero-stage", "1", *SEQUENCE, *_PAIRS, "--group-query-attention"),
        ),
        "bf16, ZeRO 1, sequence parallel, recomputed": (
            *(*bf16, "--checkpoint-activations", *SEQUENCE, *_PAIRS),
        ),
        "bf16, ZeRO 1, sequence parallel, interleaved 1F1B": (*bf16, *SEQUENCE, *_CHUNKS),
        "bf16, ZeRO 1, sequence parallel, zero bubble": (
            *(*bf16, *SEQUENCE, *STAGES, *_REPLICAS),
            "--enable-zbh1-pipeline",
        ),
    }


def recorded(*flags: str) -> "Step":
    """Return the collectives of a step; the forward passes of the next one hide those at its end."""
    engine, plan, groups = engine_of(*flags)
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    _ = engine.module  # waits for the weights
    with record_communication() as record:
        engine.train_batch(batches)
        number, products = len(record.collectives), record.num_products
        engine.train_batch(batches)
        _ = engine.module
    parameters = sum(1 for _ in engine.module.parameters())
    return Step(plan, groups, record.collectives[:number], products, parameters)


def step_of(*flags: str) -> "Step":
    """Return the collectives of a step of the network of the golden file."""
    return recorded(*_NETWORK, *flags)


@dataclass
class Step:
    """What this rank sent in a step.

    Args:
        products: matrix products in the step.
        parameters: that this rank has.
    """

    plan: Plan
    groups: Groups
    collectives: list[Collective]
    products: int
    parameters: int

    def axis(self, each: Collective) -> str:
        """Return the kind of parallelism that a collective belongs to."""
        topology = self.groups.topology
        if each.kind in ("send", "receive"):
            return "pipeline"
        if topology.tensor > 1 and each.ranks == _ranks(self.groups.tensor):
            return "tensor"
        if each.kind == "all-to-all":
            return "sequence" if topology.sequence > 1 else "experts"
        return "data"

    @property
    def tensors(self) -> list[Collective]:
        """Its collectives but for norms, losses and numbers of tokens."""
        return [each for each in self.collectives if each.num_bytes > 8]

    def sums_of_parts(self) -> list[Collective]:
        """Return the reductions of what tensor-parallel ranks have parts of, at the end of the step."""
        return [
            each
            for each in self.tensors
            if each.kind == "all-reduce"
            and self.axis(each) == "tensor"
            and each.started == self.products
        ]

    def sent(self) -> dict[str, float]:
        """Return the bytes that a ring of each kind of parallelism sends."""
        sent = dict.fromkeys(("tensor", "pipeline", "data", "sequence"), 0.0)
        left_out = {id(each) for each in self.sums_of_parts()}
        for each in self.tensors:
            axis = self.axis(each)
            if axis in sent and each.kind != "receive" and id(each) not in left_out:
                sent[axis] += each.num_bytes * ring_passes(each.kind, len(each.ranks))
        return sent

    def planned(self) -> dict[str, float]:
        """Return the same as the planner computes it, with the loss, which that leaves out."""
        plan, topology = self.plan, self.groups.topology
        stages, index, number = stages_of(plan), self.groups.stage, self.number
        traffic: Traffic = stage_traffic(plan, stages, index, number)
        # Of each token the largest logit, the sum of exponentials, and the target's logit.
        tokens = plan.batch.micro_batch_size * plan.model.seq_length
        loss = (
            12 * tokens * ring_passes("all-reduce", topology.tensor)
            if stages[index].has_head
            else 0
        )
        return {
            "tensor": traffic.tensor.total + number * loss,
            "pipeline": traffic.pipeline.total,
            "data": traffic.data.total,
            "sequence": traffic.sequence.total,
        }

    @property
    def number(self) -> int:
        """Micro-batches of the step."""
        return self.plan.batch.num_micro_batches(self.plan.batch.global_batch_size)

    def lines(self) -> Iterator[str]:
        """Yield kind, axis, calls and bytes, and which share of them can be and is hidden."""
        rows = defaultdict[tuple[str, str], list[Collective]](list)
        for each in self.tensors:
            rows[self.axis(each), each.kind].append(each)
        for (axis, kind), found in sorted(rows.items()):
            size = sum(each.num_bytes for each in found)
            early = sum(each.num_bytes for each in found if each.started < self.products)
            # How many tokens an expert gets hangs on rounding.
            amount = f"{size} bytes | " if axis != "experts" else ""
            yield (
                f"{axis} {kind} | {len(found)} calls | {amount}"
                f"{100 * early / size:.0f}% before the last product | "
                f"{100 * hidden_share(found):.0f}% beside one"
            )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
