"""Bad lines and inputs: the error names file and line, and nothing is published."""

import gzip

import pytest
from preprocessed import outputs, read_texts, run, write_lines
from problems import problem

from megatron.common.errors import DataError, MegatronError
from megatron.data.preprocessing.preprocess import (
    input_problems,
)

BAD_LINES = [
    (b"plain text", "JSON: 'plain text' … --input-format text"),
    (b'{"text": "a"', "JSON … column 13"),
    (b'{"text": "\xff"}', "JSON … byte 11 … UTF-8"),
    (b'  {"text": "\xc3\xa9" "c": 1}', """JSON … column 16, '"c": 1}'"""),
    (b'{"text":', "JSON … column 9, the end"),
    (b'{"text": "a\tb"}', r"""JSON … column 12, '\tb"}'"""),
    (b"[" * 200_000, "nested … 1000 … '[[[["),
    (b'{"text": ' + b"9" * 5000 + b"}", "'text' … Infinity"),
    (b'"text"', "object … '\"text\"' … jq -c"),
    (b'{"body": "a", "id": 1}', "'text' … 'body', 'id' … --json-keys"),
    (b"{}", "'text' … none … --json-keys"),
    (b'{"text": null}', "'text' … null"),
    (b'{"text": ["a"]}', "'text' … [\"a\"]"),
    (b'{"text": "refuse"}', "no tokens for this text"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with problem(f"a.jsonl, line 3: … {message}", DataError):
        run(tmp_path, [str(path)], chunk_size=1)
    assert outputs(tmp_path) == []


def test_a_bad_line_is_named_by_a_worker_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 50 + b"x\n" + b'{"text": "a"}\n' * 50)
    with problem("a.jsonl, line 51: … JSON … 'x'", DataError):
        run(tmp_path, [str(path)], workers=2, shard_bytes=500)
    assert outputs(tmp_path) == ["out.stage"]  # the first shard is finished


def test_a_killed_worker_is_an_error_and_nothing_is_written(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 9 + [{"text": "kill"}])
    with problem("worker … killed … --workers than 2", MegatronError):
        run(tmp_path, [path], workers=2, shard_bytes=120)
    assert outputs(tmp_path) in ([], ["out.stage"])


def test_the_old_files_stay_when_the_new_ones_fail(tmp_path):
    good = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    bad = write_lines(tmp_path / "b.jsonl", [{"text": "b"}, {"text": None}])
    run(tmp_path, [good])
    with pytest.raises(DataError):
        run(tmp_path, [bad])
    assert read_texts(tmp_path / "out_text_document") == ["a"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "a.jsonl … empty"),
        ("\n \n", "a.jsonl … blank lines"),
        ('{"text": ""}\n{"text": ""}\n', "2 documents … a.jsonl … token"),
    ],
)
def test_an_input_without_text_is_an_error(tmp_path, content, reason):
    (tmp_path / "a.jsonl").write_text(content)
    with problem(f"'text' … {reason}", DataError):
        run(tmp_path, [str(tmp_path / "a.jsonl")])
    assert outputs(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x\n\n[]\n" * 2, "all 4 lines … a.jsonl"),
        (
            'x\n{"text": ""}\n',
            "1 documents … a.jsonl … 1 lines",
        ),
    ],
)
@pytest.mark.parametrize("shard_bytes", [None, 9])
def test_when_all_lines_are_bad_the_first_is_reported_and_all_are_listed(
    tmp_path, content, reason, shard_bytes
):
    (tmp_path / "a.jsonl").write_text(content)
    spec = {"shard_bytes": shard_bytes}
    with problem(f"{reason} … first … a.jsonl, line 1: … 'x'", DataError):
        run(tmp_path, [str(tmp_path / "a.jsonl")], on_error="skip", **spec)
    listed = tmp_path / "bad.jsonl"
    with problem(f"{reason} … bad.jsonl … first … line 1", DataError):
        run(
            tmp_path,
            [str(tmp_path / "a.jsonl")],
            on_error="collect",
            bad_lines_path=str(listed),
            **spec,
        )
    bad = sum(line in ("x", "[]") for line in content.split("\n"))
    assert len(listed.read_text().splitlines()) == bad
    assert outputs(tmp_path) == []


def test_one_key_without_text_leaves_no_files_of_the_others(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"src": "a", "dst": ""}])
    with problem("'src' and 'dst' … a.jsonl", DataError):
        run(tmp_path, [path], json_keys=("src", "dst"))
    assert outputs(tmp_path) == []


def test_an_input_that_cannot_be_read_is_named(tmp_path):
    with problem("--input … none.jsonl: No such file", DataError):
        run(tmp_path, [str(tmp_path / "none.jsonl")])
    (tmp_path / "empty").mkdir()
    with problem(f"--input {tmp_path}/empty … .jsonl", DataError):
        run(tmp_path, [str(tmp_path / "empty")])


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with problem("write … nowhere/out.stage: No such file", DataError):
        run(tmp_path, [path], output_prefix=str(tmp_path / "nowhere" / "out"))


def test_a_first_look_names_what_is_wrong_with_each_input(tmp_path):
    (tmp_path / "plain.txt").write_text("\nonce upon\n")
    (tmp_path / "empty.jsonl").write_text("")
    keyless = write_lines(tmp_path / "keyless.jsonl", [{"body": "a"}])
    good = write_lines(tmp_path / "good.jsonl", [{"text": "a"}])
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"\n" * 70 + b"once upon\n"))
    names = ["plain.txt", "packed.gz", "empty.jsonl", "none.jsonl"]
    inputs = [*(str(tmp_path / name) for name in names), keyless, good]
    plain, packed, missing, no_key = input_problems(inputs, ["text"])
    assert "plain.txt, line 2: not JSON: 'once upon'" in plain
    assert "packed.gz, line 71: not JSON: 'once upon'" in packed
    assert "cannot read --input" in missing
    assert "no key 'text'" in no_key
