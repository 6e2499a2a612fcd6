"""What slurm/ asks a cluster for, starts there and leaves behind, by an srun that only pretends."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import REPOSITORY

from megatron.config.config import parse_config
from megatron.config.plan.plan import Plan, plan
from megatron.planner.devices import device_of
from megatron.planner.search import obstacle

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.slurm"))
LAYOUTS = [script for script in SCRIPTS if script.name.startswith(("gpt", "bloom"))]
WRITES_WORDS = "printf '%s\\0' \"$@\" > launched"


def requested(script: Path, option: str) -> int:
    """Return the number that a script asks SLURM for."""
    return int(re.search(rf"^#SBATCH --{option}=(\d+)$", script.read_text(), re.MULTILINE)[1])


def start(
    script: Path, folder: Path, *flags: str, srun: str = WRITES_WORDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, where `srun` is done in place of a step of the job."""
    program = folder / "srun"
    program.write_text(f"#!/bin/sh\n{srun}\n")
    program.chmod(0o755)
    (folder / "corpus.idx").touch()
    return subprocess.run(
        ["bash", str(script), *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        env={
            **{"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(REPOSITORY)},
            **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "DATA_PATH": "corpus"},
            **variables,
        },
    )


@pytest.mark.parametrize("name", ["DATA_PATH", "SHARDS", "SAVE"])
def test_a_variable_that_is_not_set_is_asked_for(name: str, tmp_path: Path) -> None:
    scripts = {
        "DATA_PATH": LAYOUTS,
        "SHARDS": [REPOSITORY / "slurm" / "preprocess_merge.slurm"],
        "SAVE": [script for script in SCRIPTS if script.name.startswith(("train", "evaluate"))],
    }
    for script in scripts[name]:
        done = start(script, tmp_path, **{name: ""})
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: set {name} to the "), script
    assert not (tmp_path / "launched").exists()


def launched(folder: Path, program: str) -> list[str]:
    """Return the flags of `program` in the last step that was started."""
    words = (folder / "launched").read_text().rstrip("\0").split("\0")
    return words[words.index(program) + 1 :]


def planned(script: Path, folder: Path, **variables: str) -> Plan:
    """Return the run that a script of a network with a name starts."""
    start(script, folder, "--seed", "7", **variables).check_returncode()
    config, _ = parse_config(launched(folder, str(REPOSITORY / "pretrain_gpt.py")))
    assert config.training.seed == 7
    vocabulary = 250680 if "bloom" in script.name else 50257
    world_size = requested(script, "nodes") * requested(script, "ntasks-per-node")
    return plan(config, world_size=world_size, vocab_size=vocabulary, device="cuda")


@pytest.mark.parametrize("script", LAYOUTS, ids=lambda script: script.stem)
def test_the_run_fits_the_nodes_that_are_asked_for(script: Path, tmp_path: Path) -> None:
    assert "A100 of 80 GB" in script.read_text() or script.stem == "gpt_tiny"
    assert obstacle(planned(script, tmp_path), device_of("a100-80gb")) is None


def test_both_scripts_of_gpt_3_train_the_same(tmp_path: Path) -> None:
    by_slurm = planned(REPOSITORY / "slurm" / "gpt3_175B.slurm", tmp_path)
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\n{WRITES_WORDS}\n")
    launcher.chmod(0o755)
    subprocess.run(
        ["bash", str(REPOSITORY / "examples" / "pretrain_gpt3_175B.sh"), "--seed", "7"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "DATA_PATH": "corpus", "LAUNCHER": str(launcher)},
    )
    config, _ = parse_config(launched(tmp_path, str(REPOSITORY / "pretrain_gpt.py")))
    by_hand = plan(config, world_size=1024, vocab_size=50257, device="cuda")
    # Where they save, and what they tell, is their own.
    switch = by_slurm.training.kill_switch
    assert replace(by_hand.training, kill_switch=switch) == by_slurm.training
    for part in (
        *("model", "parallel", "batch", "schedule", "optimizer", "precision", "recompute"),
        *("kernels", "deepspeed"),
    ):
        assert getattr(by_hand, part) == getattr(by_slurm, part)


def test_a_chain_begins_with_the_weights_of_base_and_goes_on_from_its_own(tmp_path: Path) -> None:
    script = REPOSITORY / "slurm" / "gpt_tiny.slurm"

    def loaded(**base: str) -> tuple[str, bool]:
        checkpoint = planned(script, tmp_path, SAVE="run", **base).checkpoint
        assert checkpoint.save == "run"
        assert checkpoint.loads_optimizer is checkpoint.loads_progress
        return checkpoint.load, checkpoint.loads_progress

    assert loaded() == ("run", True)
    assert loaded(BASE="base") == ("base", False)
    published = tmp_path / "run" / "global_step5" / "manifest.json"
    published.parent.mkdir()
    assert loaded(BASE="base") == ("base", False), "it has not been published"
    published.touch()
    assert loaded(BASE="base") == ("run", True)

    (tmp_path / "launched").unlink()
    for flags in (["--load", "base"], ["--save=other"], ["--finetune", "--load=base"]):
        refused = start(script, tmp_path, *flags)
        flag = flags[0].partition("=")[0]
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: leave {flag} out: ")
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "launched").exists()


@pytest.mark.parametrize("has_pyxis", [True, False])
def test_processes_run_in_the_container(has_pyxis: bool, tmp_path: Path) -> None:
    script = REPOSITORY / "slurm" / "gpt_tiny.slurm"
    for name in ("base", "data"):
        (tmp_path / name).mkdir()
    srun = f'if [ "$1" = --help ]; then echo --container-image=PATH; else\n{WRITES_WORDS}\nfi'
    if not has_pyxis:
        srun = srun.replace("--container-image=PATH", "--nodes=N")
        (tmp_path / "singularity").touch(mode=0o755)
    run = {"CONTAINER": "an image.sif", "MOUNTS": f"{tmp_path}/data", "SAVE": "run"}
    start(script, tmp_path, srun=srun, BASE="base", **run).check_returncode()
    seen = (REPOSITORY, *(tmp_path / name for name in ("", "data", "run", "base")))
    mounts = ",".join(f"{folder}:{folder}" for folder in seen)
    expected = ["singularity", "exec", "--nv", "--bind", mounts, "--pwd", str(tmp_path)]
    expected += ["an image.sif"]
    if has_pyxis:
        expected = ["--container-image", "an image.sif", "--container-mounts", mounts]
        expected += ["--container-workdir", str(tmp_path)]
    words = (tmp_path / "launched").read_text().split("\0")
    begin = words.index("python") - len(expected)
    assert words[begin : begin + len(expected)] == expected
    assert words[begin - 1] == "--wait=600"

    refused = start(script, tmp_path, srun=srun, **run | {"MOUNTS": "none"})
    assert refused.returncode == 2
    assert refused.stderr.endswith(" has no folder none\n")


def test_a_container_without_a_program_for_it_is_refused(tmp_path: Path) -> None:
    if shutil.which("apptainer") or shutil.which("singularity"):
        pytest.skip("this machine has one")
    script = REPOSITORY / "slurm" / "preprocess_merge.slurm"
    refused = start(script, tmp_path, srun="", CONTAINER="image.sif", SHARDS="1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith('error: CONTAINER is "image.sif", but srun has no pyxis, and ')


def test_modules_are_loaded_before_anything_runs(tmp_path: Path) -> None:
    script = REPOSITORY / "slurm" / "preprocess_merge.slurm"
    loads = '() { [ "$1 $UNSET" = "load " ] && [ "$2" != gone ] && export LOADED="$LOADED $2"; }'
    start(
        *(script, tmp_path),
        srun="printf '%s' \"$LOADED\" > launched",
        **{"MODULES": "cuda/12.4 gcc/12", "SHARDS": "1", "BASH_FUNC_module%%": loads},
    ).check_returncode()
    assert (tmp_path / "launched").read_text() == " cuda/12.4 gcc/12"
    (tmp_path / "launched").unlink()
    for environment, message in (
        ({"BASH_FUNC_module%%": loads}, "error: module load gone: "),
        ({}, 'error: MODULES is "gone", but '),
    ):
        refused = start(script, tmp_path, MODULES="gone", SHARDS="1", **environment)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(message)
        assert not (tmp_path / "launched").exists()


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_an_evaluation_that_is_ended_leaves_its_checkpoint_to_the_run(
    signal: str, tmp_path: Path
) -> None:
    script = REPOSITORY / "slurm" / "evaluate_checkpoints.slurm"
    read, wanted = (tmp_path / "run" / f"global_step{n}" for n in (5, 10))
    for folder in (read, wanted):
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (wanted / "keep").touch()
    ended = start(script, tmp_path, srun=f"ls run/*/keep > seen; kill -{signal} 0", SAVE="run")
    assert ended.returncode != 0
    assert (tmp_path / "seen").read_text().split() == [
        "run/global_step10/keep",
        "run/global_step5/keep",
    ]
    # Who is killed cannot tidy up: the job does when it begins again.
    assert (read / "keep").exists() is (signal == "KILL")
    start(script, tmp_path, srun="ls run/*/keep", SAVE="run").check_returncode()
    assert not (read / "keep").exists()
    assert (wanted / "keep").exists()
    results = tmp_path / "run" / "evaluation"
    assert sorted(file.name for file in results.iterdir()) == [
        "global_step10.txt",
        "global_step5.txt",
    ]


def test_a_folder_with_spaces_is_evaluated_oldest_checkpoint_first(tmp_path: Path) -> None:
    script = REPOSITORY / "slurm" / "evaluate_checkpoints.slurm"
    save = tmp_path / "ev*l dir"
    for number in (5, 10):
        (save / f"global_step{number}").mkdir(parents=True)
        (save / f"global_step{number}" / "manifest.json").touch()
    start(script, tmp_path, srun="echo done", SAVE=str(save)).check_returncode()
    results = sorted((save / "evaluation").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert [file.name for file in results] == ["global_step5.txt", "global_step10.txt"]


def test_the_page_names_each_script() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`slurm/([\w.]+\.slurm)`", page)) == {s.name for s in SCRIPTS}
