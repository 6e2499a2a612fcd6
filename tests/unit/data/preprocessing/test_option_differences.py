"""Differences between two runs are named by files and flags."""

import pytest

from megatron.data.preprocessing.preprocess_spec import differences

FILES = [[f"{i}.jsonl", "plain", 5, 10**18] for i in range(9)]
LATER = 10**18 + 2 * 10**9


def changed(i, **to):
    """Return an entry of `FILES` with other values."""
    names = ("path", "kind", "num_bytes", "changed_at")
    return list((dict(zip(names, FILES[i], strict=True)) | to).values())


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (FILES[:4], "named 9 files and names 4 files: none new, 4.jsonl, 5.jsonl, 6.jsonl, 2 oth"),
        ([*FILES, ["x"]], "--input named 9 files and names 10 files: x new, none gone"),
        ([*FILES, FILES[0]], "--input named 9 files and names 10 files: none new, none gone"),
        ([*FILES[:7], *FILES[:6:-1]], "--input has another order: 8.jsonl comes where 7.jsonl was"),
        ([*FILES[:8], changed(8, num_bytes=70)], "--input 8.jsonl had 5 bytes and has 70"),
        (
            [*FILES[:8], changed(8, num_bytes=3)],
            "--input 8.jsonl had 5 bytes and has 3",
        ),
        ([*FILES[:8], changed(8, kind="gzip")], "--input 8.jsonl was plain and is gzip"),
    ],
)
def test_files_are_named_with_what_became_of_them(now, message):
    (found,) = differences({"--input": FILES}, {"--input": now})
    assert message in found


def test_the_time_of_a_change_is_reported():
    (found,) = differences(
        {"--input": FILES}, {"--input": [changed(0, changed_at=LATER), *FILES[1:]]}
    )
    assert ":40.000000000, and now at 2001-09-0" in found
    assert found.endswith(":42.000000000")


def test_of_many_files_the_first_are_named():
    later = [changed(i, changed_at=LATER) for i in range(9)]
    *named, others = differences({"--input": FILES}, {"--input": later})
    assert [each.split()[1] for each in named] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert others == "6 files more of --input are not as then"


@pytest.mark.parametrize(
    ("name", "was", "now", "parts"),
    [
        ("--lang", "english", "german", ["--lang", "'english'", "'german'"]),
        ("--prepend-space", False, True, ["--prepend-space", " off ", " on"]),
        ("--json-keys", ("a", "b"), ("b",), ["--json-keys", "'a' and 'b'", "'b'"]),
        ("--on-error collect", None, "bad", ["--on-error collect", "not given", "'bad'"]),
        ("the end of a document", (50256,), (), ["50256", "nothing", "--append-eod"]),
        (
            "the tokenizer",
            {"name": "a", "fingerprint": 1},
            {"name": "a", "fingerprint": 2},
            ["tokenizer", "fingerprint", " 1 ", " 2"],
        ),
    ],
)
def test_flags_are_named_with_both_values(name, was, now, parts):
    (found,) = differences({name: was}, {name: now})
    positions = [found.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)
