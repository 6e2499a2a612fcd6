"""What slurm/ asks of a cluster fits it, and docs/clusters.md names each script."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from cluster import REPOSITORY

from megatron.config.config import parse_config
from megatron.plan.estimate.devices import device_of
from megatron.plan.estimate.search import obstacle
from megatron.plan.plan import plan

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.slurm"))
LAYOUTS = [script for script in SCRIPTS if script.name.startswith(("gpt", "bloom"))]


def asked(script: Path, option: str) -> int:
    """Return the number that a script asks SLURM for."""
    return int(re.search(rf"^#SBATCH --{option}=(\d+)$", script.read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("script", LAYOUTS, ids=lambda script: script.stem)
def test_the_run_fits_the_nodes_that_are_asked_for(script: Path, tmp_path: Path) -> None:
    nodes, tasks = asked(script, "nodes"), asked(script, "ntasks-per-node")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" > launched\n")
    srun.chmod(0o755)
    (tmp_path / "corpus.idx").touch()
    subprocess.run(
        ["bash", str(script), "--seed", "7"],
        cwd=tmp_path,
        check=True,
        timeout=60,
        env={
            **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(REPOSITORY)},
            **{"DATA_PATH": "corpus", "SLURM_JOB_NUM_NODES": str(nodes)},
        },
    )
    words = (tmp_path / "launched").read_text().rstrip("\0").split("\0")
    at = words.index(str(REPOSITORY / "pretrain_gpt.py"))
    config, _ = parse_config(words[at + 1 :])
    assert config.training.seed == 7
    vocabulary = 250680 if "bloom" in script.name else 50257
    decided = plan(config, world_size=nodes * tasks, vocab_size=vocabulary, device="cuda")
    assert "A100 of 80 GB" in script.read_text() or script.stem == "gpt_tiny"
    assert obstacle(decided, device_of("a100-80gb")) is None


def test_the_page_names_each_script() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`slurm/([\w.]+\.slurm)`", page)) == {s.name for s in SCRIPTS}
