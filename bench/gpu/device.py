"""What the measuring machine is, and the energy that its GPU has used where the driver tells it.

NVML's counter of the whole device (Volta and newer), in millijoules, renewed every 20 to 100 ms:
energies of batches shorter than a second are rough. Without the package nvidia-ml-py, the counter,
or an NVIDIA GPU, there is no energy: null, not zero.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch


def no_energy() -> None:
    """The counter of a device without one."""


def energy_counter(device: str) -> tuple[Callable[[], float | None], dict[str, Any]]:
    """Joules since some instant, and what NVML says about the device; never raises."""
    if device == "cpu":
        return no_energy, {}
    try:
        import pynvml
    except ImportError:
        return no_energy, {"energy": "not read: nvidia-ml-py is missing"}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        facts = {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "energy": "NVML total energy counter of the device",
        }
    except (
        pynvml.NVMLError,
        AttributeError,
    ) as error:  # no such counter, or a PyTorch that tells no UUID
        return no_energy, {"energy": f"not read: {error}"}
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, facts


def machine(device: str) -> dict[str, Any]:
    """Describe the GPU and the processor that drives it: at small batches the processor's
    launches are the step.
    """
    facts: dict[str, Any] = {
        "device": processor(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    return facts


def free_memory(device: str) -> float:
    """Free bytes; unbounded on the processor, where only small shapes are tried."""
    return float("inf") if device == "cpu" else float(torch.cuda.mem_get_info()[0])


def processor() -> str:
    """Its name, as the kernel tells it."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "numpy": np.__version__,
    }


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
