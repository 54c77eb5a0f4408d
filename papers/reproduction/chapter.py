"""The serving chapter: its latency table (25.3), its formulas (25.4, 25.6) and its case study
(25.9).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.as_published import kingman_delay, md1_delay
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.gg1 import kingman
from kendall.queueing.models.mm1 import md1, mm1
from kendall.queueing.result import Quantiles
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve

TABLE = ((0.5, "2"), (0.8, "5"), (0.9, "10"), (0.95, "20"))
CASE_RATE, CASE_SERVICE = 3.2, 0.25
KINGMAN_LOADS = (0.3, 0.6, 0.85, 0.95)
BATCH, BATCH_SERVICE = 8, 1.0  # requests, seconds


def latency(say: Say) -> Artefact:
    """Section 25.2 and 25.3: Little's law and the cliff."""
    say("closed forms")
    statements = [
        Statement(f"E[W] / E[S] of M/M/1 at rho = {rho:g}", stated, mm1(rho, 1.0).mean_sojourn)
        for rho, stated in TABLE
    ]
    statements += [
        Statement(
            "E[W] at E[S] = 50 ms, rho = 0.9 (ms)", "500", 1e3 * mm1(18.0, 0.05).mean_sojourn
        ),
        Statement("Little: 200 requests/s, 0.25 s each (requests in flight)", "50", 200 * 0.25),
    ]
    loads = np.linspace(0.02, 0.96, 48)
    curves = (
        curve("M/M/1", loads, [mm1(rho, 1.0).mean_delay for rho in loads]),
        curve("M/D/1", loads, [md1(rho, 1.0).mean_delay for rho in loads]),
        curve("M/D/1 as printed", loads, [md1_delay(rho, 1.0) for rho in loads], "printed"),
    )
    panel = Panel("Queueing delay in service times", "utilisation ρ", "W_q / E[S]", curves, "y")
    return Artefact(
        "chapter-latency", "Serving chapter, 25.3: the latency cliff", tuple(statements), (panel,)
    )


def variability(say: Say) -> Artefact:
    """Section 25.4: M/D/1, M/M/1 and Kingman."""
    statements, curves = _at_80_percent(), []
    for name, scv in (
        ("regular arrivals, c_a = 0 (D/M/1)", 0.0),
        ("bursty arrivals, c_a^2 = 4 (gamma/M/1)", 4.0),
    ):
        errors = _errors_of_kingman(name, scv, say)
        shown = ", ".join(
            f"{100 * error:+.0f} % at {load:g}"
            for load, error in zip(KINGMAN_LOADS, errors, strict=True)
        )
        statements.append(
            Statement(
                f"Kingman is 'a useful approximation': {name}",
                "in words",
                shown,
                "exact only for Poisson arrivals, and right as rho tends to 1",
            )
        )
        curves.append(curve(name, KINGMAN_LOADS, [100 * error for error in errors]))
    remarks = (
        "The printed expression is the heavy-traffic approximation. Kingman's upper bound is lam "
        "(Var A + Var S)/(2 (1 - rho)); it held in every case above.",
    )
    title = "Printed 'Kingman' against exact"
    panel = Panel(title, "utilisation ρ", "error (%)", tuple(curves))
    return Artefact(
        "chapter-variability",
        "Serving chapter, 25.4: variability",
        tuple(statements),
        (panel,),
        remarks=remarks,
    )


def _at_80_percent() -> list[Statement]:
    rho = 0.8
    right, printed = md1(rho, 1.0).mean_delay, md1_delay(rho, 1.0)
    return [
        Statement(
            "W_q of M/D/1 = rho^2/(2 mu (1 - rho)) (service times at rho = 0.8)",
            f"{printed:g}",
            right,
            (
                "right: rho/(2 mu (1 - rho)); the printed one is L_q times E[S], too low by the "
                "factor rho"
            ),
            fault=True,
        ),
        Statement(
            "W_q of M/M/1 = rho/(mu - lam) (service times at rho = 0.8)",
            "4",
            mm1(rho, 1.0).mean_delay,
        ),
        Statement(
            "Kingman, M/M/1 (service times at rho = 0.8)",
            f"{kingman_delay(rho, 1.0, 1, 1):g}",
            mm1(rho, 1.0).mean_delay,
        ),
    ]


def _errors_of_kingman(name: str, scv: float, say: Say) -> list[float]:
    """Relative, of the printed formula."""
    errors = []
    for load in KINGMAN_LOADS:
        say(f"{name}, load {load}")
        exact = _gm1_delay(load, scv)
        errors.append(kingman_delay(load, 1.0, scv**0.5, 1) / exact - 1)
        assert kingman(load, 1.0, scv, 1.0).upper_bound >= exact * (1 - 1e-12)
    return errors


def _gm1_delay(rho: float, scv: float) -> float:
    """Exact mean delay of GI/M/1, E[S] = 1, gamma gaps: sigma/(1 - sigma), sigma = E e^{-(1 -
    sigma) A}.
    """

    def gap(sigma: float) -> float:
        s = (1 - sigma) / rho
        transform = np.exp(-s) if scv == 0 else (1 + scv * s) ** (-1 / scv)
        return float(transform - sigma)

    sigma = float(brentq(gap, 0.0, 1 - (1 - rho) * 1e-3))
    return sigma / (1 - sigma)


def batching(say: Say) -> Artefact:
    """Section 25.6: batches of b, b = 8, constant service 1 s, at several loads."""
    time = BatchTime(
        LatencyModel(k4=BATCH_SERVICE),
        parse_distribution("deterministic:value=1"),
        None,
        padded=True,
    )
    rows: list[tuple[float, float, float]] = []
    for load in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        say(f"batches of {BATCH} at load {load}")
        lam = load * BATCH / BATCH_SERVICE
        exact = _mean(solve_fixed_batches(time, lam, BATCH, quantiles=False).sojourn)
        forming = (BATCH - 1) / (2 * lam)
        rows.append((load, exact, md1(load, BATCH_SERVICE).mean_delay + forming + BATCH_SERVICE))
    x = [row[0] for row in rows]
    curves = (
        curve("exact M/D^8/1", x, [row[1] for row in rows]),
        curve("sum with an M/D/1 wait", x, [row[2] for row in rows], "printed"),
    )
    panel = Panel("Batches of 8, 1 s each", "load λ E[H]/b", "mean sojourn (s)", curves, "y")
    return Artefact(
        "chapter-batching",
        "Serving chapter, 25.6: the forming delay",
        _batching_statements(time, rows),
        (panel,),
    )


def _batching_statements(
    time: BatchTime, rows: list[tuple[float, float, float]]
) -> tuple[Statement, ...]:
    """`rows`: load, exact mean sojourn, the printed sum."""
    shown = ", ".join(
        f"{100 * (naive / exact - 1):+.0f} % at {load:g}" for load, exact, naive in rows[::2]
    )
    quiet = 0.01
    delay = _mean(solve_fixed_batches(time, quiet, BATCH, quantiles=False).delay)
    alone = delay / ((BATCH - 1) / (2 * quiet))
    return (
        Statement(
            "W_batch = (b - 1)/(2 lam), 'roughly' (exact delay without any queue / formula)",
            "in words",
            f"{alone:.9f}",
            holds=abs(alone - 1) < 1e-8,
        ),
        Statement(
            "W = W_queue + W_batch + W_service, W_queue taken from M/D/1 with batches as customers",
            "in words",
            shown,
            (
                "batches are complete at E_b intervals, more regular than Poisson: with the wait "
                "of E_b/D/1 the sum is exact"
            ),
        ),
    )


def _mean(quantiles: Quantiles) -> float:
    assert quantiles.mean is not None
    return quantiles.mean


def case_study(say: Say) -> Artefact:
    """Section 25.9."""
    say("closed forms")
    queue = mm1(CASE_RATE, CASE_SERVICE)
    p99 = queue.sojourn_quantile(0.99)
    statements = (
        Statement("utilisation (%)", "80", 100 * queue.load),
        Statement("W (s)", "1.25", queue.mean_sojourn),
        Statement("W / E[S]", "5", queue.mean_sojourn / CASE_SERVICE),
        Statement("W_q (s)", "", queue.mean_delay),
        Statement(
            "'P99 will be worse': p99 of the sojourn (s)",
            "in words",
            f"{p99:.3f}",
            holds=p99 > queue.mean_sojourn,
        ),
        Statement(
            "'fine at 60 %, fall apart at 80 %': W at 60 %, p99 at 60 % and 80 % (s)",
            "",
            _pair(p99),
            "the mean doubles, and so does p99",
        ),
    )
    x = np.linspace(0, 8, 81)
    tail = curve("P(W > t), M/M/1", x, np.exp(-queue.decay * x))
    panel = Panel(
        "Case study: 3.2 requests/s, 0.25 s each",
        "sojourn t (s)",
        "P(W > t)",
        (tail,),
        "y",
        marks=((1.25, "mean 1.25 s"), (p99, "p99 5.76 s")),
    )
    return Artefact("chapter-case", "Serving chapter, 25.9: the case study", statements, (panel,))


def _pair(p99: float) -> str:
    lighter = mm1(2.4, CASE_SERVICE)
    return f"{lighter.mean_sojourn:.3f}, {lighter.sojourn_quantile(0.99):.3f}, {p99:.3f}"
