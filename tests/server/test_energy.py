"""Energy of batches, from a device that is not there: known power gives known joules."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress

from kendall.server.runtime.clock import clock_of
from kendall.server.telemetry.energy.batches import FEW, MeteredBatches
from kendall.server.telemetry.energy.fit import energy_estimate
from kendall.server.telemetry.energy.meter import BATCHES, PERIOD, EnergyMeter
from kendall.server.telemetry.energy.sources import (
    EnergyCounter,
    Integral,
    Together,
    nvml_source,
    rapl_source,
)
from tests.eventually import eventually

WATTS = 250.0


class Clock:
    """An instant that the test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class NvmlError(Exception):
    """As pynvml.NVMLError."""


def fake_nvml(
    power: Callable[[int], float], *, counter: Callable[[int], int] | None = None, count: int = 1
) -> Any:
    """The part of pynvml that is used: mW and mJ, integers, an exception where something is not
    supported.
    """
    module = SimpleNamespace(NVMLError=NvmlError, shut=0, asked=[])

    def energy(handle: int) -> int:
        module.asked.append(handle)
        if counter is None:
            raise NvmlError("Not Supported")
        return counter(handle)

    def shutdown() -> None:
        module.shut += 1

    module.nvmlInit = lambda: None
    module.nvmlShutdown = shutdown
    module.nvmlDeviceGetCount = lambda: count
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = lambda name: {"GPU-b": 1}[name]
    module.nvmlDeviceGetPowerUsage = lambda handle: int(power(handle) * 1e3)
    module.nvmlDeviceGetTotalEnergyConsumption = energy
    return module


def refusing(message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NvmlError(message)

    return refuse


def metered(meter: EnergyMeter, clock: Clock, seconds: float, step: float = PERIOD) -> None:
    """Readings as the thread takes them."""
    for _ in range(round(seconds / step)):
        clock.at += step
        assert meter.sample()


def started(source: Any, clock: Clock) -> EnergyMeter:
    """A meter without its thread, at its first reading."""
    meter = EnergyMeter(source)
    meter._now = clock
    assert meter.sample()
    return meter


# --- sources ---


@pytest.mark.parametrize("counts", [True, False])
def test_known_power_gives_known_joules(counts: bool) -> None:
    """250 W for 10 s: 2500 J, by the device's own counter, or by its power where it has none."""
    clock = Clock()
    nvml = fake_nvml(
        lambda _: WATTS, counter=(lambda _: int(7e9 + WATTS * clock.at * 1e3)) if counts else None
    )
    source = nvml_source(1, nvml, {})
    assert source is not None
    assert source.name == f"1 GPU, NVML {'energy counter' if counts else 'power readings'}"
    meter = started(source, clock)
    metered(meter, clock, 10.0)
    assert meter.joules() == pytest.approx(2500.0, rel=1e-6)
    meter.close()
    assert nvml.shut == 1


def test_power_that_rises_is_integrated_by_trapezoids() -> None:
    """100 + 20 t W over 10 s: 2000 J exactly."""
    clock = Clock()
    meter = started(Together("", [Integral(lambda: 100 + 20 * (clock.at - 100))]), clock)
    metered(meter, clock, 10.0)
    assert meter.joules() == pytest.approx(2000.0, rel=1e-9)


def test_the_counter_is_preferred_to_the_power() -> None:
    """A device that lies about its power and counts well."""
    clock = Clock()
    source = nvml_source(
        1, fake_nvml(lambda _: 9999.0, counter=lambda _: int(WATTS * clock.at * 1e3)), {}
    )
    meter = started(source, clock)
    metered(meter, clock, 1.0)
    assert meter.joules() == pytest.approx(250.0, rel=1e-4)


def test_only_the_devices_that_the_engine_uses_are_counted() -> None:
    """CUDA_VISIBLE_DEVICES, by index and by UUID, and no more than asked for."""
    for environment, devices, seen in (
        ({}, 1, {0}),
        ({}, 4, {0, 1, 2, 3}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 1, {2}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, 2, {1}),
    ):
        nvml = fake_nvml(lambda _: WATTS, counter=lambda _: 0, count=4)
        assert nvml_source(devices, nvml, environment) is not None
        assert set(nvml.asked) == seen
    hidden = fake_nvml(lambda _: WATTS, counter=lambda _: 0, count=4)
    assert nvml_source(1, hidden, {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert hidden.shut == 1


def test_without_module_driver_or_permission_there_is_no_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing there: not a word. There but not to be read: one line."""
    caplog.set_level(logging.INFO)
    no_driver = fake_nvml(lambda _: WATTS)
    no_driver.nvmlInit = refusing("Driver Not Loaded")
    assert nvml_source(1, no_driver, {}) is None
    assert not caplog.records
    forbidden = fake_nvml(lambda _: WATTS)
    forbidden.nvmlDeviceGetPowerUsage = refusing("Insufficient Permissions")
    assert nvml_source(1, forbidden, {}) is None
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read the energy counter of the GPU: Insufficient Permissions"
    ]
    assert forbidden.shut == 1


def test_a_machine_without_pynvml_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_source() is None


def test_counters_that_wrap_go_on() -> None:
    """RAPL starts again at 0 after its range; a counter without a range was set to 0."""
    values = iter([90.0, 95.0, 5.0, 15.0])
    wraps = EnergyCounter(lambda: next(values), 1.0, 100.0)
    assert [wraps.joules(0.0) for _ in range(4)] == [0.0, 5.0, 15.0, 25.0]
    values = iter([90.0, 95.0, 5.0])
    resets = EnergyCounter(lambda: next(values), 1.0)
    assert [resets.joules(0.0) for _ in range(3)] == [0.0, 5.0, 10.0]


def powercap(root: Path, **packages: str) -> Path:
    """A powercap folder as an Intel laptop has it: packages, a core and a memory zone within,
    the platform, the second interface.
    """
    zones = {f"intel-rapl:{index}": name for index, name in enumerate(packages.values())}
    zones |= {
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:9": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for zone, name in zones.items():
        (root / zone).mkdir(parents=True)
        (root / zone / "name").write_text(name + "\n")
        (root / zone / "energy_uj").write_text("1000000\n")
        (root / zone / "max_energy_range_uj").write_text("262143328850\n")
    (root / "intel-rapl").mkdir()
    return root


def test_rapl_adds_packages_and_nothing_twice(tmp_path: Path) -> None:
    """Two packages of 3 J and 4 J; core, memory, platform and the second interface move too and
    do not count.
    """
    root = powercap(tmp_path, a="package-0", b="package-1")
    source = rapl_source(root)
    assert source is not None
    assert source.name == "2 CPU packages, RAPL: engine, gateway and everything else there"
    (root / "intel-rapl:1" / "name").write_text("dram\n")
    one = rapl_source(root)
    assert one is not None
    assert one.name == "1 CPU package, RAPL: engine, gateway and everything else there"
    source.joules(0.0)
    for zone in root.glob("*/energy_uj"):
        zone.write_text("4000000\n")
    (root / "intel-rapl:1" / "energy_uj").write_text("5000000\n")
    assert source.joules(1.0) == pytest.approx(7.0)
    (root / "intel-rapl:0" / "energy_uj").write_text("0\n")  # wrapped
    assert source.joules(2.0) == pytest.approx(7.0 + 262143.32885 - 4.0)


def test_rapl_that_is_absent_or_forbidden_gives_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    assert rapl_source(tmp_path / "nowhere") is None
    assert not caplog.records
    root, read = powercap(tmp_path / "here", a="package-0"), Path.read_text

    def forbidden(path: Path, *arguments: Any, **named: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", forbidden)  # root may read everything
    assert rapl_source(root) is None
    assert len(caplog.records) == 1
    assert "Permission denied" in caplog.text


# --- batches ---


def test_the_line_through_the_batches_is_found() -> None:
    """Batches of 1..8 that take 3 J a member and 5 J each, idle stretches of 40 W between: beta,
    c0 and joules per token.
    """
    clock, drawn = Clock(), [0.0]
    meter = started(Together("", [EnergyCounter(lambda: drawn[0], 1.0)]), clock)
    rng = np.random.default_rng(1)

    def spend(joules: float, seconds: float) -> None:
        for _ in range(4):  # readings at the ends and within
            clock.at += seconds / 4
            drawn[0] += joules / 4
            assert meter.sample()

    tokens = 0
    for _ in range(60):
        size = int(rng.integers(1, 9))
        spend(40.0 * 0.5, 0.5)
        begin = clock.at
        spend(3.0 * size + 5.0, 0.2 + 0.05 * size)
        meter.on_batch(size, begin, clock.at, 10 * size)
        tokens += 10 * size
    meter.sample()
    found = meter.estimate()
    assert found is not None
    assert found.beta.value == pytest.approx(3.0)
    assert found.c0.value == pytest.approx(5.0)
    assert found.per_token.value == pytest.approx(
        sum(3.0 * s + 5.0 for s, _, _ in meter._batches) / tokens
    )
    assert meter.state()["batches"] == 60
    assert meter.short == 0


def test_a_batch_waits_for_the_reading_behind_its_end() -> None:
    clock = Clock()
    meter = started(Together("", [Integral(lambda: WATTS)]), clock)
    metered(meter, clock, 1.0)
    meter.on_batch(1, clock.at - 0.5, clock.at + 1.5 * PERIOD, 4)
    metered(meter, clock, PERIOD)
    assert meter.state()["batches"] == 0
    metered(meter, clock, PERIOD)
    assert meter._batches[0][1] == pytest.approx(WATTS * (0.5 + 1.5 * PERIOD))


def test_a_batch_below_the_period_is_its_duration_times_the_power_around_and_is_counted() -> None:
    clock = Clock()
    meter = started(Together("", [Integral(lambda: WATTS)]), clock)
    metered(meter, clock, 1.0)
    meter.on_batch(1, clock.at - 0.03, clock.at - 0.01, 4)
    metered(meter, clock, PERIOD)
    assert meter._batches[0][1] == pytest.approx(WATTS * 0.02)
    assert meter.short == 1


def test_what_overlaps_or_began_before_the_readings_is_left_out() -> None:
    clock = Clock()
    meter = started(Together("", [Integral(lambda: WATTS)]), clock)
    metered(meter, clock, 1.0)
    meter.on_batch(1, 99.0, 100.2, 4)
    meter.on_batch(1, 100.2, 100.5, 4)
    meter.on_batch(1, 100.3, 100.6, 4)
    metered(meter, clock, PERIOD)
    assert (meter.state()["batches"], meter.overlapping) == (1, 1)


def test_without_a_source_there_is_no_thread_and_no_estimate() -> None:
    meter = EnergyMeter(None)
    meter.start(Clock())
    meter.on_batch(1, 0.0, 1.0, 4)
    assert meter._thread is None
    assert meter.estimate() is None
    assert not meter._pending
    meter.close()


def test_a_device_that_is_lost_ends_the_readings_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    nvml = fake_nvml(lambda _: WATTS, counter=lambda _: 0)
    meter = started(nvml_source(1, nvml, {}), clock)
    nvml.nvmlDeviceGetTotalEnergyConsumption = refusing("GPU is lost")
    assert not meter.sample()
    assert [record.getMessage() for record in caplog.records] == [
        "energy measurement stopped: NVML: GPU is lost"
    ]


@pytest.mark.slow  # of real time: a machine that stands still reads late
def test_the_thread_reads_on_the_clock_of_the_loop() -> None:
    """At 10 Hz or more: a constant power over an interval of the loop's clock gives its joules,
    to the error of the reading.
    """

    async def main() -> tuple[float, int, float]:
        now = clock_of(asyncio.get_running_loop())
        meter = EnergyMeter(Together("", [EnergyCounter(lambda: WATTS * time.perf_counter(), 1.0)]))
        meter.start(now)
        begin = now()
        await asyncio.sleep(0.5)
        end = now()
        meter.on_batch(1, begin, end, 4)
        await asyncio.sleep(4 * PERIOD)
        await eventually(lambda: meter.state()["batches"])
        readings = len(meter._curve.instants)
        meter.close()
        return meter._batches[0][1] / (end - begin), readings, end - begin

    watts, readings, seconds = asyncio.run(main())
    assert watts == pytest.approx(WATTS, rel=0.05)
    assert readings >= 10 * seconds


def test_a_thread_reads_until_the_device_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    readings, lost = [0.0, 5.0], threading.Event()

    def read() -> float:
        if not readings:
            lost.set()
            raise OSError("gone")
        return readings.pop(0)

    closed: list[bool] = []
    source = Together("one", [EnergyCounter(read, 2.0)], lambda: closed.append(True))
    meter = EnergyMeter(source, period=0.001)
    meter.start(Clock())
    meter.start(Clock())  # no second one
    assert lost.wait(60)
    assert meter.state() == {
        "source": "one",
        "joules": 10.0,
        "batches": 0,
        "short": 0,
        "overlapping": 0,
    }
    meter.close()
    meter.close()
    assert closed == [True]
    assert caplog.messages == ["energy measurement stopped: gone"]
    assert meter.described()["source"] is None


def test_the_line_has_the_intervals_of_its_batches_and_tokens() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 9, 40).astype(float)
    tokens = sizes * rng.integers(5, 20, 40)
    joules = 3.0 * sizes + 5.0 + rng.normal(0, 1, 40)
    found = energy_estimate(sizes, joules, tokens)
    assert found is not None
    line = linregress(sizes, joules)
    assert found.beta.value == pytest.approx(line.slope)
    assert found.c0.value == pytest.approx(line.intercept)
    assert found.r2 == pytest.approx(line.rvalue**2)
    ratio = joules.sum() / tokens.sum()
    spread = statistics.stdev((joules - ratio * tokens).tolist())
    error = 1.96 * spread / (tokens.mean() * math.sqrt(40))
    assert found.per_token.value == pytest.approx(ratio)
    assert found.per_token.high - ratio == pytest.approx(error, rel=1e-3)
    assert found.per_token.effective_n == 40
    assert energy_estimate(sizes[:20], joules[:20], tokens[:20]) is not None
    assert energy_estimate(sizes[:19], joules[:19], tokens[:19]) is None
    assert energy_estimate(sizes, joules, 0 * tokens) is None
    assert energy_estimate(0 * sizes + 4, joules, tokens) is None, "one size tells no line"


def test_memory_is_bounded() -> None:
    """A week of readings and batches keeps the last ones only."""
    clock = Clock()
    meter = started(Together("", [Integral(lambda: WATTS)]), clock)
    for _ in range(30_000):
        clock.at += 1.0
        meter.on_batch(1, clock.at - 0.9, clock.at - 0.1, 4)
        assert meter.sample()
    assert len(meter._batches) == BATCHES
    assert len(meter._curve.instants) < 24_000
    assert meter._batches[-1][1] == pytest.approx(0.8 * WATTS)


def test_a_server_that_is_never_idle_keeps_no_requests_that_are_over() -> None:
    """`continuous` under load: the meter counts what was served and keeps no reference to the
    requests.
    """
    told: list[tuple[int, float, float, int]] = []
    batches = MeteredBatches(
        SimpleNamespace(source=object(), on_batch=lambda *served: told.append(served))
    )  # type: ignore[arg-type]
    going: deque[SimpleNamespace] = deque()
    for number in range(10_000):
        sequence = SimpleNamespace(
            outcome=None, interruptions=0, stop_detector=SimpleNamespace(output_tokens=number % 7)
        )
        going.append(sequence)
        batches.on_dispatch(
            SimpleNamespace(server_id=0, dispatched_at=float(number), sequences=[sequence])
        )  # type: ignore[arg-type]
        if len(going) > 20:
            going.popleft().outcome = "completed"
        assert len(batches._going[0].live) <= FEW + 2 * 21 + 1
    batches.on_idle(0, 20_000.0)
    assert told == [(10_000, 0.0, 20_000.0, sum(number % 7 for number in range(10_000)))]
    batches.on_idle(0, 20_001.0)
    assert len(told) == 1


@pytest.mark.parametrize("which", [0, 5_000, 9_999])
def test_a_stretch_with_an_interruption_in_it_is_not_metered(which: int) -> None:
    told: list[object] = []
    batches = MeteredBatches(
        SimpleNamespace(source=object(), on_batch=lambda *served: told.append(served))
    )  # type: ignore[arg-type]
    for number in range(10_000):
        sequence = SimpleNamespace(
            outcome="completed",
            interruptions=int(number == which),
            stop_detector=SimpleNamespace(output_tokens=1),
        )
        batches.on_dispatch(
            SimpleNamespace(server_id=0, dispatched_at=float(number), sequences=[sequence])
        )  # type: ignore[arg-type]
    batches.on_idle(0, 20_000.0)
    assert told == []
