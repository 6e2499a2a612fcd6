"""The scripts of examples/ hand their launcher a run that can be planned."""

from pathlib import Path

import pytest
from jobs import REPOSITORY, Finished, clean_environment, free_port, start

from megatron.config.config import parse_config
from megatron.plan.plan import plan

PROCESSES = {
    "pretrain_gpt.sh": 1,
    "pretrain_gpt_single_node.sh": 4,
    "pretrain_gpt_distributed.sh": 8,
    "pretrain_gpt_distributed_with_mp.sh": 8,
    "pretrain_gpt3_175B.sh": 1024,
    "pretrain_gpt_curriculum.sh": 2,
    "pretrain_multilingual.sh": 1,
    "codeparrot.sh": 1,
}
"""Scripts that train, and how many processes they start in the test that plans them."""


def example(name: str, folder: Path, *flags: str, **variables: str) -> Finished:
    """Run a script from `folder`, on a port that other jobs do not use."""
    script = str(REPOSITORY / "examples" / name)
    variables = {"MASTER_PORT": str(free_port()), **variables}
    return start("bash", script, *flags, cwd=folder, **variables).succeeded()


@pytest.mark.parametrize("name", PROCESSES)
def test_the_launcher_is_given_a_run_that_can_be_planned(name: str, tmp_path: Path) -> None:
    launched = tmp_path / "launched"
    for launcher in ("python", "deepspeed"):
        program = tmp_path / launcher
        program.write_text(f"#!/bin/sh\nprintf '%s\\0' {launcher} \"$@\" > {launched}\n")
        program.chmod(0o755)
    (tmp_path / "corpus.idx").touch()
    variables = {"DATA_PATH": "corpus", "LANGUAGES": "en:0.7:a fr:0.3:b", "TOKENIZER": "t"}
    variables["CHECKPOINT_PATH"] = str(tmp_path / "checkpoints")
    variables["PATH"] = f"{tmp_path}:{clean_environment()['PATH']}"
    if "single_node" in name or "curriculum" in name:
        variables["GPUS_PER_NODE"] = str(PROCESSES[name])
    example(name, tmp_path, "--seed", "7", **variables)

    words = launched.read_text().rstrip("\0").split("\0")
    at = words.index(str(REPOSITORY / "pretrain_gpt.py"))
    assert _processes(words[:at]) == PROCESSES[name]
    config, _ = parse_config(words[at + 1 :])
    decided = plan(config, world_size=PROCESSES[name], vocab_size=50257, device="cuda")
    assert config.training.seed == 7
    if "175B" in name:
        assert decided.parallel.tensor * decided.parallel.pipeline == 128


def _processes(launcher: list[str]) -> int:
    said = dict(zip(launcher, launcher[1:], strict=False))
    if said.get("-m") == "torch.distributed.run":
        return int(said["--nnodes"]) * int(said["--nproc_per_node"])
    return int(said.get("--num_gpus", 1))
