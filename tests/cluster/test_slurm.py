"""The scripts of slurm/, each submitted to a cluster of two nodes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import READ_ONLY, REPOSITORY, Cluster
from tokenizers import ByteLevelBPETokenizer

from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.checkpointing.resharding.digest import digest_of, digests
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.training.loop.journal import read_journal, starts_of

SIZES = {
    "gpt_1.3B.slurm": (2, 16),
    "gpt_13B.slurm": (8, 64),
    "gpt3_175B.slurm": (128, 1024),
    "bloom_176B.slurm": (48, 384),
}
"""Nodes and processes of the scripts of large networks."""

SHARDS = 2
ITERATIONS = 100
TOKENIZER = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
FLAGS = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--lr", "1e-3", "--train-iters", str(ITERATIONS), "--eval-iters", "0", "--device", "cpu"),
    *("--log-interval", "1", "--save-interval", str(ITERATIONS)),
    *("--data-path", "sharded_text_document", *TOKENIZER),
]


def steps(save: Path) -> list[dict[str, Any]]:
    """Return what counts of the steps that a run has taken."""
    kept = ("iteration", "first_sample", "lm_loss", "grad_norm", "learning_rate")
    records = read_journal(save) if (save / "journal.jsonl").exists() else ()
    return [{name: r[name] for name in kept} for r in records if r["event"] == "step"]


def starts(save: Path) -> list[int]:
    """Return behind which iterations a run has begun and gone on."""
    return [record["iteration"] for record in starts_of(save)]


def flags_of(save: Path, *, is_slow: bool) -> list[str]:
    """Return the flags of a run; it takes its time if the next start is to be stopped on its way.

    A job that starts again has the flags that it had, and reads this file again.
    """
    pace = save.with_suffix(".yaml")
    pace.write_text(f"chaos: seed=0,stall={int(is_slow)},stall_s=0.5\n")
    return [*FLAGS, "--config", str(pace)]


def digest(save: Path) -> str:
    """Return the digest of the newest checkpoint."""
    folder = save / published_tags(save)[0]
    manifest = read_manifest(folder)
    whole = read_checkpoint(folder, manifest)
    return digest_of(digests(whole, manifest.spec.vocabulary.vocab_size))


@pytest.fixture(scope="module")
def data(cluster: Cluster) -> Path:
    """The token files of an array of jobs; returns the folder of all jobs."""
    sources = sorted(Path(json.__file__).parent.glob("*.py"))
    texts = [source.read_text(encoding="utf-8") for source in sources]
    corpus = cluster.folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (cluster.folder / "wiki.tokens").write_text(" = Homarus = \n The lobster lives in 2 seas . \n")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=500, special_tokens=["<|endoftext|>"])
    trained.save_model(str(cluster.folder))
    arguments = ["--input", "corpus.jsonl", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    arguments += TOKENIZER
    to_shards = [*arguments, "--output-prefix", "sharded"]
    array = cluster.submit("preprocess_array.slurm", *to_shards, options="--array=0-1")
    merge = cluster.submit(
        *("preprocess_merge.slurm", *to_shards),
        options=f"--dependency=afterok:{array}",
        SHARDS=str(SHARDS),
    )
    tool = str(REPOSITORY / "tools" / "preprocess_data.py")
    cluster.run(sys.executable, tool, *arguments, "--output-prefix", "whole")
    cluster.finish(array, merge)
    return cluster.folder


@pytest.fixture(scope="module")
def calm(cluster: Cluster, data: Path) -> Path:
    """The folder of a run of two processes on one node, which nothing has happened to."""
    options = "--ntasks-per-node=2 --nodelist=n1"
    job = cluster.submit("train_single_node.slurm", *FLAGS, options=options, SAVE="calm")
    cluster.finish(job)
    assert len(steps(data / "calm")) == ITERATIONS
    return data / "calm"


def is_same(save: Path, calm: Path) -> bool:
    """Whether two runs took the same steps and came to the same state, bit for bit."""
    return steps(save) == steps(calm) and digest(save) == digest(calm)


def test_a_run_goes_on_with_fewer_nodes_and_with_all_when_they_are_back(
    cluster: Cluster, data: Path, request: pytest.FixtureRequest
) -> None:
    save = cluster.folder / "lost"
    flags = [*flags_of(save, is_slow=True), "--save-interval", "5"]
    job = cluster.submit(
        *("train_elastic.slurm", *flags, "--tensor-model-parallel-size", "2"),
        options="--array=1-3%1 --nodes=1-2 --ntasks-per-node=2",
        **{"SAVE": "lost", "GROW_S": "1", "POLL_S": "1"},
    )
    cluster.wait_until(lambda: published_tags(save))
    cluster.order("kill", "n2")
    try:
        # That of nothing happening runs on n1 while SLURM is finding out.
        calm = request.getfixturevalue("calm")
        cluster.wait_until(lambda: len(starts(save)) == 2 and len(steps(save)) > starts(save)[1])
        flags_of(save, is_slow=False)
    finally:
        cluster.order("start", "n2")
    cluster.end(job)
    assert cluster.job_field(job, "JobState") == ["NODE_FAIL", "FAILED", "COMPLETED"]
    assert cluster.job_field(job, "ExitCode")[1:] == ["75:0", "0:0"]
    hosts = [record["with"]["hosts"] for record in starts_of(save)]
    assert hosts == ["n1, n2", "n1", "n1, n2"]
    begun, alone, again = starts(save)
    assert begun == 0 < alone < again < ITERATIONS, "the node was to be lost and back on the way"
    log = cluster.log(job)
    assert "resumed on 1 replicas instead of 2: gradient accumulation 2 instead of 1" in log
    assert "resumed on 2 replicas instead of 1: gradient accumulation 1 instead of 2" in log
    # The same samples; other ranks round their sums otherwise.
    taken, expected = steps(save), steps(calm)
    for name in ("iteration", "first_sample", "learning_rate"):
        assert [step[name] for step in taken] == [step[name] for step in expected]
    for name in ("lm_loss", "grad_norm"):
        assert [step[name] for step in taken] == pytest.approx(
            [s[name] for s in expected], rel=1e-3
        )


def test_shards_of_an_array_are_joined_to_the_files_of_one_process(data: Path) -> None:
    for kind in ("bin", "idx"):
        whole, joined = (data / f"{n}_text_document.{kind}" for n in ("whole", "sharded"))
        assert joined.read_bytes() == whole.read_bytes()


def test_a_drained_node_is_waited_for(cluster: Cluster, data: Path) -> None:
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=maintenance")
    try:
        job = cluster.submit(
            *("gpt_tiny.slurm", *TOKENIZER, "--device", "cpu"),
            **{"DATA_PATH": "sharded_text_document", "SAVE": "tiny"},
        )
        cluster.wait_until(lambda: "UnavailableNodes:n2" in cluster.job_field(job, "Reason")[0])
        assert cluster.job_field(job, "JobState") == ["PENDING"]
        assert "maintenance" in cluster.run("sinfo", "--list-reasons")
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    cluster.finish(job)
    assert cluster.job_field(job, "NodeList") == ["n[1-2]"]
    assert len(steps(data / "tiny")) == 100
    start = next(r for r in read_journal(data / "tiny") if r["event"] == "start")
    assert start["with"]["hosts"] == "n1, n2"


def test_chains_come_to_the_same_end_and_each_checkpoint_is_evaluated(
    cluster: Cluster, calm: Path
) -> None:
    queued, listed = cluster.folder / "queued", cluster.folder / "listed"
    flags = [*flags_of(queued, is_slow=True), "--keep-last", "1"]
    requeued = cluster.submit("train_requeue.slurm", *flags, SAVE="queued")
    evaluation = cluster.submit(
        *("evaluate_checkpoints.slurm", "--task", "WIKITEXT103", "--valid-data", "wiki.tokens"),
        **{"SAVE": "queued", "TRAINING": requeued, "POLL_S": "1"},
    )
    flags = flags_of(listed, is_slow=True)
    array = cluster.submit("train_array.slurm", *flags, options="--array=1-3%1", SAVE="listed")
    # Who evaluates is to be there before the run removes what it was stopped at.
    cluster.wait_until(lambda: cluster.job_field(evaluation, "JobState") == ["RUNNING"])
    for save, job in ((queued, requeued), (listed, f"{array}_1")):
        cluster.wait_until(lambda save=save: len(steps(save)) > 2)
        cluster.ask_to_stop(job)
    flags_of(queued, is_slow=False)

    # Of the array, the second job finds the kill switch on its way, and the third when it begins.
    cluster.wait_until(lambda: cluster.job_field(array, "ExitCode")[0] == "75:0")
    before = len(steps(listed))
    cluster.wait_until(lambda: len(steps(listed)) > before)
    (listed / "stop").touch()
    cluster.end(array)
    assert before < len(steps(listed)) < ITERATIONS
    assert cluster.job_field(array, "ExitCode") == ["75:0", "0:0", "0:0"]
    (listed / "stop").unlink()
    flags = flags_of(listed, is_slow=False)
    last = cluster.submit("train_multi_node.slurm", *flags, SAVE="listed")

    cluster.wait_until(lambda: cluster.job_field(requeued, "Restarts") == ["1"])
    cluster.finish(last, requeued, evaluation)
    begun, stopped = starts(queued)
    assert begun == 0 < stopped < ITERATIONS, "it was to be stopped on its way"
    assert is_same(listed, calm)
    assert is_same(queued, calm)
    results = {file.stem: file.read_text() for file in (queued / "evaluation").iterdir()}
    assert set(results) == {f"global_step{stopped}", f"global_step{ITERATIONS}"}
    assert all("validation results on WIKITEXT103" in output for output in results.values())
    assert not list(queued.glob("*/keep"))


def test_mistakes_are_told_before_the_run_begins(cluster: Cluster, data: Path) -> None:
    wrong = cluster.submit(
        *("train_multi_node.slurm", *FLAGS, "--tensor-model-parallel-size", "2"),
        options="--nodes=1 --ntasks-per-node=3",
        SAVE="wrong",
    )
    unwritable = cluster.submit("train_multi_node.slurm", *FLAGS, SAVE=READ_ONLY)
    nowhere = cluster.submit("train_single_node.slurm", *FLAGS)
    lost = cluster.submit("train_single_node.slurm", *FLAGS, REPOSITORY="moved")
    empty = cluster.submit("evaluate_checkpoints.slurm", SAVE="empty")
    jobs = (wrong, unwritable, nowhere, lost, empty)
    cluster.end(*jobs)
    for job, output in (
        (wrong, "error: --tensor-model-parallel-size 2 "),
        (unwritable, f"error: the nodes named above cannot write to {READ_ONLY}"),
        (nowhere, "error: set SAVE to the folder of the checkpoints"),
        (lost, "error: set REPOSITORY to the folder of this repository"),
        (empty, "error: no checkpoints are in empty: correct SAVE"),
    ):
        assert cluster.job_field(job, "JobState") == ["FAILED"]
        assert cluster.log(job).count(output) == 1, cluster.log(job)
    # Process 0 says it, and the first of those that share a parent, as those of a node do. One that
    # comes when that one has left says it again.
    assert cluster.log(wrong).count("needs a multiple of 2 processes") >= 2
    parents = cluster.run("srun", "--nodes=1", "--ntasks=3", "bash", "-c", "echo $PPID").split()
    assert len(parents) == 3
    assert len(set(parents)) == 1
    assert "n2\n" in cluster.log(unwritable)
    assert "n1\n" not in cluster.log(unwritable)
    assert {cluster.job_field(job, "ExitCode")[0] for job in jobs} == {"2:0"}


def test_layouts_are_accepted_at_full_size_and_run(cluster: Cluster, tmp_path: Path) -> None:
    """A module brings the program for containers."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(
        '#!/bin/sh\n[ "$1 $7" = "exec image.sif" ] && shift 7 && echo in && "$@"\n'
    )
    apptainer.chmod(0o755)
    contained = {
        "MODULES": "apptainer",
        "BASH_FUNC_module%%": f'() {{ PATH="{tmp_path}:$PATH"; }}',
        "CONTAINER": "image.sif",
    }
    planned = []
    for script, (nodes, processes) in SIZES.items():
        held = cluster.submit(script, options="--hold --partition=large")
        assert cluster.job_field(held, "NumNodes")[0].partition("-")[0] == str(nodes)
        assert cluster.job_field(held, "NumTasks") == [str(processes)]
        assert cluster.job_field(held, "Requeue") == ["1"]
        assert cluster.job_field(held, "CPUs/Task") == ["8"]
        assert cluster.job_field(held, "OverSubscribe") == ["NO"]
        assert cluster.job_field(held, "MinMemoryNode") == ["0"]
        cluster.run("scancel", held)
        planned.append(
            cluster.submit(
                *(script, "--num-gpus", str(processes), "--gpu", "a100-80gb"),
                *("--vocabulary", "250680" if "bloom" in script else "50257"),
                options="--nodes=1 --ntasks-per-node=1 --gpus-per-node=1",
                **{"TRAIN": "tools/plan.py", "DATA_PATH": "corpus", "SAVE": script},
                **contained,
            )
        )
    cluster.finish(*planned)
    assert all(cluster.log(job).count("a100-80gb: fits") == 1 for job in planned)
    assert all("in\n" in cluster.log(job) for job in planned), cluster.log(planned[0])
