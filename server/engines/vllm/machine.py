"""The machine that a CPU engine computes on: what its processor has, how much memory is free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 62  # bytes; cgroup v1 writes a number of this size for none


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes: None where the system does not say."""

    flags: frozenset[str]  # of /proc/cpuinfo
    free: int | None
    total: int | None
    limited: bool = False  # by a cgroup, in which vLLM counts the page cache as used

    @classmethod
    def here(cls, root: Path = Path("/")) -> Machine:
        """As the files below `root` say. Memory is the least of what the system has, of what its
        NUMA nodes have (vLLM computes on one), and of what the control group may still take.
        """
        system = _meminfo(root / "proc/meminfo")
        free, total = system.get("MemAvailable"), system.get("MemTotal")
        if free is None or total is None:
            return cls(_flags(root), None, None)
        for node in _nodes(root):
            free, total = min(free, node[0]), min(total, node[1])
        limited = False
        for left, limit in _control_groups(root):
            free, total = min(free, left), min(total, limit)
            limited = True
        return cls(_flags(root), free, total, limited)


def _flags(root: Path) -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in {"flags", "Features"}:  # x86, Arm
                return frozenset(words.split())
    return frozenset()


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name; the files of NUMA nodes begin each line with `Node 0`."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name.split()[-1]] = int(value.split()[0]) << 10
    return found


def _nodes(root: Path) -> Iterator[tuple[int, int]]:
    """Free and total of each NUMA node that has memory and processors, as vLLM counts them."""
    for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        memory = _meminfo(node / "meminfo")
        cpus = ""
        with contextlib.suppress(OSError):
            cpus = (node / "cpulist").read_text(encoding="utf-8").strip()
        if cpus and memory.get("MemTotal"):
            cached = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
            yield sum(memory.get(name, 0) for name in cached), memory["MemTotal"]


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """What is left and the limit of every control group around this process that has one."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(root / "sys/fs/cgroup/memory", path, *files)


def _limits(top: Path, path: str, limit: str, usage: str) -> Iterator[tuple[int, int]]:
    """From the group itself up to the top. In a container the path may be the host's: then only
    the top is there.
    """
    group = Path(os.path.normpath(f"{top}/{path}"))
    inside = [folder for folder in (group, *group.parents) if top in folder.parents]
    for folder in (*inside, top):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            most = int((folder / limit).read_text(encoding="utf-8"))
            if most < NO_LIMIT:
                used = int((folder / usage).read_text(encoding="utf-8"))
                yield max(0, most - used), most
