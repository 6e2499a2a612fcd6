"""Corpora are cleaned by the tasks of a cluster, on SLURM and on Ray."""

import filecmp
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from tempfile import mkdtemp

import pytest
from cluster import REPOSITORY, Cluster
from tokenizers import pre_tokenizers

from megatron.common.errors import MegatronError

CLEAN = REPOSITORY / "tools" / "corpora" / "clean.py"


def clean_words(folder: Path, prefix: str, *words: str) -> list[str]:
    """Return the flags that clean the corpus in `folder` with two tasks of each step."""
    files = ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod"]
    work = ["--tasks", "2", "--filters", "remove_512", "--similarity", "1", *words]
    named = ["--input", f"{folder}/raw.jsonl", "--output-prefix", prefix]
    return [*named, *tokenizer, *work]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with documents that are too short, a vocabulary, and what one process makes of them."""
    pytest.importorskip("datatrove")
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    texts = [" ".join(f"word{draw.randrange(500)}" for _ in range(90)) for _ in range(30)]
    lines = (json.dumps({"text": text}) + "\n" for text in [*texts, "short"])
    (folder / "raw.jsonl").write_text("".join(lines))
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    words = clean_words(folder, f"{folder}/here", "--workers", "1")
    run_path(str(CLEAN))["main"](words)
    return folder


def is_that_of_one_process(corpus: Path, prefix: Path) -> bool:
    """Whether a cleaned corpus has the bytes of that which one process made."""
    ends = ("_text_document.bin", "_text_document.idx", ".corpus.json")
    return all(filecmp.cmp(f"{corpus}/here{end}", f"{prefix}{end}", False) for end in ends)


def array_of(cluster: Cluster, step: str) -> str:
    """Return the number of the newest array of a step, which another job sums up."""
    words = ["squeue", "--states", "all", "--noheader", "--name", step, "--format", "%F"]
    return str(sorted(set(map(int, cluster.run(*words).split())))[-2])


def test_cleaning_on_slurm_goes_on_after_a_task_was_killed(cluster: Cluster, corpus: Path) -> None:
    slurm = ["--executor", "slurm", "--slurm", "time=10:00", "partition=test"]
    words = [sys.executable, str(CLEAN), *clean_words(corpus, "cleaned", "--workers", "2", *slurm)]
    assert "submitted; cleaned.corpus.json will have the counts" in cluster.run(*words)
    array = array_of(cluster, "1-filter_documents")
    cluster.wait_until(lambda: cluster.job_field(f"{array}_1", "JobState") == ["RUNNING"])
    cluster.run("scancel", "--signal", "KILL", f"{array}_1")
    cluster.end(array)
    first, second = cluster.job_field(array, "JobState")
    assert first == "COMPLETED" != second
    # What follows it has left the queue.
    cluster.end(array_of(cluster, "4-join"))
    cluster.run(*words)
    cluster.finish(array_of(cluster, "4-join"))
    assert is_that_of_one_process(corpus, cluster.folder / "cleaned")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a Ray cluster of this machine, which commands find through the environment."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("datatrove")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # The path of a socket may have 107 characters.
    folder = mkdtemp(prefix="ray-", dir="/tmp")
    started = ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
        object_store_memory=100 << 20, _memory=8 << 30,
    )  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", started.address_info["gcs_address"])
    yield
    ray.shutdown()
    shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:placement_group:DeprecationWarning")
def test_cleaning_on_ray_goes_on_after_a_task_failed(
    ray: None, corpus: Path, tmp_path: Path
) -> None:
    words = clean_words(corpus, f"{tmp_path}/cleaned", "--workers", "2", "--executor", "ray")
    clean = run_path(str(CLEAN))["main"]
    # Something is in the way of what one task writes.
    obstacle = tmp_path / "cleaned.cleaning" / "cleaned" / "00001.jsonl"
    obstacle.mkdir(parents=True)
    with pytest.raises(MegatronError, match="1 tasks of step 2-clean_documents failed, the first"):
        clean(words)
    log = tmp_path / "cleaned.cleaning" / "2-clean_documents" / "logs" / "task_00001.log"
    assert f"cannot write {obstacle}" in log.read_text()
    obstacle.rmdir()
    clean(words)
    assert is_that_of_one_process(corpus, tmp_path / "cleaned")
