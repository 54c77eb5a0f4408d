"""What the arrivals must be, and who makes them so: the gateway's own limits, retries, closed
loops, changes of rate, arrivals that are not Poisson; and the lengths of the answers to one call.

Each rule is stated with its threshold; a cause explains what it causes: where clients retry or wait
for their answers, the arrivals cannot be Poisson, and that is not held against them a second time.
Which calls a limit keeps out depends on the queue, so that the admitted ones look as those of a
closed loop do; of the clients nothing is said then.

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
                  clients, which n(t) then never exceeds. Arrivals that are merely regular see few
                  in the system too, but there n(t) goes far beyond n*.
constant_rate     the CUSUM of queueing.estimation.change signals at most `FEW_CHANGES` changes and
                  all pieces of at least `PIECE` arrivals between them pass as Poisson: the rate
                  changed. With more changes, or pieces that fail, the arrivals are not Poisson; one
                  name, not two.
poisson_arrivals  queueing.measurement.arrival_audit at significance `LEVEL` over the window, of
                  its last `AUDITED` arrivals.
independent_lengths
                  of calls of several sequences. Fails where the intraclass correlation of their
                  output lengths (queueing.estimation.lengths.within_calls) is beyond chance, and
                  with independent lengths the predicted mean would be another one by `MATERIAL` and
                  by `FLOOR`. The prediction draws lengths by call, so that a failure is no reason
                  to doubt it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from policies.text import short_number
from queueing.estimation.assumptions.assumption import Assumption, Name, factor
from queueing.estimation.assumptions.engine_assumptions import FLOOR, MATERIAL
from queueing.estimation.change import FEW_CHANGES, Change, Vector, burstiness, changes
from queueing.estimation.interval import Estimate
from queueing.estimation.lengths.within_calls import significant
from queueing.estimation.window.snapshot import Snapshot
from queueing.measurement.arrival_audit import audit_arrivals

REFUSED_SHARE = 0.02
RETRY_SHARE = 0.02
DEPENDENT = 4.5
LEVEL = 0.0005
PIECE = 50
FEWEST = 100  # arrivals before anything is said of them
AUDITED = 10_000  # of them, at most: the last ones


def client_assumptions(seen: Snapshot) -> tuple[Assumption, ...]:
    """all_admitted, no_retries, open_loop, constant_rate, poisson_arrivals."""
    admitted = all_admitted(seen)
    if admitted.holds is False:
        names: tuple[Name, ...] = ("no_retries", "open_loop", "constant_rate", "poisson_arrivals")
        says = "not judged: the gateway refuses a part of the calls"
        return (admitted, *(Assumption(name, None, math.nan, says) for name in names))
    retries, loop = no_retries(seen), open_loop(seen)
    explained = retries.holds is False or loop.holds is False
    return (admitted, retries, loop, *arrival_assumptions(seen.arrivals, explained=explained))


def all_admitted(seen: Snapshot) -> Assumption:
    """The queue that is predicted is that of the admitted, as if chance had chosen them."""
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
    """Clients that try again make more arrivals the longer the queue is."""
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
    """Whether arrivals come whatever is in the system."""
    if seen.arrivals.size < FEWEST:
        return Assumption("open_loop", None, math.nan, "too few arrivals")
    met, at, number = _number_in_system(seen)
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


def _number_in_system(seen: Snapshot) -> tuple[Vector, Vector, Vector]:
    """What each arrival met; the instants of all events and the number from each on."""
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


def arrival_assumptions(
    instants: Vector, *, explained: bool = False
) -> tuple[Assumption, Assumption]:
    """constant_rate and poisson_arrivals; `explained`: another cause is known already."""
    if instants.size < FEWEST or explained:
        says = "explained by the clients" if explained else "too few arrivals"
        return Assumption("constant_rate", None, math.nan, says), Assumption(
            "poisson_arrivals", None, math.nan, says
        )
    whole = audit_arrivals(instants[-AUDITED:], significance=LEVEL)
    if whole.poisson:
        return _constant(), Assumption(
            "poisson_arrivals", True, whole.dispersion, "arrivals pass as Poisson"
        )
    found = changes(instants)
    if 1 <= len(found) <= FEW_CHANGES and all(_passes(piece) for piece in _pieces(instants, found)):
        last = found[-1]
        word = "rose" if last.ratio > 1 else "fell"
        ago = short_number(instants[-1] - last.at, 3)
        says = (
            f"the arrival rate {word} by a factor of {factor(last.ratio)}, {ago} s before the "
            "last arrival"
        )
        return Assumption("constant_rate", False, last.ratio, says), Assumption(
            "poisson_arrivals", True, 1.0, "Poisson between the changes"
        )
    says = "arrivals are not Poisson: " + "; ".join(whole.reasons[:2])
    return _constant(None), Assumption("poisson_arrivals", False, whole.dispersion, says)


def _constant(holds: bool | None = True) -> Assumption:
    return Assumption(
        "constant_rate",
        holds,
        1.0,
        "no change of the arrival rate" if holds else "not judged: the arrivals are not Poisson",
    )


def _pieces(instants: Vector, found: Sequence[Change]) -> list[Vector]:
    edges = [-math.inf, *(change.at for change in found), math.inf]
    pieces = [instants[(instants >= low) & (instants < high)] for low, high in pairwise(edges)]
    return [piece for piece in pieces if piece.size >= PIECE]


def _passes(piece: Vector) -> bool:
    return bool(audit_arrivals(piece, significance=LEVEL).poisson)


def independent_lengths(alike: Estimate, mean: float | None, worth: float) -> Assumption:
    """`mean`: predicted, seconds; `worth`: with independent lengths, over it."""
    if not alike.known:
        says = "not judged: too few calls of several sequences, or all answers are equally long"
        return Assumption("independent_lengths", None, math.nan, says)
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
