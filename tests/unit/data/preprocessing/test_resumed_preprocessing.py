"""Runs that are killed, or whose disk is full, give the same bytes when resumed."""

import gzip
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from bytes_tokenizer import BytesTokenizer
from preprocessing_runs import (
    conversion,
    outputs,
    program,
    uninterrupted,
)
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shard_writer import ShardWriter


@pytest.mark.parametrize("more", ["", "workers=2,"])
def test_a_run_killed_again_and_again_gives_the_same_bytes(directory, more):
    expected = uninterrupted(directory)
    (directory / "run.py").write_text(program(pause=0.001, more=more))
    command = [sys.executable, str(directory / "run.py")]
    chance = random.Random(more)
    kills = 0
    for _ in range(6):
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.2, 0.7))
        process.kill()
        kills += process.wait() != 0
        assert outputs(directory).items() <= expected.items()
    (directory / "run.py").write_text(program(more=more))
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    assert kills
    assert outputs(directory) == expected
    assert not (directory / "out.stage").exists()


def test_a_shard_that_is_not_finished_does_not_count(directory, monkeypatch):
    expected = uninterrupted(directory)

    def killed(writer):
        writer.close()
        raise KeyboardInterrupt

    spec = conversion(directory, append_eod=True, json_keys=("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", killed)
        patch.setattr("megatron.data.preprocessing.preprocess.remove_folders", lambda folders: None)
        with pytest.raises(KeyboardInterrupt):
            preprocess(spec)
    assert (directory / "out.stage" / "000000" / "0.bin").stat().st_size
    preprocess(replace(spec, resume=True))
    assert outputs(directory) == expected


def test_a_full_disk_publishes_nothing_and_can_be_mended(directory):
    expected = uninterrupted(directory)
    (directory / "run.py").write_text(program())
    command = [sys.executable, str(directory / "run.py")]
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)),
    )
    assert done.returncode == 1
    assert "out.stage/000000: File too large" in done.stderr
    assert outputs(directory) == {}
    subprocess.run(command, cwd=directory, check=True)
    assert outputs(directory) == expected


class Fails(BytesTokenizer):
    """Bytes, but for one text."""

    def encode(self, text):
        if text == "kill":
            raise DataError("the text that kills")
        return super().encode(text)


@pytest.mark.parametrize("kind", ["gzip", "pipe"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_packed_input_is_resumed_shard_by_shard(directory, stdin, kind, workers):
    path = directory / "a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[150] = '{"a": "kill", "b": "b"}\n'
    path.write_text("".join(lines))
    expected = uninterrupted(directory)
    path.write_bytes(gzip.compress(path.read_bytes()))
    spec = conversion(directory, append_eod=True, json_keys=("a", "b"), shard_bytes=200)
    if kind == "pipe":
        spec = replace(spec, inputs=("-",))

    def run(spec):
        stdin(path)
        preprocess(spec)

    with problem("line 151: the text that kills", DataError):
        run(replace(spec, make_encoder=Fails, workers=workers))
    assert len([*directory.glob("out.stage/*/finished.json")]) > 3
    run(replace(spec, workers=workers))
    assert outputs(directory) == expected


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_resumed_run_logs_the_shards_it_skips_and_counts_each_byte_once(
    directory, caplog, monkeypatch, is_packed
):
    path = directory / "a.jsonl"
    if is_packed:
        path.write_bytes(gzip.compress(path.read_bytes(), compresslevel=0))
    spec = conversion(directory, shard_bytes=1500)
    num_bytes = []

    class Counting(Progress):
        def add(self, documents, tokens, num):
            super().add(documents, tokens, num)
            num_bytes.append(self.bytes)

    monkeypatch.setattr("megatron.data.preprocessing.preprocess.Progress", Counting)
    convert_share(spec, 0, 1)
    finished = sorted((directory / "out.stage").glob("*/finished.json"))
    finished[-1].unlink()
    finished[-2].unlink()
    with caplog.at_level("INFO", "megatron"):
        convert_share(spec, 0, 1)
    assert f"--resume: skips {len(finished) - 2} finished shards" in caplog.text
    assert num_bytes[-1] == pytest.approx(path.stat().st_size, rel=0.01)


@pytest.mark.parametrize("name", ["0.bin", "0.sizes", "0.hashes"])
def test_a_shard_whose_content_a_power_failure_took_is_converted_again(directory, caplog, name):
    """Its length is as recorded, and what had not reached the disk is zero."""
    spec = conversion(directory)
    preprocess(replace(spec, resume=False))
    expected = outputs(directory)
    convert_share(spec, 0, 1)
    damaged = directory / "out.stage" / "000001" / name
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with problem("1 of … out.stage … 000001 … --resume", DataError):
        merge_shards(spec)
    assert f"out.stage/000001 counts as not finished: {name} is not what was written" in caplog.text
    preprocess(spec)
    assert outputs(directory) == expected


@pytest.mark.parametrize("keep", [None, 4])
@pytest.mark.parametrize("name", ["0.sizes", "0.hashes", "0.counts", "1.bin", "finished.json"])
def test_a_damaged_shard_counts_as_not_finished(directory, caplog, name, keep):
    pytest.importorskip("nltk.tokenize.punkt")
    spec = conversion(directory, json_keys=("a", "b"), split_sentences=True)
    preprocess(replace(spec, resume=False))
    expected = outputs(directory)
    convert_share(spec, 0, 1)
    for path in directory.glob("out_*"):
        path.unlink()
    damaged = directory / "out.stage" / "000002" / name
    if keep is None and name in ("1.bin", "finished.json"):
        damaged.write_bytes(b"")
    elif keep is None:
        damaged.unlink()
    else:
        os.truncate(damaged, keep)
    with problem("1 of … out.stage … 000002 … --resume", DataError):
        merge_shards(spec)
    assert f"out.stage/000002 counts as not finished: {name} " in caplog.text
    convert_share(spec, 0, 1)
    merge_shards(spec)
    assert outputs(directory) == expected


def test_a_damaged_piece_of_a_packed_input_is_converted_again(directory):
    path = directory / "a.jsonl"
    path.write_bytes(gzip.compress(path.read_bytes()))
    spec = conversion(directory, shard_bytes=200)
    preprocess(replace(spec, resume=False))
    expected = outputs(directory)
    convert_share(spec, 0, 1)
    os.truncate(directory / "out.stage" / "000000-000003" / "0.sizes", 4)
    with problem("1 of 1 … out.stage … 000000 … --resume", DataError):
        merge_shards(spec)
    preprocess(spec)
    assert outputs(directory) == expected


def test_finished_shards_are_those_of_any_number_of_ranks_and_workers(directory):
    spec = conversion(directory, append_eod=True, json_keys=("a", "b"))
    expected = uninterrupted(directory)
    convert_share(spec, 0, 2)
    convert_share(spec, 2, 3)
    marker = directory / "out.stage" / "000000" / "finished.json"
    before = marker.stat().st_mtime_ns
    convert_share(replace(spec, workers=2), 0, 1)
    assert marker.stat().st_mtime_ns == before
    preprocess(spec)
    assert outputs(directory) == expected


def test_two_runs_do_not_write_to_one_stage(directory):
    (directory / "run.py").write_text(program(pause=0.05))
    command = [sys.executable, str(directory / "run.py")]
    first = subprocess.Popen(command, cwd=directory)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "out.stage" / "000000").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with problem("another process … out.stage … --output-prefix", DataError):
            preprocess(conversion(directory))
    finally:
        first.kill()
        first.wait()
