"""Execute notebooks without Jupyter: `python tools/notebook.py FILE...` runs the code cells in
order and writes their outputs.

What a cell prints becomes its text; the figures that are open at its end become its pictures, as in
Jupyter. The value of a last expression is not shown: print it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def main() -> None:
    """Write each file back with the outputs of this run."""
    for path in map(Path, sys.argv[1:]):
        notebook = json.loads(path.read_text())
        cells = code_cells(notebook)
        for number, (cell, outputs) in enumerate(zip(cells, run(cells), strict=True), start=1):
            cell.update(execution_count=number, outputs=outputs)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path}: {len(cells)} cells")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """In their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(cells: list[dict[str, Any]]) -> list[list[Output]]:
    """The outputs of each cell, all cells in one namespace. An exception of a cell is raised."""
    os.environ.setdefault("MPLBACKEND", "agg")  # before the first cell imports pyplot
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        outputs.append(_text(printed.getvalue()) + _pictures())
    return outputs


def _text(printed: str) -> list[Output]:
    return (
        [{"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}]
        if printed
        else []
    )


def _pictures() -> list[Output]:
    """The open figures as PNG; they are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    outputs: list[Output] = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=80, metadata={"Software": None})
        data = {
            "image/png": base64.b64encode(file.getvalue()).decode() + "\n",
            "text/plain": ["<Figure>"],
        }
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


if __name__ == "__main__":
    main()
