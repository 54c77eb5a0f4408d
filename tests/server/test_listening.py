"""What listens for other machines: nothing, unless the operator says so."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from tests.server.ray.actors import require_ray
from tests.serving import started

LISTENS = "0A"  # the kernel's number of the state
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def listening(parent: int) -> dict[str, list[str]]:
    """Addresses on which a process and all that it started listen, by the name of the process."""
    sockets = _sockets()
    found: dict[str, list[str]] = {}
    for name, folder in _family(parent):
        try:
            opened = [str(file.readlink()) for file in (folder / "fd").iterdir()]
        except OSError:
            continue  # it ended meanwhile
        there = [sockets[text[8:-1]] for text in opened if text[8:-1] in sockets]
        found.setdefault(name, []).extend(there)
    return {name: sorted(addresses) for name, addresses in found.items() if addresses}


def _family(parent: int) -> list[tuple[str, Path]]:
    """Names and folders under /proc."""
    of: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            of[int(folder.name)] = (int(rest.split()[1]), name.partition("(")[2])
    family = {parent}
    while more := {each for each, (made_by, _) in of.items() if made_by in family} - family:
        family |= more
    return [(of[each][1], Path("/proc", str(each))) for each in family]


def _sockets() -> dict[str, str]:
    """Addresses by inode."""
    found = {}
    for file in ("tcp", "tcp6"):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS:
                found[rest[5]] = _address(local.partition(":")[0])
    return found


def _address(text: str) -> str:
    """As the kernel writes it: words of the machine's own byte order."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw)


def is_local(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--engine", "emulated"], id="emulated"),
        pytest.param(["--engine", "vllm"], id="vllm", marks=pytest.mark.engine),
        pytest.param(
            ["--engine", "vllm", "--replicas", "2"],
            id="replicas",
            marks=(pytest.mark.engine, pytest.mark.slow),
        ),
        pytest.param(["--engine", "ray"], id="ray", marks=(pytest.mark.engine, pytest.mark.slow)),
    ],
)
def test_no_other_machine_reaches_a_gateway_or_its_engines(
    arguments: list[str], tmp_path: Path
) -> None:
    if "ray" in arguments:
        require_ray()
    gateway = GatewayProcess(["tiny", *arguments], free_port(0), tmp_path / "gateway.log")
    with started(gateway):
        found = listening(gateway.pid)
    assert found, "the gateway's own"
    reached = {
        name: [address for address in addresses if not is_local(address)]
        for name, addresses in found.items()
    }
    assert {name: addresses for name, addresses in reached.items() if addresses} == {}
