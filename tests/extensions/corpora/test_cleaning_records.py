"""JSON lines read and written: errors name file and line, and unfinished output does not appear."""

import os
from pathlib import Path

import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.common.process_pool import num_workers, ordered_map
from megatron.extensions.corpora.cleaning.records import (
    Line,
    Output,
    batches,
    new_files,
    read_lines,
    to_bytes,
)


def test_lines_know_their_number_and_offset(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    lines = list(read_lines([str(path)]))
    assert [(line.number, line.offset, line.record()) for line in lines] == [
        (1, 0, {"a": 1}),
        (4, 17, {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{bad", "in.jsonl, line 2 … JSON … '{bad'"),
        (b"\xff", "line 2 … not JSON"),
        (b"[1]", "line 2 … JSON object … '[1]'"),
        (b"[" * 100_000, "line 2 … nested"),
        (b'{"n": ' + b"9" * 5000 + b"}", "line 2 … number … large"),
        (b'{"url": "x"}', "line 2 … 'text' … 'url'"),
        (b'{"text": null}', "line 2 … 'text' … null"),
    ],
)
def test_a_bad_line_is_named(tmp_path, raw, message):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + raw + b"\n")
    with problem(message, DataError):
        for line in read_lines([str(path)]):
            line.text(line.record(), "text")


def test_a_missing_file_is_named(tmp_path):
    with problem("cannot read … none.jsonl", DataError):
        list(read_lines([str(tmp_path / "none.jsonl")]))


def test_half_of_a_surrogate_pair_survives():
    line = Line("x", 1, 0, b'{"text": "\\ud83d and \xc3\xa9"}')
    assert Line("x", 1, 0, to_bytes(line.record())).record() == line.record()
    assert to_bytes({"text": "é"}) == '{"text": "é"}'.encode()


def test_files_appear_together_or_not_at_all(tmp_path):
    names = [tmp_path / "a", tmp_path / "b"]
    names[0].write_text("old")
    with pytest.raises(ZeroDivisionError), new_files(*names) as (first, _):
        first.write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"]
    assert names[0].read_text() == "old"
    with new_files(*names) as (first, second):
        first.write(b"new")
        second.write(b"too")
        assert names[0].read_text() == "old"
    assert [name.read_text() for name in names] == ["new\n", "too\n"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_output_that_would_destroy_something_is_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    with problem("read and replaced"), new_files(path, inputs=[str(path)]):
        pass
    with problem(f"{tmp_path} … not a file"), new_files(tmp_path):
        pass
    with (
        problem("cannot write … none/out", DataError),
        new_files(tmp_path / "none/out"),
    ):
        pass


def test_a_full_disk_is_named():
    with (
        open("/dev/full", "wb", buffering=0) as full,
        problem("out.json … No space left", DataError),
    ):
        Output(Path("out.json"), full).write(b"{}")


def test_batches_are_bounded_and_complete():
    lines = [Line("x", i, 0, b"x" * size) for i, size in enumerate([1] * 600 + [1 << 20] * 3)]
    cut = list(batches(lines))
    assert [line for batch in cut for line in batch] == lines
    assert max(map(len, cut)) == 256
    assert all(sum(len(line.raw) for line in batch[:-1]) < 1 << 20 for batch in cut)


def test_many_processes_keep_the_order():
    assert list(ordered_map(abs, range(-50, 0), 2)) == list(ordered_map(abs, range(-50, 0), 1))


def test_an_error_in_a_worker_comes_out():
    with pytest.raises(ValueError, match="invalid literal"):
        list(ordered_map(int, ["1", "x", "2"], 2))


def test_processes_are_as_many_as_pay():
    cores = len(os.sched_getaffinity(0))
    assert num_workers(1000) == 1
    assert num_workers(1 << 40) == cores
    assert num_workers(1 << 40, 1) == 1
    assert num_workers(1 << 40, 10_000) == cores
