"""The doctor finds problems of a machine, and reports each with its remedy."""

import json
import os
import resource
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from problems import require_problem
from tiny import tiny_config

from megatron.common.errors import ConfigError
from megatron.common.nvidia import num_nvidia_devices
from megatron.config.tools.diagnostics import DoctorConfig
from megatron.diagnostics.doctor import devices, disk, host, network, run, versions
from megatron.diagnostics.doctor.examine import examine
from megatron.diagnostics.doctor.findings import (
    GIB,
    MIB,
    Examined,
    Problem,
    Section,
    as_json,
    format_bytes,
    problems_of,
    report_lines,
)
from megatron.training.process.environment import read_launch

REPOSITORY = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
UNLIMITED = resource.RLIM_INFINITY

INSTALLED = {
    **dict.fromkeys(("torch", "deepspeed", "numpy"), "1"),
    "megatron-core": versions.ABSENT,
}


def lines_of(problems):
    return [f"{problem.what}: {problem.mend}" for problem in problems]


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (host.load_problems(11.9, cores=8), []),
        (host.load_problems(12.1, cores=8), ["the load is 12.1 on 8 cores", "`top`"]),
        (host.swap_problems(GIB, 2 * GIB), []),
        (host.swap_problems(2 * GIB, GIB), ["2 GiB is in swap, and 1 GiB of memory", "end other"]),
        (host.memory_problems(GIB), []),
        (host.memory_problems(GIB // 2), ["only 512 MiB of memory"]),
        (host.shared_memory_problems(64 * MIB, num_gpus=0), []),
        (host.shared_memory_problems(GIB, num_gpus=8), []),
        (host.shared_memory_problems(64 * MIB, num_gpus=8), ["/dev/shm holds 64 MiB", "--shm-s"]),
        (host.shared_memory_problems(None, num_gpus=0), ["/dev/shm holds 0 B"]),
        (host.open_file_problems(1024, 4096, processes=8), []),
        (host.open_file_problems(UNLIMITED, UNLIMITED, processes=9999), []),
        (host.open_file_problems(256, 4096, processes=1), ["open 256 files", "ulimit -n 1024"]),
        (host.open_file_problems(1024, 4096, processes=512), ["512 processes", "ulimit -n 8192"]),
        (host.open_file_problems(64, 64, processes=1), ["root has raised nofile"]),
        (host.open_file_problems(64, UNLIMITED, processes=1), ["run `ulimit -n 1024` before"]),
        (host.locked_memory_problems(8 * MIB, has_infiniband=False), []),
        (host.locked_memory_problems(UNLIMITED, has_infiniband=True), []),
        (host.locked_memory_problems(8 * MIB, has_infiniband=True), ["lock 8 MiB", "ulimit -l"]),
        (host.compiler_problems({"clang"}, {"gcc or clang": "Triton"}), []),
        (host.compiler_problems({"g++"}, {"ninja": "Adam"}), ["Adam needs ninja", "install ninja"]),
        (versions.version_problems(INSTALLED), []),
        (
            versions.version_problems({**INSTALLED, "megatron-core": "0.16"}),
            ["megatron-core 0.16", "hides", "separate environments"],
        ),
        (
            versions.version_problems(
                {**INSTALLED, "deepspeed": versions.installed_version("no-such")}
            ),
            ["the package deepspeed is not installed", "pip install"],
        ),
        (versions.range_problems({"torch": "2.10.0a0+b4"}, {"torch": ">=2.10,<2.16"}), []),
        (versions.range_problems({"torch": versions.ABSENT}, {"torch": ">=2"}), []),
        (versions.range_problems({"torch": "2.6.0+cpu"}, {"numpy": ">=2"}), []),
        (
            versions.range_problems({"torch": "2.6.0+cpu"}, {"torch": ">=2.7,<2.16"}),
            ["torch 2.6.0+cpu is outside the supported range >=2.7,<2.16", "'torch>=2.7,<2.16'"],
        ),
        (
            versions.range_problems({"torch": "2.16.0"}, {"torch": ">=2.7,<2.16"}),
            ["torch 2.16.0 is outside"],
        ),
        (devices.device_problems(driver="", build="", nodes=0, visible=0), []),
        (devices.device_problems(driver="570", build="12.8", nodes=8, visible=8), []),
        (
            devices.device_problems(driver="570", build="", nodes=8, visible=0),
            ["8 NVIDIA GPUs (driver 570)", "build for CPUs", "install the build for CUDA"],
        ),
        (
            devices.device_problems(driver="450", build="12.8", nodes=8, visible=0),
            ["PyTorch sees none", "CUDA_VISIBLE_DEVICES", "450", "CUDA 12.8"],
        ),
        (devices.product_problems(CPU), []),
        (devices.product_problems(torch.device("meta")), ["meta cannot multiply matrices"]),
        (network.clock_problems({1: 0.9, 2: -0.9}), []),
        (
            network.clock_problems({1: 0.0, 4: -3.25}),
            ["the clock of rank 4 is -3.2 s from that of rank 0", "NTP"],
        ),
        (disk.disk_problems(Path("/d"), disk.Disk(GIB, 1, 1)), []),
        (disk.disk_problems(Path("/d"), disk.Disk(MIB, 1, 1)), ["of /d has only 1 MiB free"]),
    ],
)
def test_a_problem_is_reported_with_its_remedy(problems, words):
    found = lines_of(problems)
    assert len(found) == bool(words)
    assert [word for word in words if word not in found[0]] == []


def test_a_device_that_multiplies_wrongly_is_reported(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda product: product + 1e-3)
    assert lines_of(devices.product_problems(CPU))[0].startswith("cpu multiplies matrices wrongly")


def test_a_lock_of_a_killed_compilation_is_reported(tmp_path):
    for name, age_s in (("old", 7200), ("fresh", 10)):
        lock = tmp_path / "py311" / name / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (1e9 - age_s, 1e9 - age_s))
    (found,) = host.lock_problems(tmp_path, now=1e9)
    assert "old/lock is left" in found.what
    assert "rm " in found.mend
    assert lines_of(
        host.compilers_section(needs={}, extensions=tmp_path, now=1e9).problems
    ) == lines_of([found])


def test_limits_of_this_machine_are_found(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    section = host.host_section(processes=1)
    assert section.facts["open files"] == "100, at most 100"
    assert any("may open 100 files" in problem.what for problem in section.problems)


def test_of_many_clocks_the_worst_are_listed_and_the_others_counted():
    skews = {rank: 0.001 * rank * (-1) ** rank for rank in range(1, 1001)}
    facts = network.clock_facts(skews)
    assert [*facts] == [*(f"rank {rank}" for rank in range(1000, 992, -1)), "the others"]
    assert (facts["rank 999"], facts["the others"][:5]) == ("-999 ms", "992, ")
    assert network.clock_facts({1: 0.5}) == {"rank 1": "+500 ms"}
    assert [*network.clock_problems(skews)] == []
    problems = lines_of(network.clock_problems({rank: 2 * skew for rank, skew in skews.items()}))
    assert len(problems) == 9
    assert problems[0].startswith("the clock of rank 1000 is +2.0 s")
    assert problems[-1].startswith("the clocks of 492 more hosts are over 1 s off")


@pytest.mark.parametrize(
    ("rank", "is_reported", "is_written"), [(0, True, True), (1, False, False), (2, True, False)]
)
def test_ranks_without_a_rendezvous_examine_each_host_once(
    monkeypatch, tmp_path, capsys, rank, is_reported, is_written
):
    """Four ranks on two hosts."""
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "DS_ACCELERATOR": "cpu"}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    apart = Section("network", {"state": "not connected"}, (Problem("no rendezvous", "look"),))
    options = DoctorConfig(path=str(tmp_path / "none"))
    launch = read_launch(None)
    examined = examine(tiny_config(), options, launch, is_example=False, join=lambda launch: apart)
    report = tmp_path / "report.json"
    tool = runpy.run_path(str(REPOSITORY / "tools" / "doctor.py"))
    with pytest.raises(SystemExit) as left:
        tool["report"](examined, str(report) if rank == 0 else None)
    assert left.value.code == int(is_reported)
    lines = capsys.readouterr().out
    assert ("PROBLEM: no rendezvous: look" in lines) == is_reported
    assert (lines != "") == is_reported
    assert report.exists() == is_written


def test_gpus_are_counted_whether_or_not_they_can_be_used(tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_nvidia_devices(tmp_path) == 2


def test_installed_versions_are_compared_with_the_ranges_of_the_requirements(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch>=0.4,<0.5\nregex\nnumpy>=1\n")
    section = versions.versions_section(requirements)
    assert section.facts["torch"] == version("torch")
    (problem,) = section.problems
    assert problem.what == f"torch {version('torch')} is outside the supported range >=0.4,<0.5"
    supported = versions.supported_ranges(REPOSITORY / "requirements.txt")
    assert versions.is_in_range(version("torch"), supported["torch"])
    assert versions.supported_ranges(tmp_path / "none").get("numpy", ">=2").startswith(">=")


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    section = disk.disk_section(tmp_path, seconds=0.01)
    assert set(section.facts) == {"folder", "free", "write", "read"}
    assert [*tmp_path.iterdir()] == []
    missing = disk.disk_section(tmp_path / "none", seconds=0.01)
    require_problem("none … No such file", [lines_of(missing.problems)[0]])


def test_kernels_are_those_of_the_run():
    config = tiny_config("--kernels", "reference", "--attention-impl", "reference")
    facts = run.kernels_section(config, CPU, is_example=False).facts
    assert facts["network"] == "2 layers of width 8, fp32"
    assert facts["norm"] == "PyTorch (--kernels reference)"
    assert facts["attention"].startswith("reference (scores are written out")


@pytest.mark.parametrize(
    "words",
    ["--slow-rank-factor 2", "--num-experts 4 --moe-expert-parallel-size 4", "--world-size 2"],
)
def test_flags_that_need_several_replicas_are_possible(words):
    assert run.kernels_section(tiny_config(*words.split()), CPU, is_example=False).problems == ()


def test_impossible_flags_are_reported():
    config = tiny_config("--hidden-size", "9")
    (problem,) = run.kernels_section(config, CPU, is_example=False).problems
    assert "--hidden-size 9" in problem.what
    config = tiny_config("--kernels", "apex")
    (problem,) = run.kernels_section(config, GPU, is_example=False).problems
    assert "apex is not installed" in f"{problem.what}: {problem.mend}"


def test_flags_must_suit_the_processes_that_examine():
    config = tiny_config("--pipeline-model-parallel-size", "4", "--num-layers", "4")
    assert run.kernels_section(config, CPU, is_example=False).problems == ()
    assert run.kernels_section(config, CPU, is_example=False, processes=4).problems == ()
    (problem,) = run.kernels_section(config, CPU, is_example=False, processes=2).problems
    assert "2 processes" in problem.what and "--pipeline-model-parallel-size 4" in problem.what


def test_a_misspelt_flag_of_the_doctor_needs_no_flags_of_a_run():
    tool = runpy.run_path(str(REPOSITORY / "tools" / "doctor.py"))
    with pytest.raises(ConfigError) as refused:
        tool["main"](["--npoc", "2"])
    assert refused.value.problems == ("unknown flag --npoc; did you mean --nproc?",)


def test_compilers_are_needed_by_what_compiles(modules):
    modules("triton", is_stand_in=True)
    plain, compiled = tiny_config(), tiny_config("--optimizer-impl", "deepspeed")
    assert run.compilers_needed(plain, CPU) == {}
    assert set(run.compilers_needed(plain, GPU)) == {"gcc or clang"}
    assert set(run.compilers_needed(compiled, CPU)) == {"g++ or clang", "ninja"}
    assert "nvcc" in run.compilers_needed(compiled, GPU)


def test_the_tokenizer_of_the_run_is_tried(tmp_path):
    config = tiny_config()
    assert "encodes" not in run.tokenizer_section(config).facts
    null = tiny_config("--tokenizer-type", "NullTokenizer", "--vocab-size", "60")
    assert "no fast backend" in run.tokenizer_section(null).facts["encodes"]
    missing = tiny_config("--vocab-file", str(tmp_path / "v"), "--merge-file", str(tmp_path / "m"))
    (tmp_path / "words").write_text("[CLS]\na\n")
    words = (
        "--objective",
        "t5",
        "--decoder-seq-length",
        "4",
        "--vocab-file",
        str(tmp_path / "words"),
    )
    t5 = tiny_config(*words)
    assert run.tokenizer_section(t5).facts["of the run"].endswith("words, 104 tokens")
    assert run.plan_of(t5, CPU).model.architecture == "t5"
    (problem,) = run.tokenizer_section(missing).problems
    assert str(tmp_path / "v") in problem.what


HERE = Examined("a", [Section("versions", {"torch": "2.1"}), Section("host", {"cores": "8"})])
FULL = Problem("the disk is full", "make room")


def test_equal_facts_of_hosts_are_reported_once():
    there = replace(HERE, host="b", sections=[*HERE.sections, Section("clocks", {})])
    assert [*report_lines([HERE, there])] == [
        *("versions:", "  torch  2.1", "host:", "  cores  8", "no problems found")
    ]


def test_different_facts_are_reported_by_host_and_versions_must_be_equal():
    sections = [Section("versions", {"torch": "2.0"}), Section("host", {"cores": "8"}, (FULL,))]
    examined = [HERE, Examined("b", sections), Examined("c", sections)]
    lines = [*report_lines(examined)]
    assert lines[1:3] == ["  torch  2.1 (a)", "  torch  2.0 (b, c)"]
    assert lines[-2:] == [
        "PROBLEM: the disk is full (on b, c): make room",
        "PROBLEM: hosts have different versions of torch: 2.1 (a); 2.0 (b, c) (on a, b, c): "
        "install the same on all of them",
    ]
    data = as_json(examined)
    assert data["hosts"]["b"]["versions"] == {"torch": "2.0"}
    assert data["problems"][0] == {
        "problem": "the disk is full",
        "mend": "make room",
        "hosts": ["b", "c"],
    }
    assert len(problems_of(examined)) == 2


def test_different_disks_are_reported_by_host(tmp_path):
    examined = []
    for host_name in ("a", "b"):
        folder = tmp_path / host_name
        folder.mkdir()
        examined.append(Examined(host_name, [disk.disk_section(folder, seconds=0.01)]))
    title, first, second, *_ = report_lines(examined)
    assert title == "disk:"
    assert first.split() == ["folder", str(tmp_path / "a"), "(a)"]
    assert second.split() == ["folder", str(tmp_path / "b"), "(b)"]


def test_sizes_have_units():
    assert [format_bytes(n) for n in (0, 2048, 64 * MIB, 3 * GIB // 2)] == [
        *("0 B", "2 KiB", "64 MiB", "1.5 GiB")
    ]


def test_the_tool_examines_two_processes_and_fails_on_a_problem(tmp_path):
    """Other problems of this machine do not matter here."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, str(REPOSITORY / "tools" / "doctor.py"), "--nproc", "2"),
            *("--device", "cpu", "--path", str(tmp_path / "none"), "--json", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"PROBLEM: --path {tmp_path / 'none'}: cannot be written to" in done.stdout
    assert "gloo all-reduce of 64 MiB" in done.stdout
    (facts,) = json.loads(report.read_text())["hosts"].values()
    assert facts["network"]["processes"] == "2, 2 on this host"
    assert "an example" in facts["kernels"]["network"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("dies", "message"),
    [("os.kill(os.getpid(), 9)", "rank 1 was ended by SIGKILL"), ("exit(1)", "")],
)
def test_a_process_that_dies_ends_those_that_wait_for_it(tmp_path, capfd, dies, message):
    tool = runpy.run_path(str(REPOSITORY / "tools" / "doctor.py"))
    script = tmp_path / "rank.py"
    script.write_text(f"import os, time\nif os.environ['RANK'] == '1': {dies}\ntime.sleep(600)\n")
    start = tool["start_processes"]
    start.__globals__["__file__"] = str(script)
    assert start(3, []) == 1
    printed = capfd.readouterr().err
    assert message in printed and bool(printed) == bool(message)


def test_processes_are_not_started_beside_those_of_a_launcher():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "doctor.py"), "--nproc", "3"],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    require_problem("--nproc 3 … launcher … 2", [done.stderr])
