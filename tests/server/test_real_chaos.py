"""A thousand calls on the real engine beside each kind of fault: one outcome each, and clients,
records and counters agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess
from kendall.queueing.measurement.record import read_run
from kendall.server.engines.vllm.process import descendants
from tests.server.counts import outcomes, tell
from tests.server.marked_gateway import LOST, POISON, MarkedGateway
from tests.server.processes import (
    ClosedLoop,
    SocketCall,
    command,
    engine_process,
    gateway,
    gone,
    stream_text,
)
from tests.server.test_engine_boot_faults import parent, stop_in_boot
from tests.server.test_engine_faults import ready_again

pytestmark = [pytest.mark.engine, pytest.mark.slow]
CALLS = 1000
CLIENTS = 24
FIRST = 200  # answers before a fault, so that it comes under load
LONGEST = 600.0  # seconds of a scene
SEQUENCES = {"model": "tiny", "prompt": ["a"] * 1024, "n": 128}  # 131,072 of them in 5 KB
PAUSE = 4.0  # seconds; an engine that is silent for 5 is taken for dead
SOON = {"x-llm-d-slo-ttft-ms": "500"}
LOSSES = range(
    50, 451, 100
)  # numbers of the calls that the engine forgets: others go on long after the last one
POISONS = range(200, 900, 201)


@dataclass
class Crowd(ClosedLoop):
    """Each call on a connection of its own."""

    calls, clients = CALLS, CLIENTS
    fields: Callable[[int], dict[str, Any]]
    headers: dict[str, str] = field(default_factory=dict)
    refused: int = 0  # attempts; the call is made again
    asked: list[int] = field(
        default_factory=list
    )  # output tokens of each sequence that was answered
    left: dict[str, bool] = field(
        default_factory=dict
    )  # ids of calls whose clients left: whether the answer had begun
    broken: list[tuple[int, int, bytes]] = field(default_factory=list)

    async def call(self, number: int) -> None:
        """One, to the end of its answer; sent again where it is refused for now."""
        body = {
            "model": "tiny",
            "prompt": [300, 301 + number % 50],
            "max_tokens": 100,
            "stream": number % 2 == 0,
        }
        body |= {"kendall_forced_output_tokens": 1 + number * 37 % 24} | self.fields(number)
        tokens = body["kendall_forced_output_tokens"]
        while (got := await (await SocketCall(self.url, body, self.headers).send()).answer())[
            0
        ] == 429:
            self.refused += 1
            await asyncio.sleep(0.05)
        status, answer = got
        self.statuses[status] += 1
        if status != 200:
            return
        self.asked += [tokens] * body.get("n", 1)
        whole = (
            stream_text(answer)[1]
            if body["stream"]
            else json.loads(answer)["usage"]["completion_tokens"] == tokens * body.get("n", 1)
        )
        if not whole:
            self.broken.append((number, status, answer[-300:]))


async def nothing(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The calls are the fault."""


async def kill(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    os.kill(engine_process(running.pid), signal.SIGKILL)


async def hang_in_boot(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The engine dies, and its successor is stopped while it boots."""
    engine = engine_process(running.pid)
    server = parent(engine)
    await kill(running, crowd, folder)
    stopped = await stop_in_boot(server, {engine})
    await ready_again(running)
    assert await gone([stopped]) == []


async def hang_in_calibration(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    calibrating = asyncio.create_task(
        running.ask("POST", "/admin/calibrate", {"max_batch_size": 4, "max_output_tokens": 64})
    )
    while await running.is_ready():
        assert not calibrating.done()
    await asyncio.sleep(0.3)
    os.kill(engine_process(running.pid), signal.SIGSTOP)
    with pytest.raises(GatewayError, match="503"):
        await calibrating


async def stop_the_predictor(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    await crowd.answered(FIRST)
    async with asyncio.timeout(60):
        while not (  # noqa: ASYNC110
            found := [
                pid for pid in descendants(running.pid) if "predictor_process" in command(pid)
            ]
        ):
            await asyncio.sleep(0.05)
    os.kill(found[0], signal.SIGSTOP)


async def pause(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The gateway stands still; all that came meanwhile is admitted at once."""
    for _ in range(3):
        await crowd.answered(crowd.statuses.total() + FIRST)
        os.kill(running.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        os.kill(running.pid, signal.SIGCONT)


async def pause_the_engine(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """The first service times that the gateway measures include a pause. A client refused
    afterwards retries until admitted.
    """
    for answers in (0, FIRST):
        await crowd.answered(crowd.statuses.total() + answers)
        engine = engine_process(running.pid)
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(PAUSE)
        os.kill(engine, signal.SIGCONT)


async def hang_ups(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    while True:
        os.kill(running.pid, signal.SIGHUP)
        await asyncio.sleep(0.1)


async def leave(running: GatewayProcess, crowd: Crowd, folder: Path) -> None:
    """Two requests on one connection whose client leaves, half of the times once the first
    answer has begun.
    """
    body = json.dumps(
        {"model": "tiny", "prompt": [300], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {}\r\n"
        "content-length: {}\r\n\r\n"
    )
    for number in itertools.count(len(crowd.left)):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(running.url.rpartition(":")[2])
        )
        names = f"left-{number}", f"behind-{number}"
        crowd.left[names[0]] = False
        try:
            writer.write(b"".join(head.format(name, len(body)).encode() + body for name in names))
            await writer.drain()
            if number % 2:
                crowd.left[names[0]] = await reader.read(1) != b""
            else:
                await asyncio.sleep(0.01 * (number % 10))
        finally:
            writer.close()


def no_more(number: int) -> dict[str, Any]:
    return {}


def several(number: int) -> dict[str, Any]:
    return {"n": 1 + number % 8, "stream": False}


def bombs(number: int) -> dict[str, Any]:
    return SEQUENCES if number % 50 == 0 else {}


def losses(number: int) -> dict[str, Any]:
    """Long calls, so that others move for many seconds after the last loss."""
    prompt = [LOST if number in LOSSES else 300, 301 + number % 50]
    return {"prompt": prompt, "max_tokens": 200, "kendall_forced_output_tokens": 150}


def poison(number: int) -> dict[str, Any]:
    """Each prompt another one: the same would be refused the second time."""
    return {"prompt": [POISON, 300 + number // 100], "stream": False} if number in POISONS else {}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what it may cost."""

    says: str
    meanwhile: Callable[[GatewayProcess, Crowd, Path], Awaitable[None]] = nothing
    arguments: tuple[str, ...] = ()
    fields: Callable[[int], dict[str, Any]] = no_more
    statuses: dict[int, int] = field(default_factory=lambda: {200: CALLS})
    headers: dict[str, str] = field(default_factory=dict)
    restarts: Collection[int] = (0,)
    logged: dict[str, int] = field(default_factory=dict)  # how often a line says so
    leavers: bool = False  # others than the crowd call, too, and leave
    recorded: bool = True
    log_is_read: bool = True
    process: type[GatewayProcess] = GatewayProcess


KINDS = [
    Kind(says="an engine is killed", meanwhile=kill, restarts=(1,)),
    Kind(
        says="a successor hangs in its boot",
        meanwhile=hang_in_boot,
        arguments=("--restart-timeout", "15"),
        restarts=(1,),
    ),
    Kind(says="an engine hangs in a calibration", meanwhile=hang_in_calibration, restarts=(1,)),
    Kind(
        says="the predictor is stopped",
        meanwhile=stop_the_predictor,
        arguments=("--prediction-interval", "1", "--latency", "tiny"),
    ),
    Kind(says="the gateway stands still", meanwhile=pause),
    Kind(
        says="the engine stands still, and each call has its limit to the first token",
        meanwhile=pause_the_engine,
        headers=SOON,
    ),
    Kind(
        says="sequences are lost while others move",
        fields=losses,
        arguments=("--stuck-timeout", "2"),
        logged={"it is submitted to the engine again": len(LOSSES)},
        process=MarkedGateway,
    ),
    Kind(
        says="prompts kill the engine",
        fields=poison,
        statuses={200: CALLS - len(POISONS), 500: len(POISONS)},
        restarts=range(2 * len(POISONS), 3 * len(POISONS) + 1),
        logged={"its prompt is refused for a while": len(POISONS)},
        process=MarkedGateway,
    ),
    Kind(says="several sequences a call", fields=several),
    Kind(
        says="nobody reads the log",
        arguments=("--log-level", "debug", "--log-prompts"),
        log_is_read=False,
    ),
    Kind(
        says="the disk is full",
        arguments=("--record-file", "/dev/full"),
        recorded=False,
        process=MarkedGateway,
    ),
    Kind(says="a hangup ten times a second", meanwhile=hang_ups),
    Kind(says="pipelining clients leave", meanwhile=leave, leavers=True),
    Kind(says="131,072 sequences in 5 KB", fields=bombs, statuses={200: CALLS - 20, 400: 20}),
]


@dataclass(frozen=True)
class Seen:
    """Of a scene, once nothing is left."""

    crowd: Crowd
    state: dict[str, Any]
    counted: Counter[str]
    dropped: int  # records


async def scene(running: GatewayProcess, kind: Kind, folder: Path) -> Seen:
    """The calls beside the fault."""
    await running.ready()
    crowd = Crowd(running.url, kind.fields, kind.headers)
    fault = asyncio.ensure_future(kind.meanwhile(running, crowd, folder))
    await crowd.run()
    if kind.meanwhile in (hang_ups, leave):  # until the calls are over
        fault.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await fault
    await ready_again(running)
    while (state := await running.ask("GET", "/admin/state"))["unanswered"]:  # noqa: ASYNC110 - it tells by being asked
        await asyncio.sleep(0.05)
    metrics = (await running._client.get("/metrics")).text
    (dropped,) = re.findall(r"^kendall_dropped_records_total (\S+)$", metrics, re.MULTILINE)
    return Seen(crowd, state, outcomes(metrics), int(float(dropped)))


def play(kind: Kind, folder: Path) -> Seen:
    async def main() -> Seen:
        arguments = (
            "tiny",
            "--engine",
            "vllm",
            "--policy",
            "continuous:max_batch_size=8",
            *kind.arguments,
        )
        async with (
            asyncio.timeout(LONGEST),
            gateway(folder, *arguments, kind=kind.process) as running,
        ):
            return await scene(running, kind, folder)

    if kind.log_is_read:
        return asyncio.run(main())
    pipe = folder / "gateway.log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return asyncio.run(main())
    finally:
        os.close(reader)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.says)
def test_a_thousand_calls_beside_a_fault_have_one_outcome_each(kind: Kind, tmp_path: Path) -> None:
    seen = play(kind, tmp_path)
    crowd, state, counted = seen.crowd, seen.state, seen.counted
    restarts = state["supervision"]["restarts"]
    tell(
        kind.says,
        statuses=crowd.statuses,
        refused=crowd.refused,
        counted=counted,
        restarts=restarts,
    )
    assert crowd.statuses == kind.statuses
    assert crowd.broken == []
    assert restarts in kind.restarts
    assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)
    expected = Counter(
        completed=len(crowd.asked), failed=crowd.statuses[500], rejected=crowd.refused
    )
    assert counted == expected + Counter(cancelled=counted["cancelled"] if kind.leavers else 0)
    log = (tmp_path / "gateway.log").read_text() if kind.log_is_read else ""
    assert {words: log.count(words) for words in kind.logged} == kind.logged
    if kind.recorded:
        check_records(tmp_path / "records.jsonl", seen, leavers=kind.leavers)
    else:
        (last,) = re.findall(r"the last ([\d,]+) records could not be written", log)
        assert seen.dropped + int(last.replace(",", "")) == CALLS, (
            "each is counted as dropped, or named at the end"
        )
        assert seen.dropped > 0


def check_records(file: Path, seen: Seen, *, leavers: bool) -> None:
    """One for each call, and of those whose client left for each that had arrived."""
    records = read_run(file)[1]
    crowd = seen.crowd
    assert Counter(record.outcome for record in records) == seen.counted
    assert sorted(
        record.output_tokens or 0 for record in records if record.outcome == "completed"
    ) == sorted(crowd.asked)
    assert len({record.request_id for record in records}) == len(records), (
        "nothing is recorded twice"
    )
    assert seen.dropped == 0
    if leavers:
        left = Counter(
            record.client_request_id for record in records if record.outcome == "cancelled"
        )
        begun = {name for name, begun in crowd.left.items() if begun}
        assert begun
        assert begun <= set(left) <= set(crowd.left), (
            "each answer that had begun is cancelled, and no request behind another is served"
        )
        assert set(left.values()) == {1}
