"""Yang et al., one request at a time: Table I, and the model of Fig. 4 (max-token clipping, M/G/1
and M/G/1+D).

S = a min(N, n_max) + c, N lognormal(7, 0.7). a and c are not printed. They follow from two stated
numbers, E[W(1600)] = 23 s and 58.93 % less than E[W(3000)] at lam = 1/40, which are therefore met
by construction; everything else is a check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.optimize import brentq

from kendall.queueing.models.as_published import objective_impatient, objective_patient
from kendall.queueing.models.mg1d import de_kok_tijms, solve_impatient
from papers.limited_moments import kept_of_lognormal, lognormal_limited_moment
from papers.measured_laws import YANG, yang_times
from papers.measurements import load_measurement
from papers.memory import LLAMA2_7B, Device, largest_batch
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve
from papers.reproduction.lengths import Vector, clipped_lognormal, lognormal

MU, SIGMA = 7.0, 0.7
PATIENT_RATE, RATE, PATIENCE = 1 / 40, 1 / 25, 60.0
THETA1, THETA2, COST = 119 / 120, 0.95, 4.0
LIMITS = np.arange(200.0, 3401.0, 50.0)
SEARCHED = np.arange(250.0, 3351.0)  # limits among which an optimum is looked for


@dataclass(frozen=True, slots=True)
class SingleLaw:
    """S = a n + c, seconds."""

    a: float
    c: float

    def moments(self, limit: float) -> tuple[float, float]:
        """E[S], E[S^2] under a token limit (Eq. 2-5)."""
        first, second = (lognormal_limited_moment(k, limit, MU, SIGMA) for k in (1, 2))
        return self.a * first + self.c, self.a**2 * second + 2 * self.a * self.c * first + self.c**2

    def load(self, limit: float, lam: float) -> float:
        """rho."""
        return lam * self.moments(limit)[0]

    def delay(self, limit: float, lam: float = PATIENT_RATE) -> float:
        """Eq. 1; infinite where there is no steady state."""
        mean, second = self.moments(limit)
        return lam * second / (2 * (1 - lam * mean)) if lam * mean < 1 else math.inf

    def sample(self, rng: np.random.Generator, size: int, limit: float) -> Vector:
        """Service times."""
        return self.a * np.minimum(lognormal(MU, SIGMA).sample(rng, size), limit) + self.c


@cache
def inferred_law() -> SingleLaw:
    """The one law with E[W(1600)] = 23 s and E[W(1600)] = (1 - 0.5893) E[W(3000)]."""

    def slope(c: float) -> float:
        return float(brentq(lambda a: SingleLaw(a, c).delay(1600) - 23, 0.01, 0.027))

    c = brentq(lambda c: 1 - 23 / SingleLaw(slope(c), c).delay(3000) - 0.5893, 0.05, 3.0)
    return SingleLaw(slope(c), c)


def table_laws() -> dict[str, SingleLaw]:
    """Least squares through Table I."""
    lines = {"Table I, input 128": yang_times(128), "Table I, all rows": yang_times()}
    return {name: SingleLaw(line.slope, line.intercept) for name, line in lines.items()}


@dataclass(frozen=True)
class Impatient:
    """Loss and served delay over the token limits, as smooth functions: exact and by de Kok and
    Tijms.
    """

    exact: tuple[CubicSpline, CubicSpline]
    interpolated: tuple[CubicSpline, CubicSpline]


def impatient(law: SingleLaw, say: Say) -> Impatient:
    """M/G/1+D at every limit of the grid."""
    exact, interpolated = [], []
    for limit in LIMITS.tolist():
        say(f"M/G/1+D at a limit of {limit:.0f} tokens")
        values, mass = clipped_lognormal(limit, MU, SIGMA)
        queue = solve_impatient(law.a * values + law.c, mass, RATE, PATIENCE)
        exact.append((queue.loss_fraction, queue.served.mean))
        mean, second = law.moments(limit)
        means = de_kok_tijms(RATE, mean, second / mean**2 - 1, PATIENCE)
        interpolated.append((means.loss_fraction, means.served))
    splines = [
        tuple(CubicSpline(LIMITS, column) for column in np.array(rows).T)
        for rows in (exact, interpolated)
    ]
    return Impatient((splines[0][0], splines[0][1]), (splines[1][0], splines[1][1]))


def share_of_tokens(limit: float) -> float:
    """E[min(N, n_max)] / E[N], a utility that the paper may have meant."""
    return lognormal_limited_moment(1, limit, MU, SIGMA) / math.exp(MU + SIGMA**2 / 2)


def best_limit(objective: Vector) -> float:
    """The limit with the largest objective."""
    return float(SEARCHED[int(np.argmax(objective))])


def table1(say: Say) -> Artefact:
    """Table I has measurements only; the line through them is ours."""
    say("least squares")
    rows = [row for name, law in table_laws().items() for row in _law_statements(name, law)]
    rows += _other_statements()
    tokens = (128, 256, 512, 1024)
    fit = yang_times(128)
    panel = Panel(
        "One request alone on the device, 128 input tokens",
        "output tokens",
        "inference time (s)",
        (
            curve("Table I", tokens, (2.91, 5.88, 12.63, 23.47), "measured"),
            curve("least squares", tokens, [fit(n) for n in tokens]),
        ),
    )
    remarks = (
        "(128, 512) stands twice in the table with the same time; it counts once.",
        "Fig. 2a (the line S = a n + c) and 2b (throughput and step times against batch size) "
        "show measurements whose numbers are printed nowhere: a, c and k1 .. k4 cannot be read "
        "from the document.",
    )
    return Artefact(
        "yang-table1",
        "Table I: inference time and token counts",
        tuple(rows),
        (panel,),
        remarks=remarks,
    )


def _law_statements(name: str, law: SingleLaw) -> list[Statement]:
    drop = 100 * (1 - law.delay(1600) / law.delay(3000))
    return [
        Statement(f"a, {name} (s/token)", "", law.a),
        Statement(f"c, {name} (s)", "", law.c),
        Statement(
            f"E[W(1600)], {name} (s)",
            "23",
            law.delay(1600),
            "the delays of Fig. 4 do not come from Table I; probably from Fig. 2a",
        ),
        Statement(f"decrease from n_max = 3000, {name} (%)", "58.93", drop, "as above"),
    ]


def _other_statements() -> list[Statement]:
    """What Section II says in numbers."""
    fits = {
        memory: largest_batch(LLAMA2_7B, Device(memory=memory), 1280) for memory in (40e9, 80e9)
    }
    table = {
        (cell["input_tokens"], cell["output_tokens"]): cell["seconds"]
        for cell in load_measurement(YANG).cells()
    }
    longer = 100 * (table[512, 512] / table[64, 512] - 1)
    return [
        Statement(
            "'latency is gently affected by the input' (eight times the input, 512 output tokens)",
            "in words",
            f"+{longer:.0f} %",
            holds=longer < 15,
        ),
        Statement(
            "largest batch of 256 + 1024 tokens of LLaMA-2-7b on an A100, 80e9 bytes",
            "49",
            fits[80e9],
            (
                f"40e9 bytes admit {fits[40e9]}; the document does not say what else takes memory "
                "(readings for 49: papers/memory.py)"
            ),
        ),
    ]


def patient_objectives(law: SingleLaw) -> dict[str, Vector]:
    """V1 over SEARCHED: as printed, and the readings that give 1600."""
    delay = np.array([law.delay(limit) for limit in SEARCHED.tolist()])
    kept = np.array([kept_of_lognormal(limit, MU, SIGMA) for limit in SEARCHED.tolist()])
    shared = np.array([share_of_tokens(limit) for limit in SEARCHED.tolist()])
    cases = (
        ("as printed", THETA1, kept),
        ("theta = 199/200", 199 / 200, kept),
        ("share of tokens", THETA1, shared),
    )
    return {
        name: np.array([objective_patient(theta, u, w) for u, w in zip(use, delay, strict=True)])
        for name, theta, use in cases
    }


def impatient_objectives(queue: Impatient) -> dict[str, Vector]:
    """V2 over SEARCHED, with either sign and either method."""
    kept = np.array([kept_of_lognormal(limit, MU, SIGMA) for limit in SEARCHED.tolist()])
    found = {}
    for method, (loss, served) in (("exact", queue.exact), ("de Kok-Tijms", queue.interpolated)):
        lost, delay = loss(SEARCHED), served(SEARCHED)
        everyone = (1 - lost) * delay + lost * PATIENCE
        for sign, waits in (
            ("as printed (+)", delay),
            ("with -", -delay),
            ("+ and E[Wq]", everyone),
        ):
            rows = zip(kept, waits, lost, strict=True)
            found[f"{sign}, {method}"] = np.array(
                [objective_impatient(THETA2, u, w, pi, COST) for u, w, pi in rows]
            )
    return found
