"""What the report explains: captions, how to read it, method and limits."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.compare.cells import ReportCell
from loadgen.compare.comparison import TOO_SHORT
from loadgen.compare.residual import AGREE, JOINED, SHARE


def captions(cells: Sequence[ReportCell]) -> list[tuple[str, str, str]]:
    """Name, heading and caption of every figure, in the order of the page."""
    star = (
        " A star marks policies whose sojourn is compared."
        if any(c.comparison.compared == "sojourn_time" for c in cells)
        else ""
    )
    return [
        ("beside", "Observed beside predicted", BESIDE + star),
        ("over-load", "Delay against load", OVER_LOAD),
        ("parts", "Where the difference comes from", PARTS),
        ("tails", "The whole distribution", TAILS),
    ]


BESIDE = """
Mean delay per policy and load on a logarithmic axis. The <strong>open diamond</strong> could be
known before the run; the filled one takes the machine’s speed from the run’s service times; the
square is a simulation of the very requests that arrived.
"""

OVER_LOAD = """
The curve is the formula under the law as calibrated; the band is the same formula at the slowest
and fastest speed that the machine showed in these cells. Load = arrival rate over the largest
stable rate of that policy.
"""

PARTS = """
Observed minus predicted a priori, as parts that add up to it exactly. <strong>Full colour</strong>:
beyond chance; pale: within chance for a run of this length, or the cell is not judged.
"""

TAILS = """
Share of requests that took longer than a time. Marks are predicted p50, p90, p95 and p99: where
they lie on the curve, the prediction holds in the tail too.
"""

READING = """
<p>The same requests stand beside several answers to “how long should they have waited?”. From the
first to the last, more of the run is taken as given, so where the numbers part says what was
wrong.</p>
<dl class="facts">
<dt>a priori</dt><dd>Asked rate and lengths, latency law as calibrated: everything known before the
run.</dd>
<dt>run’s speed</dt><dd>The same, with the law’s speed and scatter taken from the run’s service
times, never from its delays.</dd>
<dt>live</dt><dd>The formula with the run’s own rate and lengths as well.</dd>
<dt>same arrivals</dt><dd>The very arrivals and lengths of the run, simulated under the law at the
run’s speed.</dd>
<dt>measured service</dt><dd>The recursion on the run’s own batches and service times. It must meet
the observation within 1 to 2 %, or the gateway is wrong.</dd>
<dt>as printed</dt><dd>The formula of the papers where they have one: exact for single, an upper
bound for uncapped padded batches without scatter, an approximation elsewhere; it knows no bound of
the batch.</dd>
<dt>speed, cv</dt><dd>Measured service times over the calibrated law’s (above 1 the machine was
slower than when it was calibrated), and the coefficient of variation of what is left.</dd>
<dt>batch size, in use</dt><dd>Mean over batches (continuous: in service at a dispatch); share of
the time that a server was busy. For batches it is far above the load.</dd>
</dl>
"""

LIMITS = f"""
<p><strong>Intervals</strong> are 95 %. They respect that consecutive delays are correlated, and
that a lucky run underestimates its mean and its variance. The first requests of a run are dropped
as warm-up. A cell is <strong>too short</strong> where {TOO_SHORT}: then it is not judged. Nor is
one that is <strong>INVALID</strong>. The title, the medians and the list of causes leave both out;
all plots draw what was observed in them pale.</p>
<p><strong>Agree</strong> means: the prediction made before the run lies in the observed interval,
or within {100 * AGREE:.0f} %. Otherwise the verdict is the largest part of the difference that is
beyond chance, has the difference’s sign and is at least {100 * SHARE:.0f} % of it; without one it
is sampling noise.</p>
<p><strong>Chance</strong> of the arrivals’ part is the spread of simulated runs of the same length
under the asked process; of the other parts, batch means of paired differences. The gateway’s part
counts the time lost before dispatches with the waiting that it caused behind them. The sender’s
part needs the load generator’s file (it must know {100 * JOINED:.0f} % of the requests); without
it, it is counted as arrivals.</p>
<p><strong>Limits.</strong> Speed and scatter are taken from the run, so “run’s speed” tests the
queueing, not the service law in advance. A speed that wanders within a run shows as the law’s
shape. Before a continuous engine, waiting for its next step belongs to service: there the sojourn
is compared. Predictions assume Poisson arrivals at a constant rate and lengths independent of the
queue.</p>
"""
