"""Pictures of the pages are those that the code draws today."""

import re
from runpy import run_path

from source import REPOSITORY

DOCS = REPOSITORY / "docs"
_TEXT = re.compile(r">([^<>]*\S[^<>]*)</text>")


def test_pictures_are_up_to_date(tmp_path):
    draw = run_path(str(REPOSITORY / "tools" / "docs" / "pictures.py"))
    draw["main"](["--output", str(tmp_path)])
    pictures = sorted(tmp_path.glob("*.svg"))
    assert [picture.name for picture in pictures] == [
        "badge_licence.svg",
        "badge_python.svg",
        "badge_version.svg",
        "checkpoint_life.svg",
        "quickstart_loss.svg",
        "rank_grid.svg",
        "samples.svg",
        "zero_stages.svg",
    ]
    for picture in pictures:  # versions of matplotlib differ in the lines
        texts = _TEXT.findall(picture.read_text(encoding="utf-8"))
        assert texts == _TEXT.findall((DOCS / picture.name).read_text(encoding="utf-8"))
        assert texts
