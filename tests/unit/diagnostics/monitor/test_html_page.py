"""The page of a run: parsed, and looked at in a browser where there is one."""

import errno
import json
import math
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import CHROMIUM, browser

from megatron.common.errors import ConfigError
from megatron.diagnostics.monitor.history import History
from megatron.diagnostics.monitor.html_page import Line, chart, page, write_page

ARTIFACTS = Path(os.environ.get("TEST_ARTIFACTS") or Path(__file__).parents[3] / "artifacts")
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
        record = {"iteration": i, "lm_loss": loss, "grad_norm": 100 / i, "learning_rate": i / 1e5}
        counted = {"first_sample": 4 * i - 4, "samples": 4 * i, "tokens": 128 * i}
        record |= {**counted, "seq_length": 32, "seconds": 0.02, "at": began["at"], "host": "n"}
        yield {"event": "step", **record}
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
    record = {"kind": EVIL, "iteration": 180, "message": EVIL, "time": "2026-01-02T03:30:00+00:00"}
    record |= {"rank": 0, "stage": EVIL}
    (tmp_path / "failure.json").write_text(json.dumps(record))
    (tmp_path / "global_step100").mkdir()
    (tmp_path / "global_step100" / "manifest.json").write_text(EVIL)
    made = History()
    made.add(records())
    return made


def parsed(text):
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def figures(root):
    return {f.find("figcaption").text: f.find(f"{SVG}svg") for f in root.iter("figure")}


def groups(picture, name):
    return [g for g in picture.iter(f"{SVG}g") if g.get("id", "").startswith(f"{name}-")]


def curves(picture):
    """Return each curve's points: M (begin a piece) or L, x, y."""
    paths = ["".join(p.get("d") for p in g.iter(f"{SVG}path")) for g in groups(picture, "curve")]
    found = [re.findall(r"([ML]) ([\d.]+) ([\d.]+)", path) for path in paths]
    return [[(command, float(x), float(y)) for command, x, y in points] for points in found]


def test_unreadable_checkpoints_are_reported_and_the_rest_stays(history, tmp_path, monkeypatch):
    def refused(place):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    text = page(history, tmp_path, NOW)
    assert f"{tmp_path} cannot be read: Permission denied" in text
    assert figures(parsed(text))


def test_everything_of_the_run_is_text_and_nothing_comes_from_elsewhere(history, tmp_path):
    root = parsed(page(history, tmp_path, NOW))
    used = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert not used & {"script", "img", "link", "iframe", "object", "image", "foreignObject", "a"}
    addresses = {
        value
        for element in root.iter()
        for name, value in element.attrib.items()
        if name.endswith(("href", "src")) or name.startswith("on")
    }
    assert all(address.startswith("#") for address in addresses)
    styles = [element.text or "" for element in root.iter() if element.tag.endswith("style")]
    styles += [element.get("style", "") for element in root.iter()]
    assert not [style for style in styles if "import" in style or "//" in style]
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
        *(
            "Tokens per second",
            "Seconds per step",
            "Utilization of the device (fraction of its peak)",
        ),
        *("TFLOPs per process", "Memory of the rank that uses most (GiB)"),
    ]
    ((*points,),) = curves(drawn["Loss"])
    # Up to the iteration that was gone back to, with a gap where the loss was NaN.
    first, last, (begin,) = points[0], points[-1], [p for p in points[1:] if p[0] == "M"]
    iterations = [1 + (x - first[1]) / (last[1] - first[1]) * 179 for _, x, _ in points]
    assert iterations[points.index(begin)] == pytest.approx(151, abs=0.5)
    known = [i for i in range(1, 181) if i != 150]
    losses = [2 + 8 / i + (i == 120) * 3 for i in known]
    low, high = first[2], max(y for _, _, y in points)  # SVG counts from the top: 10 is the highest
    expected = [
        low + (10 - loss) / (10 - min(losses)) * (high - low)
        for loss in np.interp(iterations, known, losses)
    ]
    assert [y for _, _, y in points] == pytest.approx(expected, abs=1)
    assert len(curves(drawn["Validation loss"])) == 2
    marks = [g.find(f"{SVG}title").text for g in groups(drawn["Loss"], "mark")]
    assert [mark.partition(":")[0] for mark in marks] == ["start", "failure"]


def test_names_have_their_curves_colour_and_stand_beside_the_picture():
    xs = [*range(0, 1001, 10)]
    lines = [Line(f"a set with a $long$ name {i}", xs, [i + x for x in xs]) for i in range(2)]
    figure = ElementTree.fromstring(chart("Loss", lines))
    names = [(span.get("style").split()[-1], span.text) for span in figure.iter("span")]
    drawn = [path.get("style") for g in groups(figure, "curve") for path in g]
    colours = [re.search("stroke: (#[0-9a-f]+)", style)[1] for style in drawn]
    assert names == list(zip(colours, (line.name for line in lines), strict=True))
    texts = {text.text: text for text in figure.iter(f"{SVG}text")}
    assert "1000" in texts
    assert not {*texts} & {line.name for line in lines}
    # The page's own colour, whether it is light or dark.
    assert all("fill: currentColor" in text.get("style") for text in texts.values())


def test_a_long_curve_is_simplified_and_keeps_its_peaks_and_gaps():
    ys = [math.sin(i / 50) for i in range(100_000)]
    ys[43_210], ys[77] = 9.0, math.nan
    long = ElementTree.fromstring(chart("t", [Line("a", range(100_000), ys)]))
    short = ElementTree.fromstring(chart("t", [Line("a", [0, 1, 99_999], [0, 9.0, -1.0])]))
    (points,), (few,) = curves(long), curves(short)
    assert len(points) < 20_000
    assert min(y for _, _, y in points) == pytest.approx(min(y for _, _, y in few), abs=1)


def test_a_value_between_gaps_is_a_dot():
    figure = ElementTree.fromstring(chart("t", [Line("a", [1, 2, 3, 4], [1, 2, math.nan, 4])]))
    dots = [use for use in figure.iter(f"{SVG}use") if "fill: #" in use.get("style")]
    assert len(dots) == 1


@pytest.mark.parametrize(
    "ys", [[5.0], [5.0, 5.0], [0.0, 0.0], [-3.0, 1e-9, 2.0], [1e-7, 3e5], [1.0, math.inf, 2.0]]
)
def test_any_values_can_be_drawn(ys):
    root = ElementTree.fromstring(chart("t", [Line("a", range(len(ys)), ys)], falls=True))
    numbers = [number for points in curves(root) for _, *xy in points for number in xy]
    numbers += [float(use.get(axis)) for use in root.iter(f"{SVG}use") for axis in "xy"]
    assert numbers and all(0 <= number <= 720 for number in numbers)


def test_nothing_to_draw_is_no_picture():
    assert chart("t", [Line("a", [1, 2], [math.nan, math.nan]), Line("b", [], [])]) == ""


def test_a_page_that_cannot_be_written_is_an_error(history, tmp_path):
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
        width = "document.querySelector('g[id^=curve] path').getBoundingClientRect().width"
        assert shown.value(width) > 300
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / "run-report.png").write_bytes(shown.picture())
