"""`kendall watch --otlp`: receives spans, feeds the live model, and reports: once, or as a server
with the gateway's routes of the live model.
"""

from __future__ import annotations

import asyncio
import json as text_of
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from kendall.policies.durations import rounded_duration
from kendall.policies.text import SpecError
from kendall.queueing.commands.terminal import console, say, working
from kendall.queueing.errors import CommandError
from kendall.remote import check_key, check_no_credentials
from kendall.server.runtime.clock import clock_of
from kendall.server.watch.lost import LostSpans
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.prometheus import headers_of
from kendall.server.watch.receiver import Listener, SpanReceiver, set_by_signal
from kendall.server.watch.report import WatchReport, report_of, show
from kendall.server.watch.servers import WatchedServers

INTERVAL = 5.0  # seconds between assessments
TICK = 1.0  # seconds between two looks at what came
SCRAPED = 5.0  # seconds between two readings of the counters
WHAT_IFS = 30.0  # seconds that the last what-ifs may take


def watch(options: WatchOptions, urls: Sequence[str], *, json: bool) -> None:
    """Raises SpecError, CommandError."""
    for url in urls:
        check_no_credentials(url, "a URL")
    check_key(options.api_key, "--api-key")
    if options.source.otlp is None:
        raise SpecError(
            "got URLs without --otlp; expected --otlp HOST:PORT, and `vllm serve "
            "--otlp-traces-endpoint` that sends its spans there"
        )
    asyncio.run(_Watch.of(options, urls).run(json=json))


@dataclass(eq=False)
class _Watch:
    options: WatchOptions
    servers: WatchedServers
    receiver: SpanReceiver
    listener: Listener
    lost: LostSpans

    @classmethod
    def of(cls, options: WatchOptions, urls: Sequence[str]) -> _Watch:
        """Nothing is open yet."""
        servers = WatchedServers(options.queue, INTERVAL)

        def now() -> float:
            return asyncio.get_running_loop().time()

        receiver = SpanReceiver(lambda span: servers.fleet.add(span, now()))
        return cls(
            options,
            servers,
            receiver,
            Listener(receiver, options.source.otlp or ""),
            LostSpans(urls, headers_of(options), options.trust),
        )

    async def run(self, *, json: bool) -> None:
        """Until the time is over or a signal comes."""
        self._now = clock_of(asyncio.get_running_loop())
        began, ended = self._now(), set_by_signal()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            await self.listener.start()
            to = console(sys.stderr)
            if self.listener.without_grpc is not None:
                say(to, self.listener.without_grpc)
            say(
                to, f"waiting for spans on port {self.listener.port}: {_advice(self.listener.port)}"
            )
            if not self.options.report.once:
                from kendall.server.watch.app import create_app, serving  # noqa: PLC0415 - heavy

                app = create_app(self.servers, self.report)
                await stack.enter_async_context(serving(app, self.options))
            scraping = asyncio.create_task(self._scrape())
            stack.callback(scraping.cancel)
            if not self.options.report.once:
                await self._follow(ended)
                return
            with working("receiving spans") as tell:
                await self._follow(ended, self.options.report.seconds, tell)
                tell("predicting, and trying other settings")
                await self._finish()
            self._print(self.report(self._now() - began), json=json)

    def report(self, seconds: float | None = None) -> WatchReport:
        """What is known now."""
        return report_of(
            self.servers,
            self.receiver.received,
            self.lost.lost(self.servers.fleet, self._now()) if self.lost.urls else None,
            why_not_lost=self.lost.why_not,
            now=self._now(),
            seconds=seconds,
            state=self.lost.state(),
        )

    async def _follow(
        self,
        ended: asyncio.Event,
        seconds: float | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Receive spans and assess them until the time is over; `tell` shows the time left."""
        due = self._now() + INTERVAL
        until = None if seconds is None else self._now() + seconds
        assessing: asyncio.Task[None] | None = None
        while not ended.is_set() and (until is None or self._now() < until):
            left = math.inf if until is None else max(0.0, until - self._now())
            if until is not None:
                tell(f"receiving spans: {rounded_duration(left)} left")
            rest = min(TICK, left)
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), rest)
            if assessing is not None and not assessing.done():
                continue
            await self.servers.advance(self._now())
            if self.servers.ready and self._now() >= due:
                due = self._now() + INTERVAL
                assessing = asyncio.create_task(self.servers.live_model().assess())
        if assessing is not None:
            await assessing

    async def _finish(self) -> None:
        """The last assessment, with all what-ifs."""
        await self.lost.read(self._now())
        await self.servers.advance(self._now(), last=True)
        if not self.servers.ready:
            return
        live = self.servers.live_model()
        await live.assess()
        if live.prediction is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(live.update_what_if(), WHAT_IFS)

    async def _scrape(self) -> None:
        while self.lost.urls:
            await self.lost.read(self._now())
            await asyncio.sleep(SCRAPED)

    def _print(self, report: WatchReport, *, json: bool) -> None:
        if json:
            sys.stdout.write(text_of.dumps(report.as_json()) + "\n")
        if report.nothing is not None:
            raise CommandError(report.nothing)
        if not json:
            show(report, console())

    async def _close(self) -> None:
        self.servers.lifecycle.leaving = True
        await self.listener.stop()
        if self.servers.live is not None:
            await self.servers.live.close()


def _advice(port: int) -> str:
    return (
        f"start vLLM with --otlp-traces-endpoint http://HOST:{port} (gRPC), or with "
        f"http://HOST:{port}/v1/traces and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
    )
