"""A corpus that preprocessing runs read."""

import json

import pytest


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a corpus of two keys."""
    lines = [{"a": "x" * (i * 7 % 31), "b": "y" * (i * 5 % 17)} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def sample_one_in(monkeypatch):
    """Return a function that sets how many documents of a run are decoded again."""

    def choose(count):
        for module in ("block_encoder", "report"):
            monkeypatch.setattr(f"megatron.data.preprocessing.{module}.SAMPLE_ONE_IN", count)

    return choose


@pytest.fixture
def nltk_data(monkeypatch):
    """Return a function that installs data of NLTK: what makes a splitter of a language's name."""
    return lambda splitter: monkeypatch.setattr("nltk.tokenize.punkt.PunktTokenizer", splitter)
