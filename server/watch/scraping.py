"""`kendall watch URL ... --once`: `/metrics` of running servers, once a second for a while; then
what was observed beside what the model says of these very estimates.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kendall.policies.durations import rounded_duration
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.commands.terminal import Column, Table, console, say, working
from kendall.queueing.errors import CommandError
from kendall.queueing.estimation.counters.fleet import (
    FEWEST,
    FleetPrediction,
    Movement,
    predicted,
    slots_in_words,
    slots_of,
)
from kendall.queueing.estimation.counters.samples import Samples
from kendall.queueing.estimation.counters.step_law import StepLaw, step_law
from kendall.queueing.estimation.counters.track_record import PARTS, Hour, Observed, fleet_of
from kendall.queueing.json_form import to_json
from kendall.queueing.measurement.server_signals import ServerKind, server_of
from kendall.remote import server_root
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.prometheus import client_of, get
from kendall.server.watch.record_text import given_law, interval, law_in_words, seconds
from kendall.server.watch.signals import Series, samples_of

PATHS = ("/metrics", "/prometheus/metrics")
EVERY = 1.0  # seconds between two scrapes
LATE = 5.0  # seconds that a scrape may take
MOST_PARTS = 600  # of the time
MOST_FAILED = 10  # scrapes in a row that one server may leave unanswered


@dataclass(frozen=True, kw_only=True)
class WatchedModel:
    """One model in the time that was watched. `check` is null: single requests are not known."""

    model: str
    server: str
    seconds: float
    observed: Observed
    forecast: FleetPrediction | None
    law: StepLaw | None
    slots: int | None
    reason: str = ""  # why there is no forecast
    slowed: str = ""  # that the engine was not as fast all the time

    def as_dict(self) -> dict[str, object]:
        """As JSON."""
        return {
            "model": self.model,
            "server": self.server,
            "seconds": self.seconds,
            "observed": to_json(self.observed),
            "check": None,
            "forecast": to_json(self.forecast),
            "law": None if self.law is None else self.law.law.as_dict(),
            "notes": [] if self.law is None else list(self.law.notes),
            "slots": self.slots,
            "reason": self.reason or None,
            "slowed": self.slowed or None,
        }


def watch_once(options: WatchOptions, urls: Sequence[str], *, json: bool) -> None:
    """Watch for the time of --for and print what was seen. Raises SpecError, CommandError."""
    found = watched(options, urls)
    if json:
        shown = {"source": list(urls), "models": [each.as_dict() for each in found]}
        sys.stdout.write(msgspec.json.encode(to_json(shown)).decode() + "\n")
        return
    to = console()
    for number, each in enumerate(found):
        if number:
            say(to, "")
        name = f" serves {each.model}" if each.model else ""
        say(to, f"{each.server}{name}: {_what(each)}")
        to.print(_table(each))
        for line in _basis(each, options.queue.max_num_seqs):
            say(to, line)


def watched(options: WatchOptions, urls: Sequence[str]) -> list[WatchedModel]:
    """Each model of the servers, after the time of --for."""
    with working(f"watching {counted(len(urls), 'server')}") as tell:
        targets = [ScrapedServer.at(url, options) for url in urls]
        try:
            start = time.time()  # noqa: TID251 - the instants of samples, as a Prometheus has them
            _scrape(targets, start + options.report.seconds, tell)
        finally:
            for target in targets:
                target.client.close()
    ends = [target.scrapes[-1] for target in targets if target.scrapes]
    if not ends:
        raise CommandError(f"got no answer from {targets[0].url}; expected its metrics again")
    edges = edges_of(start, max(ends))
    return [
        _watched(model, server, edges, samples, options)
        for (server, model), samples in by_model(targets)
    ]


def edges_of(start: float, end: float) -> list[float]:
    """Of the parts of a watched time."""
    parts = min(MOST_PARTS, max(PARTS, int((end - start) / EVERY)))
    return [start + (end - start) * index / parts for index in range(parts)] + [end]


def by_model(
    targets: Iterable[ScrapedServer],
) -> list[tuple[tuple[str, str], list[Samples]]]:
    """Kind of server and model, in their order, with the samples of each replica."""
    found: dict[tuple[str, str], list[Samples]] = {}
    for target in targets:
        for samples in target.samples():
            found.setdefault((target.server.name, samples.model), []).append(samples)
    return sorted(found.items())


def _watched(
    model: str,
    server: str,
    edges: Sequence[float],
    samples: Sequence[Samples],
    options: WatchOptions,
) -> WatchedModel:
    hour = Hour.of(edges, [each.between(edges) for each in samples])
    given = options.queue.max_num_seqs
    slots = slots_of([hour.totals]) if given is None else given
    law = given_law(options.queue.latency) or step_law(hour.stretches, slots)
    fleet = None
    if law is not None:
        fleet = fleet_of(hour, law.law, slots)
    return WatchedModel(
        model=model,
        server=server,
        seconds=edges[-1] - edges[0],
        observed=Observed.of(hour),
        forecast=None if fleet is None else predicted(fleet, Movement()),
        law=law,
        slots=slots,
        reason="" if fleet is not None else _reason(hour, law),
        slowed=hour.slowed,
    )


def _reason(hour: Hour, law: StepLaw | None) -> str:
    arrived = hour.totals.total("arrived")
    if not arrived >= FEWEST:
        came = counted(int(arrived), "request") if math.isfinite(arrived) else "no request"
        return f"{came} came; a prediction takes {FEWEST}: watch for longer with --for"
    if law is None:
        return "no part of the time has requests enough that tell how long a token takes"
    return "the lengths of the answers are not counted"


@dataclass(eq=False)
class ScrapedServer:
    """One server, and what its metrics said at each scrape."""

    url: str
    client: httpx.Client
    server: ServerKind
    scrapes: list[float]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]]
    failed: int = 0

    @classmethod
    def at(cls, url: str, options: WatchOptions) -> ScrapedServer:
        """The server of this URL. Raises SpecError, CommandError."""
        client = client_of(options, url)
        root = server_root(url)
        named = any(root.endswith(path) for path in PATHS)
        paths = (root,) if named else tuple(root + path for path in PATHS)
        for path in paths:
            response = get(client, path)
            if response.status_code != 200:
                continue
            lines = _lines(response.text, path)
            server = server_of({name for name, _, _ in lines}, path)
            client.timeout = httpx.Timeout(LATE)  # of a scrape; meanwhile the others wait
            return cls(path, client, server, [], {})
        raise SpecError(
            f"got status {response.status_code} from {paths[-1]}; expected metrics of a running "
            "server: is it the server's URL, and are its metrics on?"
        )

    def scrape(self) -> None:
        """Read the metrics once. Raises CommandError where they are not answered again and again,
        or by a server of another kind.
        """
        asked = time.time()  # noqa: TID251 - as above
        try:
            response = get(self.client, self.url)
        except CommandError:
            self.failed += 1
            if self.failed >= MOST_FAILED:
                raise
            return
        if response.status_code != 200:
            raise CommandError(f"cannot read {self.url}: status {response.status_code}")
        self.failed = 0
        names = self.server.names
        self.scrapes.append(asked)
        totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for name, labels, value in _lines(response.text, self.url):
            if name in names:
                totals[name, labels] = value
        for key, value in totals.items():
            self.values.setdefault(key, []).append((asked, value))

    def forget(self) -> None:
        """All but the last scrape."""
        del self.scrapes[:-1]
        for values in self.values.values():
            del values[:-1]

    def samples(self) -> list[Samples]:
        """By model and replica."""
        series = [
            Series(name, dict(labels), *np.array(found).T)
            for (name, labels), found in self.values.items()
        ]
        return samples_of(self.server, series, self.url)


def _lines(text: str, where: str) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    try:
        return [
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except ValueError as error:
        raise SpecError(
            f"got text from {where} that is no exposition of metrics ({error}); expected the "
            "metrics of a running server"
        ) from None


def _scrape(targets: Sequence[ScrapedServer], until: float, tell: Callable[[str], None]) -> None:
    """Every server once a second; one that answers late is late."""
    while True:
        now = time.time()  # noqa: TID251 - as above
        for target in targets:
            target.scrape()
        if now >= until:
            return
        tell(f"watching {counted(len(targets), 'server')}: {rounded_duration(until - now)} left")
        spent = time.time() - now  # noqa: TID251 - as above
        time.sleep(max(0.0, min(EVERY - spent, until - now)))


def _what(each: WatchedModel) -> str:
    seen = each.observed
    return (
        f"{_number(seen.requests)} requests in {rounded_duration(each.seconds)} at "
        f"{counted(seen.replicas, 'replica')}, {_number(seen.arrival_rate)} a second"
    )


def _table(each: WatchedModel) -> Table:
    forecast = each.forecast
    rows = [
        [
            "queueing delay",
            seconds(each.observed.queueing_delay),
            *_predicted(forecast, "queueing_delay"),
        ],
        ["sojourn", seconds(each.observed.sojourn_time), *_predicted(forecast, "sojourn_time")],
        ["time to first token", seconds(each.observed.time_to_first_token), "", ""],
        ["gap between tokens", seconds(each.observed.token_gap), "", ""],
        ["running", _number(each.observed.running), "", ""],
        ["waiting", _number(each.observed.waiting), "", ""],
    ]
    headings = ("mean of", "observed", "predicted", "9 of 10 such times in")
    return Table([Column(heading=h, left=not i) for i, h in enumerate(headings)], rows)


def _predicted(forecast: FleetPrediction | None, name: str) -> tuple[str, str]:
    if forecast is None:
        return "-", "-"
    found = getattr(forecast, name)
    return seconds(found.value), interval(found)


def _basis(each: WatchedModel, given: int | None) -> Iterator[str]:
    if each.reason:
        yield f"no prediction: {each.reason}"
    if each.slowed:
        yield f"{each.slowed}; so it does in the prediction"
    yield slots_in_words(each.slots, given, each.observed.running)
    if each.law is not None:
        yield from law_in_words(each.law)
    if each.observed.restarts:
        yield f"{counted(each.observed.restarts, 'restart')} meanwhile"
    yield "counters know means only: no check of single requests, no quantiles"


def _number(value: float) -> str:
    return short_number(value, 3) if math.isfinite(value) else "-"
