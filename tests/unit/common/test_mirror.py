"""A mirror downloads each file once, and again after another took its place or an attempt failed."""

import os
import time
from pathlib import Path

import pytest

from megatron.common.mirror import first_of, mirror, read_record
from megatron.common.remote_files import download, remove, write_text

NAMES = ("a", "b/c")


@pytest.fixture
def update(tmp_path):
    """Return a function that mirrors a folder with files `NAMES`, and lists what it downloads."""
    origin, local = f"file://{tmp_path}/there/", f"{tmp_path}/here/"
    for name in NAMES:
        write_text(origin + name, f"first {name}")

    def update(names=NAMES, failing=""):
        downloaded = []

        def get(url, file):
            if url == f"{origin}{failing}":
                raise OSError(110, "cut")
            downloaded.append(url.removeprefix(origin))
            download(url, file)

        mirror(origin, local, names, tmp_path / "record", get=get)
        return downloaded

    update.origin, update.local = origin, Path(local)
    return update


def test_files_are_downloaded_once_and_those_that_changed_again(update):
    assert update() == ["a", "b/c"]
    assert update() == []
    write_text(f"{update.origin}b/c", "another one")
    assert update() == ["b/c"]
    assert (update.local / "b/c").read_text() == "another one"
    (update.local / "a").unlink()
    assert update() == ["a"]


def test_a_download_that_failed_counts_for_no_file(update, tmp_path):
    update()
    for name in NAMES:
        write_text(update.origin + name, f"another {name}")
    with pytest.raises(OSError, match="cut"):
        update(failing="b/c")
    assert read_record(tmp_path / "record")["identities"].keys() == {"a"}
    assert update() == ["b/c"]


def test_files_that_are_gone_at_the_url_are_removed(update):
    update()
    remove(f"{update.origin}a")
    assert update(["b/c"]) == []
    assert not (update.local / "a").exists()


def test_a_missing_file_is_an_error(update):
    with pytest.raises(FileNotFoundError, match="there/none"):
        update(["none"])


def test_a_task_is_done_again_whatever_time_a_clock_that_ran_ahead_left(tmp_path):
    lock = tmp_path / "lock"
    with first_of(lock, "task") as is_first:
        assert is_first
    os.utime(lock, (time.time() + 3600,) * 2)
    with first_of(lock, "task") as is_first:
        assert is_first
