"""The gateway that a sweep measures: its own child, which it starts again when it dies, or one that
runs already.

Every start of an own gateway writes a run file of its own: a gateway that starts anew would
overwrite the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kendall.loadgen.gateway.gateway_process import (
    GatewayClient,
    GatewayError,
    GatewayLostError,
    GatewayProcess,
    KeyRefusedError,
    free_port,
)
from kendall.loadgen.sending.client.target import NO_KEYS, Keys
from kendall.loadgen.sweep.grid import GatewayBounds
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.policies import Fixed, is_built_in, parse_policy
from kendall.policies.text import counted
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.record import Header, Record

POLL = 0.05  # seconds between looks at a gateway that must become idle
IDLE_LIMIT = 120.0
NOTED_AFTER = 1.5  # seconds of waiting for an idle gateway
KEEPS_NOTHING = "dynamic"  # serves whatever waits as soon as the server is free
COME_BACK_LIMIT = 60.0  # for a gateway that somebody else must start again


Note = Callable[[str], None]  # of a line that stays on the terminal


class SweptGateway(Protocol):
    """The interface of a gateway that a sweep measures."""

    client: GatewayClient
    record_file: Path  # that it writes now

    async def start(self) -> None:
        """Return when it serves. Raises GatewayError."""
        ...

    async def stop(self) -> None:
        """Leave it as it is, or stop what was started."""
        ...

    async def why_lost(self) -> str | None:
        """Why it cannot go on; None where it can."""
        ...


class OwnGateway:
    """`kendall serve` as a child; `start` after a loss starts it anew. Of the `flags` beyond the
    plan's, the last one wins.
    """

    def __init__(self, plan: SweepPlan, folder: Path, port: int, flags: Sequence[str] = ()) -> None:
        self._plan, self._folder, self._port, self._flags = plan, folder, port, flags
        self._process: GatewayProcess | None = None
        self.client: GatewayClient
        self.record_file = folder / "gateway-1.jsonl"

    async def start(self) -> None:
        await self.stop()
        number = 1 + sum(1 for _ in self._folder.glob("gateway-*.jsonl"))
        self.record_file = self._folder / f"gateway-{number}.jsonl"
        with writing(self.record_file):
            self.record_file.parent.mkdir(parents=True, exist_ok=True)
            self.record_file.touch()
        process = GatewayProcess(
            self._arguments(), free_port(self._port), self._folder / f"gateway-{number}.log"
        )
        self.client = self._process = await process.__aenter__()
        with writing(pid := self._folder / "gateway.pid"):
            pid.write_text(f"{process.pid}\n")
        await process.ready()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.__aexit__(None, None, None)
            (self._folder / "gateway.pid").unlink(missing_ok=True)

    async def why_lost(self) -> str | None:
        assert self._process is not None
        if self._process.ended:
            return f"the gateway ended: {self._process.last_line()}"
        return (
            None
            if await self._process.is_healthy()
            else "the gateway runs, but its /health does not answer 200"
        )

    def _arguments(self) -> list[str]:
        plan = self._plan
        given = [] if plan.latency is None else ["--latency", plan.latency]
        return [
            plan.model,
            *("--engine", plan.engine),
            *("--max-num-seqs", str(plan.max_num_seqs)),
            *("--record-file", str(self.record_file)),
            "--allow-forced-lengths",
            *("--served-model-name", "swept"),
            *("--prediction-interval", "0"),
            *("--max-num-queued-reqs", "0"),  # the theory's queue has no bound
            *given,
            *self._flags,
        ]


class GivenGateway:
    """A gateway that runs already and writes a run file that can be read here."""

    def __init__(self, base_url: str, keys: Keys = NO_KEYS) -> None:
        self.client = GatewayClient(base_url, keys)
        self.record_file = Path()

    async def start(self) -> None:
        """See `SweptGateway`; waits a while for one that is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + COME_BACK_LIMIT
        while not await self.client.is_ready():
            if loop.time() > deadline or not self.record_file.name:
                raise await self._not_there()
            await asyncio.sleep(1)
        named = (await self.client.ask("GET", "/admin/state")).get("record_file")
        if not named or not _is_file(named):
            raise GatewayError(
                f"the gateway at {self.client.url} writes no run file that can be read here; "
                "start it with --record-file"
            )
        self.record_file = Path(named)

    async def _not_there(self) -> GatewayError:
        """Nobody who listens, a server that is no gateway, or one that refuses the key."""
        try:
            await self.client.ask("GET", "/admin/state")
        except GatewayLostError as error:
            return GatewayLostError(f"no gateway serves at {self.client.url}: {error}")
        except KeyRefusedError as error:
            return error
        except GatewayError as error:
            return GatewayLostError(
                f"the server at {self.client.url} is no Kendall gateway, or is not ready: {error}"
            )
        return GatewayLostError(f"the gateway at {self.client.url} is not ready")

    async def stop(self) -> None:
        await self.client.__aexit__()

    async def why_lost(self) -> str | None:
        return (
            None if await self.client.is_healthy() else f"no healthy gateway at {self.client.url}"
        )


def _is_file(name: str) -> bool:
    return Path(name).is_file()


async def bounds_of(client: GatewayClient) -> GatewayBounds:
    """Ask the gateway for the bounds of its engine."""
    return msgspec.convert((await client.ask("GET", "/admin/state"))["engine"], GatewayBounds)


async def until_idle(client: GatewayClient, note: Note) -> None:
    """Wait until nothing waits or runs; dispatch a remainder (`let_remainder_go`) and note a
    long wait once. Raises GatewayError.
    """
    loop = asyncio.get_running_loop()
    began, noted = loop.time(), False
    while True:
        state = await client.ask("GET", "/admin/state")
        if not (state["unanswered"] or state["in_service"] or state["queue_length"]):
            return
        await let_remainder_go(client, state, note)
        waited = loop.time() - began
        if waited > IDLE_LIMIT:
            raise GatewayError(
                f"the gateway is still busy after {IDLE_LIMIT:.0f} s; stop other clients that "
                "send requests to it"
            )
        if waited >= NOTED_AFTER and not noted:
            noted = True
            note(
                f"waiting up to {IDLE_LIMIT:.0f} s for an idle gateway: "
                f"{counted(state['unanswered'], 'request')} unanswered"
            )
        await asyncio.sleep(POLL)


async def let_remainder_go(client: GatewayClient, state: Mapping[str, Any], note: Note) -> None:
    """Switch to a policy that dispatches at once where the requests in the queue are too few for a
    batch without a `max_wait`.

    The load generator sends whole batches, so a request of another client, or one of ours that
    failed, leaves a remainder. A policy switch rejects no request, and those it dispatches belong
    to another epoch than the cell's. Raises GatewayError.
    """
    policy, waiting = parse_policy(state["policy"]), state["queue_length"]
    forever = isinstance(policy, Fixed) and math.isinf(policy.max_wait)
    may_wait = forever or not is_built_in(policy)
    if not may_wait or state["in_service"] or not 0 < waiting < state["effective_max_batch_size"]:
        return
    note(
        f"{state['policy']}: {counted(waiting, 'request')} waiting for a batch that nothing more "
        f"fills; served under {KEEPS_NOTHING} now"
    )
    await client.ask("PUT", "/admin/policy", {"policy": KEEPS_NOTHING})


def header_of(path: Path) -> Header:
    """The header of a gateway's run file."""
    with path.open("rb") as file:
        return msgspec.json.decode(file.readline(), type=Header)


def records_since(path: Path, offset: int, epoch: int) -> list[Record]:
    """The records of an epoch among those written after `offset` bytes; a last line that a kill cut
    short is left out.

    None of them where the file is not the one in which that offset was the end of a line: another
    gateway writes it now.
    """
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        if offset and file.read(1) != b"\n":
            return []
        lines = file.read().splitlines(keepends=True)
    decoder = msgspec.json.Decoder(Record)
    records = [decoder.decode(line) for line in lines if line.endswith(b"\n")]
    return [record for record in records if record.epoch == epoch]


def stop_left_behind(folder: Path) -> bool:
    """End a gateway that a killed sweep left behind, known by its run file; says whether there
    was one.
    """
    path = folder / "gateway.pid"
    if not path.is_file():
        return False
    pid = path.read_text().strip()
    path.unlink()
    listed = (
        subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", pid], capture_output=True, text=True, check=False
        ).stdout
        if pid.isdigit()
        else ""
    )
    if str(folder / "gateway-") not in listed:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(pid), signal.SIGKILL)
    return True
