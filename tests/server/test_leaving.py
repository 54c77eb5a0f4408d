"""The end of the process: what was accepted is answered, no connection is reset, and nothing
outside can hold it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.queueing.measurement.record import read_run
from kendall.server.engines.vllm.process import descendants
from kendall.server.operations.shutdown import drop_new_connections, unaccepted
from kendall.server.runtime.log_writer import LINES_OF_A_KIND, WINDOW
from tests.eventually import eventually, eventually_here
from tests.server.processes import SocketCall, command, gateway, gone
from tests.server.test_gateway_signals import FAST, LONGEST, STEP, body, ended

FEW = "k1=0,k2=0,k3=0,k4=1e-3"  # seconds a token


class KeepAlive:
    """A client that sends one call after the other on a connection, and opens another where an
    answer ended it.
    """

    def __init__(self, url: str, outcomes: Counter[str], think: float) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._outcomes = outcomes
        self._think = think
        content = b'{"model":"tiny","prompt":[5,6,7],"max_tokens":4,"ignore_eos":true}'
        self._call = (
            b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%s"
            % (len(content), content)
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> None:
        """Until the gateway takes no more: 503, or nobody listens."""
        outcome = "200"
        while outcome == "200":
            outcome = await self._one()
            self._outcomes[outcome] += 1
            if self._think:
                await asyncio.sleep(self._think)
        if self._streams is not None:
            self._streams[1].close()

    async def _one(self) -> str:
        try:
            self._streams = self._streams or await asyncio.open_connection(*self._address)
        except ConnectionRefusedError:
            return "refused before a call"
        reader, writer = self._streams
        writer.write(self._call)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            await reader.readexactly(int(length[1]))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            return f"reset: {type(error).__name__}"
        if b"connection: close" in head:
            writer.close()
            self._streams = None
        return head.split()[1].decode()


async def stopped_under(running: GatewayProcess, clients: int, think: float = 0.0) -> Counter[str]:
    """What became of every call of so many clients while the gateway was told to stop."""
    outcomes: Counter[str] = Counter()
    playing = [
        asyncio.create_task(KeepAlive(running.url, outcomes, think).run()) for _ in range(clients)
    ]
    while outcomes["200"] < 3 * clients:  # noqa: ASYNC110 - nothing to wait on
        await asyncio.sleep(0.01)
    os.kill(running.pid, signal.SIGTERM)
    await asyncio.gather(*playing)
    await ended(running)
    return outcomes


def no_reset(folder: Path, clients: int, think: float = 0.0) -> None:
    async def main() -> Counter[str]:
        async with (
            asyncio.timeout(LONGEST),
            gateway(
                folder,
                "tiny",
                "--engine",
                "emulated",
                "--latency",
                FEW,
                "--policy",
                "continuous:max_batch_size=64",
            ) as running,
        ):
            await running.ready()
            return await stopped_under(running, clients, think)

    outcomes = asyncio.run(main())
    assert set(outcomes) <= {"200", "503", "refused before a call"}, outcomes
    records = read_run(folder / "records.jsonl")[1]
    assert Counter(record.outcome for record in records) == {
        "completed": outcomes["200"],
        "rejected": outcomes["503"],
    }


@pytest.mark.slow
def test_no_call_of_50_keep_alive_clients_is_reset_by_sigterm(tmp_path: Path) -> None:
    no_reset(tmp_path, 50)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_no_call_of_200_keep_alive_clients_is_reset_by_sigterm(tmp_path: Path, number: int) -> None:
    no_reset(tmp_path, 200, think=0.0 if number % 2 else 0.05)


@pytest.mark.slow
def test_within_the_shutdown_delay_it_is_not_ready_and_serves(tmp_path: Path) -> None:
    async def main() -> None:
        arguments = ["tiny", "--engine", "emulated", "--latency", FAST, "--shutdown-delay", "150s"]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            os.kill(running.pid, signal.SIGTERM)
            while await running.is_ready():
                pass
            assert await running.is_healthy()
            made = await SocketCall(running.url, body(5, stream=False)).send()
            assert (await made.answer())[0] == 200
            assert (await running.ask("GET", "/admin/state"))["draining"] is False
            os.kill(running.pid, signal.SIGTERM)
            await ended(running)

    asyncio.run(main())
    assert [record.outcome for record in read_run(tmp_path / "records.jsonl")[1]] == ["completed"]
    assert (
        "SIGTERM: /ready answers 503; requests are accepted for 150 s more"
        in (tmp_path / "gateway.log").read_text()
    )


@pytest.mark.slow
def test_after_the_shutdown_delay_it_ends_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        arguments = ["tiny", "--engine", "emulated", "--latency", FAST, "--shutdown-delay", "500ms"]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            os.kill(running.pid, signal.SIGTERM)
            await ended(running)

    asyncio.run(main())
    assert "requests are accepted for 0.5 s more" in (tmp_path / "gateway.log").read_text()


@pytest.mark.slow
def test_an_answer_under_way_and_the_next_call_on_its_connection_are_both_answered(
    tmp_path: Path,
) -> None:
    """The headers of a stream that began before the signal say keep-alive: its client may send
    on.
    """

    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST),
            gateway(tmp_path, "tiny", "--engine", "emulated", "--latency", STEP) as running,
        ):
            await running.ready()
            host, _, port = running.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            made = SocketCall(
                running.url, body(300)
            )  # 3 s, from the first of which on the signal is sent
            call = (
                b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%s"
                % (len(made._body), made._body)
            )
            writer.write(call)
            await reader.readuntil(b"data: ")
            os.kill(running.pid, signal.SIGTERM)
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            writer.write(call)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in answer
            writer.close()
            await ended(running)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")
def test_new_connections_are_passed_over_and_those_that_are_there_are_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        with socket.create_connection(listening.getsockname()) as early, socket.socket() as late:
            early.sendall(b"early")
            assert eventually_here(lambda: unaccepted(listening)) == 1
            assert drop_new_connections(listening)
            late.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                late.connect(listening.getsockname())
            served, _ = listening.accept()
            with served:
                served.setblocking(True)
                assert served.recv(5) == b"early"
                early.sendall(b" and more")
                assert served.recv(9) == b" and more"
            assert unaccepted(listening) == 0
            with pytest.raises(BlockingIOError):
                listening.accept()


@pytest.mark.slow
def test_a_predicting_process_that_is_stopped_does_not_hold_the_exit_up(tmp_path: Path) -> None:
    async def main() -> None:
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            STEP,
            "--prediction-interval",
            "0.2",
        ]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            below = await stopped_below(running)
            made = await SocketCall(running.url, body(20)).send()
            await made.answer()
            await asyncio.sleep(0.5)  # it is asked
            os.kill(running.pid, signal.SIGTERM)
            await ended(running, 40)
            assert await gone(below) == []

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_every_process_of_a_gateway_is_no_error_of_its_prediction(
    number: signal.Signals, tmp_path: Path
) -> None:
    """`timeout` and service managers signal all of them, some with SIGKILL those beside the main
    one.
    """

    async def main() -> None:
        arguments = ["tiny", "--engine", "emulated", "--latency", STEP]
        arguments += ["--prediction-interval", "0.2"]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            below = await predicting_below(running)
            made = await SocketCall(running.url, body(200)).send()
            await asyncio.sleep(0.5)  # it is asked
            os.kill(running.pid, signal.SIGTERM)
            await asyncio.sleep(0.05)
            for pid in below:
                os.kill(pid, number)
            await made.answer()  # several assessments later
            await ended(running, 40)
            assert await gone(below) == []

    asyncio.run(main())
    assert " ERROR " not in (tmp_path / "gateway.log").read_text()


async def predicting_below(running: GatewayProcess) -> list[int]:
    """The predicting process, when it runs its own program: until then the kernel holds up its
    parent (vfork).
    """
    while not (  # noqa: ASYNC110
        below := [pid for pid in descendants(running.pid) if "predictor_process" in command(pid)]
    ):
        await asyncio.sleep(0.05)
    return below


async def stopped_below(running: GatewayProcess) -> list[int]:
    below = await predicting_below(running)
    for pid in below:
        os.kill(pid, signal.SIGSTOP)
    return below


@pytest.mark.slow
def test_a_stopped_predicting_process_and_a_state_file_do_not_hold_the_exit_up(
    tmp_path: Path,
) -> None:
    """The last look is asked for, and waited for in vain."""

    async def main() -> None:
        state = str(tmp_path / "state.json")
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            STEP,
            "--prediction-interval",
            "10",
            "--state-file",
            state,
        ]
        async with asyncio.timeout(LONGEST), gateway(tmp_path, *arguments) as running:
            await running.ready()
            await predicting_below(running)
            await asyncio.sleep(8)  # it has come up, and is asked nothing until the next look
            below = await stopped_below(running)
            os.kill(running.pid, signal.SIGTERM)
            await ended(running, 60)
            assert await gone(below) == []

    asyncio.run(main())


@pytest.mark.slow
def test_sigkill_loses_the_records_of_one_second_at_most(tmp_path: Path) -> None:
    ended_at: dict[str, float] = {}

    async def client(url: str, name: str) -> None:
        for number in range(1_000_000):
            made = await SocketCall(
                url, body(1, stream=False, request_id=f"{name}-{number}")
            ).send()
            status, _ = await made.answer()
            if status != 200:
                return
            ended_at[f"{name}-{number}"] = time.clock_gettime(time.CLOCK_MONOTONIC)

    async def main() -> float:
        async with (
            asyncio.timeout(LONGEST),
            gateway(tmp_path, "tiny", "--engine", "emulated", "--latency", FAST) as running,
        ):
            await running.ready()
            playing = [
                asyncio.create_task(client(running.url, f"client{number}")) for number in range(4)
            ]
            await eventually(lambda: len(ended_at) > 100)
            await asyncio.sleep(2)
            killed_at = time.clock_gettime(time.CLOCK_MONOTONIC)
            os.kill(running.pid, signal.SIGKILL)
            await asyncio.gather(*playing, return_exceptions=True)
            return killed_at

    killed_at = asyncio.run(main())
    there = {record.client_request_id for record in read_run(tmp_path / "records.jsonl")[1]}
    due = {name for name, at in ended_at.items() if at < killed_at - 1.0}
    assert len(due) > 100
    assert due <= there


@pytest.mark.slow
def test_neither_a_log_that_nobody_reads_nor_a_full_disk_stops_a_gateway_or_its_end(
    tmp_path: Path,
) -> None:
    """1,100 malformed requests, each a line of the log; the pipe that takes them is full from
    the start.
    """
    unread, log = os.pipe()
    os.set_blocking(log, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(log, b"x" * 4096)
    os.set_blocking(log, True)

    async def main() -> tuple[str, float]:
        running = gateway(
            tmp_path,
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            FAST,
            "--record-file",
            "/dev/full",
        )
        command = [sys.executable, "-m", "kendall", "serve", *running._arguments]
        process = running._process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log
        )
        try:
            async with asyncio.timeout(LONGEST):
                await running.ready()
                began = time.perf_counter()
                for _ in range(1_100):
                    assert await answer_to(running, b"nonsense\r\n\r\n") == 400
                took = time.perf_counter() - began
                made = await SocketCall(running.url, body(5, stream=False)).send()
                assert (await made.answer())[0] == 200
                await running.ask("GET", "/admin/state")
                metrics = (await running._client.get("/metrics")).text
                await running.ask("POST", "/admin/drain")
                os.kill(process.pid, signal.SIGTERM)
                assert await process.wait() == 1, "its records are lost, and it says so"
        finally:
            await running._client.aclose()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return metrics, took

    try:
        metrics, took = asyncio.run(main())
    finally:
        os.close(log)
        os.close(unread)
    repeated = re.search(r'kendall_dropped_log_lines_total{reason="repeated"} ([\d.e+]+)', metrics)
    assert repeated is not None
    assert float(repeated[1]) >= 1_100 - LINES_OF_A_KIND * (1 + math.ceil(took / WINDOW)), (
        "1,000 in the time of one window"
    )


async def answer_to(running: GatewayProcess, sent: bytes) -> int:
    """The status of whatever answers this on a connection of its own."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


HANGS = """
import threading
from kendall.server.operations.shutdown import ExitBound
from kendall.server.runtime.logs import LogSettings, configure_logs

configure_logs(LogSettings())
ExitBound().start(0.1)
# the interpreter would wait for it for ever
threading.Thread(target=threading.Event().wait).start()
"""


def test_an_end_that_does_not_come_is_made() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 1
    assert (
        "the gateway had not stopped 0.1 s after the request to stop; it exits now" in found.stderr
    )
