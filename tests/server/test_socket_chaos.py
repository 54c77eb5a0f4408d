"""Real sockets: a third of the clients leaves, at every stage of a call, while policies and
limits change; each call has one outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.measurement.record import Record, read_run
from tests.eventually import eventually
from tests.server.counts import outcomes as ended
from tests.server.counts import resident, tell
from tests.server.processes import gateway, stream_text
from tests.server.stepping_gateway import SteppingGateway

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,turnaround=1.5e-3"
POLICIES = [
    "continuous:max_batch_size=16",
    "elastic:max_batch_size=16",
    "capped:max_batch_size=16",
    "fixed:batch_size=4,max_wait=0.01",
]
LEAVING = 0.3
NEVER_ARRIVED = ("in the head", "in the body")
AT_ONCE = ("sent", "waiting")  # it may not have been read when the client was gone
ARRIVED = ("first bytes", "in the middle", "answered")
STAGES = (*NEVER_ARRIVED, *AT_ONCE, *ARRIVED)
ASKING = 2  # connections on which the state is asked and the policy is changed
GROWTH = 30_000 * 1024  # bytes: windows that fill, and what 48 connections at once need
RESET = struct.pack("ii", 1, 0)


@dataclass
class Clients:
    """Many at once, each call on a connection of its own and with an id of its own."""

    port: int
    calls: int
    at_once: int = 48
    stages: dict[str, str] = field(
        default_factory=dict
    )  # where a client left, by its id; whole: it did not
    wrong: list[tuple[str, Any]] = field(default_factory=list)

    async def run(self) -> None:
        """All calls."""
        numbers = iter(range(self.calls))

        async def client() -> None:
            for number in numbers:
                await self.call(f"c{number}", np.random.default_rng((1, number)))

        await asyncio.gather(*(client() for _ in range(self.at_once)))

    async def call(self, own_id: str, rng: np.random.Generator) -> None:
        """One, to its end or to where it leaves; whatever the others do, it draws the same."""
        stage = str(rng.choice(STAGES)) if rng.random() < LEAVING else "whole"
        tokens, stream, reset = (
            int(rng.integers(1, 20)),
            bool(rng.random() < 0.7),
            bool(rng.random() < 0.5),
        )
        self.stages[own_id] = stage
        body = {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 60,
            "stream": stream,
            "kendall_forced_output_tokens": tokens,
        }
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-request-id: "
            f"{own_id}\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        request = head.encode() + raw
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(
                request[
                    : {"in the head": 40, "in the body": len(head) + 9}.get(stage, len(request))
                ]
            )
            await writer.drain()
            answer = await self.read(reader, stage, float(rng.exponential(0.01)))
            if stage in {"whole", "answered"}:
                self.look(own_id, answer, tokens, stream=stream)
        finally:
            if reset and stage != "whole":
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET
                )
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def read(self, reader: asyncio.StreamReader, stage: str, pause: float) -> bytes:
        """As much as a client reads that leaves at that stage."""
        if stage in {"whole", "answered"}:
            return await reader.read(-1)
        if stage in {"waiting", "in the body"}:
            await asyncio.sleep(pause)
        if stage in {"first bytes", "in the middle"}:
            await reader.read(1)
        if stage == "in the middle":
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(100)
        return b""

    def look(self, own_id: str, answer: bytes, tokens: int, *, stream: bool) -> None:
        """A whole answer is whole."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            self.wrong.append((own_id, answer[:300]))
            return
        text, whole = (
            stream_text(body) if stream else (json.loads(body)["choices"][0]["text"], True)
        )
        if not whole or text.count("word") != tokens:
            self.wrong.append((own_id, (whole, tokens, text)))


async def switching(running: GatewayProcess) -> int:
    """Another policy, limit and patience every half second, until cancelled; the count of them
    is the last epoch.
    """
    for number, policy in enumerate(itertools.cycle(POLICIES)):
        await asyncio.sleep(0.5)
        await running.ask(
            "PUT",
            "/admin/policy",
            {"policy": policy, "max_output_tokens": 20 + number % 7, "patience": 60.0 + number % 2},
        )
    raise AssertionError


def connections(port: int) -> int:
    """Sockets that a process on this machine holds on a port of its own, those that listen left
    out.
    """
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(row[1].rpartition(":")[2], 16) == port and row[3] != "0A" and row[9] != "0"
        for row in rows
    )


async def scene(running: GatewayProcess, calls: int) -> tuple[Clients, dict[str, Any]]:
    """The load, and what the gateway holds before and after it."""
    await running.ready()
    clients = Clients(int(running.url.rpartition(":")[2]), calls)
    memory = [resident(running.pid)]
    switches = asyncio.create_task(switching(running))
    await clients.run()
    switches.cancel()
    await asyncio.gather(switches, return_exceptions=True)

    async def nothing_is_held() -> bool:
        return (
            not (await running.ask("GET", "/admin/state"))["unanswered"]
            and connections(clients.port) <= ASKING
        )

    await eventually(nothing_is_held)
    state, held = await running.ask("GET", "/admin/state"), connections(clients.port)
    memory.append(resident(running.pid))
    metrics = (await running._client.get("/metrics")).text
    return clients, state | {"held": held, "memory": memory, "counted": ended(metrics)}


def check(clients: Clients, state: dict[str, Any], records: list[Record], log: str) -> None:
    """Conservation: who arrived has one record, of one outcome, and the counters say the same."""
    of = Counter(record.client_request_id for record in records)
    outcomes = Counter(record.outcome for record in records)
    stages = Counter(clients.stages.values())
    ends = Counter(
        (clients.stages[str(record.client_request_id)], record.outcome) for record in records
    )
    ends_told = {f"{stage}: {outcome}": count for (stage, outcome), count in sorted(ends.items())}
    tell(
        "sockets",
        calls=clients.calls,
        stages=stages,
        outcomes=outcomes,
        ends=ends_told,
        memory=state["memory"],
        connections=state["held"],
    )
    assert state["held"] <= ASKING, "a connection is left"
    assert state["memory"][1] - state["memory"][0] < GROWTH
    assert clients.wrong == []
    assert max(of.values()) == 1, "one outcome each"
    for own_id, stage in clients.stages.items():
        if stage in NEVER_ARRIVED:
            assert of[own_id] == 0
        elif stage not in AT_ONCE:
            assert of[own_id] == 1, (own_id, stage)
    assert ends["whole", "completed"] == stages["whole"]
    assert ends["answered", "completed"] == stages["answered"]
    assert set(outcomes) == {"completed", "cancelled"}
    assert state["counted"] == outcomes
    assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)
    assert "Traceback" not in log
    assert set(stages) == {*STAGES, "whole"}


def check_clocks(records: list[Record]) -> None:
    """Every instant of a record follows the one before it, on one clock."""
    for record in records:
        instants = [
            record.received_at,
            record.arrived_at,
            record.dispatched_at,
            record.first_token_at,
            record.last_token_at,
            record.released_at,
        ]
        known = [instant for instant in instants if instant is not None]
        assert known == sorted(known), record
        assert known[-1] - known[0] < 30.0, record


def play(running: GatewayProcess, folder: Path, calls: int) -> None:
    async def main() -> tuple[Clients, dict[str, Any]]:
        async with running:
            return await scene(running, calls)

    clients, state = asyncio.run(main())
    records = read_run(folder / "records.jsonl")[1]
    check(clients, state, records, (folder / "gateway.log").read_text())
    check_clocks(records)


ARGUMENTS = ("tiny", "--engine", "emulated", "--latency", LAW, "--policy", POLICIES[0])


def test_clients_that_leave_at_every_stage_have_one_outcome_each(tmp_path: Path) -> None:
    play(gateway(tmp_path, *ARGUMENTS), tmp_path, 200)


@pytest.mark.slow
def test_ten_thousand_calls_of_which_a_third_leaves_have_one_outcome_each(tmp_path: Path) -> None:
    play(gateway(tmp_path, *ARGUMENTS), tmp_path, 10_000)


@pytest.mark.slow
def test_steps_of_the_wall_clock_move_nothing(tmp_path: Path) -> None:
    """By an hour, forwards and back, five times a second."""
    arguments = [
        "--record-file",
        str(tmp_path / "records.jsonl"),
        "--prediction-interval",
        "0.5",
        "--allow-forced-lengths",
        *ARGUMENTS,
    ]
    play(SteppingGateway(arguments, free_port(0), tmp_path / "gateway.log"), tmp_path, 2_000)
