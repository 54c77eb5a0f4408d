"""Where joules can be read: NVML for NVIDIA devices, the powercap folder of Linux (RAPL) for CPUs.

A source answers the joules since it was opened. NVML's energy counter (Volta and later, mJ since
the driver was loaded) is preferred
over the integral of its power readings (mW), which are averages over the device's own sampling
time. RAPL counts whole CPU packages: the engine, this gateway, and everything else that runs there;
it wraps at `max_energy_range_uj`, and kernels since 5.10 let only root read it. Sources: NVML API
reference (nvmlDeviceGetTotalEnergyConsumption, nvmlDeviceGetPowerUsage); Linux
Documentation/power/powercap. `nvidia-ml-py` (module pynvml, BSD-3-Clause) comes with vLLM for CUDA;
without it, or without a device, there is no source and no cost.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("kendall.energy")
POWERCAP = Path("/sys/class/powercap")
Reader = Callable[[], float]


class Source(Protocol):
    """A device, or several together, whose energy can be read."""

    @property
    def name(self) -> str:
        """What is counted, in words."""

    def joules(self, at: float) -> float:
        """Since the first reading; `at` is the instant of this one (s). Raises OSError where it
        is lost.
        """

    def close(self) -> None:
        """Let the device go."""


class EnergyCounter:
    """Joules from a counter of `unit` joules that starts again at 0 after `limit` (None: it
    never does).
    """

    def __init__(self, read: Reader, unit: float, limit: float | None = None) -> None:
        self._read, self._unit, self._limit = read, unit, limit
        self._last: float | None = None
        self._total = 0.0

    def joules(self, at: float) -> float:
        """See `Source`. A counter that jumps back without a limit was set to 0: what it lost in
        between is not known.
        """
        del at
        value = self._read()
        if self._last is not None:
            moved = value - self._last
            if moved < 0:
                moved = value if self._limit is None else moved + self._limit
            self._total += moved * self._unit
        self._last = value
        return self._total


class Integral:
    """Joules from readings of power (W), each taken to last half-way to its neighbours
    (trapezoids).
    """

    def __init__(self, watts: Reader) -> None:
        self._watts = watts
        self._last: tuple[float, float] | None = None
        self._total = 0.0

    def joules(self, at: float) -> float:
        """See `Source`."""
        watts = self._watts()
        if self._last is not None:
            before, then = self._last
            self._total += (at - before) * (watts + then) / 2
        self._last = at, watts
        return self._total


class Together:
    """The sum over devices."""

    def __init__(
        self,
        name: str,
        parts: Sequence[EnergyCounter | Integral],
        close: Callable[[], Any] = lambda: None,
    ) -> None:
        self.name = name
        self.close = close
        self._parts = tuple(parts)

    def joules(self, at: float) -> float:
        """See `Source`."""
        return sum(part.joules(at) for part in self._parts)


def nvml_source(
    devices: int = 1, nvml: Any = None, environment: Mapping[str, str] = os.environ
) -> Source | None:
    """The first `devices` that CUDA_VISIBLE_DEVICES shows, or None. `nvml` is the module, for
    tests.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("NVML is not available: %s", error)
        return None
    try:
        parts = [_nvml_part(nvml, handle) for handle in _visible(nvml, environment)[:devices]]
    except (nvml.NVMLError, ValueError) as error:
        log.info("cannot read the energy counter of the GPU: %s", error)
        parts = []
    if not parts:
        nvml.nvmlShutdown()
        return None
    kind = "energy counter" if isinstance(parts[0], EnergyCounter) else "power readings"
    return Together(f"{len(parts)} GPU, NVML {kind}", parts, nvml.nvmlShutdown)


def rapl_source(root: Path = POWERCAP) -> Source | None:
    """All CPU packages, or None. Subzones, the second interface to a package (mmio) and the
    platform zone would count twice.
    """
    try:
        parts = [
            _rapl_part(zone)
            for zone in sorted(root.glob("intel-rapl:*"))
            if (zone / "name").read_text().startswith("package")
        ]
    except (OSError, ValueError) as error:
        log.info("cannot read the energy counter of the CPU: %s", error)
        return None
    if not parts:
        return None
    return Together(
        f"{len(parts)} CPU package{'s' * (len(parts) > 1)}, RAPL: engine, gateway and everything "
        "else there",
        parts,
    )


def _visible(nvml: Any, environment: Mapping[str, str]) -> list[Any]:
    """Handles in the order of the bus; NVML itself does not heed CUDA_VISIBLE_DEVICES."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _nvml_part(nvml: Any, handle: Any) -> EnergyCounter | Integral:
    """The device's energy counter where it has one, its power otherwise. Raises NVMLError where
    it has neither.
    """
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        nvml.nvmlDeviceGetPowerUsage(handle)
        return Integral(
            _lost_is_oserror(nvml, lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) * 1e-3)
        )
    return EnergyCounter(
        _lost_is_oserror(nvml, lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))),
        1e-3,
    )


def _lost_is_oserror(nvml: Any, read: Reader) -> Reader:
    def reading() -> float:
        try:
            return read()
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    return reading


def _rapl_part(zone: Path) -> EnergyCounter:
    """Raises OSError where it may not be read."""
    energy = zone / "energy_uj"
    limit = float((zone / "max_energy_range_uj").read_text())
    float(energy.read_text())
    return EnergyCounter(lambda: float(energy.read_text()), 1e-6, limit)
