"""Good lines are read at once and others one by one; both ways agree on any lines."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.documents import _from_any_lines, _from_good_lines, _from_lines

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
        assert _from_lines(data, keys) == one_by_one


def test_good_lines_are_read_at_once():
    found = _from_good_lines(
        b'{"text": "a", "b": ""}\n{"b": "c", "text": "\\u00e9"}', ("text", "b")
    )
    assert found is not None
    assert found.texts == [["a", "é"], ["", "c"]]
