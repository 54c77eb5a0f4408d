"""Inoue (2021): Table 1 and its fits, Fig. 2-8. H = alpha b + tau0 constant, everything that waits
is taken (Fig. 8: at most b_max).

Units: milliseconds, joules, jobs/ms; the paper prints alpha and tau0 without a unit, they are
milliseconds. Fig. 1 is a sketch of a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.energy import EnergyLaw
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.batches.batch_chain import BatchQueue, solve_batch_chain
from papers.energy import efficiency_bound
from papers.measured_laws import inoue_energy, inoue_times
from papers.measurements import load_measurement
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve

DEVICES = {"inoue-v100": "Tesla V100, mixed precision", "inoue-p4": "Tesla P4, INT8"}
PRINTED = {
    "inoue-v100": ("0.1438", "1.8874", "0.99975", "0.99978"),
    "inoue-p4": ("0.5833", "1.4284", "0.99986", "0.99998"),
}
RATIOS = {
    "inoue-v100": ("4", "8.1", "12.4", "17.5", "21.4", "22"),
    "inoue-p4": ("12.9", "16.7", "19.9", "22.6", "26.6", "27"),
}


@dataclass(frozen=True)
class Device:
    """The two laws of a device: alpha, tau0 in ms; energy in joules."""

    name: str
    alpha: float
    tau0: float
    energy: EnergyLaw

    @property
    def title(self) -> str:
        """For pictures."""
        return DEVICES[self.name]

    @property
    def crossing(self) -> float:
        """rho at lam = 1/(alpha + tau0), where phi0 = phi1 and where the bound of the batch size
        leaves 1.
        """
        return self.alpha / (self.alpha + self.tau0)

    def rate(self, load: float) -> float:
        """Jobs/ms at rho = lam alpha."""
        return load / self.alpha

    def efficiency_bound(self, load: float) -> float:
        """At least so many jobs per joule (Eq. 40)."""
        return efficiency_bound(self.energy, self.rate(load), self.alpha, self.tau0)

    def queue(self, load: float, bound: int | None = None) -> BatchQueue:
        """The exact queue; times in ms."""
        return _solve(self, load, bound)


@cache
def device(name: str) -> Device:
    """Fitted to Table 1."""
    line = inoue_times(name)
    return Device(name, 1e3 * line.slope, 1e3 * line.intercept, inoue_energy(name).law)


@cache
def _time(of: Device) -> BatchTime:
    return BatchTime(
        LatencyModel(k2=of.tau0, k3=of.alpha),
        parse_distribution("deterministic:value=1"),
        None,
        padded=True,
    )


@cache
def _solve(of: Device, load: float, bound: int | None) -> BatchQueue:
    return solve_batch_chain(_time(of), of.rate(load), bound)


def table1(say: Say) -> Artefact:
    """The measurements, and the lines through them."""
    say("least squares")
    statements: list[Statement] = []
    for name, digits in PRINTED.items():
        times, energy, title = inoue_times(name), inoue_energy(name), DEVICES[name]
        values = (1e3 * times.slope, 1e3 * times.intercept, times.r2, energy.line.r2)
        names = ("alpha (ms)", "tau0 (ms)", "R2 of alpha b + tau0", "R2 of the energy line")
        statements += [
            Statement(f"{title}: {what}", stated, ours)
            for what, stated, ours in zip(names, digits, values, strict=True)
        ]
        statements += [
            Statement(f"{title}: beta (mJ)", "", 1e3 * energy.law.beta),
            Statement(f"{title}: c0 (mJ)", "", 1e3 * energy.law.c0),
        ]
        table = load_measurement(name)
        rows = zip(RATIOS[name], *(table.column(key) for key in table.columns), strict=True)
        statements += [
            Statement(f"{title}: images/s/W at b = {b:.0f}", stated, rate / watts)
            for stated, b, rate, watts in rows
        ]
    remarks = (
        "alpha and tau0 are printed without their unit (ms); beta and c0 are not printed at all.",
        (
            "Tesla P4: 1677 images/s at b = 64, 1676 at 128: the measured throughput falls, "
            "against Assumption 1 (i); the line hides it."
        ),
        "Typing errors: Eq. 7, second equation, is the second FACTORIAL moment of A (E[A^2] = lam "
        "E[H] + lam^2 E[H^2], used rightly in Eq. 34); Theorem 2 and its proof print phi1(lam, "
        "alpha, tau_1) for tau_0.",
    )
    return Artefact(
        "inoue-table1",
        "Table 1 and the lines through it (Sections 3.2, 3.3)",
        tuple(statements),
        remarks=remarks,
    )


def fig2(say: Say) -> Artefact:
    """Energy of a batch."""
    say("least squares")
    return _measured(
        "inoue-fig2",
        "Fig. 2: energy for a batch",
        "c[b] (J)",
        _energies,
        lambda of, b: of.energy.batch(b),
    )


def fig3(say: Say) -> Artefact:
    """Throughput."""
    say("least squares")
    return _measured(
        "inoue-fig3",
        "Fig. 3: throughput",
        "μ[b] (images/s)",
        lambda name: load_measurement(name).column("images_per_second"),
        lambda of, b: 1e3 * b / (of.alpha * b + of.tau0),
    )


def _energies(name: str) -> list[float]:
    table = load_measurement(name)
    columns = (table.column(key) for key in ("batch_size", "images_per_second", "watts"))
    return [b * watts / rate for b, rate, watts in zip(*columns, strict=True)]


def _measured(
    name: str,
    title: str,
    label: str,
    points: Callable[[str], list[float]],
    line: Callable[[Device, float], float],
) -> Artefact:
    panels, sizes, statements = [], tuple(range(1, 129)), []
    for key in DEVICES:
        of, table = device(key), load_measurement(key)
        measured = curve("Table 1", table.column("batch_size"), points(key), "measured")
        panels.append(
            Panel(
                of.title,
                "batch size b",
                label,
                (measured, curve("fitted", sizes, [line(of, b) for b in sizes])),
            )
        )
        errors = [
            line(of, b) / y - 1
            for b, y in zip(table.column("batch_size"), points(key), strict=True)
        ]
        worst = max(errors, key=abs)
        note = (
            "least squares over two decades of b weighs the large batches, and R2 does not "
            "show what is lost at the small ones"
        )
        statements.append(
            Statement(
                f"'well fitted', {of.title} (largest relative error)",
                "in words",
                f"{100 * worst:+.1f} %",
                note,
                holds=abs(worst) < 0.05,
            )
        )
    return Artefact(name, title, tuple(statements), tuple(panels))
