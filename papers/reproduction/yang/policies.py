"""Yang et al., Fig. 6b: lognormal(7, 0.7) lengths under all policies, and why no bound means no
steady state. The artefact yang-fig6.
"""

from __future__ import annotations

import numpy as np

from kendall.queueing.models.as_published import fixed_batch_delay, psi
from papers.reproduction.artefact import Artefact, Curve, Panel, Say, Statement, curve
from papers.reproduction.heavy_tails import (
    HeavyTailedTime,
    dynamic_batches,
    fixed_batches,
    unlimited_batches,
)
from papers.reproduction.lengths import Vector
from papers.reproduction.simulate import SEED, BatchRun, points, simulate_batches
from papers.reproduction.yang.batches import HEAVY, SETS, batch_time
from papers.reproduction.yang.fixed import (
    BEST,
    CONSTANTS,
    PADDED,
    RATE,
    against_size,
    fixed_statements,
    line_through,
)

ELASTIC = HeavyTailedTime(CONSTANTS, HEAVY, padded=False)
RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.39, 0.42, 0.43)
EVENT_RATES = (0.05, 0.2, 0.35)
BLOW_UP_RATES, RUNS, REQUESTS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.43), 24, 100_000


def endless(lam: float, run: int) -> tuple[Vector, float]:
    """One run of padded batches without a bound: mean delay of the first n requests, and the
    largest batch's share of all requests.
    """
    system = BatchRun(constants=CONSTANTS, lengths=HEAVY)
    arrived, dispatched, _, sizes = system.path(
        np.random.default_rng([SEED, int(1000 * lam), run]), lam, REQUESTS
    )
    return np.cumsum(dispatched - arrived) / np.arange(1, len(arrived) + 1), float(
        sizes.max()
    ) / REQUESTS


def fig6(say: Say) -> Artefact:
    """Fixed batches against b, all policies against lam, and what happens without a bound."""
    say("Eq. 25 and Eq. 16")
    printed = {
        b: fixed_batch_delay(RATE, batch_time(CONSTANTS, HEAVY, b), b)
        for b in range(6, 25)
        if batch_time(CONSTANTS, HEAVY, b) * RATE < b
    }
    panel_a, exact = against_size(printed, say)
    panel_b, curves = _against_rate(say)
    paths, shares = _without_bound(say)
    statements = (
        *fixed_statements(printed, exact, say),
        *_policy_statements(curves, paths, shares),
    )
    assumed = (
        f"k1, k2, k3, k4 = {', '.join(f'{k:.6g}' for k in CONSTANTS)} s: set F, k3 tuned to the "
        "125 s",
        (
            "Eq. 16 needs a line H = alpha b + beta, the document does not say which: least "
            "squares through H[1] .. H[32]"
        ),
    )
    return Artefact(
        "yang-fig6",
        "Fig. 6: fixed, capped, unbounded and elastic batches",
        statements,
        (panel_a, panel_b, *_endless_panels(paths, shares)),
        assumed,
        _remarks(),
    )


def _remarks() -> tuple[str, ...]:
    alpha, beta = line_through(CONSTANTS)
    rounded = psi(RATE, *line_through(SETS["F"]))
    return (
        f"The line has alpha = {alpha:.4f}, beta = {beta:.3f} s (below 0): lam alpha = "
        f"{RATE * alpha:.4f}. So near to saturation Eq. 16 says little: with k3 rounded to "
        f"4.09e-4 it gives {rounded:.0f} s instead of 125 s.",
        "k1 .. k4 are not printed and not identifiable. Constants of Table I's scale (22-23 ms a "
        "token) serve at most 0.11 requests/s in batches of 8: at 0.43 requests/s they have no "
        "steady state. Fig. 6 used constants at least four times faster, or another unit of lam.",
        "The '125 s at 0.43' is no delay of any queue: for lognormal lengths padded batches "
        "without a bound have NO steady state at any arrival rate (E[L_b] grows without limit, so "
        "lam k3 E[L_b] > 1 for large b). Any simulated value is a matter of the run's length.",
    )


def _against_rate(say: Say) -> tuple[Panel, dict[str, Curve]]:
    found: dict[str, list[float]] = {
        "fixed, b = 8": [],
        "dynamic, b_max = 8": [],
        "elastic, no bound": [],
    }
    for lam in RATES:
        say(f"policies at {lam:g} requests/s")
        found["fixed, b = 8"].append(fixed_batches(PADDED, lam, BEST).delay)
        found["dynamic, b_max = 8"].append(dynamic_batches(PADDED, lam, BEST).delay)
        found["elastic, no bound"].append(unlimited_batches(ELASTIC, lam).delay)
    curves = {name: curve(name, RATES, values) for name, values in found.items()}
    service = batch_time(CONSTANTS, HEAVY, BEST)
    curves["Eq. 25, b = 8"] = curve(
        "Eq. 25 as printed, b = 8",
        RATES,
        [fixed_batch_delay(lam, service, BEST) for lam in RATES],
        "printed",
    )
    systems = {
        "fixed, b = 8": {"bound": BEST, "fixed": True},
        "dynamic, b_max = 8": {"bound": BEST},
        "elastic, no bound": {"padded": False},
    }
    for name, system in systems.items():
        say(f"simulation: {name}")
        run = BatchRun(constants=CONSTANTS, lengths=HEAVY, **system)  # type: ignore[arg-type]
        found_points = [
            simulate_batches(f"yang-fig6b {name} {lam}", run, lam)[0] for lam in EVENT_RATES
        ]
        label = f"{name}, simulated"
        curves[label] = points(label, EVENT_RATES, found_points)
    return Panel(
        "(b) policies, set F",
        "arrival rate λ (requests/s)",
        "mean queueing delay (s)",
        tuple(curves.values()),
        "y",
    ), curves


def _without_bound(say: Say) -> tuple[list[Curve], list[float]]:
    shares, paths = [], []
    shown = np.unique(np.geomspace(100, REQUESTS, 60).astype(int)) - 1
    for lam in BLOW_UP_RATES:
        blown = 0
        for run in range(RUNS):
            say(f"padded batches without a bound, {lam:g} requests/s, run {run + 1} of {RUNS}")
            means, largest = endless(lam, run)
            blown += largest > 0.05
            if lam == RATE and run < 5:
                paths.append(curve(f"run {run + 1}", shown + 1, means[shown]))
        shares.append(blown / RUNS)
    return paths, shares


def _endless_panels(paths: list[Curve], shares: list[float]) -> tuple[Panel, ...]:
    stated = curve("stated: 125 s by Eq. 16", (100, REQUESTS), (125, 125), "printed")
    blown = curve("one batch held over 5 % of all requests", BLOW_UP_RATES, shares)
    return (
        Panel(
            "(c) no bound, padded, λ = 0.43/s: no steady state",
            "requests since the start",
            "mean delay so far (s)",
            (*paths, stated),
            "xy",
        ),
        Panel(
            f"(d) {RUNS} runs of {REQUESTS:,} requests that blew up",
            "arrival rate λ (requests/s)",
            "share of runs",
            (blown,),
        ),
    )


def _policy_statements(
    curves: dict[str, Curve], paths: list[Curve], shares: list[float]
) -> tuple[Statement, ...]:
    fixed, capped, elastic = (
        np.array(curves[name].y, dtype=float)
        for name in ("fixed, b = 8", "dynamic, b_max = 8", "elastic, no bound")
    )
    low = RATES.index(0.05)
    wider = dynamic_batches(PADDED, RATES[low], 16).delay
    shortest = min(path.y[-1] or 0.0 for path in paths)
    crossing = "everywhere" if np.all(fixed > capped) else "not everywhere"
    return (
        Statement(
            "'when lam is small, any b_max above the mean queue gives the same low delay' (s at "
            "0.05, b_max = 8 and 16)",
            "in words",
            f"{capped[low]:.4f}, {wider:.4f}",
            holds=abs(capped[low] / wider - 1) < 1e-3,
        ),
        Statement(
            "'dynamic with b_max = 8 is much less than infinite for large lam' (s at 0.43; "
            "without a bound, simulated)",
            "in words",
            f"{capped[-1]:.1f}, {shortest:.0f} after {REQUESTS:,} requests and growing",
            holds=bool(10 * capped[-1] < shortest),
        ),
        Statement(
            "runs of 100,000 requests without a bound that blow up at 0.35 and 0.43",
            "",
            f"{shares[BLOW_UP_RATES.index(0.35)]:.2f}, {shares[-1]:.2f}",
            "share of 24 runs",
        ),
        Statement(
            "'elastic is better than dynamic even for a heavy tail' (b_max = 8 / elastic, all lam)",
            "in words",
            f"{(capped / elastic).min():.3f} to {(capped / elastic).max():.1f} times",
            holds=bool(np.all(elastic < capped)),
        ),
        Statement("fixed b = 8 waits longer than dynamic b_max = 8", "", crossing),
    )
