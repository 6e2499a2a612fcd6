"""Worker processes of preprocessing: their start, threads, shards and progress."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import active_children, resource_tracker, util
from pathlib import Path

import pytest
from bytes_tokenizer import BytesTokenizer
from scripts import forget_plugin

from megatron.common.process_pool import map_in_processes
from megatron.common.registry import TOKENIZERS
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shards import plan_shards, shards_of_rank
from megatron.data.preprocessing.worker_counts import try_worker_counts
from megatron.data.readers.inputs import find_sources
from megatron.data.token_files.indexed_dataset import IndexedDataset


class Threads(BytesTokenizer):
    """A text is the number of threads that the tokenizers library would start."""

    def encode(self, text):
        return [int(os.environ["RAYON_NUM_THREADS"])]


@pytest.mark.parametrize(("workers", "threads"), [(2, 6), (1, 12)])
def test_the_processes_of_a_conversion_share_the_threads(tmp_path, monkeypatch, workers, threads):
    monkeypatch.setenv("RAYON_NUM_THREADS", "12")
    (tmp_path / "in.jsonl").write_text(4 * (json.dumps({"text": "a"}) + "\n"))
    options = PreprocessSpec(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=Threads,
        workers=workers,
        shard_bytes=20,
    )
    (written,) = preprocess(options)
    assert IndexedDataset(written.prefix).tokens[:].tolist() == [threads] * 4


def make_len():
    return len


@pytest.fixture
def at_start(monkeypatch):
    """Return a list to which a test adds what is called with the pid of each new process."""
    resource_tracker.ensure_running()  # not one of them
    called, start = [], util.spawnv_passfds

    def spawn(*words):
        pid = start(*words)
        for each in called:
            each(pid)
        return pid

    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    return called


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_worker_starts_waits_until_it_has(capfd, at_start, number):
    def leave(*_):
        raise KeyboardInterrupt

    earlier = signal.signal(number, leave)
    pids = []
    at_start += [pids.append, lambda _: os.kill(os.getpid(), number)]
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map_in_processes(make_len, ["a"], 2))
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, earlier)
    (worker,) = active_children()  # no second one
    assert pids == [worker.pid]
    worker.terminate()
    worker.join()
    assert capfd.readouterr().err == ""


def test_a_worker_is_not_interrupted_while_it_starts(at_start):
    at_start.append(lambda pid: os.kill(pid, signal.SIGINT))
    assert list(map_in_processes(make_len, ["a", "bc"], 2)) == [1, 2]


def test_a_trial_of_worker_counts_has_shards_for_every_worker(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text(100 * '{"text": "a"}\n')
    spec = PreprocessSpec(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
    )
    num_shards = []
    monkeypatch.setattr(
        "megatron.data.preprocessing.worker_counts.preprocess",
        lambda trial: num_shards.append(len(plan_shards(trial.sources(), trial.shard_bytes))),
    )
    list(try_worker_counts(spec, [1, 8], 100))
    assert min(num_shards) >= 4 * 8


def test_progress_beside_stdin_names_no_share_of_an_unknown_length(tmp_path, stdin, caplog):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    stdin(4 * '{"text": "a"}\n')
    spec = PreprocessSpec(
        inputs=("-", str(tmp_path / "in.jsonl")),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
        log_interval=1,
    )
    with caplog.at_level(logging.INFO, "megatron"):
        preprocess(spec)
    assert "documents: 5 |" in caplog.text
    assert "input:" not in caplog.text


def test_what_an_earlier_run_did_is_no_part_of_the_rates_whenever_it_is_added(clock, caplog):
    progress = Progress(0, log_interval=100)
    progress.add_earlier(documents=1000, tokens=0, num_bytes=0)
    clock.pass_time(10)
    progress.add(documents=50, tokens=0, num_bytes=0)
    progress.add_earlier(documents=1000, tokens=0, num_bytes=0)
    with caplog.at_level(logging.INFO, "megatron"):
        progress.add(documents=50, tokens=0, num_bytes=0)
    assert "documents: 2100 | tokens: 0 | documents/s: 10 |" in caplog.text


PLUGIN = """
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.null import NullTokenizer


class Letters(NullTokenizer):
    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


TOKENIZERS.register("letters")(lambda options: Letters(options.vocab_size))
"""


def test_workers_have_the_tokenizer_of_a_plugin(tmp_path):
    (tmp_path / "letters_plugin.py").write_text(PLUGIN)
    (tmp_path / "in.jsonl").write_text(4 * (json.dumps({"text": "abc"}) + "\n"))
    words = ["--plugin", tmp_path / "letters_plugin.py", "--tokenizer-type", "letters"]
    words += ["--vocab-size", 26, "--input", tmp_path / "in.jsonl", "--workers", 2]
    words += ["--output-prefix", tmp_path / "out"]
    try:
        command = read_flags([*map(str, words)], description="")
        (written,) = preprocess(replace(command.spec, shard_bytes=20))
    finally:
        forget_plugin("letters_plugin", TOKENIZERS, "letters")
    assert IndexedDataset(written.prefix)[3].tolist() == [0, 1, 2]


ROOT = Path(__file__).parents[4]
STREAMS = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from bytes_tokenizer import BytesTokenizer
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec

if __name__ == "__main__":
    preprocess(PreprocessSpec(inputs=tuple(sys.argv[1:]), output_prefix="out",
        make_encoder=BytesTokenizer, shard_bytes=200, json_keys=("a",), workers=2))
"""


@pytest.mark.parametrize("kinds", [["-", "gz"], ["pipe", "pipe"]])
def test_workers_convert_stdin_and_pipes_that_only_the_first_process_has(tmp_path, kinds):
    """There are as many packed inputs as workers, which could unpack one each if all were files."""
    here = str(ROOT / "tests")
    (tmp_path / "run.py").write_text(STREAMS.format(root=str(ROOT), here=here))
    texts = [f'{{"a": "{letter}"}}\n'.encode() * 50 for letter in "xy"]
    (tmp_path / "b.gz").write_bytes(gzip.compress(texts[1], compresslevel=0))
    inputs, pipes = [], []
    for kind, text in zip(kinds, texts, strict=True):
        if kind == "pipe":
            reading, writing = os.pipe()
            os.write(writing, text)
            os.close(writing)
            pipes.append(reading)
        inputs.append({"-": "-", "gz": "b.gz", "pipe": f"/dev/fd/{(pipes or [0])[-1]}"}[kind])
    subprocess.run(
        [sys.executable, "run.py", *inputs],
        cwd=tmp_path,
        input=texts[0],
        pass_fds=pipes,
        check=True,
    )
    for pipe in pipes:
        os.close(pipe)
    assert (tmp_path / "out_a_document.bin").read_bytes() == b"x\0" * 50 + b"y\0" * 50


def test_a_pipe_behind_files_belongs_to_the_only_rank(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n')
    os.mkfifo(tmp_path / "fifo")
    shards = plan_shards(find_sources([str(tmp_path / "a.jsonl"), str(tmp_path / "fifo")]))
    assert shards_of_rank(shards, 0, 1) == shards
