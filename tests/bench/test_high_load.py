"""High load on a recorded speed, on virtual time: a short cell of it, and what the committed
trace says of itself.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.live.virtual import CALM, Trace, virtual_cells


def wandering() -> Trace:
    """The speed swings within a minute."""
    levels = 1 + 0.15 * np.sin(np.arange(300) * 2 * np.pi / 300)
    return Trace(levels * float(np.mean(1 / levels)), 0.2, {})


@pytest.mark.slow
def test_a_steady_engine_is_predicted_either_way() -> None:
    steady = Trace(np.ones(300), 0.2, {})
    (cell,) = virtual_cells(steady, ("elastic:max_batch_size=8",), (0.75,))
    predicted = cell.found.compared.predicted.value
    assert cell.says(predicted) == cell.says(cell.at_its_speeds) == "holds"
    assert cell.at_its_speeds == pytest.approx(predicted, rel=0.03)
    assert cell.band.low < predicted < cell.band.high
    assert cell.band.half_width < 0.25
    assert cell.true_band.low == pytest.approx(cell.band.low, rel=0.1)
    assert cell.lies_in(cell.true_band)


@pytest.mark.slow
def test_a_wandering_engine_is_predicted_much_better_at_its_speeds() -> None:
    (cell,) = virtual_cells(wandering(), ("capped:max_batch_size=8",), (0.9,))
    observed, constant = cell.found.compared.observed.value, cell.found.compared.predicted.value
    assert cell.at_its_speeds is not None
    assert abs(cell.at_its_speeds - observed) < abs(constant - observed) / 3
    assert cell.says(cell.at_its_speeds) == cell.says(constant) == "too short", (
        "no prediction holds by a wide interval"
    )
    assert cell.lies_in(cell.true_band)


def test_the_committed_trace_is_a_real_engines() -> None:
    trace = Trace.read()
    assert trace.header["engine"].startswith("vllm")
    assert trace.seconds > 1000
    for part in (trace, trace.first(CALM)):
        assert np.mean(1 / part.levels) == pytest.approx(1.0)
    assert trace.first(CALM).seconds == CALM
