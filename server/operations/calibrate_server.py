"""`kendall calibrate URL` before a server with OpenAI's API that is no gateway of ours.

The designed batches of `server.calibration`, sent through the server's own API by the http engine:
sizes and lengths in random order, each answer's length forced by `ignore_eos` and `max_tokens`, its
stream timed; and the closed loop of a few slots. How many requests the server serves at once is
found first, with twice as many at each step: larger batches would wait in its queue.

Requests of others would be in every time, so a server whose `/metrics` shows any, before or during
the measurement, is refused unless `share` is set. Without `/metrics` nobody knows, and the profile
says so.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import httpx
import msgspec
import numpy as np

from kendall.policies import SpecError
from kendall.policies.text import counted
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.server_signals import ServerCounters
from kendall.remote import REFUSED, SYSTEM, Trust, key_refusal, server_root
from kendall.server.calibration.calibration import CalibrationRequest, Calibrator
from kendall.server.calibration.designed import PROMPT_TOKENS, SIZES, Cell, DesignedBatches
from kendall.server.engines.base import EngineStartError
from kendall.server.engines.http.engine import HttpEngine
from kendall.server.engines.http.pool import HttpOptions
from kendall.server.gateway import Gateway
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from kendall.server_metrics import read_counters

LOOK_LIMIT = 10.0  # seconds for the list of models
START_LIMIT = 60.0  # seconds for a server that is there to say what it is
SETTLE, PERIOD = 3.0, 0.2  # seconds that gauges and counters may lag; between two readings
# seconds that an idle connection is kept: a batch has no second try, and a busy machine may take
# seconds to see that a server (uvicorn: after 5 s) has closed one
KEEPALIVE = 1.0
FIRST_LENGTH = 32  # tokens of the answers that tell how many are served at once
TRIES = 3  # with so many at once, before fewer are believed
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignServer:
    """A server by its URL, and how it is reached."""

    url: str
    key: str | None = None
    trust: Trust = SYSTEM
    share: bool = False  # measure beside requests of others

    def models(self) -> httpx.Response | None:
        """Its answer to the question for its models; None where there is none: the call for a
        calibration will say why.
        """
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            return httpx.get(
                f"{server_root(self.url)}/v1/models",
                headers=headers,
                timeout=LOOK_LIMIT,
                verify=self.trust.verification(self.url),
                trust_env=False,
            )
        except (httpx.HTTPError, httpx.InvalidURL):
            return None

    def calibrated(self, request: CalibrationRequest, tell: Tell) -> Profile:
        """Measure its law. Raises SpecError, CommandError."""
        if request.speed_only or request.resume_cost:
            flag = "--speed-only" if request.speed_only else "--resume-cost"
            raise SpecError(
                f"got {flag} with {self.url}, which is no gateway; expected it with a running "
                "`kendall serve`: leave it out"
            )
        try:
            return asyncio.run(self._calibrated(request, tell))
        except EngineStartError as error:
            raise CommandError(str(error)) from None
        except ApiError as error:
            raise CommandError(error.message) from None

    async def _calibrated(self, request: CalibrationRequest, tell: Tell) -> Profile:
        before = await self._idle()
        tell("finding how many requests the server serves at once")
        most, made = await self._slots(request)
        settings = Settings(
            model="", engine="http", engine_url=(server_root(self.url),), prediction_interval=0
        )
        gateway = Gateway(settings, self._engine(most))
        try:
            async with asyncio.timeout(START_LIMIT):
                await gateway.start()
            calibrator = Calibrator(
                gateway, lambda done, total: tell(f"measuring the server: {done} of {total}")
            )
            profile = await calibrator.run(request.model_copy(update={"max_batch_size": most}))
        except TimeoutError:
            raise self._silent() from None
        finally:
            await gateway.stop()
        note = await self._beside(before, made + calibrator.requests)
        return msgspec.structs.replace(
            profile, note="; ".join(filter(None, (f"through the API of {self.url}", note)))
        )

    def _engine(self, most: int) -> HttpEngine:
        return HttpEngine(
            HttpOptions(urls=(server_root(self.url),), key=self.key, max_num_seqs=most),
            self._connect,
        )

    def _connect(self, url: str) -> aiohttp.BaseConnector:
        verified = self.trust.verification(url)
        tls = verified if isinstance(verified, ssl.SSLContext) else True
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE, ssl=tls)

    async def _slots(self, request: CalibrationRequest) -> tuple[int, int]:
        """How many requests it serves at once, as far as batches are to be measured, and how many
        were sent to find out.
        """
        largest = request.max_batch_size or SIZES[-1]
        prompt = request.prompt_tokens or PROMPT_TOKENS
        engine, rng = self._engine(largest), np.random.default_rng(request.seed)
        try:
            async with asyncio.timeout(START_LIMIT):
                batches = DesignedBatches(engine, await engine.start())
        except TimeoutError:
            await engine.stop()
            raise self._silent() from None
        try:
            for size in (*itertools.takewhile(lambda size: size < largest, SIZES), largest):
                cell = Cell((FIRST_LENGTH,) * size, prompt, padded=False)
                together = 0
                for _ in range(TRIES):  # of a busy machine the best one tells
                    together = max(together, await batches.served_together(cell, rng))
                    if together == size:
                        break
                if together < size:
                    return max(1, together), batches.made
        finally:
            await engine.stop()
        return largest, batches.made

    # others

    async def _idle(self) -> ServerCounters | str:
        """The counters before the measurement. Raises CommandError where others use the server."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE
        while True:
            counters = await read_counters(self.url, self.key, self.trust)
            if isinstance(counters, str) or self.share or not counters.unanswered:
                return counters
            if loop.time() > deadline:
                running, waiting = int(counters.running), int(counters.waiting)
                raise CommandError(
                    f"got {self.url} with {running} running and {waiting} waiting requests of "
                    "others; expected an idle server: wait until they have ended, or --share "
                    "measures beside them"
                )
            await asyncio.sleep(PERIOD)

    async def _beside(self, before: ServerCounters | str, made: int) -> str | None:
        """What the profile says of requests of others; None where there were none. Raises
        CommandError where there were and the server is not shared.
        """
        if isinstance(before, str):
            return f"whether others used the server is not known: {before}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE
        ended = None
        while loop.time() < deadline:
            after = await read_counters(self.url, self.key, self.trust)
            if isinstance(after, str) or after.requests is None:
                break
            ended = after.requests - (before.requests or 0)
            if ended >= made:
                break
            await asyncio.sleep(PERIOD)
        if ended is None:
            return "whether others used the server is not known: it counts no ended requests"
        if ended <= made:
            return None
        others = f"{counted(ended - made, 'request')} of others ended during the measurement"
        if self.share:
            return others
        raise CommandError(
            f"got {self.url}, where {others}; expected a server of our own: calibrate when it is "
            "idle, or --share keeps such a law"
        )

    def _silent(self) -> CommandError:
        return CommandError(
            f"got no answer from {self.url} that says what it serves within {START_LIMIT:g} s; "
            "expected a server with OpenAI's API that is ready"
        )


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def lists_foreign_models(answer: httpx.Response | None) -> bool:
    """Whether a server that is no gateway of ours lists its models."""
    if answer is None or answer.status_code != httpx.codes.OK:
        return False
    try:
        models = msgspec.json.decode(answer.content, type=_Models).data
    except msgspec.MsgspecError:
        return False
    return bool(models) and models[0].owned_by != "kendall"


def key_refused(answer: httpx.Response | None) -> str | None:
    """One line where the list of models needs another key; None elsewhere."""
    if answer is None or answer.status_code not in REFUSED:
        return None
    said = " ".join(answer.text[:200].split())
    return key_refusal(str(answer.url), answer.status_code, said, "--api-key")
