"""The grammar of weighted split paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem

from megatron.config.data.split_paths import (
    SplitGroup,
    SplitPart,
    parse_split_group,
    read_split_groups,
)

names = st.text("abcXYZ_0189.-", min_size=1)
fractions = st.floats(0, 1)
parts = st.builds(
    lambda weight, bounds, prefix: SplitPart(weight, min(bounds), max(bounds), prefix),
    st.floats(0.001, 1e6),
    st.tuples(fractions, fractions).filter(lambda pair: pair[0] != pair[1]),
    st.text("abc/._-0", min_size=1),
)


@given(st.builds(SplitGroup, names, st.lists(parts, min_size=1, max_size=5).map(tuple)))
def test_what_is_written_is_read(group):
    entries = [f"{p.weight!r} {p.start!r}:{p.end!r} {p.prefix}" for p in group.parts]
    assert parse_split_group(f"{group.name}: {', '.join(entries)}", "--flag") == group
    assert parse_split_group(f" {group.name}:{' ,'.join(entries)} ", "--flag") == group


def test_the_name_ends_at_the_first_colon():
    group = parse_split_group("valid_en: 0.3 0.95:1.0 data/en:v2", "--flag")
    assert group == SplitGroup("valid_en", (SplitPart(0.3, 0.95, 1.0, "data/en:v2"),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no colon", "one word and a colon"),
        (": 1 0:1 a", "one word and a colon"),
        ("two words: 1 0:1 a", "one word and a colon"),
        ("n:", "the weights in n are all 0"),
        ("n: 0:1 a", "expected three words"),
        ("n: one 0:1 a", "WEIGHT, START and END must be numbers"),
        ("n: 1 01 a", "must be numbers"),
        ("n: -1 0:1 a", "WEIGHT must be 0 or more"),
        ("n: nan 0:1 a", "WEIGHT must be 0 or more"),
        ("n: 1 0.5:0.5 a", "0 <= START < END <= 1"),
        ("n: 1 0:1.5 a", "0 <= START < END <= 1"),
        ("n: 1 nan:1 a", "0 <= START < END <= 1"),
        ("n: 0 0:1 a, 0 0:1 b", "the weights in n are all 0"),
    ],
)
def test_what_is_not_of_the_grammar_is_refused(text, words):
    with problem(f"--flag: … {words}"):
        parse_split_group(text, "--flag")


@pytest.mark.parametrize("text", ['"a: 1 0:1 x" "b: 1 0:1 y"\n', '"a: 1 0:1 x"\n"b: 1 0:1 y"'])
def test_a_file_holds_groups_in_quotes(tmp_path, text):
    file = tmp_path / "paths.txt"
    file.write_text(text)
    assert read_split_groups(str(file), "--flag") == ["a: 1 0:1 x", "b: 1 0:1 y"]


@pytest.mark.parametrize("text", ["", "a: 1 0:1 x", '"a: 1 0:1 x', '"a: 1 0:1 x", "b: 1 0:1 y"'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "paths.txt"
    file.write_text(text)
    with problem("double quotes"):
        read_split_groups(str(file), "--flag")


@pytest.mark.parametrize("text", ["n: 1 0:1 a,", "n: ,1 0:1 a", "n: 1 0:1 a, ,"])
def test_empty_fields_are_passed_over(text):
    assert parse_split_group(text, "--flag") == parse_split_group("n: 1 0:1 a", "--flag")
