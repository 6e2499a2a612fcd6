"""The planner as it is typed."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
NETWORK = (
    *("--num-layers", "24", "--hidden-size", "2048", "--num-attention-heads", "16"),
    *("--seq-length", "2048", "--bf16", "--global-batch-size", "512", "--train-iters", "1000"),
)


def run(*flags):
    words = (sys.executable, str(REPOSITORY / "tools" / "plan.py"), *NETWORK, *flags)
    return subprocess.run(words, capture_output=True, text=True, timeout=100)


def test_a_run_is_planned_to_its_cost():
    done = run(
        *("--num-gpus", "16", "--tensor-model-parallel-size", "2", "--micro-batch-size", "4"),
        *("--device=h100-80gb", "--mfu", "0.4", "--price-per-gpu-hour", "3"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "16 processes = tp 2 * pp 1 * sp 1 * dp 8 | ZeRO stage 1 | bf16" in done.stdout
    assert [line for line in lines if line.startswith("stage 0 (24 layers, embedding, head;")]
    assert [line for line in lines if line.startswith("h100-80gb: fits")]
    assert "MFU: 40.0%" in done.stdout
    assert " | cost: " in lines[-1]


def test_a_search_ends_in_flags_to_take():
    done = run("--search", "16", "--device", "h100-80gb", "--show", "3")
    assert done.returncode == 0, done.stderr
    assert "flags of the first: --tensor-model-parallel-size" in done.stdout
    assert "do not run (tp 16): more than the 8 GPUs of a node" in done.stdout


def test_weighted_data_need_not_be_there():
    done = run("--num-gpus", "8", "--train-weighted-split-paths", "ALL: 1 0:0.9 nowhere")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "h1000"), "h1000 is none of v100-16gb"),
        (("--mfu", "2", "--gpu", "h200"), "--mfu 2 must be more than 0 and at most 1"),
        (("--price-per-gpu-hour", "2"), "give --gpu too"),
        (("--search", "0"), "--search 0 must be at least 1"),
        (("--num-gpus", "3", "--tensor-model-parallel-size", "2"), "3 processes cannot hold"),
        (("--search", "8", "--deepspeed_config", "x.json"), "leave --deepspeed_config out"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_torch_nor_deepspeed_is_imported():
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['plan.py', *{NETWORK!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(REPOSITORY / 'tools' / 'plan.py')!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        "assert not {'torch', 'deepspeed', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=100)
