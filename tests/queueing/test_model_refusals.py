"""What each model refuses, just outside its borders, and in which words; what it takes just
inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import (
    NotConvergedError,
    OutOfReachError,
    UnstableQueueError,
)
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.latency.slots.slot_time import SlotTime
from kendall.queueing.models import as_published, gg1, mg1, mg1d, mgc, mm1, mm1d, tandem
from kendall.queueing.models.batches import batch_chain
from kendall.queueing.models.batches import calls as groups
from kendall.queueing.models.batches.call_chain import solve_call_chain
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.erlang_series import ErlangSeries
from kendall.queueing.models.roots import bisected
from kendall.queueing.models.slots.continuous import doubt, solve_continuous
from kendall.queueing.models.slots.processor_sharing import (
    SharedEngine,
    solve_sharing,
    unbounded_states,
)
from tests.kept_values import moved

LAW = parse_law("k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3")
SHORT = parse_distribution("uniform:low=1,high=6")
ONE = ServiceTime(np.array([1.0]), np.ones(1))
TIME = BatchTime(LAW, SHORT, None, padded=True)
UNIT = {"per_member": 0.25, "per_step": 0.25, "mean_tokens": 2.0}
ERRORS = (SpecError, ValueError, UnstableQueueError, NotConvergedError, OutOfReachError)


def engine(slots: int | None = None, **about: float) -> SharedEngine:
    return SharedEngine(**(UNIT | about), slots=slots)


def nothing_at(_: int) -> Any:
    """A cut that loses a quarter of the batches whatever its size."""
    return None, 0.25


def law_of(values: list[float], weights: list[float]) -> Any:
    return mg1d.solve_impatient(np.array(values), np.array(weights), 0.5, 1.0)


REFUSED: dict[str, Callable[[], Any]] = {
    **{
        f"{name} {rate}/s {service} s": lambda solve=solve, rate=rate, service=service: solve(  # type: ignore[misc]
            rate, service
        )
        for name, solve in (
            ("mm1", mm1.mm1),
            ("md1", mm1.md1),
            ("misprinted", mm1.misprinted_md1_delay),
            ("mmc", lambda rate, service: mgc.mmc(rate, service, 1)),
            ("kingman", lambda rate, service: gg1.kingman(rate, service, 1.0, 1.0)),
            ("md1 as printed", as_published.md1_delay),
            (
                "kingman as printed",
                lambda rate, service: as_published.kingman_delay(rate, service, 1, 1),
            ),
        )
        for rate, service in ((2.0, 0.5), (4.0, 0.5))
    },
    **{
        f"mm1 {rate}/s {service} s": lambda rate=rate, service=service: mm1.mm1(rate, service)  # type: ignore[misc]
        for rate, service in (
            (0.0, 0.5),
            (math.inf, 0.5),
            (math.nan, 0.5),
            (1.0, 0.0),
            (1.0, math.inf),
        )
    },
    "no servers": lambda: mgc.mmc(0.5, 0.5, 0),
    "two servers": lambda: mgc.mmc(4.0, 0.5, 2),
    **{f"level {u}": lambda u=u: mm1.check_level(u) for u in (-0.001, 1.0, 1.001)},  # type: ignore[misc]
    "quantile": lambda: mm1.mm1(1.0, 0.5).delay_quantile(1.0),
    "quantile of M/D/1": lambda: mm1.md1(1.0, 0.5).delay_quantile(-0.1),
    "quantile of a sojourn": lambda: mm1.mm1(1.0, 0.5).sojourn_quantile(1.0),
    "quantile of M/M/c": lambda: mgc.mmc(1.0, 0.5, 2).delay_quantile(1.0),
    "scv of gaps": lambda: gg1.kingman(1.0, 0.5, -0.01, 1.0),
    "scv of services": lambda: gg1.kingman(1.0, 0.5, 1.0, math.inf),
    "mg1": lambda: mg1.mean_delay(ONE, 1.0),
    "mg1d": lambda: mg1d.solve_lossy_service(ONE, 0.5, 0.0),
    **{
        f"{name} {given}": lambda solve=solve, given=given: solve(*given)  # type: ignore[misc]
        for name, solve in (("mm1d", mm1d.mm1d), ("md1d", mm1d.md1d))
        for given in ((0.0, 1.0, 1.0), (1.0, math.inf, 1.0), (1.0, 1.0, -1.0), (1.0, 1.0, math.inf))
    },
    "scv below 0": lambda: mm1d.de_kok_tijms(0.5, 1.0, -0.01, 1.0),
    "scv above 1": lambda: mm1d.de_kok_tijms(0.5, 1.0, 1.01, 1.0),
    "no time": lambda: law_of([0.0, 1.0], [0.5, 0.5]),
    "negative weight": lambda: law_of([1.0, 2.0], [-0.5, 1.5]),
    "weights": lambda: law_of([1.0, 2.0], [0.5, 0.5 + 2e-9]),
    "shapes": lambda: law_of([1.0, 2.0], [1.0]),
    "nothing": lambda: mg1d.solve_impatient(np.ones((1, 1)), np.ones((1, 1)), 0.5, 1.0),
    **{
        f"printed {name}": lambda name=name: getattr(as_published, name)(2.0, 0.5, 0.5)  # type: ignore[misc]
        for name in ("phi0", "phi1", "phi", "psi0", "psi1", "psi")
    },
    "printed batch": lambda: as_published.fixed_batch_delay(2.0, 1.0, 2),
    "series": lambda: ErlangSeries(1.0, 1.0, 50_001.0),
    "one sign": lambda: bisected(lambda x: x + 2, 0.0, 1.0),
    "one sign below": lambda: bisected(lambda x: -x - 2, 0.0, 1.0),
    "tandem": lambda: tandem.solve_tandem(ONE, ServiceTime(np.array([2.0]), np.ones(1)), 0.5),
    "prefill": lambda: tandem.phases(LatencyModel(k4=1.0), SHORT),
    "prefill of means": lambda: tandem.phase_means(LatencyModel(k4=1.0), SHORT),
    **{
        f"engine {about}": lambda about=about: engine(**about)  # type: ignore[misc]
        for about in (
            {"per_member": -0.1},
            {"per_step": -0.1},
            {"admission": -0.1},
            {"mean_tokens": 0.0},
            {"mean_tokens": math.inf},
            {"per_member": 0.0, "per_step": 0.0},
        )
    },
    "no slots": lambda: engine(0),
    "full engine": lambda: solve_sharing(engine(1), 1.0),
    "full engine without a cap": lambda: solve_sharing(engine(), 2.0),
    "no arrivals": lambda: solve_sharing(engine(1), 0.0),
    "endless arrivals": lambda: solve_sharing(engine(1), math.inf),
    "scv of tokens": lambda: solve_sharing(engine(1), 0.5, -0.01),
    "endless scv of tokens": lambda: solve_sharing(engine(1), 0.5, math.inf),
    "law of a delay": lambda: solve_sharing(engine(2, admission=0.1), 0.5).exceeds(1.0),
    "law of other lengths": lambda: solve_sharing(engine(2), 0.5, 0.5).exceeds(1.0),
    "sojourn of a length": lambda: solve_sharing(engine(2), 0.5).sojourn_given(3.0),
    "states under a cap": lambda: unbounded_states(engine(2), 0.5, 3),
    "continuous": lambda: solve_continuous(
        time := SlotTime(LAW, SHORT), time.throughput(3, refilled=True), 3
    ),
    "batches": lambda: batch_chain.solve_batch_chain(TIME, TIME.largest_stable_rate(4), 4),
    "fixed batches": lambda: solve_fixed_batches(TIME, 4.001 / TIME.mean(4), 4),
    "calls": lambda: solve_call_chain(
        TIME,
        groups.Calls.of(
            TIME.largest_stable_rate(4) / 2, parse_distribution("deterministic:value=2")
        ),
        4,
    ),
    "long calls": lambda: groups.Calls(1.0, np.full(40_001, 1 / 40_001)).arrivals(
        TIME.table(4), 2000
    ),
    **{
        f"large batches up to {bound}": lambda bound=bound: batch_chain.solve_cut(  # type: ignore[misc]
            bound, lambda _: True, nothing_at
        )
        for bound in (None, 600)
    },
}


def test_refusals_are_as_kept() -> None:
    def words(calculate: Callable[[], Any]) -> Callable[[], str]:
        def said() -> str:
            with pytest.raises(ERRORS) as refused:
                calculate()
            return f"{type(refused.value).__name__}: {refused.value}"

        return said

    assert moved("model-refusals.json", {name: words(each) for name, each in REFUSED.items()}) == []


def test_what_lies_just_inside_is_taken() -> None:
    for solve in (mm1.mm1, mm1.md1):
        assert solve(2.0, 0.4999).load < 1
    for level in (0.0, 0.999):
        mm1.check_level(level)
    assert mm1.check_queue(4.0, 0.4, 2) == 0.8
    assert gg1.kingman(1.0, 0.5, 0.0, 0.0).heavy_traffic == 0
    assert law_of([1.0, 2.0], [0.5, 0.5 + 5e-10]).load > 0
    assert law_of([1.0, 2.0], [1.0, 0.0]).load == 0.5
    assert mm1d.de_kok_tijms(0.5, 1.0, 0.0, 1.0).loss_fraction > 0
    assert ErlangSeries(1.0, 1.0, 49_999.0).horizon == 49_999.0
    assert solve_sharing(engine(1), 0.999).load == pytest.approx(0.999)
    assert engine(1).slots == 1


def test_a_function_may_cross_zero_either_way() -> None:
    assert bisected(lambda x: x - 0.25, 0.0, 1.0) == pytest.approx(0.25, abs=1e-15)
    assert bisected(lambda x: 0.25 - x, 0.0, 1.0) == pytest.approx(0.25, abs=1e-15)


@pytest.mark.parametrize(
    ("tokens", "slots", "share", "law", "said"),
    [
        ("uniform:low=1,high=15", 8, 0.5, LAW, False),  # 8 tokens
        (
            "uniform:low=1,high=15",
            8,
            0.95,
            parse_law("k1=0,k2=0,k3=1e-4,k4=3e-3,turnaround=1e-3"),
            False,
        ),
        ("uniform:low=1,high=14", 8, 0.5, LAW, True),
        ("uniform:low=1,high=14", 7, 0.5, LAW, False),
        ("deterministic:value=20", 8, 0.95, LAW, False),
        (
            "deterministic:value=20",
            8,
            0.95,
            parse_law("k1=0,k2=0,k3=1e-4,k4=3e-3,turnaround=1e-3"),
            True,
        ),
        (
            "deterministic:value=20",
            8,
            0.87,
            parse_law("k1=0,k2=0,k3=1e-4,k4=3e-3,turnaround=1e-3"),
            False,
        ),
        (
            "uniform:low=1,high=39",
            8,
            0.95,
            parse_law("k1=0,k2=0,k3=1e-4,k4=3e-3,turnaround=1e-3"),
            False,
        ),
        ("uniform:low=1,high=39", 5, 0.9, parse_law("k1=60e-3,k2=0,k3=1e-4,k4=3e-3"), True),
        ("uniform:low=1,high=39", 4, 0.9, parse_law("k1=60e-3,k2=0,k3=1e-4,k4=3e-3"), False),
    ],
)
def test_where_the_approximation_of_slots_is_doubted(
    tokens: str, slots: int, share: float, law: LatencyModel, said: bool
) -> None:
    time = SlotTime(law, parse_distribution(tokens))
    rate = share * time.throughput(slots, refilled=True)
    assert (doubt(time, rate, slots) is not None) == said


@pytest.mark.parametrize(
    ("before", "lost", "doublings", "reached"),
    [
        (math.inf, 0.5, 0, True),
        (1e-2, 1e-12, 0, True),
        (1e-2, 1e-3, 0, False),
        (1e-1, 1e-2, 1, False),  # 1e-2 times (1e-1) ** 4 is 1e-6
        (1e-1, 1e-3, 1, True),  # 1e-3 times (1e-2) ** 4 is 1e-11
        (1e-1, 1.1e-3, 1, False),
        (1e-1, 1e-2, 2, True),
        (1e-3, 1e-2, 5, False),
    ],
)
def test_whether_a_cut_chain_may_yet_be_long_enough(
    before: float, lost: float, doublings: int, reached: bool
) -> None:
    assert batch_chain._may_reach(before, lost, doublings) == reached


def test_a_cut_grows_from_32_until_it_holds_all_but_the_negligible() -> None:
    asked: list[int] = []

    def cut_at(size: int) -> tuple[Any, float]:
        asked.append(size)
        return size, {64: 1e-3, 128: 1e-6, 256: 1e-12}[size]

    found: Any = batch_chain.solve_cut(None, lambda size: size < 64, cut_at)
    assert (found, asked) == (256, [64, 128, 256])
