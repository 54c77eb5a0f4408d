"""What wrong predictions cost: the price of misprediction, bounded noise, and one bit with the
power of two choices. The slides draw no numbers here; their claims are checked.
"""

from __future__ import annotations

import numpy as np
from scipy.integrate import quad
from scipy.special import kv

from kendall.queueing.models.soap.orders import (
    PREEMPTIVE_SHORTEST,
    SHORTEST_REMAINING,
    BounceRanks,
    Order,
)
from kendall.queueing.models.soap.queue import EXACT, solve_order
from kendall.queueing.predictors.laws import LognormalPrediction, UniformPrediction
from kendall.queueing.predictors.sizes import SizeLaw
from papers.reproduction.artefact import Artefact, Curve, Panel, Say, Statement, curve
from papers.reproduction.simulate import SEED, Simulated, points
from papers.reproduction.slides.cells import EXPONENTIAL, PREDICTED, WEIBULL
from papers.reproduction.slides.tables import FIRST, REMAINING
from papers.two_choices import TwoClasses, two_choices

LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
COARSE = 100  # cells
NOISES = ((0.99, 1.01), (0.9, 1.1), (0.5, 1.5), (0.5, 2.0), (0.25, 4.0), (0.1, 2.0))
SPREADS = [above / below for below, above in NOISES]
GRACE = 3.5
NOISY: dict[str, Order] = {
    "SPRPT": SHORTEST_REMAINING,
    "PSPJF": PREEMPTIVE_SHORTEST,
    "SRPT-B": BounceRanks(),
}
LAWS: dict[str, SizeLaw] = {"exponential": EXPONENTIAL, "Weibull": WEIBULL}
Ratios = dict[tuple[str, str, float], list[float]]  # by order, law and load: for each of NOISES
CHOICE_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
FEW = {10: 50_000, 100: 200_000}  # queues, and jobs of a replication
BITS = {
    "no bit": TwoClasses(0.5, 2.0, 1 / 3, 0.0, 1.0),  # all predicted short: first come first served
    "bit wrong for 20 %": TwoClasses(0.5, 2.0, 1 / 3, 0.2, 0.2),
    "exact bit": TwoClasses(0.5, 2.0, 1 / 3),
}


def misprediction(say: Say) -> Artefact:
    """Price of misprediction, its formula and its size."""
    curves: list[Curve] = []
    for label, column in (("SPJF / SJF", FIRST), ("SPRPT / SRPT", REMAINING)):
        order = column[0][1]
        prices = []
        for load in LOADS:
            say(f"{label} at load {load:g}")
            prices.append(_price(order, EXPONENTIAL, load, PREDICTED))
        curves.append(curve(f"{label}, exponential predictions", LOADS, prices))
    for sigma in (0.25, 0.5, 1.0):
        say(f"lognormal predictions, sigma {sigma:g}")
        told = LognormalPrediction(sigma)
        prices = [_price(SHORTEST_REMAINING, EXPONENTIAL, load, told) for load in LOADS]
        curves.append(curve(f"SPRPT / SRPT, lognormal sigma {sigma:g}", LOADS, prices))
    return Artefact(
        "slides-misprediction",
        "Price of misprediction",
        (_formula(say),),
        (Panel("Exponential sizes", "load", "E[T] / E[T] with exact sizes", tuple(curves)),),
        remarks=("Ratios of mean sojourn times; the slides' formula is that of the waits.",),
    )


def _formula(say: Say) -> Statement:
    """The ratio of waits at lam = 0.8: squares outside of rho' and inside, against the analysis."""
    load = 0.8
    say("formula")
    waits = [solve_order(FIRST[0][1], EXPONENTIAL, load, told).delay for told in (PREDICTED, EXACT)]
    found = waits[0] / waits[1]
    outside = _ratio(load, lambda rho: 1 / (1 - rho) ** 2)
    inside = _ratio(load, lambda rho: 1 / (1 - rho**2))
    return Statement(
        "int f_p / (1 - rho'_y^2) over int f_S / (1 - rho_x^2), lam = 0.8 (ratio of waits)",
        f"{inside:.4f}",
        found,
        f"the squares belong outside, 1 / (1 - rho'_y)^2: {outside:.4f} by that formula, "
        f"{found:.4f} by the analysis of SPJF and SJF; misprinted in our text of the slide",
        fault=True,
    )


def _ratio(load: float, weight: object) -> float:
    assert callable(weight)

    def predicted(z: float) -> float:
        rho = load * (1 - 2 * z * z * float(kv(2, 2 * z)))
        return float(weight(rho)) * 4 * z * float(kv(0, 2 * z))

    def exact(x: float) -> float:
        return float(weight(load * (1 - (1 + x) * np.exp(-x)))) * float(np.exp(-x))

    return float(quad(predicted, 1e-12, 60, limit=300)[0] / quad(exact, 0, 60, limit=300)[0])


def _price(order: Order, sizes: SizeLaw, load: float, told: object) -> float:
    predicted = solve_order(order, sizes, load, told, COARSE).sojourn  # type: ignore[arg-type]
    return predicted / solve_order(order, sizes, load, EXACT, COARSE).sojourn


def noise(say: Say) -> Artefact:
    """Bounded noise, Y uniform on [beta X, alpha X]: consistency and grace of SRPT-B."""
    ratios: Ratios = {}
    for law, sizes in LAWS.items():
        for load in (0.5, 0.8, 0.95):
            say(f"bounded noise, {law} sizes, load {load:g}")
            best = solve_order(SHORTEST_REMAINING, sizes, load, EXACT, COARSE).sojourn
            for name, order in NOISY.items():
                ratios[name, law, load] = [
                    solve_order(order, sizes, load, UniformPrediction(*ends), COARSE).sojourn / best
                    for ends in NOISES
                ]
    return Artefact(
        "slides-noise",
        "Bounded noise: SRPT with bounce",
        _noise_statements(ratios),
        tuple(_noise_panel(ratios, law, load) for law in LAWS for load in (0.8, 0.95)),
        assumed=(
            "rank of the policy: min(|prediction - age|, prediction), SRPT-B",
            "noise uniform on [beta X, alpha X]",
        ),
        remarks=(
            "That no policy is within a constant factor for all alpha, beta is a theorem (Scully, "
            "Grosof and Mitzenmacher 2022); no computation shows it.",
        ),
    )


def _noise_statements(ratios: Ratios) -> tuple[Statement, ...]:
    bounces = [row for (name, *_), row in ratios.items() if name == "SRPT-B"]
    near = max(row[0] for row in bounces)
    grace = max(
        ratio / (GRACE * spread)
        for row in bounces
        for ratio, spread in zip(row, SPREADS, strict=True)
    )
    return (
        Statement(
            "C = 1: E[T] / E[T_SRPT] tends to 1 (largest ratio at 0.99 X .. 1.01 X)",
            "in words",
            f"{near:.4f}",
            holds=near < 1.02,
        ),
        Statement(
            "G = 3.5: E[T] / E[T_SRPT] <= 3.5 alpha / beta (largest share of the bound)",
            "in words",
            f"{grace:.2f}",
            holds=grace <= 1,
        ),
    )


def _noise_panel(ratios: Ratios, law: str, load: float) -> Panel:
    curves = tuple(
        curve(name, sorted(SPREADS), _by(SPREADS, ratios[name, law, load])) for name in NOISY
    )
    return Panel(
        f"{law} sizes, load {load:g}", "alpha / beta", "E[T] / E[T] under SRPT", curves, "x"
    )


def _by(places: list[float], values: list[float]) -> list[float]:
    return [value for _, value in sorted(zip(places, values, strict=True))]


def choices(say: Say) -> Artefact:
    """One bit with the power of two choices, in the limit of many queues."""
    curves = []
    means: dict[tuple[str, int], list[float]] = {}
    for choice in (1, 2):
        for name, classes in BITS.items():
            say(f"{choice} choices, {name}")
            loads = CHOICE_LOADS if choice == 2 else CHOICE_LOADS[:4]
            means[name, choice] = [two_choices(classes, load, choice).sojourn for load in loads]
            curves.append(curve(f"d = {choice}, {name}", loads, means[name, choice]))
    finite = _of_few(say)
    curves += [
        points(f"{n} queues, d = 2, exact bit", CHOICE_LOADS, row) for n, row in finite.items()
    ]
    return Artefact(
        "slides-choices",
        "Power of two choices with one bit",
        _choice_statements(means["exact bit", 2], means["no bit", 2], finite),
        (Panel("Two exponential classes, means 0.5 and 2", "load", "E[T]", tuple(curves), "y"),),
        assumed=("two thirds of the jobs are short: exponential classes of mean 0.5 and 2",),
    )


def _of_few(say: Say) -> dict[int, list[Simulated]]:
    """Simulated E[T] of so many queues, exact bit, two choices, at CHOICE_LOADS."""
    from papers.scenarios.many_queues import (  # noqa: PLC0415 - numba: seconds, only where something is simulated
        simulate_choices,
    )
    from papers.scenarios.runs import Replications  # noqa: PLC0415

    found: dict[int, list[Simulated]] = {}
    for queues, jobs in FEW.items():
        for load in CHOICE_LOADS:
            say(f"simulation: {queues} queues, load {load:g}")
            each = simulate_choices(
                BITS["exact bit"], load, queues, 2, Replications(jobs, 16, (SEED, queues))
            )
            found.setdefault(queues, []).append(Simulated(each.mean, each.standard_error))
    return found


def _choice_statements(
    told: list[float], untold: list[float], finite: dict[int, list[Simulated]]
) -> tuple[Statement, ...]:
    """E[T] with two choices at CHOICE_LOADS."""
    few, many = (row[4] for row in finite.values())
    off = [each.mean / told[4] - 1 for each in (few, many)]
    single = two_choices(TwoClasses(1.0, 1.0, 0.5, 0.0, 1.0), 0.9).sojourn
    known = sum(0.9 ** (2**i - 2) for i in range(1, 12))
    return (
        Statement(
            "one class, lam = 0.9: sum_i lam^(2^i - 2) (Mitzenmacher 2001)", f"{known:.6f}", single
        ),
        Statement(
            "one bit helps with two choices too (E[T], exact bit / none, at 0.9)",
            "in words",
            f"{told[4] / untold[4]:.3f}",
            holds=all(exact < none for exact, none in zip(told, untold, strict=True)),
        ),
        Statement(
            "'limiting infinite server system' (simulated E[T] of "
            f"{' and '.join(map(str, finite))} queues / its own, at 0.9)",
            "in words",
            ", ".join(f"{100 * each:+.1f} %" for each in off),
            holds=abs(off[1]) < 4 * many.standard_error / told[4] + abs(off[0]) / 5,
        ),
    )
