"""Every model at a few points, to the eighth digit: a rewrite of the numerics changes nothing.

Which of the numbers are right, the other tests of the models say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from kendall.queueing.distributions.lattice import Complex
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.latency.slots.slot_time import SlotTime
from kendall.queueing.models import as_published, gg1, mg1, mg1d, mgc, mm1, mm1d, tandem
from kendall.queueing.models.batches import calls as groups
from kendall.queueing.models.batches.batch_chain import (
    full_arrivals,
    landing_below,
    solve_batch_chain,
)
from kendall.queueing.models.batches.batch_delay import batch_quantiles
from kendall.queueing.models.batches.call_chain import solve_call_chain
from kendall.queueing.models.batches.ladder import solve_ladder
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.erlang_series import ErlangSeries, renewal_of
from kendall.queueing.models.renewal import renewal_function, settled, settling_time
from kendall.queueing.models.slots.continuous import doubt, solve_continuous, trusted
from kendall.queueing.models.slots.processor_sharing import (
    SharedEngine,
    solve_sharing,
    unbounded_states,
)
from tests.kept_values import moved

Calculations = Mapping[str, Callable[[], Any]]

LAW = parse_law("k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3")
NOISY = parse_law("k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,cv=0.3")
STALLED = parse_law("k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,stall_share=0.1,stall=0.05")
PROMPTED = parse_law("k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,kp=0.2e-3")
TURNING = parse_law("k1=3e-4,k2=0,k3=25e-6,k4=0.92e-3,turnaround=0.00155")
SHORT = parse_distribution("uniform:low=1,high=6")
SKEWED = parse_distribution("lognormal:mu=2,sigma=0.6", 40)
HEAVY = parse_distribution("pareto:alpha=1.6,minimum=2", tail=True)
PROMPTS = parse_distribution("uniform:low=3,high=9")
X = np.array([-1.0, 0.0, 0.01, 0.5, 1.0, 2.5, 7.0, 20.0])

SINGLE_SERVER: Calculations = {
    **{
        f"{name} at {load}": lambda make=make, load=load: [  # type: ignore[misc]
            (q := make(load / 0.25, 0.25)).delay,
            q.sojourn,
            q.load,
            [q.delay_tail(float(x)) for x in X],
            [q.delay_quantile(u) for u in (0.0, 1 - load, 0.999)],
        ]
        for name, make in (("mm1", mm1.mm1), ("md1", mm1.md1))
        for load in (0.3, 0.8, 0.99)
    },
    "mm1 sojourn": lambda: [mm1.mm1(3.2, 0.25).sojourn_quantile(u) for u in (0.0, 0.5, 0.999)],
    "misprinted": lambda: mm1.misprinted_md1_delay(3.2, 0.25),
    "kingman": lambda: [
        [found := gg1.kingman(load / 0.25, 0.25, ca, cs), gg1.best_estimate(found, ca)]
        for load in (0.2, 0.9)
        for ca, cs in ((0.0, 0.0), (0.0, 1.0), (0.5, 0.3), (1.0, 2.0), (4.0, 0.5))
    ],
    "gaps": lambda: [
        gg1.unit_gaps(np.random.default_rng(1), scv, np.empty(5))
        for scv in (0.0, 1e-13, 0.25, 1, 4)
    ],
    "mg1": lambda: [
        mg1.solve_mg1(law, lengths, 0.7 / 0.03, prompts)
        for law, lengths, prompts in (
            (LAW, SHORT, None),
            (NOISY, SHORT, PROMPTS),
            (STALLED, SHORT, None),
            (PROMPTED, parse_distribution("uniform:low=1,high=5"), PROMPTS),
        )
    ],
    "mg1 heavy": lambda: mg1.solve_mg1(LatencyModel(k4=1.0), HEAVY, 0.1),
    "mg1 tail": lambda: mg1.delay_tail(ServiceTime.of(NOISY, SHORT), 20.0, X / 20),
    "printed": lambda: [
        [
            as_published.phi0(lam, 0.1, 0.5),
            as_published.phi1(lam, 0.1, 0.5),
            as_published.phi(lam, 0.1, 0.5),
            as_published.second_moment_of_arrivals(lam, 0.3),
            as_published.psi0(lam, 0.1, 0.5),
            as_published.psi1(lam, 0.1, 0.5),
            as_published.psi(lam, 0.1, 0.5),
            as_published.fixed_batch_delay(lam, 0.4, 4),
            as_published.fixed_batch_delay(lam, 0.4, 4, terms=7),
            as_published.md1_delay(lam, 0.1),
            as_published.kingman_delay(lam, 0.1, 0.5, 2.0),
        ]
        for lam in (0.5, 3.0, 8.0)
    ],
    "printed lines": lambda: [
        as_published.padded_line(1.0, 2.0, 3.0, 4.0, 5.0),
        as_published.elastic_line(1.0, 2.0, 3.0, 4.0, mean=2.5, longest=5.0),
        as_published.objective_patient(0.3, 2.0, 5.0),
        as_published.objective_impatient(0.3, 2.0, 5.0, 0.1, 7.0),
    ],
}

PATIENCE: Calculations = {
    **{
        f"{name} at {load} for {patience}": lambda solve=solve, load=load, patience=patience: solve(  # type: ignore[misc]
            load, 1.0, patience
        )
        for name, solve in (("mm1d", mm1d.mm1d), ("md1d", mm1d.md1d))
        for load in (0.3, 0.8, 0.9999, 1.0, 1.0001, 1.7)
        for patience in (0.5, 3.0, 30.0)
    },
    "de Kok and Tijms": lambda: [
        mm1d.de_kok_tijms(load, 1.0, scv, 2.0) for load in (0.7, 1.3) for scv in (0.0, 0.4, 1.0)
    ],
    "lost": lambda: [mm1d.lost_fraction(0.8, 0.3, tail) for tail in (None, 0.1, 0.49, 0.5, 0.9)],
    **{
        f"mg1d {name} at {rate}": lambda law=law, lengths=lengths, rate=rate: mg1d.solve_mg1d(  # type: ignore[misc]
            law, lengths, rate, 0.1
        )
        for name, law, lengths in (
            ("plain", LAW, SHORT),
            ("noisy", NOISY, SHORT),
            ("noisy and many", NOISY, parse_distribution("uniform:low=1,high=90")),
            ("one length", LAW, parse_distribution("deterministic:value=4")),
        )
        for rate in (12.0, 60.0)
    },
    "impatient": lambda: mg1d.solve_impatient(
        np.array([0.5, 1.0, 3.0]), np.array([0.25, 0.75, 0.0]), 0.9, 4.0
    ),
    "condensed": lambda: [  # the last atom holds what rounding leaves of the others
        (
            service := mg1d.plain_service(
                ServiceTime(np.linspace(1, 2, 5001), np.full(5001, 1 / 5001), cv=0.2)
            )
        ).values[:-1],
        service.weights[:-1],
    ],
    "series": lambda: [
        [
            (series := ErlangSeries(load / service, service, 6.3)).theta,
            series.scaled(X),
            series.share(X),
            series.function(),
        ]
        for service in (1.0, 0.3)
        for load in (0.4, 0.9, 1.0, 1.6, 3.5)
    ],
    "tails of M/D/1": lambda: [
        np.log(ErlangSeries(load, 1.0, x).tail(x))
        for load in (0.2, 0.9, 0.985)
        for x in (0.5, 4.0, 12.0, 90.0)
    ],
    "renewal": lambda: [
        [renewal_function(service, rate, 3.0), settling_time(service, rate)]
        for service in (ServiceTime.of(NOISY, SHORT), ServiceTime.of(LAW, SKEWED))
        for rate in (10.0, 40.0)
    ],
    "settled": lambda: [
        settled(renewal_function(ServiceTime.of(LAW, SHORT), 10.0, 1.0), 2.0),
        renewal_of(ServiceTime.of(LAW, SHORT), 10.0, 50.0),
        renewal_of(ServiceTime(np.array([1.0]), np.ones(1)), 0.5, 500.0),
    ],
}

SEVERAL_STATIONS: Calculations = {
    "mmc": lambda: [
        [
            (q := mgc.mmc(load * servers / 0.25, 0.25, servers)).load,
            q.waiting,
            q.decay,
            q.mean_delay,
            q.mean_sojourn,
            [q.delay_tail(float(x)) for x in X],
            [q.delay_quantile(u) for u in (0.0, 0.5, 0.9, 0.999)],
        ]
        for load in (0.3, 0.9)
        for servers in (1, 2, 10)
    ],
    **{
        f"mgc {servers} at {load}": lambda law=law, servers=servers, load=load: mgc.solve_mgc(  # type: ignore[misc]
            law, SHORT, load * servers / 0.025, servers
        )
        for law, servers, load in (
            (LAW, 1, 0.7),
            (LAW, 2, 0.3),
            (NOISY, 3, 0.8),
            (LAW, 20, 0.9),
            (NOISY, 80, 0.95),
            (LAW, 600, 0.1),
        )
    },
    "residual of several": lambda: [
        mgc.smallest_residual(ServiceTime.of(NOISY, SHORT), servers) for servers in (2, 10, 200)
    ],
    "general service": lambda: [
        [mgc.general_service(servers, load, scv, 0.3), mgc.deterministic_ratio(servers, load)]
        for servers in (2, 8)
        for load in (0.1, 0.9)
        for scv in (0.0, 0.5, 2.0)
    ],
    "tandem": lambda: [
        tandem.solve_disaggregated(law, lengths, rate, prompts)
        for law, lengths, prompts, rate in (
            (PROMPTED, SHORT, PROMPTS, 30.0),
            (LAW, SHORT, None, 50.0),
            (LAW, parse_distribution("deterministic:value=4"), None, 50.0),
            (parse_law("k1=0,k2=0.02,k3=0,k4=1e-3"), SHORT, None, 20.0),
            (parse_law("k1=0,k2=0.02,k3=0,k4=4e-3,cv=1"), SHORT, None, 20.0),
            (parse_law("k1=0,k2=0.02,k3=0,k4=4e-3,cv=1.7"), SHORT, None, 20.0),
        )
    ],
    "phases": lambda: [
        [tandem.phases(law, SHORT, PROMPTS), tandem.phase_means(law, SHORT, PROMPTS)]
        for law in (PROMPTED, STALLED, PROMPTED.at_speed(1.5))
    ],
    "tandem path": lambda: tandem.tandem_path(
        np.array([0.0, 1.0, 1.5, 9.0]), np.array([[2.0, 2.0, 0.1, 1.0], [3.0, 1.0, 5.0, 1.0]])
    ),
}

SLOTS: Calculations = {
    **{
        f"continuous {name}, {slots} slots at {load}": lambda time=time, slots=slots, load=load: [  # type: ignore[misc]
            rate := load * (time.throughput(slots, refilled=True) if slots else time.limit()),
            solve_continuous(time, rate, slots),
            doubt(time, rate, slots),
            trusted(time, rate, slots),
        ]
        for name, time in (
            ("plain", SlotTime(LAW, SKEWED, None)),
            ("turning", SlotTime(TURNING, parse_distribution("deterministic:value=4"), None)),
            ("prompted", SlotTime(PROMPTED, SKEWED, PROMPTS)),
        )
        for slots, load in ((1, 0.5), (2, 0.9), (8, 0.3), (8, 0.95), (300, 0.6), (None, 0.6))
    },
    "continuous, answers of one token": lambda: solve_continuous(
        SlotTime(LAW, parse_distribution("deterministic:value=1"), None), 50.0, 4
    ),
    **{
        f"sharing, {slots} slots, {admission} s": lambda slots=slots, admission=admission: [  # type: ignore[misc]
            (
                engine := SharedEngine(
                    per_member=0.2,
                    per_step=0.8,
                    mean_tokens=3.0,
                    slots=slots,
                    admission=admission,
                )
            ).capacity,
            engine.rates(10),
            [
                [
                    queue := solve_sharing(engine, share * engine.capacity, scv),
                    queue.sojourn_time,
                    queue.seconds_per_token,
                ]
                for share in (0.2, 0.9)
                for scv in (0.0, 1.0, 2.0)
            ],
        ]
        for slots in (1, 4, None)
        for admission in (0.0, 0.1)
    },
    "sharing, tails": lambda: [
        [
            solve_sharing(
                SharedEngine(per_member=0.2, per_step=0.8, mean_tokens=3.0, slots=slots), 0.4
            ).exceeds(x)
            for x in (0.0, 1.0, 9.0)
        ]
        for slots in (2, None)
    ],
    "sharing without a cap": lambda: [
        [
            solve_sharing(engine, 0.4).sojourn_given(7.0),
            unbounded_states(engine, 0.4, 9),
            solve_sharing(engine, 0.4),
        ]
        for engine in (
            SharedEngine(per_member=0.2, per_step=0.8, mean_tokens=3.0, slots=None),
            SharedEngine(per_member=0.0, per_step=0.8, mean_tokens=3.0, slots=None),
        )
    ],
}


def batches(law: LatencyModel, bound: int | None, load: float, *, padded: bool = True) -> list[Any]:
    time = BatchTime(law, SHORT, None, padded)
    rate = load * time.largest_stable_rate(bound)
    queue = solve_batch_chain(time, rate, bound)
    return [
        queue,
        queue.largest,
        queue.largest_used,
        queue.by_request(np.arange(1.0, queue.largest + 1)),
        batch_quantiles(time, rate, queue),
    ]


def of_calls(law: LatencyModel, sizes: str, bound: int | None, load: float) -> Any:
    time = BatchTime(law, SHORT, None, padded=True)
    sequences = parse_distribution(sizes)
    rate = load * time.largest_stable_rate(bound) / sequences.mean
    calls = groups.Calls.of(rate, sequences)
    return [
        solve_call_chain(time, calls, bound),
        calls.largest,
        calls.usual,
        [calls.moment(k) for k in (1, 2, 3)],
        calls.generating(1.3),
    ]


BATCHES: Calculations = {
    **{
        f"batches of {name} up to {bound} at {load}": lambda law=law, bound=bound, load=load: (  # type: ignore[misc]
            batches(law, bound, load)
        )
        for name, law in (("plain", LAW), ("noisy", NOISY))
        for bound, load in ((1, 0.7), (2, 0.9), (6, 0.3), (6, 0.95), (None, 0.4))
    },
    "batches up to 600": lambda: solve_batch_chain(
        BatchTime(LAW, SHORT, None, padded=True), 40.0, 600
    ),
    "batches that stall": lambda: batches(STALLED, 4, 0.7),
    "batches, each member leaves": lambda: batches(NOISY, 4, 0.8, padded=False),
    **{
        f"fixed {size} at {load}": lambda law=law, size=size, load=load: solve_fixed_batches(  # type: ignore[misc]
            time := BatchTime(law, SHORT, None, padded=True),
            load * size / time.mean(size),
            size,
        )
        for law, size, load in ((LAW, 1, 0.6), (LAW, 4, 0.2), (NOISY, 4, 0.9), (STALLED, 3, 0.7))
    },
    "fixed, means": lambda: solve_fixed_batches(
        BatchTime(LAW, SHORT, None, padded=True), 60.0, 4, quantiles=False
    ),
    **{
        f"calls of {about[1]} up to {about[2]}": lambda about=about: of_calls(*about)  # type: ignore[misc]
        for about in (
            (LAW, "deterministic:value=1", 4, 0.7),
            (LAW, "uniform:low=1,high=4", 1, 0.7),
            (NOISY, "uniform:low=1,high=4", 4, 0.9),
            (LAW, "uniform:low=1,high=9", 6, 0.5),
            (STALLED, "uniform:low=1,high=3", 4, 0.6),
            (LAW, "uniform:low=1,high=4", None, 0.3),
        )
    },
    "ladder": lambda: [
        [
            (ladder := solve_ladder(*_walk(bound, load))),
            ladder.mean_supremum,
            ladder.heights,
            ladder.falling_factor,
            ladder.supremum_transform(w := _circle(), w**2 / 3),
            landing_below(
                BatchTime(LAW, SHORT, None, padded=True).table(bound).arrivals(20.0, 40)[:-1],
                ladder,
            ),
        ]
        for bound, load in ((2, 0.3), (5, 0.9))
    ],
    "draws of calls": lambda: [
        groups.draw_calls(
            parse_distribution("uniform:low=1,high=4"), 11, np.random.SeedSequence(3)
        ),
        groups.draw_calls(None, 11, np.random.SeedSequence(3)),
    ],
}


def _circle() -> Complex:
    """Points inside of it and outside."""
    return np.array([0.5 + 0.1j, 0.9j, 1.05 + 0.1j], dtype=complex)


def _walk(bound: int, load: float) -> tuple[Any, int, float]:
    time = BatchTime(NOISY, SHORT, None, padded=True)
    row, radius = full_arrivals(time.table(bound), load * bound / time.mean(bound), bound)
    return row, bound, radius


@pytest.mark.parametrize(
    ("name", "calculations"),
    [
        ("single-server", SINGLE_SERVER),
        ("patience", PATIENCE),
        ("several-stations", SEVERAL_STATIONS),
        ("slots", SLOTS),
        ("batches", BATCHES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_numbers_are_as_kept(name: str, calculations: Calculations) -> None:
    assert moved(f"models-{name}.json", calculations) == []
