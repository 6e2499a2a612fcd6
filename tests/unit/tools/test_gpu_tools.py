"""The command that proves a GPU, rehearsed on a CPU, and the benchmark and tables behind it."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from problems import problem

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.append(str(REPOSITORY / "benchmarks"))
sys.path.append(str(REPOSITORY / "tests" / "gpu"))

import gpu_side  # noqa: E402
import gpu_table  # noqa: E402
import packages  # noqa: E402
import prove  # noqa: E402
import train_gpu  # noqa: E402

from megatron.planner.devices import GIB, RESERVED_BYTES  # noqa: E402

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": int(79.1 * GIB),
    "torch": "2",
    "cuda": "13",
}
RATES = {"peak_flops": 989e12, "matmul_flops": 700e12, "copy_bytes_per_s": 3e12}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Folder of the results of prove.sh without a GPU; on a CPU all parts that time measure one row."""
    folder = tmp_path_factory.mktemp("prove")
    done = subprocess.run(
        ["bash", "tests/gpu/prove.sh", "right", "peers", "--rehearse"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "OUT": str(folder / "out"),
            "PROVE_CACHE": str(folder / "cache"),
            "PROVE_WHEELS": str(folder),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith("REHEARSAL")
    return folder / "out"


def read(rehearsal, part):
    result = json.loads((rehearsal / f"{part}.json").read_text())
    outcomes = {check["check"]: check["outcome"] for check in result["checks"]}
    assert result["rehearsal"] and "failed" not in outcomes.values(), result["checks"]
    return result, outcomes


@pytest.fixture
def python_runs(tmp_path, monkeypatch):
    """Return a function that replaces Python by a script of the shell."""

    def replace_by(script):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/bash\n{script}")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("TMPDIR", str(tmp_path))

    return replace_by


def test_every_check_is_printed_when_it_ends(python_runs, capfd):
    line = "test_none.py::test_first PASSED [ 50%]"
    python_runs(f"echo collecting\necho '{line}'\nsleep 1000\n")
    (check,) = prove.run_checks(["test_none.py"], 3, {})
    assert check["reason"] == "not finished within 3 seconds" and check["outcome"] == "failed"
    assert capfd.readouterr().out.splitlines() == [
        "running the checks of test_none.py (at most 3 s)",
        "  test_none.py::test_first PASSED [ 50%]",
    ]


def test_a_rehearsal_passes_and_claims_nothing_of_a_gpu(rehearsal):
    _, outcomes = read(rehearsal, "right")
    files = {name.partition("::")[0] for name, outcome in outcomes.items() if outcome == "passed"}
    every = set(sum(prove.CHECKS.values(), ()))
    assert every - files == {"test_kernels.py", "test_gpu_large_kernels.py"}
    only_on_gpus = [name for name in outcomes if "fp16" in name or "doctor" in name]
    assert only_on_gpus and {outcomes[name] for name in only_on_gpus} == {"not run"}


def test_a_rehearsal_times_this_program_and_others(rehearsal):
    result, outcomes = read(rehearsal, "peers")
    assert outcomes["tiny auto"] == "passed" and result["device"]["name"] == "CPU"
    (row,) = result["speed"]["rows"]
    assert row["ours"]["seconds"] > 0 and row["peers"]["plain"]["seconds"] > 0
    times = [kernel["ms"] for kernel in row["ours"]["kernels_of_step"]]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert row["ours"]["loss"] == pytest.approx(row["peers"]["plain"]["loss"], rel=0.05)
    assert row["peers"]["megatron-core"].get("error", "not run").startswith("not run")
    assert result["generation"][0]["Hugging Face"] > 0 and result["kernels"]


@pytest.mark.parametrize(
    ("part", "rows", "rounds"), [("fast", prove.FAST, 3), ("where", prove.WHERE, 1)]
)
def test_each_row_of_a_gpu_is_measured_without_others(monkeypatch, part, rows, rounds):
    jobs = []
    answers = iter([H100 | RATES, {"seconds": 1.0}, *[{"error": "out of memory: no"}] * len(rows)])

    def measure(job, ends_at):
        jobs.append(job)
        return next(answers)

    monkeypatch.setattr(train_gpu, "measure", measure)
    result = {"checks": []}
    counts = [
        len(result["speed"]["rows"]) for _ in prove.PARTS[part](result, "cuda", time.monotonic())
    ]
    assert counts == [*range(1, len(rows) + 1)]
    measured = [(row["size"], row["flags"]) for row in result["speed"]["rows"]]
    assert measured == [(size, flags) for size, _, flags in rows]
    assert [job["side"] for job in jobs] == ["device", *["megatron"] * len(rows)]
    assert {job["rounds"] for job in jobs[1:]} == {rounds}
    assert not any(row["peers"] for row in result["speed"]["rows"])
    outcomes = [check["outcome"] for check in result["checks"]]
    assert outcomes == ["passed", *["failed"] * (len(rows) - 1)]


def test_missing_packages_are_one_line_before_anything_runs(tmp_path):
    """In a Python without any package: -S leaves out the site."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "tests/gpu/prove.sh", "right"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHON": str(python),
            "PYTHONPATH": "",
            "PROVE_CACHE": str(tmp_path),
            "PROVE_WHEELS": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "packages are missing" in line and "deepspeed" in line and "pytest" in line


def test_wheels_are_the_packages_that_an_image_with_torch_lacks():
    lines = (REPOSITORY / "tests" / "gpu" / "wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if not line.startswith("#")} | {"deepspeed"}
    needed = {name for name, _ in packages.walk(packages.needed_packages())}
    image = {name for name, _ in packages.walk(sorted(packages.IMAGE), below=frozenset())}
    assert needed <= wheels | image
    assert wheels <= needed | {"torchao"}


@pytest.mark.parametrize("row", [*prove.FAST, *prove.WHERE, *prove.PEERS], ids=" ".join)
def test_rows_of_a_gpu_fit_an_h100(row):
    size, batch, flags = row
    words = [*train_gpu.SIZES[size].split(), "--seq-length", "2048", "--bf16", *flags.split()]
    sizes = train_gpu.BATCHES if batch == "auto" else (int(batch),)
    room = H100["memory_bytes"] - RESERVED_BYTES
    _, decided = train_gpu.largest_that_fits(words, sizes, room)
    assert train_gpu.bytes_of(decided) <= room


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch for CPUs")
def test_a_torch_that_cannot_use_the_gpu_is_no_rehearsal(tmp_path):
    assert not prove.has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    with problem("CPUs … GPU"):
        prove.has_gpu(tmp_path)


def test_a_part_over_its_budget_leaves_no_process_on_the_gpu(tmp_path, python_runs):
    python_runs(f"sleep 1000 &\necho $! > {tmp_path}/pid\nwait\n")
    (check,) = prove.run_checks(["none.py"], 3, {})
    assert check["reason"] == "not finished within 3 seconds"
    child = int((tmp_path / "pid").read_text())
    gone = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() not in gone:
            time.sleep(0.05)


def test_a_rehearsal_is_no_result_for_the_page(rehearsal, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n".join(gpu_table.MARKERS))
    with problem("right.json … CPU … --page"):
        gpu_table.main([str(rehearsal / "right.json"), "--page", str(page)])


def test_results_are_written_between_the_markers_of_a_page(rehearsal, tmp_path):
    result = read(rehearsal, "peers")[0] | {"rehearsal": False, "device": H100 | RATES}
    result["speed"]["device"] = H100 | RATES
    row = result["speed"]["rows"][0]
    # Half of the peak in one second.
    row |= {"flops": 989e12 / 2, "ours": {"seconds": 1.0}}
    row["peers"] = {"plain": {"error": "out of memory: no"}, "other": {"seconds": 2.0}}
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps(result))
    page.write_text("before\n{}\nolder\n{}\nafter\n".format(*gpu_table.MARKERS))
    gpu_table.main([str(results), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "older" not in text
    assert "| 50.0% |" in text and f"| {100 * 0.5 * 989 / 700:.1f}% |" in text
    assert "| out of memory: no |" in text and "(2.000) |" in text
    assert result["commit"] in text and result["date"] in text
    page.write_text("no markers")
    with problem(f"--page {page} … {gpu_table.MARKERS[0]}"):
        gpu_table.main([str(results), "--page", str(page)])


def test_auto_takes_the_largest_batch_that_the_planner_expects_to_fit():
    room, flags = H100["memory_bytes"] - RESERVED_BYTES, ["--seq-length", "2048", "--bf16"]
    found = {}
    for size in ("345m", "1.3b", "2.7b"):
        words = [*train_gpu.SIZES[size].split(), *flags]
        samples, decided = train_gpu.largest_that_fits(words, train_gpu.BATCHES, room)
        assert train_gpu.bytes_of(decided) <= room
        twice, larger = train_gpu.largest_that_fits(words, (2 * samples,), room)
        assert twice == 2 * samples
        assert samples == train_gpu.BATCHES[0] or train_gpu.bytes_of(larger) > room
        found[size] = samples
    assert found["345m"] >= found["1.3b"] >= found["2.7b"] >= 1


def test_a_side_without_memory_is_a_row(monkeypatch, capsys):
    def fail(job):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(gpu_side, "measure_plain", fail)
    gpu_side.main([json.dumps({"side": "plain", "device": "cpu"})])
    found = json.loads(capsys.readouterr().out)
    assert found == {"error": "out of memory: CUDA out of memory. Tried to allocate 9 GiB."}


def test_no_side_begins_when_the_budget_is_spent():
    job = {"side": "device", "device": "cpu"}
    assert train_gpu.measure(job, time.monotonic() - 1) == {"error": "not run: no time left"}


def test_a_batch_that_is_not_a_number_is_refused():
    with problem("--batch many"):
        train_gpu.parse(["--batch", "8", "many"])
