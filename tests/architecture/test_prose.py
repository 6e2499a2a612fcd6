"""Pages are in the field's English, by the rules beside this file; spelling is codespell's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def rules():
    lines = Path(__file__).with_name("prose_rules.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if not line.startswith("#"):
            pattern, instead = line.split("\t")
            yield re.compile(pattern, re.IGNORECASE), instead


def findings(text):
    """Return what a page has to change; code and links keep their words."""
    prose = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return [
        f"line {prose.count(chr(10), 0, found.start()) + 1}: {found[0]!r}; write: {instead}"
        for pattern, instead in rules()
        for found in pattern.finditer(prose)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_the_fields_english(page):
    assert not findings(page.read_text(encoding="utf-8"))


def test_rules_find_words_outside_of_code():
    text = "Run it.\n\n```bash\necho anew\n```\nIt begins anew, `anew`.\n"
    assert findings(text) == ["line 6: 'anew'; write: again, from scratch"]
