"""What the tests of the cleaning tools share."""

import json

import pytest
from scripts import run_script


@pytest.fixture
def write(tmp_path):
    """Return a function that writes records as JSON lines and returns the path."""

    def write_records(name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return write_records


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the records of a file of JSON lines."""

    def read_records(name):
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return read_records


@pytest.fixture
def tool(tmp_path):
    """Return a function that runs a tool in the temporary directory."""

    return lambda name, *words: run_script(f"tools/openwebtext/{name}", *words, folder=tmp_path)
