"""Yang et al., Fig. 4: delay, loss and objectives against the token limit, and every number
stated about them.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import ndtr

from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve
from papers.reproduction.lengths import Vector
from papers.reproduction.simulate import Simulated, points, simulate_single
from papers.reproduction.yang.single import (
    LIMITS,
    MU,
    PATIENCE,
    PATIENT_RATE,
    RATE,
    SEARCHED,
    SIGMA,
    Impatient,
    SingleLaw,
    best_limit,
    impatient,
    impatient_objectives,
    inferred_law,
    patient_objectives,
    table_laws,
)

SIMULATED = (600.0, 1000.0, 1600.0, 2200.0, 3000.0)


def fig4(say: Say) -> Artefact:
    """Delay, loss and objectives against the token limit."""
    law = inferred_law()
    queue = impatient(law, say)
    v1, v2 = patient_objectives(law), impatient_objectives(queue)
    remarks = (
        "a and c of the three models of Fig. 4a-c (LLaMA-2-7b-chat, Chinese-Alpaca-2-7b, "
        "ChatGLM3-6b) are not printed; two stated numbers fix those of the first, of the others "
        "nothing is stated: one curve instead of three.",
        "'We randomly set the arrival rate such that rho < 1': at lam = 1/25 rho is "
        f"{law.load(3000, RATE):.2f} at 3000 tokens. With patience that is no contradiction in "
        "the mathematics, and the delay does stabilise.",
        "Eq. 11 prints '+ (1 - theta) E[W]', which rewards waiting. The stated optimum of 1300 "
        "comes out near that sign only, with E[W_qs]; no pair (a, c) meets all six stated numbers "
        "of Fig. 4.",
    )
    assumed = (
        f"a = {law.a:.6f} s/token, c = {law.c:.4f} s: from E[W(1600)] = 23 s and 58.93 %",
        "lognormal(7, 0.7) continuous; tau = 60 s; lam = 1/40 (patient), 1/25 (impatient)",
    )
    statements = (*_patient_statements(law, v1), *_impatient_statements(queue, v2))
    return Artefact(
        "yang-fig4",
        "Fig. 4: max-limit clipping",
        statements,
        _panels(law, queue, v1, v2, say),
        assumed,
        remarks,
    )


def _patient_statements(law: SingleLaw, v1: dict[str, Vector]) -> tuple[Statement, ...]:
    below = [100 * float(ndtr((math.log(n) - MU) / SIGMA)) for n in (1600, 1300)]
    other, shared = (best_limit(v1[name]) for name in ("theta = 199/200", "share of tokens"))
    readings = f"theta = 199/200 gives {other:.0f}, E[min(N, n_max)]/E[N] for u {shared:.0f}"
    return (
        Statement("E[W(1600)] (s)", "23", law.delay(1600), "used to infer a and c", fitted=True),
        Statement(
            "decrease of E[W] from n_max = 3000 to 1600 (%)",
            "58.93",
            100 * (1 - law.delay(1600) / law.delay(3000)),
            "used to infer a and c",
            fitted=True,
        ),
        Statement(
            "n_max* of V1, Eq. 10, theta = 119/120",
            "1600",
            best_limit(v1["as printed"]),
            (
                f"the printed objective has its optimum elsewhere; {readings}: the document does "
                "not decide"
            ),
        ),
        Statement(
            "n_max* of V1 with theta = 199/200",
            "1600",
            best_limit(v1["theta = 199/200"]),
            "theta chosen for it",
            fitted=True,
        ),
        Statement("P(N <= 1600) (%)", "70.53", below[0]),
        Statement("P(N <= 1300) (%)", "59", below[1], "59.60 truncated, not rounded"),
    )


def _impatient_statements(queue: Impatient, v2: dict[str, Vector]) -> tuple[Statement, ...]:
    best = {name: best_limit(values) for name, values in v2.items()}
    others = ", ".join(f"{name}: {limit:.0f}" for name, limit in best.items())
    return (
        Statement(
            "n_max* of V2, Eq. 11 (+), de Kok-Tijms as in the paper",
            "1300",
            best["as printed (+), de Kok-Tijms"],
            f"all readings: {others}",
        ),
        Statement(
            "n_max* of V2, Eq. 11 (+), exact M/G/1+D",
            "1300",
            best["as printed (+), exact"],
            "as above",
        ),
        Statement(
            "n_max* of V2 with '-' (waiting costs)",
            "1300",
            best["with -, exact"],
            (
                "the sign of Eq. 11 is wrong for what the text wants, and the stated optimum needs "
                "the wrong sign"
            ),
            fault=True,
        ),
        *_loss_statements(queue),
        *_in_words(queue.exact[1]),
    )


def _loss_statements(queue: Impatient) -> tuple[Statement, ...]:
    (loss, _), (loss_dkt, _) = queue.exact, queue.interpolated
    near = 1327
    return (
        Statement(
            "loss at n_max = 1300, exact",
            "0.12",
            float(loss(1300)),
            f"de Kok-Tijms {float(loss_dkt(1300)):.4f}; see the next rows",
        ),
        Statement(
            "loss decrease from 3000 to 1300 (%), exact",
            "56.36",
            100 * (1 - float(loss(1300) / loss(3000))),
            "as above",
        ),
        Statement(
            f"loss at n_max = {near}, exact",
            "0.12",
            float(loss(near)),
            "looked for: an optimum near 1330, given as 1300, explains this number and the next",
            fitted=True,
        ),
        Statement(
            f"loss decrease from 3000 to {near} (%), exact",
            "56.36",
            100 * (1 - float(loss(near) / loss(3000))),
        ),
    )


def _in_words(served: CubicSpline) -> tuple[Statement, ...]:
    return (
        Statement(
            "'the mean queueing delay does not decrease significantly' (s at 3000, at 1300)",
            "in words",
            f"{float(served(3000)):.1f}, {float(served(1300)):.1f}",
            holds=float(served(1300) / served(3000)) > 0.8,
            note="it falls by a sixth, far less than the loss",
        ),
        Statement(
            "'the mean queueing delay gradually stabilises' (change of E[W_qs] from 2800 to 3400)",
            "in words",
            f"{100 * (float(served(3400) / served(2800)) - 1):.1f} %",
            holds=abs(float(served(3400) / served(2800)) - 1) < 0.05,
        ),
    )


def _panels(
    law: SingleLaw, queue: Impatient, v1: dict[str, Vector], v2: dict[str, Vector], say: Say
) -> tuple[Panel, ...]:
    patient, lossy = _simulated(law, say)
    limits, tokens = LIMITS[LIMITS <= 3200], "max-token limit n_max (tokens)"
    fits = [
        curve(name, limits, [fit.delay(n) for n in limits.tolist()], "approximation")
        for name, fit in table_laws().items()
    ]
    delay = curve("exact, Eq. 1 (a, c inferred)", limits, [law.delay(n) for n in limits.tolist()])
    events = points("simulated", SIMULATED, patient)
    panels = [
        Panel(
            "(a) patient users, λ = 1/40 per s",
            tokens,
            "E[W] (s)",
            (delay, *fits, events),
            marks=((1600, "stated: 1600"),),
        )
    ]
    for index, (title, label) in enumerate(
        (
            ("(c) loss", "lost fraction"),
            ("(b) impatient users, λ = 1/25 per s, τ = 60 s", "E[W_qs] (s)"),
        )
    ):
        pair = (
            curve("exact M/G/1+D", limits, queue.exact[index](limits)),
            curve(
                "de Kok-Tijms, Eq. 6-9", limits, queue.interpolated[index](limits), "approximation"
            ),
            points("simulated", SIMULATED, [row[index] for row in lossy]),
        )
        panels.insert(1, Panel(title, tokens, label, pair, marks=((1300, "stated: 1300"),)))
    return (*panels, _objectives(v1, v2))


def _objectives(v1: dict[str, Vector], v2: dict[str, Vector]) -> Panel:
    names = {f"V1, {name}": v1[name] for name in ("as printed", "theta = 199/200")}
    names |= {
        f"V2, {name.removesuffix(', exact')}": v2[name]
        for name in ("as printed (+), exact", "with -, exact")
    }
    shown, curves = slice(0, None, 25), []
    for name, values in names.items():
        label = f"{name}: best {best_limit(values):.0f}".replace("theta", "θ")
        curves.append(
            curve(
                label,
                SEARCHED[shown],
                (values - values.max())[shown],
                "exact" if "V1" in name else "approximation",
            )
        )
    return Panel(
        "(d) objectives, less their maximum",
        "max-token limit n_max (tokens)",
        "V(n_max) - max V",
        tuple(curves),
    )


def _simulated(law: SingleLaw, say: Say) -> tuple[list[Simulated], list[tuple[Simulated, ...]]]:
    patient, lossy = [], []
    for limit in SIMULATED:
        say(f"simulation at {limit:.0f} tokens")

        def service(rng: np.random.Generator, size: int, limit: float = limit) -> Vector:
            return law.sample(rng, size, limit)

        patient.append(simulate_single(f"yang-fig4a {limit:.0f}", PATIENT_RATE, service)[1])
        lossy.append(simulate_single(f"yang-fig4b {limit:.0f}", RATE, service, PATIENCE))
    return patient, lossy
