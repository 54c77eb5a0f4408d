"""Every notebook runs, and shows what it shows now: the text to the character, the pictures but
for the edges of letters and lines.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from tools.notebook import code_cells, run

NOTEBOOKS = sorted(
    (Path(__file__).resolve().parent.parent.parent / "docs/notebooks").glob("*.ipynb")
)


def texts(outputs: list[Any]) -> list[str]:
    return ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]


def pictures(outputs: list[Any]) -> list[Any]:
    encoded = [
        output["data"]["image/png"] for output in outputs if output["output_type"] == "display_data"
    ]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(text))) for text in encoded]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_its_cells_give_now(path: Path) -> None:
    cells = code_cells(json.loads(path.read_text()))
    drawn = 0
    for cell, outputs in zip(cells, run(cells), strict=True):
        assert texts(cell["outputs"]) == texts(outputs), "`make notebooks` writes the outputs"
        for stored, now in zip(pictures(cell["outputs"]), pictures(outputs), strict=True):
            assert stored.shape == now.shape
            assert np.mean(np.abs(stored - now) > 0.1) < 1e-3, (
                "share of the pixels that differ; `make notebooks` writes the outputs"
            )
            assert now.std() > 0.05, "a picture is not blank"
            drawn += 1
    assert drawn >= 1
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
