"""The notebook of the examples runs from its first cell to its last, and its model has learned."""

import json
from pathlib import Path

from jobs import REPOSITORY, tool

NOTEBOOK = REPOSITORY / "examples" / "first_steps.ipynb"


def test_the_notebook_trains_and_generates(tmp_path: Path) -> None:
    for name in ("pretrain_gpt.py", "megatron", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    words = ["--input", str(NOTEBOOK), "--output", "run.ipynb"]
    tool("tools/docs/notebook.py", *words, cwd=tmp_path).succeeded()
    found, shown = (outputs(file) for file in (tmp_path / "run.ipynb", NOTEBOOK))
    assert found["generate("] == shown["generate("] == "[' Saturday.', ' is Sunday.']"
    assert found.keys() == shown.keys()


def outputs(file: Path) -> dict[str, str]:
    """Return the text of each output, by the beginning of its cell."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return {
        "".join(cell["source"])[:9]: output["data"]["text/plain"]
        for cell in cells
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    }
