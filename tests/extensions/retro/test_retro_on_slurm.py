"""Retro's preprocessing in an array of jobs of SLURM."""

import shlex
import sys
from collections.abc import Iterator

import pytest
from cluster import REPOSITORY, Cluster, cluster_in

pytest.importorskip("h5py")
pytest.importorskip("faiss")

from retro_preprocessing import preprocess, tables, words_for, write_corpora


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from cluster_in(tmp_path_factory.mktemp("jobs"))


def test_preprocessing_of_retro_in_an_array_of_jobs(cluster: Cluster) -> None:
    folder = cluster.folder
    write_corpora(folder)
    options = ["--array=0-1", "--parsable", "--output", "retro-%A-%a.log", "--wrap"]
    tool = f"{sys.executable} {REPOSITORY / 'tools' / 'retro' / 'preprocess_data.py'}"
    ranks = "RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT"
    command = f"{ranks} {tool} {shlex.join(words_for(folder / 'of_jobs'))}"
    job = cluster.run("sbatch", *options, command).strip()
    preprocess(folder / "here")
    cluster.finish(job)
    of_jobs, here = tables(folder / "of_jobs"), tables(folder / "here")
    assert of_jobs.keys() == here.keys()
    assert all((of_jobs[name] == here[name]).all() for name in here)
