"""Process groups, async copies, the doctor and lost ranks on GPUs."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from test_gpu_runs import RUN, environment, losses_of, write_corpus
from torch.testing import assert_close
from trainings import REPOSITORY, network_of

HANG_TIMEOUT_S = 30


def test_collectives_of_one_rank(device):
    group = dist.new_group([0])
    x = torch.arange(5.0, device=device)
    for collective in (dist.all_reduce, lambda y, group: dist.broadcast(y, 0, group=group)):
        y = x.clone()
        collective(y, group=group)
        assert torch.equal(x, y)
    box = [{"state": 3}]
    dist.broadcast_object_list(box, src=0, group=group, device=device)
    assert box == [{"state": 3}]


def test_async_saves_copy_to_the_host(device):
    """Not to pinned memory, of which there is little: that is what pieces are copied through."""
    from megatron.checkpointing.writer import HostCopies, PinnedPieces

    x = torch.randn(1000, 37, device=device)
    state = {"x": x, "view": x[3:], "list": [x.half(), 4]}
    copied = HostCopies().copy(state)
    assert copied["x"].device.type == "cpu"
    assert not copied["x"].is_pinned()
    assert copied["view"].untyped_storage().data_ptr() == copied["x"].untyped_storage().data_ptr()
    assert_close(copied, {"x": x.cpu(), "view": x[3:].cpu(), "list": [x.half().cpu(), 4]})
    if device.type == "cuda":
        source = x.view(torch.uint8).flatten()
        target = torch.empty_like(source, device="cpu")
        PinnedPieces(1 << 14).copy(source, target)
        assert torch.equal(target, source.cpu())


def test_the_doctor_finds_no_problem_but_of_versions(gpu, tmp_path, record_property):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "tools/doctor.py", "--path", str(tmp_path), "--json", str(report)],
        cwd=REPOSITORY,
        env=environment(gpu.type),
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    found = [one["problem"] for one in json.loads(report.read_text())["problems"]]
    versions = [problem for problem in found if "outside the supported range" in problem]
    record_property("versions", "; ".join(versions))
    assert found == versions


@pytest.fixture
def two_gpus(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return gpu


def launch(words, log):
    """Start pretrain_gpt.py on two GPUs."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    return subprocess.Popen(
        [sys.executable, *launcher, "pretrain_gpt.py", *words],
        cwd=REPOSITORY,
        env=environment("cuda"),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def words_of(device, corpus, save, last, *flags):
    quiet = ("--attention-dropout", "0", "--hidden-dropout", "0")
    common = ("--train-iters", str(last), "--data-path", corpus, "--save", str(save))
    return (*network_of(device), *RUN, *quiet, *common, *flags)


def test_layouts_of_two_gpus_train_the_same(two_gpus, tmp_path):
    corpus = write_corpus(tmp_path)
    layouts = {
        "dp": (),
        "tp": ("--tensor-model-parallel-size", "2"),
        "pp": ("--pipeline-model-parallel-size", "2"),
    }
    losses = {}
    for name, flags in layouts.items():
        with (tmp_path / f"{name}.log").open("w+") as log:
            words = words_of(two_gpus, corpus, tmp_path / name, 8, *flags)
            assert launch(words, log).wait() == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        losses[name] = losses_of(tmp_path / name)
    for name in layouts:
        assert_close(losses[name], losses["dp"], rtol=2e-2, atol=0, msg=name)


def test_a_lost_rank_ends_the_others(two_gpus, tmp_path, record_property):
    corpus, save = write_corpus(tmp_path), tmp_path / "save"
    flags = ("--hang-timeout", str(HANG_TIMEOUT_S), "--save-interval", "100000")
    log_file = tmp_path / "log"
    with log_file.open("w") as log:
        job = launch(words_of(two_gpus, corpus, save, 1_000_000, *flags), log)
        try:
            while not (save / "journal.jsonl").exists() or len(losses_of(save)) < 5:
                assert job.poll() is None, log_file.read_text()[-3000:]
                time.sleep(0.5)
            psutil.Process(job.pid).children()[-1].kill()
            killed_at = time.monotonic()
            code = job.wait(HANG_TIMEOUT_S + 60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    record_property("seconds to the end", round(time.monotonic() - killed_at, 1))
    assert code != 0
