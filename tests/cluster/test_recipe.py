"""The recipe of SLURM runs on a cluster of two nodes."""

import os
import re
import sys
from pathlib import Path

from cluster import Cluster
from pages_of_docs import RECIPES, blocks_of, checkout

from megatron.training.loop.journal import read_journal


def test_the_recipe_runs_on_two_nodes(cluster: Cluster) -> None:
    folder = checkout(cluster.folder / "recipe")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = "".join(
        cluster.run("bash", "-euo", "pipefail", "-c", f"cd {folder}\n{block.text}", PATH=path)
        for block in blocks_of(RECIPES / "slurm.md", "bash")
    )
    assert "fits | fullest rank" in printed
    (job,) = re.findall(r"Submitted batch job (\d+)", printed)
    cluster.finish(job)
    log = (folder / f"train-{job}.log").read_text()
    assert "using world size: 2," in log
    assert "training is done after 20 iterations" in log
    steps = [r["iteration"] for r in read_journal(folder / "run") if r["event"] == "step"]
    assert steps == [*range(1, 21)]
