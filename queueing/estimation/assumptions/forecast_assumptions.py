"""Tests of what the forecast of the steady state assumes, the engine aside: about the arrivals and
what shapes them (the gateway's own limits, retries, closed loops, changes of rate, arrivals that
are not Poisson), about the lengths of the answers to one call, and that the queue is stable and
settled.

Each rule is stated with its threshold. Causes are tested before their effects, and an effect with a
known cause is not held against the arrivals a second time: where clients retry or wait for their
answers, the arrivals cannot be Poisson. Which calls a limit of the gateway keeps out depends on the
queue, so that the admitted ones look like those of a closed loop; then neither the clients nor the
arrivals are judged.

all_admitted      fails where limits of the gateway keep out at least `REFUSED_SHARE` of the calls.
no_retries        fails where the retries that clients' libraries admit (a header) are at least
                  `RETRY_SHARE` of the arrivals.
open_loop         Poisson arrivals see time averages (Wolff 1982). With n(t) the number in the
                  system, N arrivals at t_i, n- the number just before,
                      U = sum_i (n-(t_i) - mean n),   V = D N var_t n
                      z = U / sqrt V      is standard normal
                  (a martingale: n- is known before the arrival; D as in
                  queueing.estimation.change). Clients that wait for an answer before they ask again
                  come less often when many wait: z <= -`DEPENDENT`, and the arrival rate as a
                  linear function of n falls to 0 at n* = mean n + var_t n N / -U, the number of
                  clients, which n(t) then never exceeds (10 % and one more are allowed).
                  Arrivals that are merely regular see few in the system too, but there n(t) goes
                  far beyond n*.
settled           fails where the time that the queue needs to forget how the epoch began,
                  `RELAXATIONS` relaxation times and the clearing of what waited then, reaches into
                  the window by more than `UNSETTLED` of its length.
stable_queue      fails where the load's interval lies above 1, or the load is above `NEAR_ONE` and
                  the delay grows over the window: Kendall's score of its means in `TREND` blocks is
                  at least `RISES` of 45 (one in 2000 without a trend, were the means independent),
                  and the mean of its later half is more than twice that of its earlier half.
constant_rate     fails where poisson_arrivals would, but the CUSUM of queueing.estimation.change
                  signals at most `FEW_CHANGES` changes and all pieces of at least `PIECE` arrivals
                  between them pass as Poisson: then only the rate changed. Without a change, with
                  more of them, or with pieces that fail, it is not judged, and poisson_arrivals
                  fails: one of the two names, never both.
poisson_arrivals  fails where the last `AUDITED` arrivals of the window fail
                  queueing.measurement.arrival_audit at significance `LEVEL`, and constant_rate does
                  not explain that.
independent_lengths
                  about calls of several sequences. Fails where the intraclass correlation of their
                  output lengths (queueing.estimation.lengths.within_calls) is beyond chance, and
                  with independent lengths the predicted mean would differ by a share of at least
                  `MATERIAL` and by at least `FLOOR`. The prediction draws lengths by call, so that
                  a failure is no reason to doubt it.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np

from kendall.policies.text import short_number
from kendall.queueing.estimation.assumptions.assumption import (
    LEVEL,
    Assumption,
    AssumptionTest,
    Evidence,
    ForecastTest,
    factor,
    not_judged,
)
from kendall.queueing.estimation.assumptions.engine_assumptions import FLOOR, MATERIAL
from kendall.queueing.estimation.change import FEW_CHANGES, Vector, burstiness, changes
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.lengths.within_calls import significant
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.arrival_audit import audit_arrivals
from kendall.queueing.measurement.batch_means import batch_means

REFUSED_SHARE = 0.02
RETRY_SHARE = 0.02
DEPENDENT = 4.5
PIECE = 50
FEWEST = 100  # arrivals, or delays, before anything is said of them
NEAR_ONE = 0.95
TREND, RISES = 10, 35
RELAXATIONS, UNSETTLED = 3.0, 0.2


def all_admitted(seen: Snapshot) -> Assumption:
    """Whether the gateway's limits refuse too few calls to matter: the prediction is for the
    admitted calls, as if chance had chosen them.
    """
    refused = sum(seen.refused.values())
    if not refused + seen.arrivals.size:
        return Assumption("all_admitted", None, math.nan, "no arrivals")
    share = refused / (refused + seen.arrivals.size)
    if share < REFUSED_SHARE:
        return Assumption("all_admitted", True, share, f"{share:.1%} of the calls were refused")
    by_limit = sorted(seen.refused.items(), key=lambda each: -each[1])
    parts = [f"{limit} {share * count / refused:.1%}" for limit, count in by_limit if count]
    return Assumption(
        "all_admitted",
        False,
        share,
        f"{share:.1%} of the calls were refused by limits of the gateway ({', '.join(parts)}): "
        "the prediction is for arrivals that come whatever the queue is",
    )


def no_retries(seen: Snapshot) -> Assumption:
    """Whether too few arrivals are retries to matter: clients that try again make more arrivals the
    longer the queue is.
    """
    if not seen.arrivals.size:
        return Assumption("no_retries", None, math.nan, "no arrivals")
    share = seen.retries / seen.arrivals.size
    return Assumption(
        "no_retries",
        share < RETRY_SHARE,
        share,
        f"{share:.1%} of the arrivals are retries of a client's library",
    )


def open_loop(seen: Snapshot) -> Assumption:
    """Whether arrivals come regardless of how many requests are in the system."""
    if seen.arrivals.size < FEWEST:
        return Assumption("open_loop", None, math.nan, "too few arrivals")
    met, at, number = number_in_system(seen)
    spans = np.diff(at)
    mean = float(number[:-1] @ spans / spans.sum())
    variance = float((number[:-1] - mean) ** 2 @ spans / spans.sum())
    score = float((met - mean).sum())
    scale = met.size * variance * burstiness(np.diff(seen.arrivals))
    z = score / math.sqrt(scale) if scale > 0 else math.copysign(math.inf, score) if score else 0.0
    clients = mean + variance * met.size / -score if score < 0 else math.inf
    if z > -DEPENDENT or number.max() > 1.1 * clients + 1:
        return Assumption(
            "open_loop", True, z, "arrivals do not depend on how many are in the system"
        )
    calls = clients / float(seen.call_sizes.mean())
    return Assumption(
        "open_loop",
        False,
        z,
        f"about {calls:.0f} clients wait for their answers before they ask again: a closed loop",
    )


def number_in_system(seen: Snapshot) -> tuple[Vector, Vector, Vector]:
    """Sequences in the system: how many each arriving call met; the instants of all arrivals and
    departures, in order; and how many there were from each of these on.
    """
    ends = np.where(
        np.isnan(seen.column("released_at")),
        seen.column("server_free_at"),
        seen.column("released_at"),
    )
    arrived = seen.column("arrived_at")
    before = int(np.count_nonzero((arrived <= seen.start) & (ends > seen.start)))
    left = np.concatenate([ends[(ends > seen.start) & (ends <= seen.now)], seen.lost_at])
    instants = np.concatenate([left, seen.arrivals, [seen.start, seen.now]])
    steps = np.concatenate([-np.ones(left.size), seen.call_sizes, [0.0, 0.0]])
    order = np.argsort(instants, kind="stable")  # at one instant departures come first
    number = before + np.cumsum(steps[order])
    arrivals = (order >= left.size) & (order < left.size + seen.arrivals.size)
    return number[arrivals] - steps[order][arrivals], instants[order], number


def constant_rate(evidence: Evidence) -> Assumption:
    """Whether the arrival rate changed between stretches of Poisson arrivals."""
    instants = evidence.seen.arrivals
    why = unexplained(evidence)
    if why is not None:
        return Assumption("constant_rate", None, math.nan, why)
    if evidence.audit.poisson:
        return Assumption("constant_rate", True, 1.0, "no change of the arrival rate")
    found = changes(instants)
    edges = [-math.inf, *(change.at for change in found), math.inf]
    pieces = (instants[(instants >= low) & (instants < high)] for low, high in pairwise(edges))
    if not 1 <= len(found) <= FEW_CHANGES or not all(
        audit_arrivals(piece, significance=LEVEL).poisson for piece in pieces if piece.size >= PIECE
    ):
        return not_judged("constant_rate", "the arrivals are not Poisson", 1.0)
    last = found[-1]
    word = "rose" if last.ratio > 1 else "fell"
    ago = short_number(instants[-1] - last.at, 3)
    says = (
        f"the arrival rate {word} by a factor of {factor(last.ratio)}, {ago} s before the "
        "last arrival"
    )
    return Assumption("constant_rate", False, last.ratio, says)


def poisson_arrivals(evidence: Evidence) -> Assumption:
    """Whether the arrivals are Poisson; between changes of the rate, where constant_rate fails."""
    why = unexplained(evidence)
    if why is not None:
        return Assumption("poisson_arrivals", None, math.nan, why)
    audit = evidence.audit
    if audit.poisson:
        return Assumption("poisson_arrivals", True, audit.dispersion, "arrivals pass as Poisson")
    if evidence.fails("constant_rate"):
        return Assumption("poisson_arrivals", True, 1.0, "Poisson between the changes")
    says = "arrivals are not Poisson: " + "; ".join(audit.reasons[:2])
    return Assumption("poisson_arrivals", False, audit.dispersion, says)


def unexplained(evidence: Evidence) -> str | None:
    """The reason not to judge the arrivals as a process; None where they can be judged."""
    if evidence.fails("no_retries") or evidence.fails("open_loop"):
        return "explained by the clients"
    return "too few arrivals" if evidence.seen.arrivals.size < FEWEST else None


def independent_lengths(alike: Estimate | None, mean: float | None, worth: float) -> Assumption:
    """Whether the answers to one call have independent lengths, or it does not matter. `alike` is
    their intraclass correlation, None where every call has one sequence; `mean` the predicted mean
    in seconds; `worth` the mean that independent lengths would give, divided by `mean`.
    """
    if alike is None:
        return not_judged("independent_lengths", "every call is of one sequence")
    if not alike.known:
        why = "too few calls of several sequences, or all answers are equally long"
        return not_judged("independent_lengths", why)
    if not significant(alike):
        says = "the lengths in a call are independent"
        return Assumption("independent_lengths", True, alike.value, says)
    says = f"the lengths in a call have an intraclass correlation of {short_number(alike.value, 2)}"
    if mean is None:
        return Assumption("independent_lengths", None, alike.value, says)
    fails = abs(worth - 1) >= MATERIAL and abs(worth - 1) * mean >= FLOOR
    would = f"{short_number(1000 * worth * mean, 3)} ms" if worth < 1e6 else "without bound"
    says += (
        f": drawn independently, the predicted mean would be {would}, not "
        f"{short_number(1000 * mean, 3)} ms; the prediction draws lengths by call"
    )
    return Assumption("independent_lengths", not fails, alike.value, says, counted=True)


def stable_queue(load: Estimate, delays: Vector, *, kept_finite: str | None = None) -> Assumption:
    """Whether there is a steady state. `delays` are in order of arrival; `kept_finite` names what
    keeps the queue finite at any load, if something does.
    """
    if kept_finite is not None:
        says = f"{kept_finite} keeps the queue finite"
        return Assumption("stable_queue", True, load.value, says)
    if not math.isfinite(load.value):
        return Assumption("stable_queue", None, load.value, "no law, or no arrivals")
    fails = load.low > 1
    if load.value > NEAR_ONE and delays.size >= FEWEST:
        means = batch_means(delays, TREND)
        rises = sum(float(np.sign(later - earlier)) for earlier, later in combinations(means, 2))
        earlier, later = (float(half.mean()) for half in np.split(means, 2))
        fails = fails or (rises >= RISES and later > 2 * earlier)
    says = f"the load is {load.value:.2f} ({load.low:.2f} to {load.high:.2f})"
    if fails:
        says += ": the queue grows without bound"
    elif load.value >= 1:
        says += ": whether there is a steady state is not known yet"
    return Assumption("stable_queue", False if fails else load.value < 1 or None, load.value, says)


def settled(
    window: float,
    since_epoch: float,
    relaxation: float,
    *,
    waiting_before: int = 0,
    free_rate: float = math.inf,
) -> Assumption:
    """Whether the window shows the steady state and not what the epoch began with.

    `window`: seconds of data; `since_epoch`: seconds from the epoch's start to the window's start;
    `relaxation`: the queue's relaxation time, infinite where it is not known; `waiting_before`:
    requests that waited when the epoch began; `free_rate`: requests/s that can be served beyond
    those that arrive.
    """
    transient = RELAXATIONS * relaxation + (waiting_before / free_rate if waiting_before else 0.0)
    if math.isnan(transient) or math.isinf(relaxation):
        return Assumption("settled", None, math.nan, "the queue's relaxation time is not known")
    share = max(0.0, transient - since_epoch) / window if window > 0 else math.inf
    fails = share > UNSETTLED
    says = (
        f"the queue needs {short_number(transient, 3)} s to forget how this epoch began"
        if fails
        else "settled"
    )
    return Assumption("settled", not fails, share, says)


def refusing(evidence: Evidence) -> str | None:
    """The reason not to judge clients and arrivals: limits of the gateway chose among the calls."""
    return "the gateway refuses a part of the calls" if evidence.fails("all_admitted") else None


def kept_finite(evidence: Evidence, patience: float | None) -> str | None:
    """What keeps the queue finite at any load; None where nothing does."""
    if patience is not None:
        return "patience"
    return "what the gateway refuses" if evidence.fails("all_admitted") else None


FORECAST_TESTS = (
    AssumptionTest("all_admitted", lambda evidence: all_admitted(evidence.seen)),
    AssumptionTest("no_retries", lambda evidence: no_retries(evidence.seen), refusing),
    AssumptionTest("open_loop", lambda evidence: open_loop(evidence.seen), refusing),
    ForecastTest(
        "settled",
        lambda evidence, forecast: settled(
            evidence.seen.now - evidence.seen.start,
            evidence.seen.start - evidence.seen.epoch_at,
            # not known: a closed loop forgets sooner than the open queue whose time this is
            math.inf if evidence.fails("open_loop") else forecast.relaxation,
            waiting_before=forecast.waiting_before,
            free_rate=max(forecast.free_rate, 1e-9),
        ),
    ),
    ForecastTest(
        "stable_queue",
        lambda evidence, forecast: stable_queue(
            forecast.load,
            evidence.seen.judged(),
            kept_finite=kept_finite(evidence, forecast.patience),
        ),
    ),
    AssumptionTest("constant_rate", constant_rate, refusing),
    AssumptionTest("poisson_arrivals", poisson_arrivals, refusing),
    ForecastTest(
        "independent_lengths",
        lambda _, forecast: independent_lengths(
            forecast.alike, forecast.mean, forecast.independent_effect
        ),
    ),
)
