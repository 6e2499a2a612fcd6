"""The page of a run: parsed, and looked at in a browser where there is one."""

import errno
import json
import math
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, browser

from megatron.errors import ConfigError
from megatron.monitoring.chart import STYLE, Line, chart, thinned
from megatron.monitoring.history import History
from megatron.monitoring.html_page import page, write_page

ARTIFACTS = Path(os.environ.get("TEST_ARTIFACTS") or Path(__file__).parents[2] / "artifacts")
NOW = datetime(2026, 1, 2, 4, tzinfo=timezone.utc)
EVIL = '"><script>alert(1)</script><img src=http://evil/>&'
SVG = "{http://www.w3.org/2000/svg}"


def records():
    began = {"run": EVIL, "attempt": 1, "at": "2026-01-02T03:00:00+00:00"}
    yield {
        "event": "start",
        "iteration": 0,
        **began,
        "with": {"hosts": EVIL},
        "flags": {"--x": EVIL},
    }
    for i in range(1, 201):
        loss = None if i == 150 else 2 + 8 / i + (i == 120) * 3
        told = {"iteration": i, "lm_loss": loss, "grad_norm": 100 / i, "learning_rate": i / 1e5}
        counted = {"first_sample": 4 * i - 4, "samples": 4 * i, "tokens": 128 * i}
        told |= {**counted, "seq_length": 32, "seconds": 0.02, "at": began["at"], "host": "n"}
        yield {"event": "step", **told}
        if i % 20 == 0:
            use = {"tflops": 1.0, "mfu": 0.3 + i / 1e3, "hfu": 0.4, "resident_gib": 1 + i / 100}
            yield {"event": "train", "iteration": i, "train_iters": 200, "eta_s": 1.0, **use}
            yield {"event": "evaluation", "set": EVIL, "iteration": i, "lm_loss": 3.0, "ppl": 20.0}
            yield {"event": "evaluation", "set": "b", "iteration": i, "lm_loss": 4.0, "ppl": 54.0}
    yield {
        "event": "start",
        "iteration": 180,
        **began,
        "attempt": 2,
        "with": {},
        "flags": {"--x": 2},
    }
    yield {"event": EVIL, "iteration": 180, EVIL: EVIL}


@pytest.fixture
def history(tmp_path):
    told = {"kind": EVIL, "iteration": 180, "message": EVIL, "time": "2026-01-02T03:30:00+00:00"}
    told |= {"rank": 0, "stage": EVIL}
    (tmp_path / "failure.json").write_text(json.dumps(told))
    (tmp_path / "global_step100").mkdir()
    (tmp_path / "global_step100" / "manifest.json").write_text(EVIL)
    made = History()
    made.add(records())
    return made


def parsed(text):
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def figures(root):
    return {f.find("figcaption").text: f.find(f"{SVG}svg") for f in root.iter("figure")}


def test_checkpoints_that_cannot_be_looked_at_are_told_and_the_rest_stays(
    history, tmp_path, monkeypatch
):
    def refused(place):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    text = page(history, tmp_path, NOW)
    assert f"{tmp_path} cannot be read: Permission denied" in text
    assert figures(parsed(text))


def test_everything_of_the_run_is_text_and_nothing_comes_from_elsewhere(history, tmp_path):
    root = parsed(page(history, tmp_path, NOW))
    used = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert used <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th"),
        *("td", "figure", "figcaption", "svg", "path", "text", "polyline", "circle", "details"),
        *("summary", "pre", "span"),
    }
    assert not {name for e in root.iter() for name in e.attrib} & {"href", "src", "onload", "style"}
    (policy,) = (m.get("content") for m in root.iter("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    texts = [*root.itertext()]
    assert sum(EVIL in text for text in texts) >= 7
    events = [[cell.text for cell in row] for row in root.find(".//table[@id='events']")]
    assert [row[2] for row in events[1:]] == ["start", "step", "start", EVIL, "failure"]
    assert root.find("body/p").get("class") == "bad"


def test_curves_are_those_of_the_journal(history, tmp_path):
    drawn = figures(parsed(page(history, tmp_path, NOW)))
    assert [*drawn] == [
        *("Loss", "Validation loss", "Gradient norm, logarithmic", "Learning rate"),
        *("Tokens per second", "Seconds per step", "Use of the device (part of its peak)"),
        *("TFLOPs per process", "Memory, of the rank that takes most (GiB)"),
    ]
    pieces = [curve.get("points").split() for curve in drawn["Loss"].iter(f"{SVG}polyline")]
    # Up to the iteration that was gone back to, with a gap where the loss was no number.
    assert [len(points) for points in pieces] == [149, 30]
    heights = [float(point.split(",")[1]) for points in pieces for point in points]
    losses = [2 + 8 / i + (i == 120) * 3 for i in range(1, 181) if i != 150]
    low, high = min(losses), max(losses)
    expected = [heights[0] + (10 - y) / (high - low) * (max(heights) - heights[0]) for y in losses]
    assert heights == pytest.approx(expected, abs=0.2)
    assert len([*drawn["Validation loss"].iter(f"{SVG}polyline")]) == 2
    marks = [m.find(f"{SVG}title").text for m in drawn["Loss"].iter(f"{SVG}path") if len(m)]
    assert [mark.partition(":")[0] for mark in marks] == ["start", "failure"]


def test_names_have_their_curves_colour_and_no_label_is_cut():
    xs = [*range(0, 1001, 10)]
    lines = [Line(f"a set with a long name {i}", xs, [i + x for x in xs]) for i in range(2)]
    figure = ElementTree.fromstring(chart("Loss", lines))
    names = [(span.get("class").split()[-1], span.text) for span in figure.iter("span")]
    curves = [curve.get("class") for curve in figure.iter(f"{SVG}polyline")]
    assert names == list(zip(curves, (line.name for line in lines), strict=True))
    # Nothing that is written is over the curves, and the last label has room for its half.
    texts = [*figure.iter(f"{SVG}text")]
    labels = {text.text: text for text in texts}
    width = float(figure.find(f"{SVG}svg").get("viewBox").split()[2])
    assert float(labels["1000"].get("x")) + 7 * len("1000") / 2 <= width
    assert not {text.text for text in texts} & {line.name for line in lines}
    # A rule of the page for all text would beat a colour that is an attribute.
    assert all(f".{name} {{ --curve: #" in STYLE for name in curves)


def test_thinning_keeps_every_peak_and_gaps_only_where_nothing_else_is():
    ys = [math.sin(i / 50) for i in range(10_000)]
    ys[4321], ys[77] = 9.0, math.nan
    few = thinned(Line("a", range(10_000), ys), 200)
    assert 100 <= len(few.x) <= 200
    assert max(few.y) == 9.0 and few.x[few.y.index(9.0)] == 4321
    assert all(map(math.isfinite, few.y))
    assert [*few.x] == sorted(few.x)
    empty = thinned(Line("a", range(1000), [math.nan] * 1000), 100)
    assert len(empty.x) == 50


@pytest.mark.parametrize("ys", [[5.0], [5.0, 5.0], [0.0, 0.0], [-3.0, 1e-9, 2.0], [1e-7, 3e5]])
def test_any_values_can_be_drawn(ys):
    root = ElementTree.fromstring(chart("t", [Line("a", range(len(ys)), ys)], falls=True))
    numbers = re.findall(r"-?[\d.]+", " ".join(e.get("points", "") for e in root.iter()))
    assert all(0 <= float(number) <= 720 for number in numbers)


def test_nothing_to_draw_is_no_picture():
    assert chart("t", [Line("a", [1, 2], [math.nan, math.nan]), Line("b", [], [])]) == ""


def test_a_page_that_cannot_be_written_is_told(history, tmp_path):
    with pytest.raises(ConfigError, match="--html .*none/page.html: No such file"):
        write_page(tmp_path / "none" / "page.html", history, tmp_path, NOW)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_the_page_as_a_browser_shows_it(history, tmp_path):
    file = tmp_path / "page.html"
    write_page(file, history, tmp_path, NOW)
    assert [f.name for f in tmp_path.iterdir() if "page" in f.name] == ["page.html"]
    with browser(tmp_path / "profile") as shown:
        shown.open(file.as_uri())
        assert shown.value("document.scripts.length + document.images.length") == 0
        assert shown.value("document.querySelector('h1').textContent") == f"Run {EVIL}"
        assert shown.value("performance.getEntriesByType('resource').length") == 0
        width = "document.querySelector('polyline').getBoundingClientRect().width"
        assert shown.value(width) > 300
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / "run-report.png").write_bytes(shown.picture())
