"""Inoue (2021): Fig. 4-8, the queue with the laws of Table 1. Times in ms, energy in joules."""

from __future__ import annotations

from functools import cache

import numpy as np

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.as_published import phi, phi0, phi1
from kendall.queueing.models.batches.batch_chain import BatchQueue, solve_batch_chain
from papers.reproduction.artefact import (
    Artefact,
    Curve,
    Panel,
    Say,
    Statement,
    curve,
    largest_over,
)
from papers.reproduction.inoue import DEVICES, Device, device
from papers.reproduction.lengths import Vector
from papers.reproduction.simulate import BatchRun, Simulated, points, simulate_batches

LOADS = (
    0.02,
    0.04,
    0.06,
    0.08,
    0.11,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
)
EVENTS = (0.04, 0.15, 0.3, 0.5, 0.7, 0.9)
BOUNDS = (4, 8, 16, 32, 64)
# of the largest stable load, for Fig. 8
PARTS = (
    *(0.05, 0.1, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65),
    *(0.74, 0.81, 0.86, 0.9, 0.93, 0.95, 0.965),
)


@cache
def _simulated(of: Device, load: float) -> tuple[Simulated, ...]:
    """Queueing delay and sojourn, ms."""
    run = BatchRun(constants=(of.alpha, of.tau0, 0.0, 0.0), lengths=None)
    return simulate_batches(f"{of.name} {load}", run, of.rate(load), 400_000)


def fig4(say: Say) -> Artefact:
    """Mean latency and its bounds."""
    panels, statements = [], []
    for name in DEVICES:
        of = device(name)
        exact = [_say_queue(of, load, say).sojourn_time for load in LOADS]
        curves = [curve("exact", LOADS, exact)]
        for label, bound in (("φ0, Eq. 41", phi0), ("φ1, Eq. 42", phi1)):
            values = [bound(of.rate(load), of.alpha, of.tau0) for load in LOADS]
            curves.append(curve(label, LOADS, values, "printed"))
        curves.append(_events(of, 1, say))
        panels.append(Panel(of.title, "load ρ = λα", "mean latency E[W] (ms)", tuple(curves), "y"))
        statements += _bound_statements(of)
    statements.append(_random_time(device("inoue-v100"), say))
    remarks = (
        "The bounds need constant batch times: the last row shows that they fail for exponential "
        "ones of the same mean.",
    )
    return Artefact(
        "inoue-fig4",
        "Fig. 4: mean latency and its bounds",
        tuple(statements),
        tuple(panels),
        remarks=remarks,
    )


def _bound_statements(of: Device) -> list[Statement]:
    least = min(_phi_ratio(of, load) for load in LOADS)
    worst, late = worst_phi(of), worst_phi(of, 0.3)
    return [
        Statement(
            f"Theorem 2: E[W] <= phi, {of.title} (phi / E[W], loads {LOADS[0]:g} to {LOADS[-1]:g})",
            "in words",
            f"{least:.6f} to {worst:.3f}",
            holds=least >= 1 - 1e-9,
        ),
        Statement(
            f"'E[W] is well approximated by phi', {of.title} (worst, and for rho >= 0.3)",
            "in words",
            f"+{100 * (worst - 1):.1f} %, +{100 * (late - 1):.3f} %",
            holds=worst < 1.25,
        ),
        Statement(
            f"phi0 <= phi1 iff lam <= 1/(alpha + tau0), {of.title} (rho at the crossing)",
            "in words",
            f"{of.crossing:.4f}",
            holds=_crosses(of, of.crossing),
        ),
    ]


def _phi_ratio(of: Device, load: float) -> float:
    return phi(of.rate(load), of.alpha, of.tau0) / of.queue(load).sojourn_time


def worst_phi(of: Device, least_load: float = LOADS[0]) -> float:
    """phi / E[W] at its largest."""
    return largest_over(
        lambda load: _phi_ratio(of, load), [load for load in LOADS if load >= least_load]
    )


def worst_efficiency(of: Device) -> float:
    """eta over its bound at its largest."""

    def ratio(load: float) -> float:
        return of.energy.efficiency(of.queue(load).batch_size) / of.efficiency_bound(load)

    return largest_over(ratio, LOADS)


def _crosses(of: Device, load: float) -> bool:
    below, above = (of.rate(factor * load) for factor in (0.99, 1.01))
    law = (of.alpha, of.tau0)
    return phi0(below, *law) < phi1(below, *law) and phi0(above, *law) > phi1(above, *law)


def _random_time(of: Device, say: Say) -> Statement:
    say("exponential batch times")
    load = 0.1
    time = BatchTime(
        LatencyModel(k2=of.tau0, k3=of.alpha, cv=1.0),
        parse_distribution("deterministic:value=1"),
        None,
        padded=True,
    )
    exact = solve_batch_chain(time, of.rate(load), 64).sojourn_time  # larger batches do not occur
    bound = phi(of.rate(load), of.alpha, of.tau0)
    return Statement(
        f"beyond the paper: exponential H, {of.title}, rho = {load} (E[W], phi; ms)",
        "",
        f"{exact:.3f}, {bound:.3f}",
        "phi is no bound for random H",
    )


def fig5(say: Say) -> Artefact:
    """Server utilisation."""
    panels, statements = [], []
    for name in DEVICES:
        of = device(name)
        exact = np.array([_say_queue(of, load, say).utilisation for load in LOADS])
        bound = np.array([min(1.0, of.rate(load) * (of.alpha + of.tau0)) for load in LOADS])
        curves = (
            curve("1 - π0, exact", LOADS, exact),
            curve("min(1, λ(α + τ0)), Eq. 39", LOADS, bound, "printed"),
            curve("ρ", LOADS, LOADS, "approximation"),
        )
        panels.append(Panel(of.title, "load ρ = λα", "server utilisation", curves))
        statements += [
            Statement(
                f"'close to 1 even for a moderate rho', {of.title} (at rho = 0.5)",
                "in words",
                f"{exact[LOADS.index(0.5)]:.4f}",
                holds=bool(exact[LOADS.index(0.5)] > 0.9),
            ),
            Statement(
                f"upper bound, {of.title} (smallest bound - exact)",
                "in words",
                f"{(bound - exact).min():.1e}",
                holds=bool((bound - exact).min() > -1e-12),
            ),
        ]
    return Artefact("inoue-fig5", "Fig. 5: server utilisation", tuple(statements), tuple(panels))


def fig6(say: Say) -> Artefact:
    """Energy efficiency."""
    panels, statements = [], []
    for name in DEVICES:
        of = device(name)
        exact, bound = _efficiencies(of, say)
        curves = (
            curve("η, exact", LOADS, exact),
            curve("lower bound, Eq. 40", LOADS, bound, "printed"),
        )
        panels.append(Panel(of.title, "load ρ = λα", "energy efficiency η (jobs/J)", curves))
        statements += [
            Statement(
                f"Corollary 1: eta rises with lam, {of.title}",
                "in words",
                f"{exact[0]:.2f} to {exact[-1]:.2f} jobs/J",
                holds=bool(np.all(np.diff(exact) > 0)),
            ),
            Statement(
                f"Eq. 40 is a lower bound, {of.title} (worst eta / bound - 1)",
                "in words",
                f"+{100 * (worst_efficiency(of) - 1):.1f} %",
                holds=bool((exact / bound).min() > 1 - 1e-9),
            ),
        ]
    return Artefact("inoue-fig6", "Fig. 6: energy efficiency", tuple(statements), tuple(panels))


def fig7(say: Say) -> Artefact:
    """Efficiency against latency."""
    panels, statements = [], []
    for name in DEVICES:
        of = device(name)
        exact, bound = _efficiencies(of, say)
        latency = np.array([_say_queue(of, load, say).sojourn_time for load in LOADS])
        printed = np.array([phi(of.rate(load), of.alpha, of.tau0) for load in LOADS])
        curves = (curve("exact", exact, latency), curve("Eq. 40 and 43", bound, printed, "printed"))
        panels.append(
            Panel(of.title, "energy efficiency η (jobs/J)", "mean latency E[W] (ms)", curves, "y")
        )
        errors = worst_efficiency(of) - 1, worst_phi(of) - 1
        statements.append(
            Statement(
                f"the closed forms 'are useful to determine an operating point', {of.title} "
                "(largest error of eta, of E[W])",
                "in words",
                f"{100 * errors[0]:.1f} %, {100 * errors[1]:.1f} %",
                (
                    "both largest where the branches of the bounds cross, lam = 1/(alpha + tau0): "
                    f"rho = {of.crossing:.3f}"
                ),
                holds=max(errors) < 0.25,
            )
        )
    return Artefact(
        "inoue-fig7", "Fig. 7: energy against latency", tuple(statements), tuple(panels)
    )


def fig8(say: Say) -> Artefact:
    """A largest batch size."""
    panels, statements = [], []
    for name in DEVICES:
        of = device(name)
        curves = [_bounded_curve(of, bound, say) for bound in BOUNDS]
        phis = [phi(of.rate(load), of.alpha, of.tau0) for load in LOADS]
        closed = curve("φ, Eq. 43 (b_max = ∞)", LOADS, phis, "printed")
        panels.append(
            Panel(
                of.title,
                "load ρ = λα",
                "mean latency E[W] (ms)",
                (*curves, closed),
                "y",
                top=1.5 * closed.y[-1] if closed.y[-1] else None,
            )
        )
        statements += [_at_half_the_speed(of, bound) for bound in (8, 64)]
    remarks = (
        "The values of b_max are in the picture's legend only, not in the text; 4, 8, 16, 32 and "
        "64 stand here.",
    )
    return Artefact(
        "inoue-fig8",
        "Fig. 8: a largest batch size",
        tuple(statements),
        tuple(panels),
        remarks=remarks,
    )


def _bounded_curve(of: Device, bound: int, say: Say) -> Curve:
    stable = bound * of.alpha / (of.alpha * bound + of.tau0)  # rho at mu[b_max]
    loads = [stable * part for part in PARTS]
    say(f"{of.title}: b_max = {bound}")
    latencies = [of.queue(load, bound).sojourn_time for load in loads]
    return curve(f"b_max = {bound}", loads, latencies)


def _at_half_the_speed(of: Device, bound: int) -> Statement:
    half = 0.5 * bound * of.alpha / (of.alpha * bound + of.tau0)
    ratio = phi(of.rate(half), of.alpha, of.tau0) / of.queue(half, bound).sojourn_time
    return Statement(
        f"'well approximated when lam is small against mu[b_max]', {of.title}, b_max = {bound}, "
        "lam = mu[b_max]/2 (phi / E[W])",
        "in words",
        f"{ratio:.3f}",
        holds=bool(abs(ratio - 1) < 0.2),
    )


def _say_queue(of: Device, load: float, say: Say) -> BatchQueue:
    say(f"{of.title}, load {load:g}")
    return of.queue(load)


def _events(of: Device, index: int, say: Say) -> Curve:
    found = []
    for load in EVENTS:
        say(f"{of.title}, simulation at load {load:g}")
        found.append(_simulated(of, load)[index])
    return points("simulated", EVENTS, found)


def _efficiencies(of: Device, say: Say) -> tuple[Vector, Vector]:
    exact = [of.energy.efficiency(_say_queue(of, load, say).batch_size) for load in LOADS]
    bound = [of.efficiency_bound(load) for load in LOADS]
    return np.array(exact), np.array(bound)
