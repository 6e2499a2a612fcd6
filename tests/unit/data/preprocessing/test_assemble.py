"""Joined shards are published completely, once, with the record of their tokenizer, or not at all."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from preprocessing_runs import Killed, conversion, killed_before_rename_of, outputs, uninterrupted
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.data.token_files.indexed_dataset import IndexedDataset


@pytest.mark.parametrize("suffix", ["document.bin", "document.idx", "out.report.json"])
def test_what_is_assembled_is_not_published_for_other_options(directory, monkeypatch, suffix):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, suffix):
        preprocess(spec)
    with problem("another run … nothing … 256", DataError):
        preprocess(replace(spec, append_eod=True))
    with problem("another run … --dataset-impl … 'mmap' … 'lazy'", DataError):
        preprocess(replace(spec, dataset_impl="lazy"))
    with problem("another run … --on-error collect … 'bad'", DataError):
        preprocess(replace(spec, on_error="collect", bad_lines_path="bad"))
    path = directory / "a.jsonl"
    status = path.stat()
    os.utime(path, ns=(0, 0))
    with problem("another run … --input … a.jsonl … changed", DataError):
        preprocess(spec)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    preprocess(spec)
    assert len(IndexedDataset(directory / "out_a_document")) == 290
    assert not (directory / "out.stage").exists()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("suffix", ["document.bin", "document.idx"])
def test_new_shards_win_over_what_an_earlier_merge_assembled(
    directory, monkeypatch, num_shards, suffix
):
    spec = conversion(directory)
    for shard in range(num_shards):
        convert_share(spec, shard, num_shards)
    with killed_before_rename_of(monkeypatch, suffix):
        merge_shards(spec)
    (directory / "a.jsonl").write_text('{"a": "new"}\n' * 20)
    with problem("another run … --input … a.jsonl … 260", DataError):
        merge_shards(spec)
    with problem("another run … --input … a.jsonl … 260", DataError):
        convert_share(spec, 0, num_shards)
    for shard in range(num_shards):
        convert_share(replace(spec, resume=False), shard, num_shards)
    merge_shards(spec)
    assert (directory / "out_a_document.bin").read_bytes() == b"n\0e\0w\0" * 20
    assert len(IndexedDataset(directory / "out_a_document")) == 20


def test_shards_that_are_assembled_have_nothing_to_resume(directory, monkeypatch):
    spec = conversion(directory)
    convert_share(spec, 0, 1)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        merge_shards(spec)
    assert not (directory / "out.stage" / "000000" / "0.bin").exists()
    convert_share(spec, 0, 1)
    assert merge_shards(spec)[0].documents == 290


def test_what_is_assembled_goes_before_the_parts_it_is_of(directory, monkeypatch):
    """Otherwise a run that is killed in between publishes an index without its tokens."""
    spec = conversion(directory)
    preprocess(spec)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(spec)

    def killed(folders):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("megatron.data.preprocessing.preprocess.remove_folders", killed)
        preprocess(replace(spec, resume=False))
    assert not (directory / "out.stage" / "publish.json").exists()


def test_work_of_an_earlier_version_is_not_published_unseen(directory, monkeypatch):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        preprocess(spec)
    path = directory / "out.stage" / "publish.json"
    report = json.loads(path.read_text())
    del report["options"]
    path.write_text(json.dumps(report))
    with problem("earlier version … remove", DataError):
        preprocess(spec)
    preprocess(replace(spec, resume=False))
    assert len(IndexedDataset(directory / "out_a_document")) == 290


@pytest.mark.parametrize("content", ["", '{"pairs": []', '{"pairs": []}', "[]"])
def test_a_damaged_list_of_assembled_files_is_an_error(directory, monkeypatch, content):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(spec)
    path = directory / "out.stage" / "publish.json"
    path.write_text(content)
    for again in (preprocess, merge_shards, lambda spec: convert_share(spec, 0, 1)):
        with problem("publish.json … remove", DataError):
            again(spec)
    path.unlink()
    assert preprocess(spec)[0].documents == 290


def test_a_kill_while_tokens_are_joined_loses_none(directory, monkeypatch):
    """A shard's own tokens are removed as soon as they are in the file of all."""
    spec = conversion(directory, append_eod=True, json_keys=("a", "b"), join_bytes=1)
    expected = uninterrupted(directory)
    removed, unlink = [], Path.unlink

    def unlink_until_killed(path, **how):
        if path.name == "0.bin":
            removed.append(path)
            if len(removed) == 3:
                raise Killed
        unlink(path, **how)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", unlink_until_killed)
        preprocess(spec)
    assert not removed[0].exists()
    assert removed[2].exists()
    preprocess(spec)
    assert outputs(directory) == expected
    with monkeypatch.context() as patch, pytest.raises(Killed):
        removed.clear()
        patch.setattr(Path, "unlink", unlink_until_killed)
        preprocess(spec)
    (directory / "out.stage" / "0.bin").unlink()
    with problem("tokens … shards … missing", DataError):
        preprocess(spec)


def test_tokens_that_were_not_joined_before_a_power_failure_are_missed(directory, monkeypatch):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(spec)
    (directory / "out.stage" / "publish.json").unlink()
    (directory / "out.stage" / "0.joined").write_text("9")
    with problem("tokens … shards … missing", DataError):
        preprocess(spec)


@pytest.mark.parametrize("last", range(4))
def test_no_pair_is_without_the_record_of_its_tokenizer(directory, monkeypatch, last):
    preprocess(conversion(directory, record="older", resume=False))
    older = (directory / "out_a_document.bin").read_bytes()
    replace, moves = os.replace, []

    def replace_until_killed(source, target):
        if str(target).startswith(str(directory / "out_a_document")):
            if len(moves) == last:
                raise Killed
            moves.append(target)
        replace(source, target)

    spec = {"record": "newer", "append_eod": True}
    with monkeypatch.context() as patch:
        patch.setattr("megatron.data.token_files.publish.os.replace", replace_until_killed)
        with suppress(Killed):
            preprocess(conversion(directory, resume=False, **spec))
    assert len(moves) == min(last, 3)
    record = directory / "out_a_document.tokenizer.json"
    if (directory / "out_a_document.idx").exists():
        is_older = (directory / "out_a_document.bin").read_bytes() == older
        assert record.read_text() == ("older" if is_older else "newer")
    preprocess(conversion(directory, **spec))
    assert record.read_text() == "newer"
    assert (directory / "out_a_document.bin").read_bytes() != older
    assert not [*directory.glob("*.new"), *directory.glob("out.stage")]


def test_a_failed_run_leaves_the_older_record(directory):
    preprocess(conversion(directory, record="older", resume=False))
    (directory / "a.jsonl").write_text('{"a": ""}\n')
    with problem("nothing to write … a.jsonl", DataError):
        preprocess(conversion(directory, record="newer", resume=False))
    assert (directory / "out_a_document.tokenizer.json").read_text() == "older"
    assert not [*directory.glob("*.new")]


def test_a_pair_of_an_unknown_tokenizer_has_no_record(directory):
    preprocess(conversion(directory, record="older", resume=False))
    preprocess(conversion(directory, resume=False))
    assert not (directory / "out_a_document.tokenizer.json").exists()


@pytest.mark.parametrize("suffix", ["tokenizer.json", "document.bin"])
def test_a_killed_run_leaves_its_record_to_no_other(directory, monkeypatch, suffix):
    with killed_before_rename_of(monkeypatch, suffix):
        preprocess(conversion(directory, record="of a killed run"))
    (directory / "out_a_document.tokenizer.json").unlink(missing_ok=True)
    preprocess(conversion(directory, resume=False))
    assert (directory / "out_a_document.idx").exists()
    assert not [*directory.glob("*.tokenizer.json*")]
