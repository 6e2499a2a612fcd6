"""Pages are in the field's English, by the rules beside this file; spelling is codespell's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 45
"""Of a sentence, which a full stop, colon or semicolon ends."""

_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)

_BLOCK = re.compile(r"^```.*?^```$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def rules():
    lines = Path(__file__).with_name("prose_rules.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if not line.startswith("#"):
            pattern, instead = line.split("\t")
            yield re.compile(pattern, re.IGNORECASE), instead


def findings(text):
    """Return what a page has to change; code and links keep their words."""
    prose = without(_CODE, text)
    return [
        f"line {prose.count(chr(10), 0, found.start()) + 1}: {found[0]!r}; write: {instead}"
        for pattern, instead in rules()
        for found in pattern.finditer(prose)
    ]


def without(pattern, text):
    """Return a text with spaces for what a pattern matches; lines keep their numbers."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def long_sentences(text):
    """Return the sentences of too many words, a name in code among them; tables have none."""
    return [
        f"line {number}: {len(sentence.split())} words; write two sentences: {sentence[:60]}"
        for number, line in enumerate(without(_BLOCK, text).splitlines(), 1)
        if not line.startswith("|")
        for sentence in re.split(r"(?<=[.:;!?])\s+", line)
        if len(sentence.split()) > MOST_WORDS
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_the_fields_english(page):
    text = page.read_text(encoding="utf-8")
    assert not findings(text)
    if page.name != "flags.md":  # generated: its list of sections is one sentence
        assert not long_sentences(text)


def test_rules_find_words_outside_of_code():
    text = "Run it.\n\n```bash\necho anew\n```\nIt begins anew, `anew`.\n"
    assert findings(text) == ["line 6: 'anew'; write: again, from scratch"]


@pytest.mark.parametrize(
    "text",
    [
        "It foretells.",
        "It is no matter of parts.",
        "It insists.",
        "Processes talk.",
        "In the the log",
    ],
)
def test_a_rule_finds(text):
    assert len(findings(text)) == 1


def test_sentences_that_are_too_long_are_found_outside_of_tables_and_blocks():
    words = "word " * MOST_WORDS
    assert long_sentences(f"A line.\n{words}end.\n")[0].startswith("line 2: 46 words")
    assert not long_sentences(f"{words}\n\n| {words}end |\n\n```text\n{words}end\n```\n")
