"""Checkpoints at URLs: uploaded with the manifest last, downloaded and verified, pruned, set aside."""

import logging
import os
import shutil
import time
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from object_store import BUCKET, SECRET
from problems import problem
from steps import step
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import MANIFEST, names_in, published_tags
from megatron.checkpointing.megatron_lm.detect import system_of
from megatron.checkpointing.remote import (
    fetch,
    local_checkpoint,
    local_directory,
    local_folder,
    pending_uploads,
    remote_tags,
    set_aside,
)
from megatron.checkpointing.train_state import TrainState
from megatron.common import mirror, remote_files
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.common.remote_files import (
    find_files,
    read_bytes,
    remove,
    upload,
    upload_all,
    write_text,
)
from megatron.config.run.urls import UrlConfig
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.checkpoints.save_directory import require_own
from megatron.training.prepare import with_local_checkpoints


@pytest.fixture
def remote(job, store, tmp_path):
    """The run of `job`, whose directory stands for a URL; `elsewhere` starts it on another machine."""

    class Remote:
        url = f"{BUCKET}/{tmp_path.name}"

        def __init__(self):
            self.machines = 0
            self.elsewhere()

        def elsewhere(self, *flags):
            self.machines += 1
            cache = tmp_path / f"machine{self.machines}"
            job.directory = Path(local_directory(self.url, cache, flag="--save"))
            return self.start(*flags)

        def start(self, *flags):
            job.flags = ["--save", str(job.directory), "--load", str(job.directory), *flags]
            fetch(job.directory)
            state = job.resume()
            self.engine, self.plan = job.engine, tiny_plan(*job.flags)
            job.checkpoints = Checkpoints(
                job.engine, self.plan, tiny_config(*job.flags), saved=state.iteration or -1
            )
            return state.iteration

        def save(self, iteration):
            job.engine.module.weight.data.add_(1)
            job.save(iteration)

        def follow(self, iteration):
            job.checkpoints.after_step(TrainState(iteration=iteration), step(1.0))

        directory = property(lambda self: job.directory)
        checkpoints = property(lambda self: job.checkpoints)

    return Remote()


def test_a_save_is_uploaded_and_another_machine_goes_on_from_it(remote, store, caplog):
    with caplog.at_level(logging.INFO, logger="megatron"):
        remote.save(5)
        remote.save(10)
        remote.checkpoints.verify()
        assert remote_tags(remote.url) == ["global_step10", "global_step5"]
        assert read_bytes(f"{remote.url}/latest") == b"global_step10"
        here = remote.directory / "global_step10"
        for name in ("more.txt", "weights.pt", MANIFEST):
            assert read_bytes(f"{remote.url}/global_step10/{name}") == (here / name).read_bytes()
        store.proxy.cut_next(2, after=300)
        assert remote.elsewhere() == 10
        assert store.proxy.cut == 2
        assert published_tags(remote.directory) == ["global_step10"]
    assert SECRET not in caplog.text
    assert "AKIA" not in caplog.text


@pytest.fixture
def no_answers(store, repeats):
    """Return a `with` block in which each connection to the store is cut."""

    @contextmanager
    def cut():
        usual = remote_files.ATTEMPTS
        repeats(attempts=1)
        store.proxy.cut_next(10**9, after=0)
        yield
        store.proxy.cut_next(0, after=0)
        repeats(attempts=usual)

    return cut


def test_the_manifest_is_uploaded_last(remote, monkeypatch):
    order = []

    def noted(file, url):
        order.append(file.name)
        upload(file, url)

    monkeypatch.setattr(remote_files, "upload", noted)
    remote.save(5)
    assert sorted(order[:-2]) == ["more.txt", "weights.pt"]
    assert order[-2:] == [MANIFEST, "latest"]


def test_a_run_killed_while_uploading_leaves_the_previous_checkpoint(remote, no_answers):
    remote.save(5)
    with no_answers():  # the upload of the next one is left to this test
        remote.save(10)
    killed_at = pending_uploads(remote.directory)[0][:1]
    assert [file.parent.name for file, _ in killed_at] == ["global_step10"]
    upload_all(killed_at)
    assert remote.elsewhere() == 5
    remote.save(10)
    assert remote_tags(remote.url) == ["global_step10", "global_step5"]
    assert remote.elsewhere() == 10


def test_what_was_not_uploaded_is_by_the_next_save_or_at_the_end(remote, no_answers, caplog):
    remote.save(5)
    with no_answers():
        remote.save(10)
        assert "is not uploaded to" in caplog.text
        with problem("global_step10 … not uploaded … --save", CheckpointError):
            remote.checkpoints.verify()
    assert remote_tags(remote.url) == ["global_step5"]
    assert remote.start() == 10  # on the same machine
    remote.checkpoints.verify()
    assert remote_tags(remote.url) == ["global_step10", "global_step5"]


def test_outdated_checkpoints_are_removed_at_the_url_too(remote):
    remote.save(5)
    remote.save(10)
    write_text(f"{remote.url}/global_step5/keep", "")
    assert remote.elsewhere("--keep-last", "1") == 10
    for iteration in (15, 20):
        remote.save(iteration)
        remote.follow(iteration + 1)
    assert remote_tags(remote.url) == ["global_step20", "global_step10", "global_step5"]
    assert remote.elsewhere("--keep-last", "1") == 20
    remote.save(25)
    remote.follow(26)
    assert remote_tags(remote.url) == ["global_step25", "global_step20", "global_step5"]
    assert not find_files(f"{remote.url}/global_step10")


def test_a_damaged_checkpoint_at_the_url_is_passed_over_and_of_the_cache_replaced(remote, caplog):
    remote.save(5)
    remote.save(10)
    (remote.directory / "global_step10" / "weights.pt").write_bytes(b"damaged")
    assert remote.start() == 10
    write_text(f"{remote.url}/global_step10/weights.pt", "damaged")
    assert remote.elsewhere() == 5
    assert "global_step10 is skipped" in caplog.text


def test_an_interrupted_download_goes_on_with_the_files_that_are_complete(remote, monkeypatch):
    remote.save(5)
    from megatron.checkpointing import remote as module

    loaded = []

    def interrupted(url, file):
        loaded.append(file.name)
        if len(loaded) == 2:
            raise KeyboardInterrupt
        remote_files.download(url, file)

    monkeypatch.setattr(module, "download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remote.elsewhere()
    assert remote.start() == 5
    assert loaded == ["more.txt", "weights.pt", "weights.pt"]


def test_a_rollback_counts_at_the_url_too(remote):
    for iteration in (5, 10, 15):
        remote.save(iteration)
    set_aside(remote.directory, 5)
    assert remote_tags(remote.url) == ["global_step5"]
    assert f"global_step10/aside-{MANIFEST}" in find_files(remote.url)
    assert remote.start() == 5
    remote.save(10)
    assert remote.elsewhere() == 10


def test_checkpoints_that_the_url_does_not_have_any_more_are_not_resumed_from(remote):
    remote.save(5)
    remote.save(10)
    shutil.copytree(remote.directory / "global_step5", remote.directory / "global_step7")
    assert remote.start() == 10
    assert published_tags(remote.directory) == ["global_step10", "global_step5"]


def test_a_save_directory_at_a_url_with_checkpoints_of_another_run_is_refused(remote, tmp_path):
    remote.save(5)
    other = local_directory(remote.url, tmp_path / "other", flag="--save")
    with problem("--save … checkpoints … global_step5 … --load", WrongCheckpointError):
        require_own(tiny_plan("--save", other))


def test_flags_with_urls_become_local_directories(remote, tmp_path):
    remote.save(5)
    urls = UrlConfig(object_storage_cache_path=str(tmp_path / "cache"))
    from dataclasses import replace

    def config(*flags):
        return replace(tiny_config(*flags), urls=urls)

    found = with_local_checkpoints(config("--load", remote.url, "--save", f"{BUCKET}/new"))
    assert published_tags(Path(found.checkpoint.load)) == ["global_step5"]
    assert with_local_checkpoints(found) == found
    with problem(f"--load {BUCKET}/nothing … complete … --save", WrongCheckpointError):
        with_local_checkpoints(config("--load", f"{BUCKET}/nothing"))
    with problem("--save s3://bucket/run … password … environment"):
        with_local_checkpoints(config("--save", "s3://me:word@bucket/run"))


def test_an_export_is_uploaded_and_downloaded_with_all_files(store, tmp_path):
    url, cache = f"{BUCKET}/{tmp_path.name}/model", tmp_path / "cache"
    files = {"config.json": "{}", "more/weights": "w" * 1000, "tokenizer.json": "[]"}
    with local_folder(url, cache) as output:
        for name, text in files.items():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text)
    assert find_files(url) == {name: len(text) for name, text in files.items()}
    assert not list(cache.iterdir())
    with problem("--save … /model … files", WrongCheckpointError), local_folder(url, cache):
        raise AssertionError("not reached")
    found = local_checkpoint(url, cache)
    assert {name: (found / name).read_text() for name in files} == files
    with problem("--load … /nothing … no complete checkpoint", WrongCheckpointError):
        local_checkpoint(f"{BUCKET}/nothing", cache)


def test_files_of_a_model_that_was_replaced_at_the_url_are_downloaded_again(store, tmp_path):
    url, cache = f"{BUCKET}/{tmp_path.name}/model", tmp_path / "cache"
    for name in ("config.json", "weights", "older"):
        write_text(f"{url}/{name}", "first")
    local_checkpoint(url, cache)
    write_text(f"{url}/weights", "other")  # as many bytes
    remove(f"{url}/older")
    found = local_checkpoint(url, cache)
    assert (found / "weights").read_text() == "other"
    assert not (found / "older").exists()
    assert (found / "config.json").read_text() == "first"


def test_processes_that_waited_for_a_download_take_it_and_others_do_not(
    remote, tmp_path, monkeypatch
):
    remote.save(5)
    directory = Path(local_directory(remote.url, tmp_path / "cache", flag="--load"))
    lock = directory / "fetch.lock"
    lock.touch()
    now = time.time()

    def fetch_after_waiting(written_at, **options):
        os.utime(lock, (written_at, written_at))
        times = chain([now - 1], repeat(now + 1))  # before the wait for the lock, and after
        with monkeypatch.context() as patch:
            patch.setattr(mirror, "time", SimpleNamespace(time=lambda: next(times)))
            fetch(directory, **options)
        found = published_tags(directory)
        shutil.rmtree(directory / "global_step5", ignore_errors=True)
        return found

    assert fetch_after_waiting(now) == ["global_step5"]  # one came first and has done nothing yet
    assert fetch_after_waiting(now) == []  # one has finished meanwhile
    assert fetch_after_waiting(now, step=5) == ["global_step5"]  # it was after the newest
    assert fetch_after_waiting(1, step=5) == ["global_step5"]  # it finished long ago


FOREIGN = {
    "megatron": {
        "latest_checkpointed_iteration.txt": "10",
        "iter_0000010/mp_rank_00/model_optim_rng.pt": "new",
        "iter_0000005/mp_rank_00/model_optim_rng.pt": None,
    },
    "bigscience": {
        "latest": "global_step10",
        "global_step10/layer_01-model_00-model_states.pt": "new",
        "global_step5/layer_01-model_00-model_states.pt": None,
    },
    "llama_meta": {"params.json": "{}", "consolidated.00.pth": "weights"},
}


@pytest.mark.parametrize("system", FOREIGN)
def test_the_newest_checkpoint_of_other_systems_is_downloaded(store, tmp_path, system):
    url = f"{BUCKET}/{tmp_path.name}/{system}"
    for name, text in FOREIGN[system].items():
        write_text(f"{url}/{name}", text or "older")
    with problem("--load … complete … tools/checkpoint/util.py", WrongCheckpointError):
        local_checkpoint(url, tmp_path)  # by what reads our own alone, and downloads no other
    found = local_checkpoint(url, tmp_path, foreign=True)
    assert system_of(found) == system
    expected = {name: text for name, text in FOREIGN[system].items() if text}
    names = {*names_in(found)} - {"url.json", "fetch.lock", "fetched.json"}
    assert {name: (found / name).read_text() for name in names} == expected


@pytest.mark.parametrize("hint", [b"global_step99", b"\xff"])
def test_all_checkpoints_of_a_folder_whose_newest_is_not_known_are_downloaded(
    store, tmp_path, hint
):
    url = f"{BUCKET}/{tmp_path.name}/damaged"
    names = ("global_step5", "global_step10")
    for name in names:
        write_text(f"{url}/{name}/layer_01-model_00-model_states.pt", "layer")
    (tmp_path / "latest").write_bytes(hint)
    upload(tmp_path / "latest", f"{url}/latest")
    found = local_checkpoint(url, tmp_path, foreign=True)
    assert all((found / name / "layer_01-model_00-model_states.pt").exists() for name in names)


def test_a_checkpoint_in_one_file_is_downloaded(store, tmp_path):
    url = f"{BUCKET}/{tmp_path.name}/tagger.nemo"
    write_text(url, "archive")
    found = local_checkpoint(url, tmp_path, foreign=True)
    assert found.name == "tagger.nemo"
    assert found.read_text() == "archive"
    assert system_of(found) == "nemo"
