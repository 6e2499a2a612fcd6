"""Worker processes, beside one another on the cores of one machine."""

import json
import logging
import os
import signal
import sys
from dataclasses import replace
from itertools import count
from multiprocessing import active_children, resource_tracker, util

import pytest
from bytes_tokenizer import BytesTokenizer

from megatron.common.process_pool import map_in_processes
from megatron.common.registry import TOKENIZERS
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shards import plan_shards
from megatron.data.preprocessing.worker_counts import try_worker_counts
from megatron.data.token_files.indexed_dataset import IndexedDataset


class Threads(BytesTokenizer):
    """A text is the number of threads that the tokenizers library would start."""

    def encode(self, text):
        return [int(os.environ["RAYON_NUM_THREADS"])]


@pytest.mark.parametrize(("workers", "threads"), [(2, 6), (1, 12)])
def test_the_processes_of_a_conversion_share_the_threads(tmp_path, monkeypatch, workers, threads):
    monkeypatch.setenv("RAYON_NUM_THREADS", "12")
    (tmp_path / "in.jsonl").write_text(4 * (json.dumps({"text": "a"}) + "\n"))
    wishes = PreprocessSpec(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=Threads,
        workers=workers,
        shard_bytes=20,
    )
    (written,) = preprocess(wishes)
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
def test_a_signal_while_a_worker_starts_waits_until_it_has(monkeypatch, capfd, at_start, number):
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


def test_progress_beside_stdin_names_no_share_of_an_unknown_length(tmp_path, monkeypatch, caplog):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "stdin").write_text(4 * '{"text": "a"}\n')
    spec = PreprocessSpec(
        inputs=("-", str(tmp_path / "in.jsonl")),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
        log_interval=1,
    )
    with (tmp_path / "stdin").open() as stdin, caplog.at_level(logging.INFO, "megatron"):
        monkeypatch.setattr("sys.stdin", stdin)
        preprocess(spec)
    assert "documents: 5 |" in caplog.text
    assert "input:" not in caplog.text


def test_what_an_earlier_run_did_is_no_part_of_the_rates_whenever_it_is_told(monkeypatch, caplog):
    seconds = count()
    monkeypatch.setattr(
        "megatron.data.preprocessing.progress.time.monotonic", lambda: 10 * next(seconds)
    )
    progress = Progress(0, log_interval=100)
    progress.add_earlier(documents=1000, tokens=0, num_bytes=0)
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
        TOKENIZERS._entries.pop("letters", None)
        sys.modules.pop("letters_plugin", None)
    assert IndexedDataset(written.prefix)[3].tolist() == [0, 1, 2]
