"""The kernels where there is no GPU: run by Triton's interpreter, and compiled for one.

Each in a process of its own: Triton looks at its environment when it is imported.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
ALONE = {
    "cross_entropy._sums": 1,  # the logit of each target
    "decode_attention._attend": 4,  # the new key and value: no more features than threads
}
"""Accesses of two bytes by kernel, where a program has nothing else to read beside them."""
FOLDER = REPOSITORY / "megatron" / "fused_kernels" / "triton"


@pytest.fixture
def run(tmp_path):
    pytest.importorskip("triton")

    def run_python(*argv, **environment):
        paths = [REPOSITORY, REPOSITORY / "tests", *os.environ.get("PYTHONPATH", "").split(":")]
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": ":".join(map(str, paths)),
                "TRITON_CACHE_DIR": str(tmp_path),
                "TRITON_DISABLE_LINE_INFO": "1",
                **environment,
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_python


def test_kernels_in_triton_s_interpreter(run):
    output = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_kernels.py",
        TRITON_INTERPRET="1",
    )
    assert "passed" in output.splitlines()[-1]
    assert "skipped" not in output.splitlines()[-1]


def test_first_and_last_programs_where_32_bits_count_no_further(run):
    script = Path(__file__).with_name("large_programs.py")
    ran = run(str(script), TRITON_INTERPRET="1").split()
    assert {*ran} == {*kernels()}


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills_and_read_vectors(run, capability):
    knobs = pytest.importorskip("triton.knobs")
    try:
        knobs.nvidia.ptxas, knobs.nvidia.cuobjdump  # noqa: B018 - looks for the files
    except RuntimeError as error:
        pytest.skip(f"this triton has no assembler for NVIDIA's GPUs: {error}")
    script = Path(__file__).with_name("compile_for_gpu.py")
    compiled = [json.loads(line) for line in run(str(script), str(capability)).splitlines()]
    assert {each["kernel"] for each in compiled} == set(kernels())
    for each in compiled:
        assert each["spilled"] == 0, each
        assert each["registers"] * 32 * each["warps"] <= 65536, each
        assert each["two_byte_accesses"] <= ALONE.get(each["kernel"].rpartition("triton.")[2], 0), (
            each
        )


def kernels():
    """Yield the kernels that are launched: all but those that other kernels call."""
    jitted = {}
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if any(
                ast.unparse(each) == "triton.jit" for each in getattr(node, "decorator_list", ())
            ):
                jitted[f"megatron.fused_kernels.triton.{file.stem}.{node.name}"] = node
    calls = [each for node in jitted.values() for each in ast.walk(node)]
    called = {ast.unparse(each.func) for each in calls if isinstance(each, ast.Call)}
    yield from (name for name, node in jitted.items() if node.name not in called)
