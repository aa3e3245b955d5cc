"""Runs the cells of ``examples/notebook.ipynb`` and keeps what they show.

``python -m tests.notebook`` writes the notebook, or another file that is named. The outputs are texts, as a terminal
shows them, with times in UTC: so they are the same everywhere, and a change of them can be read.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def read() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def sources(notebook: dict[str, Any]) -> list[str]:
    """The code of a notebook, a text for each cell."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """What tells whether the cells have changed since they were run."""
    return hashlib.sha256(json.dumps(sources(notebook)).encode()).hexdigest()


def run(notebook: dict[str, Any]) -> None:
    """Runs all cells, one after the other, and puts in what they show."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
        cell["outputs"] = _shown("".join(cell["source"]), number, names)
    notebook["metadata"]["aion"] = {"run_from": digest(notebook)}


def _shown(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def text_of(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"  # Spark's JVM has it, too
    time.tzset()
    found = read()
    run(found)
    (Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK).write_text(text_of(found), encoding="utf-8")
