"""Probes in idle moments: which cell, when, what becomes of the law, and that nobody else
notices. Virtual time throughout.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies import Request, SpecError
from kendall.queueing.latency.fit import COEFFICIENTS, Fit, Measured
from kendall.queueing.latency.identifiability import Identifiability
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import read_run
from kendall.server.calibration.calibration import CalibrationRequest, Calibrator
from kendall.server.calibration.candidate_law import (
    CandidateLaw,
    KnownLaw,
    LawComparison,
    verdict_of,
    weigh,
)
from kendall.server.calibration.designed import Cell, DesignedBatches, InterruptedCellError, design
from kendall.server.calibration.idle_probes import IdleProbes, niced_executor
from kendall.server.calibration.probe_schedule import (
    ProbedCell,
    ProbedLoop,
    ProbeLimits,
    ProbeSchedule,
)
from kendall.server.calibration.turnaround import ClosedLoop, slot_time
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.settings import Settings
from tests.server.harness import Immediate, engine_request_of
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=50e-6,k4=0.9e-3,turnaround=1.5e-3")
NOISY = dataclasses.replace(LAW, cv=0.05)
QUICK = ProbeLimits(fewest=3, kept=3)
LOOP_DESIGN = ClosedLoop(4, (8, 24, 16, 12, 9), 32)
LEVELS = [(size, length) for size in (1, 2, 4, 8) for length in (1, 4, 16)]


class Here(Executor):
    """Runs a function where it is submitted: virtual time knows no other process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **named))
        return done


@asynccontextmanager
async def probing(
    law: LatencyModel,
    known: LatencyModel | None = None,
    limits: ProbeLimits = QUICK,
    policy: str = "dynamic",
    **changed: Any,
) -> AsyncIterator[tuple[Gateway, IdleProbes]]:
    """A gateway on an engine of 8 under `law`, with answers up to 16 tokens, and its probes."""
    options = {
        "model": "tiny",
        "served_model_name": "tiny",
        "policy": policy,
        "prediction_interval": 0,
        "max_output_tokens": 16,
    }
    gateway = Gateway(
        Settings(**(options | changed)), EmulatedEngine(law, seed=4, max_num_seqs=8), known
    )
    await gateway.start()
    probes = IdleProbes(gateway, limits, executor=Here, seed=2)
    task = asyncio.create_task(probes.run())
    try:
        yield gateway, probes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await gateway.stop()


def submit(gateway: Gateway, count: int = 1, length: int = 8) -> list[Immediate]:
    """A call of so many sequences, now."""
    now, batcher = gateway.now(), gateway.batcher
    requests = [
        Request(id=f"r{now!r}-{index}", arrived_at=now, prompt_tokens=4, max_output_tokens=16)
        for index in range(count)
    ]
    consumers = [Immediate() for _ in requests]
    for consumer, sequence in zip(
        consumers,
        batcher.submit([engine_request_of(request, length) for request in requests], consumers),
        strict=True,
    ):
        consumer.sequence = sequence
    return consumers


async def until(true: Callable[[], bool], step: float = 0.001, at_most: float = 1000.0) -> None:
    left = at_most
    while not true():
        await asyncio.sleep(step)
        left -= step
        assert left > 0, "it did not happen"


def run(main: Awaitable[Any]) -> Any:
    return run_virtual(main)  # type: ignore[arg-type]


# --- the whole, on the emulated engine ---


@pytest.mark.parametrize("probes", [True, False])
def test_a_gateway_probes_where_it_is_told_to(probes: bool) -> None:
    async def main() -> None:
        settings = Settings(
            model="tiny", served_model_name="tiny", policy="dynamic", idle_probes=probes
        )
        gateway = Gateway(settings, EmulatedEngine(LAW, max_num_seqs=8), LAW)
        await gateway.start()
        await asyncio.sleep(10.0)
        assert (gateway.probes is not None and gateway.probes.measured > 0) is probes
        await gateway.stop()

    run(main())


def test_idle_time_alone_finds_the_law_of_the_engine() -> None:
    """Without any law: within 60 s of idle time the times of all cells are known to 3 %, the
    turnaround to 0.5 ms.
    """

    async def main() -> tuple[Gateway, IdleProbes, float]:
        async with probing(NOISY) as (gateway, probes):
            await until(lambda: gateway.latency.law is not None, step=0.1)
            return gateway, probes, gateway.now()

    gateway, probes, took = run(main())
    assert took < 60
    law = gateway.latency.law
    errors = [
        law.padded(size, length, 32 * size) / LAW.padded(size, length, 32 * size) - 1
        for size, length in LEVELS
    ]
    assert max(map(abs, errors)) < 0.03
    assert law.turnaround == pytest.approx(LAW.turnaround, abs=0.5e-3)
    assert 0.03 < law.cv < 0.07
    assert probes.candidate is not None
    assert probes.candidate.verdict == "first"
    assert gateway.latency.profile is not None
    assert gateway.latency.profile.note == "measured in idle moments"
    assert len(gateway.latency.profile.cells) == 3 * len(probes.schedule.grid)


def test_the_share_of_idle_time_is_kept() -> None:
    """At most a fifth while learning, a fiftieth afterwards (and one probe at the edge of the
    stretch), and it is really used.
    """

    async def main() -> tuple[float, float, float, float]:
        async with probing(NOISY) as (gateway, probes):
            await until(lambda: gateway.latency.law is not None, step=0.1)
            learned, used = gateway.now(), probes.seconds
            await asyncio.sleep(100)
            return learned, used, gateway.now() - learned, probes.seconds - used

    learned, used, later, used_later = run(main())
    assert 0.1 < used / learned <= 0.2
    longest = LAW.padded(8, 16, 256) + LAW.padded(8, 4, 256)
    assert 0.015 * later < used_later <= 0.02 * later + 1.2 * longest


def test_a_request_that_arrives_during_a_probe_is_served_at_once_and_as_fast_as_ever() -> None:
    """Its delay is 0 on an engine that lets go at once, far below the bound of one cell; its
    service time is the law's.
    """

    async def main() -> tuple[list[Immediate], int, int]:
        async with probing(LAW, limits=dataclasses.replace(QUICK, quiet=0.1)) as (gateway, probes):
            asked, met = [], 0
            for step in range(60):
                await until(lambda: gateway.batcher.lease.active)
                await asyncio.sleep(
                    0.0003 + 0.0007 * step
                )  # other moments of other cells, none at the start of a step
                met += gateway.batcher.lease.active
                asked += submit(gateway)
                await gateway.batcher.answered()
            return asked, met, probes.interrupted

    asked, met, interrupted = run(main())
    assert 20 < met == interrupted
    for consumer in asked:
        assert consumer.sequence is not None
        record = consumer.sequence.record()
        assert (record.outcome, record.output_tokens) == ("completed", 8)
        assert record.queueing_delay == pytest.approx(0, abs=1e-9)
        assert record.service_time == pytest.approx(LAW.padded(1, 8, 4), abs=1e-9)


def test_a_call_of_four_that_ends_a_probe_is_one_batch() -> None:
    async def main() -> list[Immediate]:
        async with probing(LAW) as (gateway, _):
            await until(lambda: gateway.batcher.lease.active)
            asked = submit(gateway, count=4)
            await gateway.batcher.answered()
            return asked

    assert [consumer.sequence and consumer.sequence.batch_size for consumer in run(main())] == [
        4
    ] * 4


def test_a_probe_interrupted_between_its_two_batches_does_not_serve_the_second() -> None:
    """The arrival comes in the very iteration in which the warm batch ends."""

    async def main() -> tuple[int, float | None]:
        async with probing(LAW) as (gateway, probes):
            await until(lambda: gateway.batcher.lease.active)
            warm = LAW.padded(1, 1, 32)  # the smallest cell comes first
            asyncio.get_running_loop().call_at(2.0 + warm, submit, gateway)
            await asyncio.sleep(0.5)
            assert gateway.batcher.unanswered == 0
            return probes.measured, probes.interrupted

    assert run(main()) == (0, 1)


def test_nothing_of_the_probes_is_visible(tmp_path: Path) -> None:
    """Metrics, run file, arrivals, epoch and queue are after a minute of probing what they were
    before.
    """

    def counted(exposition: bytes) -> list[bytes]:
        return [
            line for line in exposition.splitlines() if b"cpu_seconds" not in line
        ]  # which a process always spends

    async def main() -> tuple[list[bytes], list[bytes], int, int]:
        async with probing(NOISY, LAW, record_file=tmp_path / "run.jsonl") as (gateway, probes):
            before = counted(gateway.metrics.exposition())
            await asyncio.sleep(60.0)
            await until(lambda: not gateway.batcher.lease.active)
            after = counted(gateway.metrics.exposition())
            assert (
                gateway.batcher.queue_length,
                gateway.batcher.in_service,
                gateway.batcher.unanswered,
            ) == (0, 0, 0)
            assert gateway.arrivals.count == 0
            return before, after, probes.measured, gateway.batcher.epoch

    before, after, measured, epoch = run(main())
    assert measured > 30
    assert before == after
    assert epoch == 0
    assert read_run(tmp_path / "run.jsonl")[1] == []


def test_there_are_no_probes_under_traffic_or_while_draining() -> None:
    """A request each second leaves no two quiet seconds; a gateway that drains takes on nothing."""

    async def main() -> tuple[int, int]:
        async with probing(LAW) as (gateway, probes):
            for _ in range(30):
                submit(gateway)
                await asyncio.sleep(1.0)
            under_traffic = probes.measured + probes.interrupted
            await gateway.drain()
            await asyncio.sleep(30.0)
            return under_traffic, probes.measured + probes.interrupted

    assert run(main()) == (0, 0)


def test_a_calibration_interrupts_a_probe_and_has_the_engine_to_itself() -> None:
    async def main() -> tuple[Profile, IdleProbes, int]:
        async with probing(LAW) as (gateway, probes):
            await until(lambda: gateway.batcher.lease.active)
            profile = await Calibrator(gateway).run(
                CalibrationRequest(repeats=2, max_output_tokens=16)
            )
            during = probes.measured
            await asyncio.sleep(5.0)
            return profile, probes, during

    profile, probes, during = run(main())
    assert profile.law.k4 == pytest.approx(LAW.k4, rel=1e-6)
    assert profile.law.turnaround == pytest.approx(LAW.turnaround, abs=1e-4)
    assert (probes.interrupted, during) == (1, 0)
    assert probes.measured > 0, "they go on afterwards"


def test_a_gateway_that_stops_in_the_middle_of_a_probe_leaves_the_engine_free() -> None:
    async def main() -> bool:
        async with probing(LAW) as (gateway, _):
            await until(lambda: gateway.batcher.lease.active)
            batcher = gateway.batcher
        return batcher.lease.active

    assert run(main()) is False


def test_a_law_of_another_shape_is_replaced_and_the_same_shape_at_another_speed_is_not() -> None:
    """And the first only after a second look, on measurements of its own."""

    async def main(
        known: LatencyModel, looks: int
    ) -> tuple[LatencyModel | None, CandidateLaw | None]:
        async with probing(NOISY, known) as (gateway, probes):
            for _ in range(looks):
                before = probes.candidate
                await until(lambda before=before: probes.candidate is not before, step=0.1)
            assert probes.schedule.rounds == (0 if probes.suspected else QUICK.fewest)
            return gateway.latency.law, probes.candidate

    other = dataclasses.replace(LAW, k3=LAW.k3 * 4)
    assert run(main(other, 1))[0] is other
    law, candidate = run(main(other, 2))
    assert candidate is not None
    assert candidate.verdict == "replaces"
    assert "k3" in candidate.says
    assert law is not None
    assert law.k3 == pytest.approx(LAW.k3, rel=0.2)

    slower = LAW.at_speed(0.5)
    law, candidate = run(main(slower, 1))
    assert law is slower
    assert candidate is not None
    assert (candidate.verdict, candidate.factor) == ("agrees", pytest.approx(2.0, rel=0.03))


def test_an_engine_too_slow_for_any_probe_is_left_alone() -> None:
    """A step of 0.3 s: one look at the smallest batch a minute, and no law."""

    async def main() -> tuple[int, Gateway]:
        async with probing(parse_law("k1=0,k2=0,k3=0,k4=0.3")) as (gateway, probes):
            await asyncio.sleep(600.0)
            return probes.measured, gateway

    measured, gateway = run(main())
    assert 5 <= measured <= 10
    assert gateway.latency.law is None


# --- designed batches ---


def test_an_interrupted_batch_frees_the_engine_for_the_next() -> None:
    """In mid-batch of any kind; the next batch takes what the law says."""

    async def main() -> list[float]:
        engine = EmulatedEngine(LAW, max_num_seqs=8)
        batches = DesignedBatches(engine, await engine.start())
        rng, loop = np.random.default_rng(0), asyncio.get_running_loop()
        times = []
        for start in (
            lambda: batches.measure(Cell((16,) * 8, 32), rng),
            lambda: batches.measure(Cell((16, 2, 1), 32, padded=False), rng),
            lambda: batches.slot_time(LOOP_DESIGN, rng),
        ):
            loop.call_later(0.01, batches.interrupt)
            with pytest.raises(InterruptedCellError):
                await start()
            times.append((await batches.measure(Cell((4, 4), 32), rng)).service_time)
        return times

    assert run(main()) == [pytest.approx(LAW.padded(2, 4, 64), abs=1e-9)] * 3


def test_the_closed_loop_is_held_as_long_as_its_law_says() -> None:
    async def main() -> float:
        engine = EmulatedEngine(LAW, max_num_seqs=8)
        return await DesignedBatches(engine, await engine.start()).slot_time(
            LOOP_DESIGN, np.random.default_rng(0)
        )

    assert run(main()) == pytest.approx(slot_time(LAW, LOOP_DESIGN), rel=1e-9)


# --- which cell, and when ---

GRID = [Cell((length,) * size, 32) for size in (1, 2, 4, 8, 64) for length in (1, 4, 16, 256)]
coefficient = st.floats(0, 0.05)
laws = st.builds(
    LatencyModel,
    k1=coefficient,
    k2=coefficient,
    k3=st.floats(1e-6, 0.01),
    k4=coefficient,
    kp=st.floats(0, 1e-3),
)


def exact(law: LatencyModel, cell: Cell) -> Measured:
    size = len(cell.lengths)
    prompts = size * cell.prompt_tokens
    return Measured(cell.lengths, prompts, law.padded(size, max(cell.lengths), prompts))


def measure(law: LatencyModel, probe: ProbedCell | ProbedLoop) -> None:
    """Under the law, without noise."""
    if isinstance(probe, ProbedCell):
        probe.add(exact(law, probe.cell))
    else:
        probe.add(slot_time(law, probe.loop))


@settings(max_examples=40)
@given(laws, st.integers(0, 2**32 - 1))
def test_no_cell_but_the_smallest_ever_takes_longer_than_stated(
    law: LatencyModel, seed: int
) -> None:
    """Whatever the law; and what is measured is measured evenly."""
    schedule, rng = (
        ProbeSchedule(GRID, LOOP_DESIGN, ProbeLimits(longest=0.25)),
        np.random.default_rng(seed),
    )
    seen = []
    for _ in range(60):
        probe = schedule.next(rng)
        if probe is None:
            break
        measure(law, probe)
        if isinstance(probe, ProbedCell) and probe.cell != GRID[0]:
            assert probe.measured[-1].service_time <= 0.25 * (1 + 1e-9)
        seen.append(probe)
    counts = [seen.count(probe) for probe in schedule.admitted()]
    assert not counts or max(counts) - min(counts) <= 1


def test_a_round_is_fitted_once_and_only_with_enough_repeats() -> None:
    schedule, rng = (
        ProbeSchedule(GRID[:8], LOOP_DESIGN, ProbeLimits(fewest=3, kept=4)),
        np.random.default_rng(1),
    )
    fits = []
    while schedule.rounds < 6:
        probe = schedule.next(rng)
        assert probe is not None
        measure(LAW, probe)
        if schedule.is_due_for_fit:
            schedule.mark_fitted()
            fits.append((schedule.rounds, len(schedule.measured())))
    cells = len([probe for probe in schedule.admitted() if isinstance(probe, ProbedCell)])
    assert cells == 6, "256 tokens are too long"
    assert fits == [(3, 3 * cells), (4, 4 * cells), (5, 4 * cells), (6, 4 * cells)]
    assert schedule.full


def test_the_rest_keeps_the_share() -> None:
    """A probe of 0.1 s is followed by 0.4 s of rest: a fifth."""
    assert ProbeSchedule(GRID, LOOP_DESIGN, ProbeLimits(share=0.2)).rest(0.1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    "wrong",
    [{"share": 0.0}, {"share": 1.5}, {"upkeep": 0.5}, {"longest": 0.0}, {"fewest": 1}, {"kept": 2}],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="expected"):
        ProbeLimits(**wrong)


# --- the law against the one in force ---


def measurements(
    law: LatencyModel, cv: float, repeats: int = 4, seed: int = 0, cells: int | None = None
) -> list[Measured]:
    rng, found = np.random.default_rng(seed), []
    noise = dataclasses.replace(LAW, cv=cv)
    for cell in [Cell((length,) * size, prompt) for size, length in LEVELS for prompt in (32, 128)][
        :cells
    ]:
        one = exact(law, cell)
        found += [
            dataclasses.replace(one, service_time=one.service_time * noise.residual(rng))
            for _ in range(repeats)
        ]
    return found


def verdict(
    found: list[Measured], in_force: KnownLaw | None, slot: float | None = None
) -> CandidateLaw:
    return weigh(found, in_force, LOOP_DESIGN, slot, 3, bootstrap=5)


def test_the_true_law_in_force_stays_in_force() -> None:
    """Not replaced in any of 20 runs of noisy measurements, though its cells seem to differ by
    more than 3 % in some.
    """
    candidates = [verdict(measurements(LAW, 0.1, seed=seed), KnownLaw(LAW)) for seed in range(20)]
    assert {candidate.verdict for candidate in candidates} == {"agrees"}
    assert max(candidate.gap or 0 for candidate in candidates) > 0.03


def test_a_step_dearer_by_a_fifth_is_noticed() -> None:
    """k4 + 20 % (factored out, a few cells differ by 10 %) at a residual of 3 %: replaced in 10
    of 10 runs.
    """
    other = dataclasses.replace(LAW, k4=LAW.k4 * 1.2)
    assert all(
        verdict(measurements(LAW, 0.03, seed=seed), KnownLaw(other)).verdict == "replaces"
        for seed in range(10)
    )


def test_a_measured_law_keeps_the_seconds_of_a_resume() -> None:
    """No probe is interrupted, so that none shows them."""
    other = dataclasses.replace(LAW, k4=LAW.k4 * 1.2, kr=0.004, speed=2.0)
    found = verdict(measurements(LAW, 0.03, seed=1), KnownLaw(other)).fit.law
    assert (found.speed, found.kr) == (1.0, 0.008)
    assert verdict(measurements(LAW, 0.03, seed=1), None).fit.law.kr == 0


def test_exact_measurements_of_the_law_in_force_agree_at_any_speed() -> None:
    """Intervals of width 0 do not make a difference of 1e-16 a difference."""
    for speed in (0.5, 1.0, 3.0):
        candidate = verdict(measurements(LAW.at_speed(speed), 0.0), KnownLaw(LAW))
        assert (candidate.verdict, candidate.factor) == ("agrees", pytest.approx(speed))


def test_a_difference_that_is_certain_but_small_changes_nothing() -> None:
    """k4 + 2 % at a residual of 0.1 %: cells differ by less than 3 %."""
    candidate = verdict(
        measurements(LAW, 0.001), KnownLaw(dataclasses.replace(LAW, k4=LAW.k4 * 1.02))
    )
    assert candidate.verdict == "agrees"


@pytest.mark.slow
def test_the_fit_runs_in_a_process_of_its_own() -> None:
    """Question and candidate law can be pickled."""
    with niced_executor() as executor:
        candidate = executor.submit(
            weigh, measurements(LAW, 0.0), KnownLaw(LAW), LOOP_DESIGN, None, 0
        ).result(timeout=60)
    assert candidate.verdict == "agrees"


@pytest.mark.parametrize(
    ("chance", "gap", "batch", "length", "expected"),
    [
        # once in a thousand comparisons by chance
        (0.0009, 0.1, 0, 0, "replaces"),
        (0.0011, 0.1, 0, 0, "agrees"),
        # 3 % of some cell's time
        (0.0, 0.0301, 0, 0, "replaces"),
        (0.0, 0.0299, 0, 0, "agrees"),
        # measured on batches or answers twice as large as the 8 and 16 of the probes
        (0.0, 0.1, 15, 16, "replaces"),
        (0.0, 0.1, 16, 16, "narrow"),
        (0.0, 0.1, 8, 31, "replaces"),
        (0.0, 0.1, 8, 32, "narrow"),
    ],
)
def test_a_law_is_replaced_beyond_chance_and_three_percent_by_one_measured_as_widely(
    chance: float, gap: float, batch: int, length: int, expected: str
) -> None:
    fit = Fit(LAW, 1.0, 0.0, dict.fromkeys(COEFFICIENTS, (-1.0, 1.0)))
    found, says = verdict_of(
        LawComparison(1.0, gap, chance),
        fit,
        [],
        Identifiability(1.0, 8, 16, ()),
        KnownLaw(LAW, batch, length),
    )
    assert found == expected
    assert f"{gap:.1%}" in says


@pytest.mark.parametrize(("off", "first"), [(0.0999, "first"), (0.1001, "poor")])
def test_a_law_that_lies_a_tenth_from_the_cells_is_poor(
    off: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kendall.server.calibration.candidate_law.fit_law", lambda *_, **__: Fit(LAW, 1.0, off, {})
    )
    assert verdict(measurements(LAW, 0.0), None).verdict == first


def test_a_law_measured_on_far_larger_batches_is_not_replaced_by_a_narrow_one() -> None:
    other = dataclasses.replace(LAW, k3=LAW.k3 * 4)
    assert verdict(measurements(LAW, 0.02), KnownLaw(other, 8, 16)).verdict == "replaces"
    narrow = verdict(measurements(LAW, 0.02), KnownLaw(other, 64, 16))
    assert narrow.verdict == "narrow"
    assert "calibrate in full" in narrow.says


def test_times_that_obey_no_law_give_none() -> None:
    """Cells whose means are off by a factor of up to 2: nothing is offered for use, not even as
    a first law.
    """
    rng = np.random.default_rng(5)
    wild = [
        dataclasses.replace(one, service_time=one.service_time * factor)
        for one, factor in _each_cell(measurements(LAW, 0.0), rng)
    ]
    assert verdict(wild, None).verdict == "poor"


def _each_cell(found: list[Measured], rng: np.random.Generator) -> list[tuple[Measured, float]]:
    factors: dict[tuple[Any, int], float] = {}
    return [
        (one, factors.setdefault((one.lengths, one.prompt_tokens), float(rng.uniform(0.5, 2))))
        for one in found
    ]


def test_a_turnaround_that_was_not_measured_is_kept_and_doubted() -> None:
    known = verdict(measurements(LAW, 0.0), KnownLaw(LAW.at_speed(2.0)))
    assert known.fit.law.turnaround == pytest.approx(2 * LAW.turnaround)
    assert any("turnaround" in doubt for doubt in known.doubts)
    solved = verdict(measurements(LAW, 0.0), None, slot_time(LAW, LOOP_DESIGN))
    assert solved.fit.law.turnaround == pytest.approx(LAW.turnaround, abs=1e-5)
    assert not any("turnaround" in doubt for doubt in solved.doubts)


def test_lengths_that_were_never_varied_raise() -> None:
    """Only batches of one and one length: no law at all."""
    with pytest.raises(ValueError, match="grid"):
        verdict(measurements(LAW, 0.02, cells=2), None)


def grid(*asked: Any, **bounds: int) -> list[Cell]:
    async def main() -> list[Cell]:
        return design(await EmulatedEngine(LAW, **bounds).start(), *asked)

    cells: list[Cell] = run(main())
    return cells


def test_the_grid_stays_within_the_engine() -> None:
    cells = grid(32, None, 1000, max_num_seqs=24, max_model_len=200, max_num_batched_tokens=512)
    assert max(len(cell.lengths) for cell in cells) == 24
    assert max(cell.prompt_tokens + max(cell.lengths) for cell in cells) <= 200
    assert all(len(cell.lengths) * cell.prompt_tokens <= 512 for cell in cells)


PRODUCTION = {  # as vLLM starts on a large GPU
    "max_num_seqs": 256,
    "max_model_len": 131072,
    "max_num_batched_tokens": 8192,
    "kv_cache_tokens": 500_000,
}


@pytest.mark.parametrize("prompt", [32, 500, 4000, 100_000])
def test_long_prompts_leave_every_batch_size_and_their_own_cost_in_the_grid(prompt: int) -> None:
    """Sizes whose prompts of that length do not fit one step had been left out, and with them what
    tells the cost of a prompt from that of a sequence.
    """
    cells = grid(prompt, None, 512, **PRODUCTION)
    assert {len(cell.lengths) for cell in cells if cell.prompt_tokens == 32} >= {1, 8, 64, 256}
    assert max(cell.prompt_tokens for cell in cells) == min(4 * prompt, 8192)
    assert all(len(cell.lengths) * cell.prompt_tokens <= 8192 for cell in cells)


def test_no_cell_of_the_grid_needs_more_than_the_memory() -> None:
    cells = grid(500, None, 512, **PRODUCTION | {"kv_cache_tokens": 20_000})
    assert {1, 8, 64} <= {len(cell.lengths) for cell in cells}
    assert max(cell.context_tokens(131072) for cell in cells) <= 20_000


def test_an_engine_whose_memory_does_not_hold_all_contexts_is_calibrated() -> None:
    """Each request had reserved the whole context: the largest batch never came together."""

    async def main() -> LatencyModel:
        law = dataclasses.replace(LAW, kp=1e-5)
        memory = PRODUCTION | {"max_num_seqs": 16, "kv_cache_tokens": 200_000}
        gateway = Gateway(
            Settings(model="tiny", served_model_name="tiny", prediction_interval=0),
            EmulatedEngine(law, **memory),
            law,
        )
        await gateway.start()
        try:
            plan = CalibrationRequest(prompt_tokens=500)
            return (await Calibrator(gateway).run(plan)).law
        finally:
            await gateway.stop()

    found = run(main())
    assert found.kp == pytest.approx(1e-5, rel=0.02)
    assert found.k4 == pytest.approx(LAW.k4, rel=0.02)
