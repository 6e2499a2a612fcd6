"""A run under torch's launcher whose second node is lost and comes back."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked import steps
from jobs import PRETRAIN, Corpus, clean_environment, start_ranks
from ports import free_port
from quick_python import write_launchers

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.training.loop.journal import starts_of

RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2"),
    *("--lr", "1e-3", "--train-iters", "100", "--eval-iters", "0", "--save-interval", "5"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--zero-stage", "1", "--device", "cpu"),
    *("--elastic", "--log-interval", "1"),
]
TIMEOUT_S = 300


def wait_until(happens: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not happens():
        assert time.monotonic() < give_up_at
        time.sleep(0.2)


def test_a_run_continues_on_the_nodes_that_are_left_and_on_those_that_return(
    corpus: Corpus, tmp_path: Path
) -> None:
    save, calm, pace = tmp_path / "lost", tmp_path / "calm", tmp_path / "pace.yaml"
    flags = [*RUN, *corpus.flags, "--save", str(save), "--load", str(save), "--config", str(pace)]
    pace.write_text("chaos: seed=0,stall=1,stall_s=0.5\n")
    conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = [*("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1")]
    words += ["--max-restarts", "9", "--rdzv_backend", "c10d", "--rdzv_id", "run"]
    words += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--local_addr", "127.0.0.1"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environment = clean_environment() | variables | {"GLOO_SOCKET_IFNAME": "lo"}

    # Ranks are forks, which end with the programs that the launcher starts and kills.
    program = str(write_launchers(tmp_path / "launchers", port=str(free_port())) / "python")

    def node() -> subprocess.Popen[bytes]:
        command = [sys.executable, *words, "--rdzv_conf", conf, "--no-python", program]
        command += [PRETRAIN, *flags]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def begun() -> int:
        return len([*starts_of(save)]) if (save / "journal.jsonl").exists() else 0

    nodes = []
    with (tmp_path / "log").open("wb") as log:
        try:
            nodes.append(node())
            time.sleep(2)  # the first hosts the store
            nodes.append(node())
            # The first may have begun alone.
            wait_until(lambda: (save / "latest").exists() and replicas_of(save) == 2)
            count = begun()
            for process in [psutil.Process(nodes[1].pid), *processes_of(nodes[1])]:
                process.kill()
            wait_until(lambda: begun() > count)
            pace.write_text("chaos: seed=0,stall=0\n")
            nodes.append(node())
            assert [nodes[i].wait(TIMEOUT_S) for i in (0, 2)] == [0, 0]
        finally:
            for launcher in nodes:
                for process in processes_of(launcher):
                    process.kill()
                launcher.kill()
                launcher.wait()
    printed = (tmp_path / "log").read_text()
    assert "resumed on 1 replicas instead of 2: gradient accumulation 2 instead of 1" in printed
    assert "resumed on 2 replicas instead of 1: gradient accumulation 1 instead of 2" in printed
    start_ranks(2, *RUN, *corpus.flags, "--save", str(calm)).succeeded()
    # The same samples; the norm of a divided gradient is summed in another order.
    taken, expected = steps(save), steps(calm)
    for name in ("iteration", "first_sample", "samples", "tokens", "learning_rate"):
        assert [step[name] for step in taken] == [step[name] for step in expected]
    for name in ("lm_loss", "grad_norm"):
        assert [s[name] for s in taken] == pytest.approx([s[name] for s in expected], rel=1e-4)


def replicas_of(save: Path) -> int:
    return read_manifest(checkpoint_of(save)).parallel.data


def processes_of(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
