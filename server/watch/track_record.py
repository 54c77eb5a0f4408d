"""`kendall watch --prometheus`: the track record of what a Prometheus holds, as text, JSON and one
HTML page.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kendall.policies.durations import rounded_duration
from kendall.policies.text import SpecError
from kendall.queueing.commands.terminal import console, say, working
from kendall.queueing.errors import CommandError
from kendall.queueing.estimation.counters.samples import Totals
from kendall.queueing.estimation.counters.track_record import (
    PARTS,
    Hour,
    TrackRecord,
)
from kendall.queueing.estimation.counters.track_record import track_record as record_of
from kendall.queueing.json_form import to_json
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.server_signals import SERVERS, ServerKind, server_of
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.prometheus import Prometheus, client_of
from kendall.server.watch.record_page import page
from kendall.server.watch.record_text import given_law, show
from kendall.server.watch.signals import samples_of

MOST_ROWS = 10_000
HOUR, ROWS = 3600.0, 6  # seconds; of a shorter record


def track_record(options: WatchOptions, *, json: bool) -> None:
    """Print the record of every model that the Prometheus has seen, and write the page. Raises
    SpecError, CommandError.
    """
    records = records_from(options)
    if options.report.output is not None:
        _write(
            page(records, options.source.prometheus or "", options.queue.max_num_seqs),
            options.report.output,
        )
    if json:
        found = {"source": options.source.prometheus, "records": [r.as_dict() for r in records]}
        sys.stdout.write(msgspec.json.encode(to_json(found)).decode() + "\n")
        return
    to = console()
    show(records, to, options.queue.max_num_seqs)
    if options.report.output is not None:
        say(to, f"page: {options.report.output}")


def _write(text: str, path: Path) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def records_from(options: WatchOptions, now: float | None = None) -> list[TrackRecord]:
    """The record of each model, by its name, up to this instant (seconds since 1970)."""
    source = options.source
    assert source.prometheus is not None
    given = given_law(options.queue.latency)
    end = time.time() if now is None else now  # noqa: TID251 - instants of another machine's samples
    usual = HOUR if source.since >= 2 * HOUR else source.since / ROWS
    each_row = usual if source.every is None else source.every
    edges = _edges(end, source.since, each_row)
    with (
        Prometheus(source.prometheus, client_of(options, source.prometheus), source.match) as held,
        working(f"asking {source.prometheus}") as tell,
    ):
        kinds = _kinds(held, edges[0], end)
        hours: dict[tuple[str, str], dict[int, Hour]] = {}
        for number, (begin, until) in enumerate(itertools.pairwise(edges), start=1):
            tell(f"reading row {number} of {len(edges) - 1} from {source.prometheus}")
            for server, names in kinds.values():
                for model, hour in _hours(held, server, names, begin, until).items():
                    rows = hours.setdefault((server.name, model), {})
                    rows[number] = hour
        told = {key: rows for key, rows in hours.items() if any(h.replicas for h in rows.values())}
        if not told:
            raise CommandError(
                f"got no samples of the last {rounded_duration(source.since)} from "
                f"{source.prometheus}; expected some: does it scrape the servers, and reach back "
                "so far?"
            )
        tell("predicting each row from the row before")
        every = list(itertools.pairwise(edges))
        return [
            record_of(
                [rows.get(n) or Hour.of(each, ()) for n, each in enumerate(every, start=1)],
                model=model,
                server=name,
                slots=options.queue.max_num_seqs,
                given=given,
            )
            for (name, model), rows in sorted(told.items())
        ]


def _edges(end: float, since: float, every: float) -> list[float]:
    """Of the rows, the first one first. Raises SpecError."""
    number = int(since // every)
    if not 1 < number <= MOST_ROWS:
        raise SpecError(
            f"got --since {rounded_duration(since)} and --every {rounded_duration(every)}; "
            f"expected 2 to {MOST_ROWS:,} rows: each is predicted from the one before"
        )
    return [end - every * (number - index) for index in range(number + 1)]


def _kinds(held: Prometheus, start: float, end: float) -> dict[str, tuple[ServerKind, list[str]]]:
    """Each kind of server that it has series of, with the names of these. Raises SpecError."""
    there = {labels.get("__name__", "") for labels in held.labels(start, end)}
    found: dict[str, tuple[ServerKind, list[str]]] = {}
    for kind in SERVERS:
        names = kind.names & there
        if kind.counts_requests(names):
            found[kind.name] = kind, sorted(names)
    if not found:  # says what is missing
        server_of(there, f"a Prometheus at {held.url}{_matching(held.match)}")
    return found


def _matching(match: str) -> str:
    return f" with series that match {match}" if match else ""


def _hours(
    held: Prometheus, server: ServerKind, names: Iterable[str], begin: float, end: float
) -> dict[str, Hour]:
    """One row of each model."""
    edges = [begin + (end - begin) * index / PARTS for index in range(PARTS)] + [end]
    replicas: dict[str, list[list[Totals]]] = {}
    for samples in samples_of(server, held.samples(names, begin, end)):
        replicas.setdefault(samples.model, []).append(samples.between(edges))
    return {model: Hour.of(edges, found) for model, found in replicas.items()}
