"""Runs of pretrain_gpt.py on a GPU: killed and resumed, moved to a CPU and back, profiled, served."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jobs import start_ranks
from torch.testing import assert_close
from trainings import REPOSITORY, VOCAB_SIZE, network_of

from megatron.data.token_files.index_files import IndexContent, write_mmap_index

LAST, SAVE_INTERVAL = 12, 4
KILLS_AT_11 = "seed=239,kill=0.15"
"""Of --chaos: kills the first attempt at iteration 11, and the second never.

Then the checkpoint of iteration 4 is whole on the slowest machine: that of 8 waited for it.
"""
RUN = (
    *("--bf16", "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--async-save"),
    *("--lr", "1e-3", "--split", "1,0,0", "--log-interval", "1"),
    *("--save-interval", str(SAVE_INTERVAL), "--global-batch-size", "8"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder):
    """Write token files of random tokens; return their prefix."""
    prefix, sizes = folder / "random", np.full(200, 700)
    tokens = np.random.default_rng(1).integers(VOCAB_SIZE, size=int(sizes.sum()))
    prefix.with_suffix(".bin").write_bytes(tokens.astype("<u2").tobytes())
    content = IndexContent(
        dtype=np.dtype("<u2"),
        num_sequences=len(sizes),
        num_documents=len(sizes),
        sizes=lambda: iter([sizes]),
        document_starts=lambda: iter([np.arange(len(sizes) + 1)]),
    )
    with prefix.with_suffix(".idx").open("wb") as file:
        write_mmap_index(file, content)
    return str(prefix)


def environment(kind):
    """Return the variables of a process of one rank on `kind`."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | ({"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})


@pytest.fixture(scope="module")
def pretrain(device, corpus):
    """Return a function that runs pretrain_gpt.py and returns exit code and output."""

    def run(*flags, kind=device.type, last=LAST):
        words = (*network_of(device), *RUN, "--train-iters", str(last), "--data-path", corpus)
        words += ("--device", kind, *flags)
        if device.type == "cpu":
            finished = start_ranks(1, *words)
            return finished.codes[0], finished.outputs[0]
        done = subprocess.run(
            [sys.executable, "pretrain_gpt.py", *words],
            cwd=REPOSITORY,
            env=environment(kind),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def succeed(result):
    code, output = result
    assert code == 0, output[-3000:]
    return output


def losses_of(save):
    """Return the loss of each iteration, that of the last attempt."""
    lines = (save / "journal.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["event"] == "train"]
    return {record["iteration"]: record["lm_loss"] for record in records}


@pytest.fixture(scope="module")
def unbroken(pretrain, tmp_path_factory, device):
    """Directories of uninterrupted runs by mode, started at once."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, *flags):
        succeed(pretrain("--save", str(folder / name), *flags))
        return folder / name

    trace = ("--profile", "--profile-step-start", "3", "--profile-step-end", "4")
    trace += ("--profile-dir", str(folder / "traces"))
    if device.type == "cpu":
        return {"": run("plain", *trace)}
    with ThreadPoolExecutor() as pool:
        deterministic = pool.submit(run, "deterministic", "--deterministic-mode")
        plain = pool.submit(run, "plain", *trace)
        return {"--deterministic-mode": deterministic.result(), "": plain.result()}


@pytest.mark.parametrize("mode", ["--deterministic-mode", ""])
def test_a_killed_run_resumes_where_it_was(
    mode, unbroken, pretrain, tmp_path, device, record_property
):
    """Bit for bit with --deterministic-mode, which makes attention's backward pass reproducible."""
    if mode not in unbroken:
        pytest.skip("needs a GPU: a CPU is deterministic without it")
    chaos = ("--chaos", KILLS_AT_11)
    flags = (*mode.split(), *chaos, "--save", str(tmp_path), "--load", str(tmp_path))
    code, output = pretrain(*flags)
    assert code == -signal.SIGKILL, output[-3000:]
    assert 10 in losses_of(tmp_path)
    output = succeed(pretrain(*flags))
    assert "successfully loaded checkpoint" in output
    expected, found = losses_of(unbroken[mode]), losses_of(tmp_path)
    assert len(found) == LAST
    record_property("losses equal bit for bit", found == expected)
    if mode or device.type == "cpu":
        assert found == expected
    assert_close(found, expected, rtol=1e-2, atol=0)


def test_a_profile_is_written(unbroken, device):
    (trace,) = (unbroken[""].parent / "traces").glob("*.json")
    categories = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert ("kernel" if device.type == "cuda" else "cpu_op") in categories


def test_checkpoints_move_to_a_cpu_and_back(gpu, unbroken, pretrain, tmp_path):
    moves = ("--no-load-rng", "--attention-dropout", "0", "--hidden-dropout", "0")
    there = ("--load", str(unbroken[""]), "--save", str(tmp_path / "there"), *moves)
    here = ("--load", str(unbroken[""]), "--save", str(tmp_path / "here"), *moves)
    back = ("--load", str(tmp_path / "there"), "--save", str(tmp_path / "back"), *moves)
    succeed(pretrain(*there, kind="cpu", last=LAST + 2))
    succeed(pretrain(*here, last=LAST + 4))
    succeed(pretrain(*back, last=LAST + 4))
    on_cpu, on_gpu = losses_of(tmp_path / "there"), losses_of(tmp_path / "here")
    both = {i: on_gpu[i] for i in (LAST + 1, LAST + 2)}
    assert_close({i: on_cpu[i] for i in both}, both, rtol=1e-2, atol=0)
    last = {i: on_gpu[i] for i in (LAST + 3, LAST + 4)}
    assert_close({i: losses_of(tmp_path / "back")[i] for i in last}, last, rtol=1e-2, atol=0)


def test_a_server_answers_from_a_checkpoint(unbroken, device, tmp_path, record_property):
    words = ("--load", str(unbroken[""]), "--bf16", "--port", "0", "--device", device.type)
    log = tmp_path / "server.log"
    started_at = time.monotonic()
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "tools/run_text_generation_server.py", *words],
            cwd=REPOSITORY,
            env=environment(device.type),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        address = address_in(log, server)
        body = json.dumps({"prompts": ["1 2 3"], "tokens_to_generate": 5, "top_k": 1})
        request = urllib.request.Request(
            f"{address}/api", body.encode(), {"Content-Type": "application/json"}, method="PUT"
        )
        with urllib.request.urlopen(request, timeout=100) as reply:
            (text,) = json.load(reply)["text"]
        record_property("seconds to the first answer", round(time.monotonic() - started_at, 1))
    finally:
        server.terminate()
        server.wait(60)
    assert text.startswith("1 2 3") and len(text.split()) == 8


def address_in(log, server):
    """Return the address that a server prints once it listens."""
    while server.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://"):
                return word.rstrip("/.,")
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])
