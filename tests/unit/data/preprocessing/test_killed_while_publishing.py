"""Preprocessing killed before any change of the disk, or on a full disk, gives the same files when resumed."""

import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from bytes_tokenizer import BytesTokenizer
from children import status_of_fork
from problems import problem, require_problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec

CHANGES = ("replace", "unlink", "fsync", "mkdir", "truncate", "rmdir")
SHARD = ("mkdir", "out.stage/")
"""First change of a shard, with the beginning of its path."""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Return a conversion of two keys and a bad line, with relative paths."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"a": "x" * (i % 31), "b": "y" * (i % 17)}) for i in range(100)]
    Path("a.jsonl").write_text("\n".join([*lines, "bad", *lines]))
    return PreprocessSpec(
        inputs=("a.jsonl",),
        output_prefix="out",
        make_encoder=BytesTokenizer,
        append_eod=True,
        json_keys=("a", "b"),
        record="newer",
        on_error="collect",
        bad_lines_path="out.bad",
        resume=True,
        shard_bytes=3000,  # of 9,000
    )


def full(spec):
    """Convert in one process."""
    preprocess(spec)


def in_shards(spec):
    """Convert in two parts, and join them."""
    for shard in (0, 1):
        convert_share(spec, shard, 2)
    merge_shards(spec)


def is_killed_before(change, function, *words):
    """Call `function` in a fork; whether that was killed before so many changes of the disk."""

    def in_fork():
        numbers = count()
        for name in CHANGES:
            setattr(os, name, dying(getattr(os, name), numbers, change))
        os.scandir = files_first
        function(*words)

    return status_of_fork(in_fork) == signal.SIGKILL


def files_first(folder, scandir=os.scandir):
    """List `folder` in the order in which removing it does most harm."""
    return nullcontext(sorted(scandir(folder), key=lambda entry: (entry.is_dir(), entry.name)))


def dying(function, numbers, last):
    """Return `function`, which kills this process when it comes to be number `last`."""

    def call(*words, **named):
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*words, **named)

    return call


def changes_of(function, *words):
    """Call `function`; return its changes of the disk, each with its arguments."""
    changes = []

    def recording(name, usual):
        def call(*words, **named):
            changes.append((name, *map(str, words)))
            return usual(*words, **named)

        return call

    with ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(patch.object(os, name, recording(name, getattr(os, name))))
        function(*words)
    return changes


def outputs():
    return {path.name: path.read_bytes() for path in Path().glob("out*") if path.is_file()}


def clear():
    for path in Path().glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("convert", [full, in_shards])
def test_a_kill_at_any_change_of_the_disk_is_mended(spec, convert):
    changes = changes_of(convert, spec)
    newer = outputs()
    older = {name: b"older" for name in newer if name.startswith("out_")}
    assert len(newer) == 10
    targets = [change[-1] for change in changes]
    publishing = range(targets.index("out.stage/publish.json"), targets.index("out.bad") + 1)
    kills = [(change, has_older) for change in publishing for has_older in (False, True)]
    # Of other changes every second: what is left out in one shard comes in the next.
    shards = [n for n, (name, path, *_) in enumerate(changes) if (name, path[:10]) == SHARD]
    assert {number % 2 for number in shards} == {0, 1}
    others = {*range(0, len(changes), 2)} - {*publishing}
    kills += [(change, change % 4 == 2) for change in sorted(others)]
    for change, has_older in kills:
        clear()
        if has_older:  # there is another pair already
            for name, content in older.items():
                Path(name).write_bytes(content)
        assert is_killed_before(change, convert, spec)
        found = outputs()
        for key in "ab":
            if f"out_{key}_document.idx" in found:
                triple = {name for name in older if name.startswith(f"out_{key}_")}
                kinds = [{name: kind[name] for name in triple} for kind in (newer, older)]
                assert {name: found.get(name) for name in triple} in kinds, change
        convert(spec)
        assert outputs() == newer, change
        assert not Path("out.stage").exists()
    assert len(changes) > 80


def test_a_kill_while_older_work_is_thrown_away_mixes_nothing(spec):
    full(spec)
    newer = outputs()
    clear()
    older = replace(spec, append_eod=False, record="older")
    for change in count(20):
        clear()
        assert is_killed_before(change, full, older)
        if Path("out_a_document.bin").exists():  # and its index is not
            break
    shutil.copytree(".", "../half")
    begin_again = replace(spec, resume=False)
    for change in range(30):
        clear()
        shutil.copytree("../half", ".", dirs_exist_ok=True)
        assert is_killed_before(change, full, begin_again)
        try:
            full(spec)
        except DataError as error:
            require_problem("document … nothing … 256", [str(error)])
            full(begin_again)
        assert outputs() == newer, change


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_publishes_nothing_and_the_run_goes_on_when_there_is_room(spec, small_disk):
    full(spec)
    on_disk = replace(spec, output_prefix=str(small_disk / "out"), bad_lines_path=None)
    (small_disk / "out_a_document.idx").write_bytes(b"older")
    with problem("write … No space left on device", DataError):
        preprocess(on_disk)
    assert [path.name for path in small_disk.glob("out_*")] == ["out_a_document.idx"]
    for size in ("60k", "80k", "100k", "1m"):  # full at other moments, too
        subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)
        try:
            preprocess(on_disk)
        except DataError as error:
            assert "No space left on device" in str(error)
            assert not (small_disk / "out_a_document.bin").exists()
    for path in small_disk.glob("out_*"):
        assert path.read_bytes() == Path(path.name).read_bytes()
    assert len(list(small_disk.iterdir())) == 9
