"""Jobs that receive stop signals, and one that hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import (
    PRETRAIN,
    REPOSITORY,
    TIMEOUT_S,
    Corpus,
    clean_environment,
    journal,
    start_ranks,
)
from ports import free_port

from megatron.checkpointing.manifest import damage, published_tags, read_manifest
from megatron.common.errors import ExitCode
from megatron.training.guards.stop import SAVE_FILE

STALLS = """
import os, sys, time
from pathlib import Path

sys.path.insert(0, {repository!r})
from megatron.training.entry import train_from
from megatron.training.process.launch import run_rank


def main(argv):
    from megatron.checkpointing import writer
    from megatron.training.loop.batch_stream import Stream

    write = writer.write_state

    def write_when_it_hangs(state, file):
        while not list(Path(file).parents[1].glob("hang-*")):
            time.sleep(0.05)
        return write(state, file)

    writer.write_state = write_when_it_hangs
    read, count = Stream.__next__, iter(range(1, 1000))

    def read_from_a_dead_disk(self):
        if os.environ["RANK"] == "1" and next(count) == 9:
            time.sleep(10000)
        return read(self)

    Stream.__next__ = read_from_a_dead_disk
    return train_from(argv, "gpt", description="")


run_rank(main, sys.argv[1:])
"""


@pytest.fixture
def endless(corpus: Corpus, tmp_path: Path) -> list[str]:
    """Flags of a run of two ranks that does not end by itself and saves on a signal."""
    return [
        *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
        *("--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2"),
        *("--lr", "1e-3", "--train-iters", "1000000", "--eval-iters", "0", "--device", "cpu"),
        *("--save", str(tmp_path), "--save-interval", "1000000", *corpus.flags),
    ]


def wait_until(happens: Callable[[], object], log: Path) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not happens():
        assert time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.1)


def test_a_signal_to_one_rank_saves_and_ends_all_with_the_code_of_going_on(
    endless: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    words = ("--num_gpus", "2", "--master_port", str(free_port()), PRETRAIN, *endless)
    with log.open("wb") as stream:
        job = subprocess.Popen(
            [deepspeed, *words],
            env=clean_environment(),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: "before the start of training" in log.read_text(), log)
        (tmp_path / SAVE_FILE).touch()
        wait_until(lambda: not (tmp_path / SAVE_FILE).exists(), log)
        (first,) = published_tags(tmp_path)
        ranks = re.findall(r"process (\d+) spawned with command", log.read_text())
        os.kill(int(ranks[1]), signal.SIGUSR1)
        assert job.wait(TIMEOUT_S) == ExitCode.RESUMABLE, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    newest, older = published_tags(tmp_path)
    assert older == first
    assert newest == f"global_step{journal(tmp_path, 'step')[-1]['iteration']}"
    assert "exiting program after receiving" in log.read_text()
    assert not (tmp_path / "failure.json").exists()


def test_a_hang_of_one_rank_ends_all_and_says_where_they_were(
    endless: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "stalls.py"
    script.write_text(STALLS.format(repository=str(REPOSITORY)))
    saves = ("--async-save", "--save-interval", "6")
    ended = start_ranks(2, *endless, *saves, "--hang-timeout", "3", script=str(script))
    assert ended.codes == [ExitCode.FAILED] * 2, "\n".join(ended.outputs)
    record = json.loads((tmp_path / "failure.json").read_text())
    assert (record["kind"], record["iteration"]) == ("hang", 9)
    waits, stalls = sorted(record["groups"])
    assert re.match(r"1 rank \(0\) in all_reduce \(megatron/\S+:\d+\)", waits)
    assert stalls.startswith("1 rank (1) in read_from_a_dead_disk (")
    (output,) = [text for text in ended.outputs if "hang in step 9" in text]
    assert stalls in output
    (folder,) = tmp_path.glob("hang-*")
    names = {file.name for file in folder.iterdir()}
    assert names == {"groups.txt", "rank-0.json", "rank-1.json"}
    # What was being written in the background is finished: rank 1, which stalls, has written too.
    assert published_tags(tmp_path) == ["global_step6"]
    files = read_manifest(tmp_path / "global_step6").files
    assert damage(tmp_path / "global_step6", files) == []
    assert "successfully saved checkpoint at iteration       6" in ended.outputs[0]
