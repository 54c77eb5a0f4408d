"""What `kendall watch` says of watched servers: one object for JSON, one page for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kendall.policies.text import counted, short_form
from kendall.queueing.choosing.forecast import WhatIf
from kendall.queueing.choosing.phrases import seconds as duration
from kendall.queueing.commands.terminal import Column, Table, say
from kendall.queueing.estimation.routing import Routing
from kendall.queueing.json_form import json_object, to_json
from kendall.queueing.measurement.check import SAID
from kendall.server.live.answers import AssessmentSummary
from kendall.server.watch.fleet import EARLY, HELD_BACK, UNUSED
from kendall.server.watch.lost import ServersState
from kendall.server.watch.receiver import REFUSED, Received
from kendall.server.watch.servers import WatchedServers
from kendall.server.watch.spans import IGNORED

FEW_LOST = 0.01  # share of the spans
FEW_HITS = 0.01  # share of the prompt tokens


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that the numbers take for granted of the spans; `holds`: None where nobody says."""

    name: str
    holds: bool | None
    says: str


@dataclass(frozen=True, slots=True)
class Spans:
    """What came."""

    received: int  # of requests, used
    ignored: Mapping[str, int]
    refused: Mapping[str, int]  # exports
    lost: int | None
    ended: int | None  # requests, by the servers' counters, while `lost` were lost
    lost_unknown: str | None  # why `lost` is not known


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """One server that sent spans."""

    name: str
    requests: int
    gone: bool


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WatchReport:
    """At one instant."""

    seconds: float | None
    spans: Spans
    counters: ServersState | None  # of the servers' URLs, where they were given
    replicas: Sequence[ReplicaSummary]
    policy: str
    servers: int
    slots_from: str
    routing: Routing | None
    law: Mapping[str, Any] | None
    prediction: AssessmentSummary | None
    what_if: Sequence[WhatIf] | None
    what_if_in_force: WhatIf | None
    conditions: Sequence[Condition]
    reason: str | None

    @property
    def nothing(self) -> str | None:
        """Why there is nothing to show, in a line."""
        return self.reason if self.prediction is None else None

    def as_json(self) -> dict[str, Any]:
        """One object."""
        found = self.prediction
        return {
            "source": "otlp",
            "seconds": self.seconds,
            "spans": json_object(self.spans),
            "counters": to_json(self.counters),
            "replicas": to_json(list(self.replicas)),
            "setting": {
                "policy": self.policy,
                "servers": self.servers,
                "slots_from": self.slots_from,
                "routing": to_json(self.routing),
            },
            "law": self.law,
            "check": None if found is None else to_json(found.check),
            "forecast": None if found is None else to_json(found.forecast),
            "what_if": to_json(None if self.what_if is None else list(self.what_if)),
            "what_if_in_force": to_json(self.what_if_in_force),
            "estimates": None if found is None else to_json(found.estimates),
            "comparison": None if found is None else to_json(found.comparison),
            "observed_queueing_delay": None
            if found is None
            else to_json(found.observed_queueing_delay),
            "window": None if found is None else to_json(found.window),
            "conditions": to_json(list(self.conditions)),
            "reason": self.reason,
        }


def report_of(
    servers: WatchedServers,
    received: Received,
    lost: tuple[int, int] | None,
    *,
    why_not_lost: str | None,
    now: float,
    seconds: float | None,
    state: ServersState | None = None,
) -> WatchReport:
    """`lost`: spans, and requests that ended meanwhile, by the servers' counters; `state`: what
    else these tell.
    """
    live, fleet = servers.live, servers.fleet
    prediction = None if live is None else live.prediction
    missing, ended = (None, None) if lost is None else lost
    told = why_not_lost or "no URL of a server was given, whose counters tell"
    spans = Spans(
        received=received.requests - fleet.early,
        ignored=dict(received.ignored) | ({EARLY: fleet.early} if fleet.early else {}),
        refused=dict(received.refused),
        lost=missing,
        ended=ended,
        lost_unknown=told if missing is None else None,
    )
    return WatchReport(
        seconds=seconds,
        spans=spans,
        counters=state,
        replicas=[
            ReplicaSummary(each.name, each.requests, each.gone) for each in fleet.replicas.values()
        ],
        policy=servers.batcher.policy_text,
        servers=servers.batcher.servers,
        slots_from=servers.slots_from,
        routing=servers.routing,
        law=_law(servers),
        prediction=prediction,
        what_if=None if live is None else live.what_if,
        what_if_in_force=None if live is None else live.what_if_in_force,
        conditions=() if live is None else tuple(_conditions(servers, spans, state, now)),
        reason=_reason(servers, spans),
    )


def _law(servers: WatchedServers) -> dict[str, Any] | None:
    law = servers.latency.law
    if law is None:
        return None
    found = servers.law
    fitted: dict[str, Any] = {"from": "option", "intervals": None, "error": None, "doubts": []}
    if found is not None:
        fitted = {
            "from": "spans",
            "intervals": {name: list(ends) for name, ends in found.intervals.items()},
            "error": found.error,
            "doubts": list(found.doubts),
        }
    return {"text": str(law), **law.as_dict(), **fitted}


def _conditions(
    servers: WatchedServers, spans: Spans, state: ServersState | None, now: float
) -> Iterator[Condition]:
    fleet = servers.fleet
    longest = fleet.longest()
    yield Condition(
        "all_ended",
        longest <= HELD_BACK,
        f"the window ends {now - fleet.end:.0f} s ago: what arrived later may still be in service, "
        "and has sent no span"
        if longest <= HELD_BACK
        else f"requests stay for up to {longest:.0f} s: those of the last minutes that go on are "
        "missing",
    )
    share = None if spans.lost is None or not spans.ended else spans.lost / spans.ended
    yield Condition(
        "no_lost_spans",
        None if share is None else share <= FEW_LOST,
        spans.lost_unknown or f"{spans.lost} of {spans.ended} spans did not come",
    )
    words = {
        "option": "the slots are those of --max-num-seqs",
        "observed": "the slots are the most that a server ran while something waited",
        "unknown": "nothing waited for a slot: there are at least as many as were in service; "
        "--max-num-seqs says how many",
    }
    yield Condition("slots_known", servers.slots_from != "unknown", words[servers.slots_from])
    hits = None if state is None else state.prefix_hits
    yield Condition(
        "no_prefix_hits",
        None if hits is None else hits <= FEW_HITS,
        "spans do not tell what the prefix cache saved: a prompt takes as long as on average"
        if hits is None
        else f"the prefix cache held {hits:.0%} of the prompt tokens: a prompt takes as long as on "
        "average, whatever it held",
    )
    preempted = None if state is None else state.preemptions
    yield Condition(
        "no_preemptions",
        None if preempted is None else not preempted,
        "spans do not tell preemptions"
        if preempted is None
        else f"{counted(preempted, 'preemption')}, which the model does not have: KV memory",
    )
    if servers.batcher.servers > 1:
        routing = servers.routing
        yield Condition(
            "routing",
            None if routing is None else True,
            f"{servers.batcher.servers} servers are taken as one queue: too few requests tell how "
            "they are sent"
            if routing is None
            else f"requests are sent by the rule {routing.rule}, as {routing.requests} of them say",
        )


def _reason(servers: WatchedServers, spans: Spans) -> str | None:
    if servers.live is None and not spans.received:
        other = "; ".join(f"{count} {IGNORED.get(r, r)}" for r, count in spans.ignored.items())
        return (
            f"got no span of a request{f' but {other}' if other else ''}; expected a running "
            "`vllm serve --otlp-traces-endpoint` with requests"
        )
    if not servers.ready:
        return (
            f"got {spans.received} spans of requests; expected some 120, from which the law and "
            "the slots are read: watch longer, or give --latency and --max-num-seqs"
        )
    live = servers.live_model()
    return None if live.prediction is not None else live.why_nothing()


MEANS = (
    Column(heading="", left=True),
    *(Column(heading=name) for name in ("observed", "by the model", "forecast")),
)
OTHERS = (
    Column(heading="what if", left=True, short=short_form),
    *(
        Column(heading=name)
        for name in ("token limit", "servers", "load", "queueing delay", "sojourn time")
    ),
)


def show(report: WatchReport, to: Console) -> None:
    """For people: observed beside predicted, the verdict and its causes, what if, and what the
    numbers take for granted.
    """
    found = report.prediction
    assert found is not None
    say(to, _of_spans(report))
    say(
        to,
        f"{report.policy}, servers: {report.servers}; {found.arrival_rate:.3g} requests/s, load "
        f"{found.load_interval.value:.2f}; law {found.law.rounded()}",
    )
    check = None if found.check is None else found.check.check
    rows = [_row(found, name) for name in ("queueing_delay", "sojourn_time")]
    to.print(Table(MEANS, rows))
    if check is not None:
        say(
            to,
            f"check of {check.requests} requests ({found.compared.replace('_', ' ')}): "
            f"{SAID[check.verdict]}; observed / modelled {check.ratio:.3f} ± "
            f"{check.relative_half_width:.3f}",
        )
        for cause in check.causes:
            say(to, f"  cause: {cause}")
    if report.what_if:
        to.print(Table(OTHERS, [_other(each) for each in report.what_if]))
    for doubt in (report.law or {}).get("doubts", ()):
        say(to, f"law: {doubt}")
    for condition in report.conditions:
        if condition.holds is not True:
            say(to, f"{condition.name}: {condition.says}")


def _of_spans(report: WatchReport) -> str:
    spans = report.spans
    parts = [f"{spans.received} spans of requests"]
    parts += [
        f"{count} ignored: {IGNORED.get(r) or UNUSED.get(r, r)}"
        for r, count in spans.ignored.items()
    ]
    parts += [f"{count} exports refused: {REFUSED[r][1]}" for r, count in spans.refused.items()]
    if spans.lost is not None:
        parts.append(f"{spans.lost} lost")
    return "; ".join(parts)


def _row(found: AssessmentSummary, name: str) -> list[str]:
    check = None if found.check is None else found.check.check
    compared = found.compared == name
    observed = check.observed if check is not None and compared else None
    if name == "queueing_delay" and observed is None:
        observed = found.observed_mean
    modelled = check.modelled if check is not None and compared else None
    forecast = getattr(found.predicted, name).mean
    return [
        name.replace("_", " "),
        *("-" if each is None else duration(each) for each in (observed, modelled, forecast)),
    ]


def _other(each: WhatIf) -> list[str]:
    forecast = each.forecast
    limit = forecast.max_output_tokens
    means = [
        "-" if quantiles is None or quantiles.mean is None else duration(quantiles.mean)
        for quantiles in (forecast.queueing_delay, forecast.sojourn_time)
    ]
    return [
        forecast.policy,
        "none" if limit is None else str(limit),
        str(forecast.servers),
        f"{forecast.load:.2f}",
        *means,
    ]
