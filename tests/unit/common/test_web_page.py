"""The style of all pages: contrast of its colours, computed from the CSS."""

import re
from itertools import product

import pytest
from source import PACKAGE

from megatron.common.web_page import web_page

CSS = (PACKAGE / "common" / "web_page.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
)
CURVES = [f"curve-{i}" for i in range(6)]
TEXTS = [
    *product(("ink", "faint", "accent", "bad", *CURVES), ("back", "panel")),
    ("ink", "fresh"),
    ("on-accent", "accent"),
]


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_definition():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_edges_have_the_contrast_of_level_aa(colours):
    assert colours.keys() == LIGHT.keys() >= {*CURVES, "back"}
    low = {pair: contrast(*map(colours.get, pair)) for pair in TEXTS}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    edges = {back: contrast(colours["edge"], colours[back]) for back in ("back", "panel")}
    assert min(edges.values()) >= 3, edges


def test_colours_are_those_of_the_style_alone():
    files = [f for f in PACKAGE.rglob("*.css") if f.name != "web_page.css"]
    files += PACKAGE.glob("diagnostics/monitor/*.py")
    assert len(files) > 2
    used = {n for f in files for n in re.findall(r"var\(--([\w-]+)\)", f.read_text())}
    assert used <= LIGHT.keys()
    fixed = r"(?<![&\w])#(?:[0-9a-f]{6}|[0-9a-f]{3})\b|rgb\("
    assert [f for f in files if re.search(fixed, f.read_text())] == []


def test_the_title_is_text():
    assert "<title>&lt;b&gt;</title>" in web_page("<b>", "")
