"""The page of a run: parsed, and looked at in a browser where there is one."""

import errno
import json
import math
import re
from datetime import datetime, timezone
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import CHROMIUM, browser, take
from problems import problem

from megatron.diagnostics.monitor.charts import Line, Mark, chart, colour_of
from megatron.diagnostics.monitor.history import History
from megatron.diagnostics.monitor.html_page import ReportedRun, page, write_page

NOW = datetime(2026, 1, 2, 4, tzinfo=timezone.utc)
EVIL = '"><script>alert(1)</script><img src=http://evil/>&'


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
    return {f.find("figcaption").text.strip(): f.find("svg") for f in root.iter("figure")}


def parts_of(picture, name):
    return [part for part in picture.iter() if part.get("class") == name]


def curves(picture, name="curve"):
    """Return each curve's points: M (begin a piece) or L, x, y."""
    paths = [path.get("d") for path in parts_of(picture, name)]
    found = [re.findall(r"([ML])(-?[\d.]+) (-?[\d.]+)", path) for path in paths]
    return [[(command, float(x), float(y)) for command, x, y in points] for points in found]


def texts_of(picture):
    return [text.text for text in picture.iter("text")]


def drawn(ys, *, xs=None, **options):
    """Return the figure of one curve."""
    xs = xs or range(len(ys))
    return parsed(chart("t", [Line("a", xs, ys)], iterations=(xs[0], xs[-1]), **options))


def test_unreadable_checkpoints_are_reported_and_the_rest_stays(history, tmp_path, os_calls):
    os_calls("listdir", errno.EACCES)
    text = page([ReportedRun(tmp_path, history)], NOW)
    assert f"{tmp_path} cannot be read: Permission denied" in text
    assert figures(parsed(text))


def test_everything_of_the_run_is_text_and_nothing_comes_from_elsewhere(history, tmp_path):
    root = parsed(page([ReportedRun(tmp_path, history)], NOW))
    used = {element.tag for element in root.iter()}
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
    assert root.find("body/main/p").get("class") == "bad"


def test_curves_are_those_of_the_journal(history, tmp_path):
    shown = figures(parsed(page([ReportedRun(tmp_path, history)], NOW)))
    assert [*shown] == [
        *("Loss", "Validation loss", "Gradient norm, logarithmic", "Learning rate"),
        *(
            "Tokens per second",
            "Seconds per step",
            "Utilization of the device (fraction of its peak)",
        ),
        *("TFLOPs per process", "Memory of the rank that uses most (GiB)"),
    ]
    ((*points,),) = curves(shown["Loss"])
    # Up to the iteration that was gone back to, with a gap where the loss was NaN.
    first, last, (begin,) = points[0], points[-1], [p for p in points[1:] if p[0] == "M"]
    iterations = [1 + (x - first[1]) / (last[1] - first[1]) * 179 for _, x, _ in points]
    assert iterations[points.index(begin)] == pytest.approx(151, abs=0.5)
    known = [i for i in range(1, 181) if i != 150]
    losses = [2 + 8 / i + (i == 120) * 3 for i in known]
    assert len(points) == len(known)
    low, high = first[2], max(y for _, _, y in points)  # SVG counts from the top: 10 is the highest
    expected = [
        low + (10 - loss) / (10 - min(losses)) * (high - low)
        for loss in np.interp(iterations, known, losses)
    ]
    assert [y for _, _, y in points] == pytest.approx(expected, abs=1)
    assert len(curves(shown["Validation loss"])) == 2
    marks = {g.find("title").text.partition(":")[0]: g for g in parts_of(shown["Loss"], "mark")}
    assert {*marks} == {"step", "failure"}  # the start at iteration 180 is under the failure
    assert marks["failure"].find("title").text.endswith("(and 1 more)")
    assert marks["step"].find("line").get("x1") == f"{100 * round(149 / 179 * 500) / 500:g}%"
    assert [dot.get("cx") for dot in shown["Loss"].iter("circle")] == ["55.4%"]


def test_lines_are_named_in_their_colours_and_described_in_words():
    lines = [Line(f"set <{i}>", [0, 500, 1000], [i + 1, math.nan, i + 3]) for i in range(2)]
    figure = parsed(chart("Loss", lines, iterations=(0, 1000)))
    names = [(span.get("style"), span.text) for span in figure.iter("span")]
    colours = [part.get("style") for part in figure.find("svg/svg")]
    assert names == list(zip(colours, (line.name for line in lines), strict=True))
    assert {"1k", "200", "2", "4"} <= {*texts_of(figure)}
    picture = figure.find("svg")
    assert picture.get("role") == "img"
    assert picture.get("aria-label").split("; ")[:3] == [
        *("set <0>: from 1 at iteration 0 to 3 at iteration 1000", "lowest 1 at iteration 0"),
        "highest 3 at iteration 1000",
    ]
    rows = [[cell.text for cell in row] for row in figure.iter("tr")]
    assert rows[0] == ["iterations", "set <0>", "set <1>"]
    assert rows[1] == ["0 to 100", "1 (1 to 1)", "2 (2 to 2)"]


def test_a_million_steps_are_a_mean_in_a_band_with_peaks_and_gaps():
    ys = np.sin(np.arange(1_000_000) / 5e4)
    ys[432_100], ys[600_000:610_000] = 9.0, math.nan
    marks = [Mark(i, f"step {i}", colour_of(0)) for i in range(0, 1_000_000, 100)]
    text = chart("t", [Line("a", range(1_000_000), ys)], iterations=(0, 999_999), marks=marks)
    assert len(text) < 300_000
    (mean,), (band,) = curves(parsed(text)), curves(parsed(text), "band")
    assert len(mean) <= 500 and [command for command, _, _ in mean].count("M") == 2
    bottom, top = (y for _, _, y in curves(drawn([-1.0, 9.0]))[0])
    assert min(y for _, _, y in band) == pytest.approx(top, abs=0.5)
    assert max(y for _, _, y in band) == pytest.approx(bottom, abs=0.5)
    lowest = bottom + (top - bottom) * (ys[432_000:433_999].mean() + 1) / 10
    assert [y for _, x, y in mean if 432 < x < 434][0] == pytest.approx(lowest, abs=1)


def test_a_value_between_gaps_is_a_dot():
    (path,) = parts_of(drawn([1, 2, math.nan, 4]), "dots")
    assert re.fullmatch(r"M1000.0 \d+.\dh0", path.get("d"))


@pytest.mark.parametrize(
    ("ys", "labels"),
    [
        ([5.0], ["4.8", "5", "5.2"]),
        ([5.0, 5.0], ["4.8", "5", "5.2"]),
        ([0.0, 0.0], ["-0.4", "0", "0.4"]),
        ([-3.0, 1e-9, 2.0], ["-2", "0", "2"]),
        ([1e-7, 3e5], ["1e-05", "10", "100k"]),
        ([1.0, math.inf, 2.0], ["1", "1.2", "2"]),
        ([12e3, 48e6], ["100k", "10M"]),
        ([3e-4, 1e-5], ["1e-05", "0.0001", "0.0002"]),
    ],
)
def test_any_values_can_be_drawn_with_round_labels(ys, labels):
    figure = drawn(ys, falls=True)
    numbers = [number for points in curves(figure) for _, *xy in points for number in xy]
    assert numbers and all(0 <= number <= 1000 for number in numbers)
    assert {*labels} <= {*texts_of(figure)}
    assert 3 <= len(texts_of(figure)) <= 20


def test_the_last_events_are_in_the_table(tmp_path):
    history = History()
    history.add({"event": "x", "iteration": i} for i in range(600))
    root = parsed(page([ReportedRun(tmp_path, history)], NOW))
    rows = [*root.find(".//table[@id='events']")]
    assert (len(rows), rows[-1][1].text) == (501, "599")
    assert "100 earlier events are in the journal." in root.itertext()


def test_several_runs_are_compared(history, tmp_path):
    other = History()
    other.add({**r, "run": "other"} for r in records() if r["event"] != EVIL)
    runs = [ReportedRun(tmp_path, history), ReportedRun(tmp_path.parent, other)]
    root = parsed(page(runs, NOW))
    assert (
        root.find("body/main/h1").text == f"Comparison of {tmp_path.name}, {tmp_path.parent.name}"
    )
    shown = figures(root)
    assert len(curves(shown["Loss"])) == 2 and len(curves(shown["Validation loss: b"])) == 2
    heads, state, loss, *_ = [
        [cell.text for cell in row] for row in root.find("body/main/div/table")
    ]
    assert heads[1:] == [tmp_path.name, tmp_path.parent.name]
    assert (state[0], loss[0], loss[1]) == ("state", "loss", loss[2])
    assert loss[1].endswith("lowest 2.0444 at iteration 180")
    assert not [h.text for h in root.iter("h2") if h.text.startswith(("Flags", "Plan"))]


def test_nothing_to_draw_is_no_picture():
    lines = [Line("a", [1, 2], [math.nan, math.nan]), Line("b", [], [])]
    assert chart("t", lines, iterations=(1, 2)) == ""


def test_a_page_that_cannot_be_written_is_an_error(history, tmp_path):
    with problem("--html … none/page.html: No such file"):
        write_page(tmp_path / "none" / "page.html", [ReportedRun(tmp_path, history)], NOW)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_the_page_as_a_browser_shows_it(history, tmp_path):
    file = tmp_path / "page.html"
    write_page(file, [ReportedRun(tmp_path, history)], NOW)
    assert [f.name for f in tmp_path.iterdir() if "page" in f.name] == ["page.html"]
    with browser(tmp_path / "profile") as shown:
        shown.open(file.as_uri())
        assert shown.value("document.scripts.length + document.images.length") == 0
        assert shown.value("document.querySelector('h1').textContent") == f"Run {EVIL}"
        assert shown.value("performance.getEntriesByType('resource').length") == 0
        take("run_report", page=shown, report=file)
        for scheme, width in (("light", 900), ("dark", 360)):
            shown.show_as(scheme, width, 1600)
            assert shown.overflow() <= 0
            size = "document.querySelector('.curve').getBoundingClientRect().width"
            assert width / 3 < shown.value(size) < width
