"""The predicting process, from the gateway's side: niced, one question at a time, started when
first asked.

It is spoken to over a socket that the event loop reads and writes, so that no thread of the gateway
ever waits for it: a process that was stopped, or that computes without end, costs a question its
time limit and is killed. Seconds in which it waits for a processor, as on a machine whose engine
takes them all, do not count.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kendall.server.runtime.pools import scheduled

log = logging.getLogger("kendall.live")
LONGEST = 120.0  # seconds that an answer may take, the start of the process included
MOST = 10  # times as long, with all waits for a processor
LOOKS = 20  # at these waits, within the time limit
REAPED = 2.0  # seconds that a killed process is waited for
Ask = Callable[..., Awaitable[Any]]  # a function's name and its arguments
SIZE_BYTES = 8  # of a message's length, before the message
POLL = 0.005


class PredictorLostError(RuntimeError):
    """The predicting process died, or was killed because it took too long, with a question
    unanswered.
    """


class PredictorClient:
    """Calls functions of `server.live.prediction_worker` by name in the other process, which keeps
    what it saw last.

    `begin(ask, life)` is awaited in each life of the process, the first being 1, before anything
    else is asked in it.
    """

    def __init__(
        self, longest: float = LONGEST, begin: Callable[[Ask, int], Awaitable[None]] | None = None
    ) -> None:
        self.longest = longest
        self._begin = begin
        self._lives = 0
        self._process: _Process | None = None
        self._one = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a question is being answered."""
        return self._one.locked()

    @property
    def process_id(self) -> int | None:
        """For operators and tests; None where it was not asked yet."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Have the process, if there is none. Raises PredictorLostError."""
        await self._within(_nothing)

    async def ask(self, function: str, *arguments: Any) -> Any:
        """Its answer; what it raises is raised here.

        Raises PredictorLostError where the process died or took too long; the next question starts
        it anew.
        """
        return await self._within(lambda process: process.ask(function, arguments))

    async def _within(self, work: Callable[[_Process], Awaitable[Any]]) -> Any:
        async with self._one:
            try:
                async with asyncio.timeout(self.longest) as limit, self._starved(limit):
                    return await work(self._process or await self._new())
            except PredictorLostError:
                await self.close()
                raise
            except TimeoutError:
                await self.close()
                raise PredictorLostError(
                    f"the predicting process did not answer within {self.longest:g} s; it is "
                    "being restarted"
                ) from None

    @asynccontextmanager
    async def _starved(self, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Meanwhile the limit moves by what the process waits for a processor."""
        extending = asyncio.create_task(self._extend(limit))
        try:
            yield
        finally:
            extending.cancel()

    async def _extend(self, limit: asyncio.Timeout) -> None:
        loop, first = asyncio.get_running_loop(), self.process_id
        began, before = loop.time(), waited_for_processor(first)
        while True:
            await asyncio.sleep(max(self.longest / LOOKS, POLL))
            if self.process_id != first:  # started for this question
                first, before = self.process_id, 0.0
            waited = waited_for_processor(first) - before
            with suppress(RuntimeError):  # it is over
                limit.reschedule(began + min(self.longest + waited, MOST * self.longest))

    async def _new(self) -> _Process:
        process = self._process = await _Process.start()
        self._lives += 1
        if self._begin is not None:
            await self._begin(
                lambda function, *arguments: process.ask(function, arguments), self._lives
            )
        return process

    async def close(self) -> None:
        """End the process, whatever it computes."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()


def waited_for_processor(pid: int | None) -> float:
    """Seconds that the process waited for one; 0 where nobody says."""
    seconds = scheduled(pid)
    return 0.0 if seconds is None else seconds[1]


async def _nothing(_: object) -> None:
    """Its being there is all."""


class _Process:
    """One life of it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ended = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _popen(theirs)
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            process.kill()
            _reap(process)
            ours.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, function: str, arguments: Sequence[Any]) -> Any:
        """The answer. Raises PredictorLostError."""
        if self._ended:
            raise PredictorLostError("the predicting process has ended")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._writer.write(framed((number, function, arguments)))
            return await answer
        finally:
            del self._asked[number]

    async def kill(self) -> None:
        """Also where it is stopped. Returns when it is gone, or after REAPED seconds: a killed
        process needs a processor to end, and this one is niced.
        """
        self._process.kill()
        self._reading.cancel()
        self._writer.transport.abort()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REAPED
        try:
            while self._process.poll() is None and loop.time() < deadline:  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(POLL)
        finally:
            _reap(self._process)

    async def _read(self) -> None:
        """Read answers until the pipe closes; drop an answer that nobody waits for."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES), "big")
                number, succeeded, value = pickle.loads(await self._reader.readexactly(size))
                answer = self._asked.get(number)
                if answer is None or answer.done():
                    continue
                if succeeded:
                    answer.set_result(value)
                else:
                    answer.set_exception(value)
        except Exception as error:  # noqa: BLE001 - the connection's end, or an answer that cannot be read
            if not isinstance(error, asyncio.IncompleteReadError | OSError):
                log.warning("the answer of the predicting process cannot be read: %s", error)
        finally:
            self._ended = True
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(PredictorLostError("the predicting process has ended"))


def _reap(process: subprocess.Popen[bytes]) -> None:
    """It leaves no zombie, however long it takes to end."""
    if process.poll() is None:
        threading.Thread(target=process.wait, name="kendall-reaper", daemon=True).start()


def _popen(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Finds its modules where this process does, and nothing in the working directory that has
    the name of one.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    environment.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # more threads on small matrices spin, at four times the CPU
    descriptor = connection.fileno()
    command = [
        sys.executable,
        "-P",
        "-m",
        "kendall.server.live.prediction_process",
        str(descriptor),
    ]
    return subprocess.Popen(
        command,
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # a signal to the gateway's group would end it before it ignores signals
    )


def framed(message: Any) -> bytes:
    """A message as it is sent: its length, then itself."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(SIZE_BYTES, "big") + data
