"""Device of the checks in this folder, and the record of their outcomes for prove.py."""

import gc
import json
import os
from typing import Any

import pytest
import torch

from megatron.tensor_parallel.process_groups import lone_group
from megatron.training.process.environment import Launch, export_launch

RECORD = os.environ.get("PROVE_RECORD")
REHEARSES = os.environ.get("PROVE_REHEARSAL") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or in a rehearsal the CPU; DeepSpeed and a process group are ready on it."""
    if not (REHEARSES or torch.cuda.is_available()):
        pytest.skip("needs a GPU; bash tests/gpu/prove.sh rehearses on a CPU")
    kind = "cpu" if REHEARSES else "cuda"
    export_launch(Launch(0, 1, 0, 1), kind)
    # DeepSpeed takes the kind of device from the environment when it is imported.
    from megatron.engine.deepspeed import distributed

    distributed.start("gloo" if REHEARSES else "nccl")
    gc.freeze()  # what is imported stays: each search for garbage would look through it
    return torch.device(kind)


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone."""
    return lone_group()


@pytest.fixture(autouse=True)
def draws():
    """A check draws the same whichever checks its process ran before."""
    torch.manual_seed(0)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU; what needs one is not run in a rehearsal."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a check."""
    if report.when == "call" or report.outcome != "passed":
        record(report, seconds=report.duration, found=dict(report.user_properties))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file of checks that was skipped or cannot be imported."""
    if report.outcome != "passed":
        record(report, seconds=0.0, found={})


def record(report: Any, *, seconds: float, found: dict[str, Any]) -> None:
    """Append an outcome to the file of prove.py."""
    if not RECORD:
        return
    reason = str(report.longrepr[2]) if report.skipped else ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    outcome = {
        "check": report.nodeid.split("/")[-1],
        "outcome": "not run" if report.skipped else report.outcome,
        "seconds": round(seconds, 2),
        "reason": reason.removeprefix("Skipped: ")[:400],
        "found": found,
    }
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")
