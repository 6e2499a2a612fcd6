"""Training and decode steps on a fake GPU: no tensor on another device, few waits of the host, few launches."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
WAITS = {
    "gpt --num-layers 2": 1,
    "gpt --num-layers 2 --bf16": 1,
    "gpt --num-layers 2 --bf16 --zero-stage 0": 1,
    "gpt --num-layers 2 --bf16 --zero-stage 2": 2,
    # DeepSpeed waits for its streams: after each micro-batch, and once a step.
    "gpt --num-layers 2 --bf16 --zero-stage 3": 4,
    "gpt --num-layers 2 --fp16": 2,
    "gpt --num-layers 2 --bf16 --checkpoint-activations": 1,
    "gpt --num-layers 2 --bf16 --recompute-activations": 1,
    f"gpt --num-layers 2 --bf16 {LLAMA}": 1,
    "gpt --num-layers 2 --bf16 --num-experts 4 --expert-interval 1": 2,
    "bert --num-layers 2 --bf16": 1,
    "t5 --num-layers 2 --bf16 --decoder-seq-length 32": 1,
}
"""Waits of the host in a step of two micro-batches, as docs/performance.md has them."""

OFFLOAD = "gpt --num-layers 2 --bf16 --zero-stage 2 --cpu-optimizer --cpu_torch_adam"
DEEPER = ("gpt --num-layers 3 --bf16", f"gpt --num-layers 3 --bf16 {LLAMA}")
DECODE = {
    kind: [f"decode --num-layers {layers} --bf16 {flags}".strip() for layers in (2, 3)]
    for kind, flags in (
        ("GPT", ""),
        ("Llama", LLAMA),
        ("GPT, references", "--kernels reference"),
        ("Llama, references", f"--kernels reference {LLAMA}"),
    )
}
LINES = [*WAITS, OFFLOAD, *DEEPER, *(line for lines in DECODE.values() for line in lines)]

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch for CPUs"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What the steps of each line did."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("fake_steps.py"),
            tmp_path_factory.mktemp("device"),
        ],
        input="\n".join(LINES),
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"line"')]
    assert [one["line"] for one in found] == LINES, done.stderr[-4000:]
    return {one["line"]: one for one in found}


@pytest.mark.parametrize("line", LINES)
def test_no_tensor_is_on_another_device(steps, line):
    assert "error" not in steps[line], steps[line]["error"]


@pytest.mark.parametrize("line", WAITS)
def test_the_host_waits_for_scalars_of_the_step_alone(steps, line):
    waits = steps[line]["waits"]
    assert sum(waits.values()) == WAITS[line], waits


def test_offload_waits_in_deepspeed_but_for_the_scalars(steps):
    waits = steps[OFFLOAD]["waits"]
    ours = [place for place in waits if "stage_1_and_2.py" not in place]
    assert len(ours) == 1 and "grad_stats.py" in ours[0] and waits[ours[0]] == 1


def kernels_of_a_layer(steps, deeper):
    """Return the kernels of a layer in a micro-batch, by module."""
    fewer = deeper.replace("--num-layers 3", "--num-layers 2")
    found = Counter(steps[deeper]["kernels"]) - Counter(steps[fewer]["kernels"])
    return {kernel: count / 2 for kernel, count in found.items()}


COMMON = {
    "norms._forward": 2,
    "attention": 1,
    "heads._gather": 1,
    "bias_dropout_add._forward": 2,
    "norms._backward": 2,
    "bias_dropout_add._backward": 2,
    "attention, backward": 1,
}


def test_kernels_of_a_layer(steps):
    gpt, llama = (kernels_of_a_layer(steps, deeper) for deeper in DEEPER)
    assert gpt == COMMON | {"activations._gelu_forward": 1, "activations._gelu_backward": 1}
    glu = {"activations._glu_forward": 1, "activations._glu_backward": 1}
    assert llama == COMMON | glu | {"heads._split": 1}


WITHOUT_LAUNCH = (
    *("empty.memory_format", "empty_like.default", "new_empty.default"),
    "dropout.default",  # in evaluation
)


def launches_of_a_layer(steps, lines):
    """Return how often a layer launches a kernel or an operation in a decode step."""
    fewer, more = (
        sum((Counter(steps[line][what]) for what in ("kernels", "operations")), Counter())
        for line in lines
    )
    return sum(count for name, count in (more - fewer).items() if name not in WITHOUT_LAUNCH)


def test_launches_of_a_layer_in_decode_steps(steps):
    assert {kind: launches_of_a_layer(steps, lines) for kind, lines in DECODE.items()} == {
        "GPT": 8,
        "Llama": 9,
        "GPT, references": 14,
        "Llama, references": 27,
    }
    for lines in DECODE.values():
        assert not steps[lines[0]]["waits"]
