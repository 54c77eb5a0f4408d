"""A load run: a timetable sent to a target, every answer recorded, whatever ends it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np

from loadgen.client import Exchange, Target, open_session, run_prefix
from loadgen.pacing import pace, quiet_garbage_collector
from loadgen.timetable import IntArray, Timetable, draw_prompts
from queueing.record import Header, Record
from queueing.statistics import Summary, summarise

VOCABULARY = range(10, 250)  # above the special tokens of common vocabularies, below the end of the smallest (bytes)
START_DELAY = 0.2  # seconds between the start of the clock and instant 0 of the timetable


@dataclass(slots=True)
class Tally:
    """How far a run has come."""

    asked: int
    sent: int = 0
    completed: int = 0
    other: int = 0  # answered, but not completed


class Progress(Protocol):
    """Shows a tally now and then until it is cancelled."""

    async def show(self, tally: Tally) -> None:
        """Does not end by itself."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was sent and what came back, in the order of sending."""

    header: Header
    records: list[Record]
    lateness: Summary  # sent - intended, seconds
    interrupted: bool


async def run_load(
    target: Target,
    timetable: Timetable,
    *,
    seed: int,
    configuration: Mapping[str, Any] | None = None,
    vocabulary: range = VOCABULARY,
    drain_limit: float = 600.0,
    progress: Progress | None = None,
) -> LoadResult:
    """Send a timetable. Requests unanswered `drain_limit` seconds after the last was sent are cancelled.

    A cancellation (Ctrl-C) ends the run early and keeps its records. Runs on asyncio's own event loop, not on uvloop.
    """
    max_tokens = target.max_tokens or int(timetable.output_tokens.max())
    requests = _Requests(target, timetable, draw_prompts(timetable, seed, vocabulary), max_tokens, seed)
    tasks: list[asyncio.Task[Record]] = []
    tally = Tally(asked=len(timetable))
    async with open_session(target.api_key) as session:
        shown = asyncio.create_task(progress.show(tally)) if progress else None
        with quiet_garbage_collector():
            interrupted = await _send_all(requests, session, tasks, tally, drain_limit)
        if shown:
            shown.cancel()
            with suppress(asyncio.CancelledError):
                await shown
    records = [task.result() for task in tasks if not task.cancelled()]
    return LoadResult(_header(target, timetable, seed, max_tokens, configuration), records, lateness(records), interrupted)


@dataclass(frozen=True, slots=True)
class _Requests:
    """What every request of a run is made of."""

    target: Target
    timetable: Timetable
    prompts: list[IntArray]
    max_tokens: int
    seed: int

    def exchange(self, prefix: str, index: int, instant: float) -> Exchange:
        """The request of one row, ready to be sent."""
        prompt, output_tokens = self.prompts[index], int(self.timetable.output_tokens[index])
        return Exchange(
            request_id=f"{prefix}-{index}",
            intended_at=instant,
            body=self.target.body(prompt, output_tokens, self.max_tokens, self.seed),
            prompt_tokens=prompt.size,
            max_output_tokens=output_tokens if self.target.ignore_eos else self.max_tokens,
        )


async def _send_all(
    requests: _Requests, session: aiohttp.ClientSession, tasks: list[asyncio.Task[Record]], tally: Tally, drain_limit: float
) -> bool:
    prefix, url = run_prefix(), requests.target.url

    def prepare(index: int, instant: float) -> Callable[[], Coroutine[Any, Any, Record]]:
        exchange = requests.exchange(prefix, index, instant)

        async def send() -> Record:
            tally.sent += 1
            record = await exchange.run(session, url)
            if record.outcome == "completed":
                tally.completed += 1
            else:
                tally.other += 1
            return record

        return send

    interrupted = False
    try:
        await pace(asyncio.get_running_loop().time() + START_DELAY + requests.timetable.intended_at, prepare, tasks)
        await asyncio.wait(tasks, timeout=drain_limit)
    except asyncio.CancelledError:
        interrupted = True
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return interrupted


def lateness(records: Iterable[Record]) -> Summary:
    """How late the sender was: sent - intended, seconds."""
    late = [r.sent_at - r.intended_at for r in records if r.sent_at is not None and r.intended_at is not None]
    return summarise(np.array(late, dtype=np.float64))


def _header(target: Target, timetable: Timetable, seed: int, max_tokens: int, configuration: Mapping[str, Any] | None) -> Header:
    asked = {key: value for key, value in asdict(target).items() if key != "api_key"}
    return Header(
        writer="load",
        configuration={**asked, "max_tokens": max_tokens, "num_prompts": len(timetable), **(configuration or {})},
        seed=seed,
        versions=versions(),
        hardware=hardware(),
    )


def versions() -> dict[str, str]:
    """What ran here, by name."""
    found = {"python": platform.python_version()}
    for name in ("kendall", "aiohttp", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """Processor and cores of the sender's machine."""
    model = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"cpu": model, "cores": os.cpu_count()}
