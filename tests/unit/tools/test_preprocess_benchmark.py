"""The benchmark of preprocessing: its texts, and its clock."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from scripts import module_of

TOOLS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield module_of(TOOLS / "preprocess.py")
    del sys.modules["sample_texts"]


def test_texts_are_new_to_a_tokenizer_that_has_read_others(benchmark, tmp_path):
    prose = tmp_path / "prose.txt"
    prose.write_text("The lobster is blue .\n\nIt lives in two seas .\n" * 50)
    texts = benchmark.Texts([str(prose)])
    first, again, other = (
        texts.write(tmp_path / f"{name}.jsonl", "mixed", 0.2, seed=seed).read_text()
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again
    documents = [json.loads(line)["text"] for line in first.splitlines()]
    assert any("lobster" in text for text in documents)
    assert any("import " in text for text in documents), "half of the documents are source code"
    assert 0.2e6 <= len(first) < 0.3e6
    new = set(" ".join(documents).split()) - set(other.split())
    assert len(new) > 100


def test_a_side_is_measured_without_its_preparation_and_in_a_process_of_its_own(
    benchmark, clock, monkeypatch
):
    def side():
        clock.pass_time(100)
        return partial(clock.pass_time, 4)

    before = clock.s
    monkeypatch.setattr(benchmark, "cpu_time", lambda: clock.s / 2)
    found = benchmark.by_turns({"ours": (10**6, side)}, rounds=2)
    assert found["ours"] == {"CPU": 0.5, "wall": 0.25}
    assert clock.s == before, "it was another process's time"
    described = benchmark.described(
        {"ours": {"CPU": 6.0, "wall": 5.0}, "theirs": {"CPU": 2.0, "wall": 4.0}}, of="CPU"
    )
    assert described.endswith("theirs: 2.0 MB/CPU-s, 4.0 MB/s (ours: 3.00 x)")
