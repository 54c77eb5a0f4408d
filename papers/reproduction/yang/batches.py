"""Yang et al., batches: Fig. 3 (E[L], H[b] and mu[b] against b) and Fig. 5 (dynamic and elastic,
uniform lengths).

k1 .. k4 are printed nowhere and cannot be inferred (papers.reproduction.yang.fixed). The
sets used here, seconds:

    A   k1 .008, k2 .03,  k3 .0004,   k4 .0225    a plausible engine, one stream as in Table I
    B   k1 .01,  k2 .03,  k3 .0046,   k4 .0184    one stream as in Table I, and b* = 8 for
                                                  lognormal(7, 0.7)
    F   k1 .001, k2 .003, k3 .000409, k4 .00205   meets what is stated about Fig. 6
"""

from __future__ import annotations

from functools import cache

import numpy as np

from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.as_published import elastic_line, padded_line, psi
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from papers.reproduction.artefact import (
    Artefact,
    Curve,
    Panel,
    Say,
    Statement,
    curve,
    largest_over,
)
from papers.reproduction.heavy_tails import HeavyTailedTime, unlimited_batches
from papers.reproduction.lengths import Lengths, lognormal, truncated_gaussian, uniform
from papers.reproduction.simulate import BatchRun, Constants, points, simulate_batches

SETS: dict[str, Constants] = {
    "A": (0.008, 0.03, 0.0004, 0.0225),
    "B": (0.01, 0.03, 0.0046, 0.0184),
    "F": (0.001, 0.003, 0.000409, 0.00205),
}
ASSUMED = tuple(
    f"set {name}: k1, k2, k3, k4 = {', '.join(f'{k:g}' for k in constants)} s"
    for name, constants in SETS.items()
)
HEAVY = lognormal(7, 0.7)
FIG3 = (uniform(2000), truncated_gaussian(800, 20), HEAVY)
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
LONGEST, MEAN = 1000.0, 500.0  # of Fig. 5
LOADS = (
    0.01,
    0.02,
    0.03,
    0.045,
    0.065,
    0.09,
    0.13,
    0.18,
    0.24,
    0.3,
    0.42,
    0.54,
    0.66,
    0.76,
    0.85,
    0.91,
)
EVENTS = (2, 7, 10, 12, 14)  # which of the loads are simulated too


def batch_time(constants: Constants, lengths: Lengths, b: float) -> float:
    """H[b] with E[L]: Eq. 19 and the denominator of Eq. 24."""
    k1, k2, k3, k4 = constants
    return k1 * b + k2 + (k3 * b + k4) * lengths.longest_mean(b)


def speed(constants: Constants, lengths: Lengths, b: float) -> float:
    """mu[b], Eq. 24."""
    return b / batch_time(constants, lengths, b)


def best_size(constants: Constants, lengths: Lengths, largest: int = 2**17) -> int | None:
    """The batch size of the largest mu[b]; None where mu still rises at `largest`."""
    low, high = 0, int(np.log2(largest))
    coarse = [speed(constants, lengths, 2**k) for k in range(low, high + 1)]
    top = int(np.argmax(coarse))
    if top == high:
        return None
    first, last = 2 ** max(top - 1, 0), 2 ** (top + 1)
    while last - first > 2:  # mu[b] has one maximum here
        left, right = first + (last - first) // 3, last - (last - first) // 3
        if speed(constants, lengths, left) < speed(constants, lengths, right):
            first = left + (left == first)
        else:
            last = right - (right == last)
    return max(range(first, last + 1), key=lambda b: speed(constants, lengths, b))


def fig3(say: Say) -> Artefact:
    """The longest of a batch, the batch time and the inference speed."""
    say("E[L] by quadrature")
    standard = truncated_gaussian(0, 1)
    times = [batch_time(SETS["A"], standard, b) for b in SIZES]
    line = np.polynomial.Polynomial.fit(SIZES, times, 1)
    r2 = 1 - np.sum((line(np.array(SIZES)) - times) ** 2) / np.sum(
        (np.array(times) - np.mean(times)) ** 2
    )
    statements = _fig3_statements(r2)
    remarks = (
        "k1 .. k4 are not printed; where the optimum lies depends on k4/k3, that it exists does "
        "not.",
        (
            "Assumption 1 (i) of Inoue (mu[b] never falls), on which Eq. 16 rests, fails for every "
            "unbounded law."
        ),
    )
    return Artefact(
        "yang-fig3",
        "Fig. 3: E[L], H[b] and mu[b] against the batch size",
        statements,
        _fig3_panels(times),
        ASSUMED,
        remarks,
    )


def _fig3_statements(r2: float) -> tuple[Statement, ...]:
    standard = truncated_gaussian(0, 1)
    growth = standard.longest_mean(1024) / standard.longest_mean(64) - 1
    return (
        Statement(
            "'E[L] becomes a fixed value quickly' (truncated standard Gaussian; growth from b = "
            "64 to 1024)",
            "in words",
            f"+{100 * growth:.0f} %",
            "the longest of b draws of an unbounded law grows for ever, here as sqrt(2 ln b)",
            fault=True,
        ),
        Statement(
            "'H[b] increases approximately linearly' (R2 of a line, b <= 64, set A)",
            "in words",
            f"{r2:.4f}",
            holds=bool(r2 > 0.99),
        ),
        *_best_size_statements(),
    )


def _best_size_statements() -> tuple[Statement, ...]:
    wide, narrow, heavy = (
        {name: best_size(constants, law) for name, constants in SETS.items()} for law in FIG3
    )
    wide_law, narrow_law, heavy_law = (law.name for law in FIG3)
    return (
        Statement(
            f"'mu[b] increases with b for a light tail': {wide_law}, b*",
            "none",
            _shown(wide),
            holds=all(best is None for best in wide.values()),
        ),
        Statement(
            f"the same: {narrow_law}, b*",
            "none",
            _shown(narrow),
            (
                "E[L] has no limit, so mu[b] falls in the end for every unbounded law; for this "
                "one at sizes that no device holds"
            ),
            fault=True,
        ),
        Statement(
            f"'with a heavy tail there is an optimal batch size': {heavy_law}, b*",
            "in words",
            _shown(heavy),
            holds=all(heavy.values()),
        ),
    )


def _shown(best: dict[str, int | None]) -> str:
    return ", ".join(f"{name}: {size or 'none'}" for name, size in best.items())


def _fig3_panels(times: list[float]) -> tuple[Panel, ...]:
    standard, size = truncated_gaussian(0, 1), "batch size b"
    longest = curve("E[L]", SIZES, [standard.longest_mean(b) for b in SIZES])
    panels = [
        Panel("(a) truncated standard Gaussian: the longest", size, "E[L] (tokens)", (longest,)),
        Panel("(a) the same: batch time, set A", size, "H[b] (s)", (curve("H[b]", SIZES, times),)),
    ]
    for name in ("B", "F"):
        curves = tuple(
            curve(law.name, SIZES, [speed(SETS[name], law, b) for b in SIZES]) for law in FIG3
        )
        panels.append(
            Panel(f"(b) inference speed, set {name}", size, "μ[b] (requests/s)", curves, "x")
        )
    return tuple(panels)


def exact_delay(constants: Constants, lam: float, *, padded: bool) -> float:
    """Mean queueing delay, uniform(0, 1000), everything that waits taken."""
    if not padded:
        return unlimited_batches(
            HeavyTailedTime(constants, uniform(LONGEST), padded=False), lam
        ).delay
    k1, k2, k3, k4 = constants
    time = BatchTime(LatencyModel(k1, k2, k3, k4), _whole_tokens(), None, padded=True)
    return solve_batch_chain(time, lam, None).queueing_delay


@cache
def _whole_tokens() -> TokenDistribution:
    return parse_distribution(f"uniform:low=0,high={LONGEST:g}")


def fig5(say: Say) -> Artefact:
    """Everything that waits is taken; padded (dynamic) and unpadded (elastic)."""
    panels, statements = [], []
    for name in ("A", "B"):
        curves, ratios = _fig5_curves(name, say)
        delay = f"mean queueing delay (s), set {name}"
        title = f"uniform(0, 1000), set {name}"
        panels += [
            Panel(title, "arrival rate λ (requests/s)", delay, curves, "y"),
            Panel(f"printed bound / exact, set {name}", "load of padded batches", "ratio", ratios),
        ]
        statements += _fig5_statements(name, curves, ratios)
    statements.append(_beyond(say))
    remarks = (
        "Neither k1 .. k4 nor the axes of Fig. 5 are in the text: the picture is remade for sets "
        "A and B.",
        (
            "The product's lengths are whole tokens: uniform(0, 1000) rounded to 1 .. 1000 "
            "changes no delay by more than 1e-6."
        ),
    )
    return Artefact(
        "yang-fig5",
        "Fig. 5: dynamic and elastic batching",
        tuple(statements),
        tuple(panels),
        ASSUMED[:2],
        remarks,
    )


def _fig5_curves(name: str, say: Say) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    constants = SETS[name]
    capacity = 1 / (constants[0] + constants[2] * LONGEST)
    rates = [load * capacity for load in LOADS]
    lines = {
        "dynamic": padded_line(*constants, LONGEST),
        "elastic": elastic_line(*constants, mean=MEAN, longest=LONGEST),
    }
    curves, ratios = [], []
    for policy, line in lines.items():
        exact, found = [], []
        for index, lam in enumerate(rates):
            say(f"set {name}, {policy}, {lam:.3g} requests/s")
            exact.append(exact_delay(constants, lam, padded=policy == "dynamic"))
            if index in EVENTS:
                run = BatchRun(
                    constants=constants, lengths=uniform(LONGEST), padded=policy == "dynamic"
                )
                found.append(
                    simulate_batches(f"yang-fig5 {name} {policy} {index}", run, lam, 100_000)[0]
                )
        bound = [psi(lam, *line) for lam in rates]
        seen = [rates[index] for index in EVENTS]
        curves += [
            curve(f"{policy}, exact", rates, exact),
            curve(f"{policy}, Eq. 16 as printed", rates, bound, "printed"),
            points(f"{policy}, simulated", seen, found),
        ]
        ratios.append(curve(policy, LOADS, np.array(bound) / exact))
    return tuple(curves), tuple(ratios)


def _fig5_statements(
    name: str, curves: tuple[Curve, ...], ratios: tuple[Curve, ...]
) -> list[Statement]:
    padded, elastic = (np.array(curves[index].y, dtype=float) for index in (0, 3))
    bounds = np.array(ratios[0].y, dtype=float)
    worst = largest_over(lambda load: _bound_over_exact(SETS[name], load), LOADS)
    gain = padded / elastic
    return [
        Statement(
            "'the upper bound closely approximates the exact curve' (bound / exact, dynamic, set "
            f"{name})",
            "in words",
            (
                f"{bounds[0]:.2f} at load {LOADS[0]:g}, {worst:.2f} at worst, {bounds[-1]:.3f} at "
                f"load {LOADS[-1]:g}"
            ),
            "at moderate and high load only; at light load Eq. 20 takes m for the mean length m/2",
        ),
        Statement(
            f"'elastic has lower delays than dynamic' (set {name}, all loads)",
            "in words",
            f"{gain.min():.4f} to {gain.max():.2f} times",
            holds=bool(gain.min() > 1),
        ),
        Statement(
            f"'this advantage increases with the arrival rate' (set {name})",
            "in words",
            "monotone",
            holds=bool(np.all(np.diff(gain) > 0)),
        ),
    ]


def _bound_over_exact(constants: Constants, load: float) -> float:
    lam = load / (constants[0] + constants[2] * LONGEST)
    return psi(lam, *padded_line(*constants, LONGEST)) / exact_delay(constants, lam, padded=True)


def _beyond(say: Say) -> Statement:
    """The elastic 'bound' at high load."""
    say("elastic at load 0.95")
    lam = 0.95 / (SETS["B"][0] + SETS["B"][2] * MEAN)
    exact, bound = (
        exact_delay(SETS["B"], lam, padded=False),
        psi(lam, *elastic_line(*SETS["B"], mean=MEAN, longest=LONGEST)),
    )
    return Statement(
        "'similarly the delay can be calculated by Eq. 16' as an upper bound (elastic, set B, "
        f"{lam:.3f} requests/s, load 0.95)",
        "in words",
        f"exact {exact:.2f} s, printed bound {bound:.2f} s",
        "Eq. 26 replaces the random k3 sum n_i by its mean: not a bound"
        if exact > bound
        else "not proven by Eq. 16: k3 sum n_i is random; here it is not exceeded",
        fault=exact > bound,
    )
