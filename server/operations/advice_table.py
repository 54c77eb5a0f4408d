"""The tables of `kendall advise`: the settings, their gains, and what is predicted of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kendall.policies.text import short_form
from kendall.queueing.choosing.phrases import seconds, share, small_share
from kendall.queueing.commands.terminal import Column, Table, say

COLUMNS = (
    Column(heading="target", left=True),
    *(Column(heading=name, left=True, short=short_form) for name in ("in force", "best found")),
    *(Column(heading=name) for name in ("gain", "95 %")),
    Column(heading="advice", left=True),
)
PREDICTED = (
    Column(heading="target", left=True),
    *(
        Column(heading=heading)
        for heading in ("queueing delay\nin force", "\nfound", "sojourn time\nin force", "\nfound")
    ),
)
CUT = tuple(Column(heading=heading) for heading in ("answers cut\nin force", "\nfound"))
BALANCED = (
    Column(heading="requests join", left=True),
    *(
        Column(heading=heading)
        for heading in (
            "queueing delay\nmean",
            "\ndifference",
            "sojourn time\nmean",
            "\ndifference",
        )
    ),
)
QUEUES = {
    "central": "one queue, as here",
    "random": "a server by chance",
    "round_robin": "the servers in turn",
    "least_requests": "the emptiest server",
}
UNKNOWN = "unknown"
KEEP, SET = "keep", "set"
LEGEND = {  # of what stands in the tables instead of a number
    "-": "-: no choice was found, or the setting in force has no steady state",
    "none": "none: no token limit, or no steady state and therefore no mean",
    KEEP: f"{KEEP}: the setting in force is as good, or the gain may be zero",
    UNKNOWN: f"{UNKNOWN}: the observations do not bound it, or the method does not give it",
}


def show(
    advice: Sequence[Mapping[str, Any]],
    to: Console,
    load_balancer: Mapping[str, Any] | None = None,
    rate: Mapping[str, Any] | None = None,
) -> None:
    """The rate, one row a target, what is predicted of both settings, then the sentences; with
    several servers what a load balancer costs.
    """
    rows = [_row(each) for each in advice]
    cutting = any(each["target"] == "max-output-tokens" for each in advice)
    predicted = [_predicted(each, cutting=cutting) for each in advice]
    asked, *served = [""] if rate is None else rate["says"]
    objective = f"objective {advice[0]['objective']}"
    say(to, f"{objective}, at {asked}" if asked else objective)
    to.print(Table(COLUMNS, rows))
    say(to, "predicted means")
    to.print(Table((*PREDICTED, *CUT) if cutting else PREDICTED, predicted))
    balanced = [] if load_balancer is None else _show_balanced(load_balancer, to)
    shown = {cell for row in (*rows, *predicted, *balanced) for cell in row[1:]}
    if any(row[3] != "-" for row in rows):
        say(to, "gain: reduction of the quantity named in the sentence below")
    if any("minus much" in each["says"] for each in advice):
        say(to, "minus much: the best setting may be more than 100 times slower")
    for mark, words in LEGEND.items():
        if any(mark in cell.split(" ") for cell in shown):
            say(to, words)
    for each in advice:
        say(to, f"{each['target']}: {each['says']}")
    for words in served:
        say(to, words)


def _show_balanced(found: Mapping[str, Any], to: Console) -> list[list[str]]:
    """The means of the one queue, then those with a queue at each server; the rows."""
    here = {"routing": "central", "more": dict.fromkeys(found["central"])} | found["central"]
    known = [each for each in found["routings"] if each["reason"] is None]
    say(to, f"predicted behind a load balancer, with a queue at each of {found['servers']} servers")
    rows = [_balanced(each) for each in (here, *known)]
    to.print(Table(BALANCED, rows))
    for each in found["routings"]:
        if each["reason"] is not None:
            say(to, f"{each['routing']}: {each['reason']}")
    return rows


def _balanced(found: Mapping[str, Any]) -> list[str]:
    cells = [QUEUES[found["routing"]]]
    for name in ("queueing_delay", "sojourn_time"):
        mean, more = found[name]["mean"], found["more"].get(name)
        cells.append(UNKNOWN if mean is None else seconds(mean))
        cells.append("" if more is None else f"{'-' if more < 0 else '+'}{seconds(abs(more))}")
    return cells


def _row(advice: Mapping[str, Any]) -> list[str]:
    """The settings, the gain with its interval, and what to do."""
    gain = advice["gain"]
    known = gain["value"] is not None and advice["current"]["stable"]
    ends = f"{_percent(gain['low'])} to {_percent(gain['high'])}"
    return [
        advice["target"],
        *(_setting(advice[which], advice["target"]) for which in ("current", "best")),
        _percent(gain["value"]) if known else "-",
        ends if known else "-",
        _advised(advice),
    ]


def _predicted(advice: Mapping[str, Any], *, cutting: bool) -> list[str]:
    """Means of both settings, and the shares of the answers that they cut."""
    both = [advice[which] for which in ("current", "best")]
    means = [
        _mean(each, quantity) for quantity in ("queueing_delay", "sojourn_time") for each in both
    ]
    return [advice["target"], *means, *(map(_cut, both) if cutting else ())]


def _advised(advice: Mapping[str, Any]) -> str:
    """What the sentence says in a word."""
    if advice["best"] is None:
        return "-"
    return SET if advice["change"] else KEEP


def _setting(forecast: Mapping[str, Any] | None, target: str) -> str:
    if forecast is None:
        return "-"
    if target == "servers":
        return str(forecast["servers"])
    if target == "max-output-tokens":
        limit = forecast["max_output_tokens"]
        return "none" if limit is None else str(limit)
    return str(forecast["policy"])


def _mean(forecast: Mapping[str, Any] | None, quantity: str) -> str:
    """`none` without a steady state."""
    if forecast is None:
        return "-"
    if not forecast["stable"]:
        return "none"
    found = (forecast.get(quantity) or {}).get("mean")
    return UNKNOWN if found is None else seconds(found)


def _cut(forecast: Mapping[str, Any] | None) -> str:
    if forecast is None:
        return "-"
    cut = forecast.get("clipped_fraction")
    return UNKNOWN if cut is None else small_share(cut)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{share(value)} %"
