"""Good lines are read at once and others one by one; both ways agree on any lines."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.readers.documents import (
    _from_any_lines,
    _from_good_lines,
    problem_of,
    read_documents,
)
from megatron.data.readers.inputs import Block

VALUES = st.recursive(
    st.text(max_size=4) | st.none() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
OBJECTS = st.fixed_dictionaries({"text": VALUES | st.text()}, optional={"b": VALUES, "id": VALUES})
LINES = st.one_of(
    OBJECTS.map(lambda one: json.dumps(one).encode()),
    OBJECTS.map(lambda one: json.dumps(one, ensure_ascii=False).encode("utf-8", "replace")),
    st.sampled_from(
        [
            b"",
            b" \r",
            b'{"text": "a"}\r',
            b'{"text": "a", "text": "b"}',
            b'{"text": "a", "text": 1}',
            b'{"te\\u0078t": "escaped"}',
            b'{"b": {"text": "inner"}, "text": "outer"}',
            b'{"b": {"text": "inner"}}',
            b'{"text": "\\ud800"}',
            b'{"text": "\\ud83d\\ude00\\u0000"}',
            b'{"text": "a", "b": 1e999}',
            b'{"text": "a", "b": NaN}',
            b'{"text": "a"',
            b'{"text": "a"} {"text": "b"}',
            b'{"text": "a", "b": [1',
            b"2]}",
            b'{"text": "\xff"}',
            b'\xef\xbb\xbf{"text": "a"}',
            b'["text"]',
            b'"text"',
        ]
    ),
)


@given(lines=st.lists(LINES, max_size=6), keys=st.sampled_from([("text",), ("text", "b")]))
@settings(max_examples=300, deadline=None)
def test_both_ways_to_read_lines_agree(lines, keys):
    for data in (b"\n".join(lines), b"".join(line + b"\n" for line in lines)):
        one_by_one = _from_any_lines(data, keys)
        at_once = _from_good_lines(data, keys)
        assert at_once is None or at_once == one_by_one
        block = Block(0, "data", 0, len(data), data)
        assert read_documents(block, keys, 1 << 20) == one_by_one


def test_good_lines_are_read_at_once():
    found = _from_good_lines(
        b'{"text": "a", "b": ""}\n{"b": "c", "text": "\\u00e9"}', ("text", "b")
    )
    assert found is not None
    assert found.texts == [["a", "é"], ["", "c"]]


def test_a_number_or_a_depth_that_is_rare_is_not_called_no_json():
    deep = b'{"text": "a", "b": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"
    long = b'{"text": "b", "n": ' + b"9" * 5000 + b', "m": [-' + b"1" * 5000 + b"]}\n"
    found = _from_any_lines(deep + long, ["text"])
    assert found.texts == [["b"]]
    assert [bad.problem for bad in found.bad] == [
        f"nested too deeply to be read, over about 1000 levels: {deep[:80].decode()!r}"
    ]


def test_what_the_fast_parser_refuses_has_a_name():
    for line, problem in [
        (b"[" * 5000 + b"]" * 5000, "nested too deeply to be read"),
        (b"9" * 5000, "holds a number that is too large to be read: '9999"),
        (b"[", "not JSON: '['"),
    ]:
        with pytest.raises(ValueError) as caught:
            orjson.loads(line)
        assert problem_of(line, caught.value).startswith(problem)
