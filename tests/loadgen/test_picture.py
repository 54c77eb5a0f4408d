"""Observed beside predicted as a picture: as it looked when somebody looked at it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import matplotlib as mpl
import msgspec
import pytest

from kendall.loadgen.compare.comparison import Comparison
from kendall.loadgen.compare.picture import draw_picture
from tests.golden_files import is_as_kept

RUN = Path(__file__).parents[2] / "bench/results/demo/comparison.json"


def test_a_picture_looks_as_it_did_when_somebody_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cells of a run on the real engine: two at a load, one whose sojourn is compared and
    that is too short, one whose load is not known and of which nothing was predicted.
    """
    found = msgspec.json.decode(RUN.read_bytes(), type=list[Comparison])
    first, second, third, fourth = (found[cell] for cell in (0, 2, 1, 3))
    comparisons = [
        dataclasses.replace(first, load=0.6),
        dataclasses.replace(
            second,
            load=0.3,
            queueing_delay=dataclasses.replace(
                second.queueing_delay,
                observed=dataclasses.replace(
                    second.queueing_delay.observed, half_width=1e-3, effective_n=200.0
                ),
            ),
        ),
        dataclasses.replace(
            third,
            load=0.3,
            compared="sojourn_time",
            sojourn_time=dataclasses.replace(
                third.sojourn_time,
                observed=dataclasses.replace(third.sojourn_time.observed, half_width=1.0),
            ),
        ),
        dataclasses.replace(
            fourth,
            load=None,
            queueing_delay=dataclasses.replace(
                fourth.queueing_delay, predicted=None, a_priori=None
            ),
        ),
    ]
    assert [each.too_short for each in comparisons[1:3]] == [False, True]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    with mpl.rc_context({"svg.hashsalt": "kendall", "svg.fonttype": "none"}):
        path = draw_picture(comparisons, tmp_path / "new" / "picture.svg", "A title")
    text = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", path.read_text("utf-8"))
    assert is_as_kept("picture.svg", re.sub(r"(?s)<metadata>.*</metadata>", "", text))
