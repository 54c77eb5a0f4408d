"""Every stream of arrivals is answered: ties, two instants, one arrival, a day of gaps, instants
of any size; no warning, no error.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.queueing.estimation.arrivals import arrival_rate, dispersion
from kendall.queueing.estimation.assumptions.assumption import factor
from kendall.queueing.estimation.change import changes
from kendall.queueing.measurement.arrival_audit import audit_arrivals
from tests.queueing.estimation_windows import arrival_assumptions

GAPS = st.one_of(
    st.just(0.0),
    st.sampled_from([1e-9, 1e-3, 1.0, 60.0, 86_400.0]),
    st.floats(0.0, 86_400.0),
    st.floats(5e-324, 1e-6),
)
BLOCKS = st.lists(
    st.tuples(GAPS, st.integers(1, 120)), max_size=8
)  # a gap, and how often it comes again
ORIGINS = st.one_of(st.just(0.0), st.floats(-1e12, 1e12))


@st.composite
def streams(draw: st.DrawFn) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Runs of equal gaps, and of exponential ones among them."""
    blocks = draw(BLOCKS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gaps = [
        np.full(count, gap) * (rng.exponential(size=count) if rng.integers(2) else 1.0)
        for gap, count in blocks
    ]
    return draw(ORIGINS) + np.cumsum(np.concatenate([*gaps, [0.0]]))


@given(
    streams(),
    st.sampled_from([None, 0.0, 1e-6, 5.0, 1e9, math.inf]),
    st.sampled_from(["poisson", "gamma"]),
    st.booleans(),
)
@settings(deadline=None)
def test_the_audit_answers_for_every_stream(instants, asked_rate, process, has_timetable):
    found = audit_arrivals(
        instants,
        asked_rate=asked_rate,
        process=process,
        intended=instants - 0.001 if has_timetable else None,
    )
    assert found.n == instants.size
    assert found.verdict
    assert all(
        0 <= test.p_value <= 1 and math.isfinite(test.statistic) and test.says
        for test in found.tests
    )
    if found.span:
        assert all(
            math.isfinite(value)
            for value in (found.rate, found.rate_low, found.rate_high, found.gap_variation)
        )
        assert found.rate_low <= found.rate <= found.rate_high


@given(streams())
@settings(deadline=None)
def test_rate_and_assumptions_answer_for_every_stream(instants):
    start, now = float(instants[0]) - 1.0, float(instants[-1]) + 1.0
    rate = arrival_rate(instants, start, now)
    assert rate.low <= rate.value <= rate.high
    assert dispersion(instants, start, now).effective_n >= 0
    assert all(change.ratio >= 0 for change in changes(instants))
    assert all(each.says for each in arrival_assumptions(instants))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_instant_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match=r"got 1 instants that are not finite; expected seconds"):
        audit_arrivals(np.array([0.0, bad, 2.0]))


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.0, "inf"), (math.inf, "inf"), (0.5, "2"), (3.0, "3")]
)
def test_the_size_of_any_change_has_words(ratio, says):
    """Many arrivals at one instant have an infinite rate: behind them it falls to nothing of it."""
    assert factor(ratio) == says
