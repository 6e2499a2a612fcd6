"""Where stages begin, by DeepSpeed's partitioner and by ours: the bounds that BLOOM's runs had."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import contextlib
import io

import pytest
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from test_golden_model import steps_of

from megatron.config.architecture.partition import stage_bounds
from megatron.engine.pipeline_module import _entry, _spec


def bounds(num_layers, stages, method):
    """Return where stages begin, from DeepSpeed's code without DeepSpeed's processes."""
    module = PipelineModule.__new__(PipelineModule)
    module.__dict__ |= {
        "_layer_specs": [_spec(step) for step in steps_of(1, mixed=True, num_layers=num_layers)],
        "_topo": PipeModelDataParallelTopology(num_pp=stages, num_dp=1, num_mp=1),
        "num_stages": stages,
        "global_rank": 0,
        "loss_fn": None,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        module._partition_layers(method)
    return module.parts


@pytest.mark.parametrize(
    ("num_layers", "stages", "method", "expected"),
    [
        (4, 2, "type:transformer", [0, 5, 11]),
        (24, 2, "type:transformer", [0, 15, 31]),
        (24, 4, "type:transformer", [0, 9, 15, 21, 31]),
        (40, 4, "type:transformer", [0, 13, 23, 33, 47]),
        (24, 2, "type:transformer|embedding", [0, 15, 31]),
        (30, 4, "type:transformer|embedding", [0, 10, 18, 26, 37]),
        (
            70,
            12,
            "type:transformer|embedding",
            [0, 8, 14, 20, 26, 32, 38, 44, 50, 56, 62, 68, 77],
        ),
    ],
)
def test_stages_are_those_of_bloom(num_layers, stages, method, expected):
    assert bounds(num_layers, stages, method) == expected
    entries = [_entry(step) for step in steps_of(1, mixed=True, num_layers=num_layers)]
    assert stage_bounds(method, entries, stages) == expected
