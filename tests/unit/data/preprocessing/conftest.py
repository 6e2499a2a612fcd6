"""A corpus that preprocessing runs read."""

import json

import pytest


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a corpus of two keys."""
    lines = [{"a": "x" * (i * 7 % 31), "b": "y" * (i * 5 % 17)} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path
