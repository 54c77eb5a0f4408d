"""The texts of the report: captions, how to read it, method and limits."""

from __future__ import annotations

from collections.abc import Sequence

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.planned import JOINED
from kendall.loadgen.compare.residual import SHARE
from kendall.queueing.measurement.check import AGREE, TELLING


def captions(cells: Sequence[ReportCell]) -> list[tuple[str, str, str]]:
    """Name, heading and caption of every figure, in the order of the page."""
    star = (
        " A star marks policies whose sojourn time is compared."
        if any(c.comparison.compared == "sojourn_time" for c in cells)
        else ""
    )
    return [
        ("beside", "Observed beside predicted", BESIDE + star),
        ("orders", "Slowdown by output length", SLOWDOWN),
        ("over-load", "Delay against load", OVER_LOAD),
        ("parts", "Where the difference comes from", PARTS),
        ("tails", "The whole distribution", TAILS),
    ]


BESIDE = """
Mean delay per policy and load on a logarithmic axis. The <strong>filled diamond</strong> is the
model’s mean of the very same requests. The open diamond is the steady state that could be computed
before the run, the square the same at the machine’s speed in the run.
"""

ORDERS = """
Mean time outside of service, its 99th percentile, and its mean over the tenth of the requests with
the longest outputs; beside each its ratio to the same policy in the order of arrival (fcfs), of the
same requests where both cells served them. Below a ratio: what theory predicts at the runs’ speeds.
"""

SLOWDOWN = """
Mean sojourn time divided by mean service time, for each tenth of the output lengths; points:
observed, with 95 % intervals. Line: theory at the run’s speed; dotted where theory has no answer:
the same arrivals, simulated. Pale: a cell that is not judged.
"""

OVER_LOAD = """
The curve is the formula with the calibrated law; the band is the same formula at the slowest and
fastest speed of the machine in these cells. Load = arrival rate divided by the largest stable
rate of that policy.
"""

PARTS = """
Observed minus predicted a priori, split into parts that add up to it exactly. <strong>Full
colour</strong>: larger than its sampling error; pale: within it, or the cell is not judged.
"""

TAILS = """
Share of requests that took longer than a given time. Marks are the predicted p50, p90, p95 and
p99: where they are on the curve, the prediction also holds in the tail.
"""

READING = """
<p>Each column compares the same requests with another answer to “how long should they have
waited?”. The check comes first: the model serves the very requests that came. The steady states
after it are predictions for arrivals like these, which a short run need not reach.</p>
<dl class="facts">
<dt>model, same requests</dt><dd>The arrivals and lengths of the run, simulated under the law at the
speed that the machine had at each moment, by the run’s service times, never by its delays.</dd>
<dt>difference</dt><dd>Observed / model − 1, with the 95 % interval of the paired differences.</dd>
<dt>gateway’s share</dt><dd>Observed / recursion on the run’s own batches and service times − 1. It
must lie within 1 to 2 %; otherwise the gateway is wrong.</dd>
<dt>a priori</dt><dd>Requested rate and lengths, calibrated latency law: everything known before
the run.</dd>
<dt>run’s speed</dt><dd>The same, with the law’s speed and residual variance taken from the run’s
service times, never from its delays.</dd>
<dt>live</dt><dd>The formula with the run’s own rate and lengths as well.</dd>
<dt>as printed</dt><dd>The papers’ formula where they give one: exact for single, an upper bound
for uncapped padded batches with deterministic service times, an approximation elsewhere; it does
not include a bound on the batch size.</dd>
<dt>speed, cv</dt><dd>Measured service times divided by the calibrated law’s (above 1 the machine
was slower than when it was calibrated), and the coefficient of variation of the residual.</dd>
<dt>batch size, in use</dt><dd>Mean over batches (continuous: in service at a dispatch); share of
the time during which a server was busy. With batches it is far above the load.</dd>
</dl>
"""

LIMITS = f"""
<p><strong>Intervals</strong> are 95 %. They account for the correlation of consecutive delays,
and for runs without a long busy period, which underestimate mean and variance. The first requests
of a run are dropped as warm-up. The check <strong>agrees</strong> if the difference is within its
interval or within {100 * AGREE:.0f} %; it has <strong>too few requests</strong> if the interval
reaches further than {100 * TELLING:.0f} % of the model’s mean. Disturbed cells and
<strong>INVALID</strong> ones are not judged. The medians and the list of causes leave them out; all
plots draw their observations pale.</p>
<p>The steady state <strong>agrees</strong> if it lies within {100 * AGREE:.0f} %, or in the
observed interval of a run that is long enough to have one. Otherwise its verdict is the largest
part of the difference that is larger than its sampling error, has the sign of the difference and is
at least {100 * SHARE:.0f} % of it; if there is none, it is sampling noise.</p>
<p>The <strong>sampling error</strong> of the arrivals’ part is the spread of simulated runs of
the same length under the requested process; that of the other parts comes from batch means of
paired differences. The gateway’s part includes the time lost before dispatches and the waiting
that it causes behind them. The sender’s part needs the load generator’s file (with at least
{100 * JOINED:.0f} % of the requests); without it, the part is counted as arrivals.</p>
<p><strong>Limits.</strong> Speed and residual variance are taken from the run, so “run’s speed”
tests the queueing, not a service law known in advance. A speed that drifts within a run appears
as the law’s shape. With a continuous engine, waiting for its next step belongs to service: there
the sojourn is compared. Predictions assume Poisson arrivals at a constant rate and lengths
independent of the queue.</p>
"""
