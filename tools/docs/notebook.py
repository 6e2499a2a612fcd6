#!/usr/bin/env python
"""Run the code cells of a notebook in this process, and write the notebook with their outputs."""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from matplotlib.figure import Figure

from megatron.common.cli import ToolParser, run_tool


def main(argv: Sequence[str]) -> None:
    """Run the notebook --input, and write --output."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="a notebook (.ipynb)")
    parser.add_argument("--output", type=Path, required=True, help="where to write it with outputs")
    args = parser.parse_args(argv)
    notebook = json.loads(args.input.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"] = number
        cell["outputs"] = outputs_of("".join(cell["source"]), names, number)
    args.output.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; return what it prints, and the value of its last line if that is an expression."""
    parts = ast.parse(source)
    has_value = bool(parts.body) and isinstance(parts.body[-1], ast.Expr)
    if has_value:
        name = ast.Name("_", ast.Store())
        parts.body[-1] = ast.Assign([name], parts.body[-1].value)  # type: ignore[attr-defined]
        ast.fix_missing_locations(parts)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(parts, f"cell {number}", "exec"), names)
    value = names["_"] if has_value else None
    text = printed.getvalue()
    outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    if value is None:
        return outputs
    data = {"text/plain": repr(value)}
    if isinstance(value, Figure):
        image = io.BytesIO()
        value.savefig(image, format="png", dpi=80, bbox_inches="tight")
        data = {"text/plain": "<Figure>", "image/png": base64.b64encode(image.getvalue()).decode()}
    result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
    return [*outputs, {**result, "data": data}]


if __name__ == "__main__":
    run_tool(main)
