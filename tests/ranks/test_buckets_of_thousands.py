"""Collectives of a bf16 step do not grow with the replicas: counted without their processes.

The engine is one rank's of a world whose collectives do nothing; a network of 1.3 billion weights has
no data, and its buckets are counted beside those of Megatron-LM.
"""

import json
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
import torch.distributed as dist
from forks import exit_codes
from networks import gpt_steps
from step_traffic import recorded
from tiny import Shards, tiny_spec
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config.parallelism.deepspeed_json import BUCKET
from megatron.model.layers.layer_list import SequentialModel
from megatron.optimizer.param_groups import in_buckets, param_groups
from megatron.tensor_parallel.rng import OrdinaryStream

WORLDS = (8, 128)
TIMEOUT_S = 300
REPLICAS = (8, 64, 256, 1024, 4096)
LARGE = {
    **{"num_layers": 24, "hidden_size": 2048, "ffn_hidden_size": 8192, "seq_length": 2048},
    **{"num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 2048},
    **{"vocab_size": 51200, "padded_vocab_size": 51200},
}


def count(size, file):
    """Write the data-parallel collectives of a step of rank 0 of `size`: kind, and bytes."""
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    step = recorded(
        *("--bf16", "--global-batch-size", str(size), "--micro-batch-size", "1"),
        *("--zero-reduce-bucket-size", "300"),
    )
    file.write_text(json.dumps([(each.kind, each.num_bytes) for each in step.tensors]))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    files = {size: tmp_path_factory.mktemp("step") / f"{size}.json" for size in WORLDS}
    assert exit_codes(count, [*files.items()], timeout_s=TIMEOUT_S) == [0] * len(WORLDS)
    return {size: json.loads(file.read_text()) for size, file in files.items()}


def test_a_step_of_more_replicas_has_as_many_collectives(steps):
    few, many = ([kind for kind, _ in steps[size]] for size in WORLDS)
    assert few == many
    assert few.count("reduce-scatter") == few.count("all-gather") == len(few) / 2 > 4


def test_bytes_are_those_of_all_weights_and_padding(steps):
    for size, collectives in steps.items():
        reduced = [n for kind, n in collectives if kind == "reduce-scatter"]
        gathered = [n for kind, n in collectives if kind == "all-gather"]
        assert sorted(reduced) == sorted(2 * n for n in gathered)
        assert all(n % (4 * 2 * size) == 0 for n in reduced)
    least, most = (sum(n for kind, n in steps[size]) for size in WORLDS)
    assert least <= most <= least + len(steps[WORLDS[1]]) * 4 * 2 * WORLDS[1]


@pytest.fixture(scope="module")
def weights():
    """Parameters of the network of 1.3 billion weights, without values."""
    with torch.device("meta"):
        steps = gpt_steps(tiny_spec(**LARGE), group=Shards(0, 1), rng=OrdinaryStream(), mixed=True)
        return SequentialModel(steps)


def padded(group, replicas):
    """Return the elements of a bucket, padded as DeepSpeed pads a parameter group."""
    multiple = 2 * replicas
    return -(-sum(p.numel() for p in group["params"]) // multiple) * multiple


def buckets_of_megatron_lm(model, replicas):
    """Return the buckets that Megatron-LM reduces and gathers by default.

    Source: Megatron-LM, distributed_data_parallel.py and param_and_grad_buffer.py: from the last
    parameter on, each is full with so many elements or more.
    """
    size, found, elements = max(40_000_000, 1_000_000 * replicas), 0, 0
    for parameter in reversed([*model.parameters()]):
        elements += parameter.numel()
        if elements >= size:
            found, elements = found + 1, 0
    return found + (elements > 0)


def test_a_large_network_has_34_buckets_at_any_number_of_replicas(weights):
    groups = in_buckets(param_groups(weights, 0.1), BUCKET)
    total = sum(p.numel() for p in weights.parameters())
    assert (len(groups), total) == (34, 1_317_654_528)
    assert all(
        sum(p.numel() for p in group["params"]) <= BUCKET or len(group["params"]) == 1
        for group in groups
    )
    theirs = [buckets_of_megatron_lm(weights, replicas) for replicas in REPLICAS]
    assert theirs == [25, 19, 5, 2, 1]  # which are larger the more replicas there are
    for replicas in REPLICAS:
        elements = sum(padded(group, replicas) for group in groups)
        assert total <= elements <= total * (1 + 1e-5)
