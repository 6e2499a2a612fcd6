"""The kernels where there is no GPU: run by Triton's interpreter, and compiled for one.

Each in a process of its own: Triton looks at its environment when it is imported.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
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
                **environment,
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_python


def test_kernels_in_triton_s_interpreter(run):
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", TRITON_INTERPRET="1")
    assert "passed" in output.splitlines()[-1]
    assert "skipped" not in output.splitlines()[-1]


def test_every_kernel_compiles(run):
    output = run(str(Path(__file__).with_name("compile_for_gpu.py")))
    assert {line.split()[0] for line in output.splitlines()} == set(kernels())


def kernels():
    """Yield the kernels that are launched: all but the one that others call."""
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            jitted = isinstance(node, ast.FunctionDef) and node.decorator_list
            if jitted and node.name != "_curve":
                yield f"megatron.fused_kernels.triton.{file.stem}.{node.name}"
