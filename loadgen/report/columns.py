"""The columns of a report: for each, its value in the CSV, its cell on the HTML page and its text
in a table on a terminal.

The three need not show the same number: `measured_service_ms` is milliseconds in the CSV and a
share of the delay elsewhere, `check_difference_ms` milliseconds in the CSV and per cent elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.client_side import TokenTime
from kendall.loadgen.compare.comparison import Comparison, TheoryEstimate
from kendall.loadgen.report.numbers import (
    MS,
    NO_NUMBER,
    chip_class,
    label,
    mean_and_half,
    ms,
    number,
    percent,
    plain_ms,
    with_small,
)
from kendall.policies.text import short_number
from kendall.queueing.measurement.check import Check, signed

SHORT = {"sampling noise": "chance"}  # what tables and the page print in place of a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportColumn:
    """One column. It is in the CSV where it has a `value` and on the page where it has a `title`.
    The tables on a terminal pick their columns by `key`, and need `heading` and `text`.
    """

    key: str  # its name in `BY_KEY`, and in the CSV
    value: Callable[[ReportCell], float | str | None] | None = None
    title: str = ""
    unit: str = ""
    page: Callable[[ReportCell], str] = lambda _: ""  # its cell, as HTML
    heading: str = ""
    text: Callable[[Comparison], str] = lambda _: ""


def policy_name(comparison: Comparison) -> str:
    """The policy, with a star where sojourn times are compared."""
    return comparison.policy + ("*" if comparison.compared == "sojourn_time" else "")


def difference(check: Check, digits: int = 0) -> str:
    """Observed / model - 1 in per cent, and its half width in at least `digits` characters."""
    if not check.modelled:
        return "-"
    half = 100 * check.relative_half_width
    width = f"± {half:{digits}.1f} %" if math.isfinite(half) else "± ?"
    return f"{signed((check.ratio - 1) * 100)} {width}"


def _signed_percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{signed(share * 100)} %"


def _over(observed: str, predicted: str) -> str:
    return observed if predicted == "-" else f"{observed}\n{predicted}"


def _estimate(key: str, title: str, heading: str = "", *, deviation: bool = True) -> ReportColumn:
    """The column for the mean of one theory. The page shows the observation's deviation from it
    below; a table on a terminal shows it beside the mean, unless `deviation` is false.
    """

    def estimate(comparison: Comparison) -> TheoryEstimate | None:
        of_theory: TheoryEstimate | None = getattr(comparison.quantity, key)
        return of_theory

    def on_page(cell: ReportCell) -> str:
        known = estimate(cell.comparison)
        return NO_NUMBER if known is None else with_small(ms(known.mean), percent(known.deviation))

    def on_terminal(comparison: Comparison) -> str:
        known = estimate(comparison)
        if known is None or (deviation and math.isnan(known.mean)):
            return "-"
        share = known.deviation  # infinite where the mean is 0
        off = f"{share * 100:+.1f}%" if math.isfinite(share) else "-"
        return f"{plain_ms(known.mean)} {off:>6}" if deviation else plain_ms(known.mean)

    return ReportColumn(
        key=f"{key}_ms",
        value=lambda cell: None if (e := estimate(cell.comparison)) is None else e.mean * MS,
        title=title,
        unit="ms",
        page=on_page,
        heading=heading,
        text=on_terminal,
    )


def _quantile(level: str) -> ReportColumn:
    """The column for an observed quantile, with the one predicted at the run's speed below it."""

    def predicted(comparison: Comparison) -> float:
        return comparison.quantity.theory_quantiles.get("predicted", {}).get(level, math.nan)

    def on_page(cell: ReportCell) -> str:
        quantity = cell.comparison.quantity
        known = level in quantity.theory_quantiles.get("predicted", {})
        said = ms(predicted(cell.comparison)) if known else None
        return with_small(ms(quantity.quantiles.get(level)), said)

    return ReportColumn(
        key=f"{level}_ms",
        value=lambda cell: _in_ms(cell.comparison.quantity.quantiles.get(level)),
        title=level,
        unit="ms",
        page=on_page,
        heading=f"{level}\n(ms)",
        text=lambda c: _over(
            plain_ms(c.quantity.quantiles.get(level, math.nan)), plain_ms(predicted(c))
        ),
    )


def _predicted_quantile(level: str) -> ReportColumn:
    return ReportColumn(
        key=f"predicted_{level}_ms",
        value=lambda cell: _in_ms(
            cell.comparison.quantity.theory_quantiles.get("predicted", {}).get(level)
        ),
    )


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MS


def _beside_prediction(key: str, title: str, heading: str) -> ReportColumn:
    """The column for an observed number, with the one predicted at the run's speed below it."""

    def pair(comparison: Comparison, nothing: str) -> tuple[str, str]:
        observed, predicted = getattr(comparison, key), getattr(comparison, f"predicted_{key}")
        return number(observed, ".2f", nothing), number(predicted, ".2f", nothing)

    def on_page(cell: ReportCell) -> str:
        observed, predicted = pair(cell.comparison, NO_NUMBER)
        return with_small(observed, None if predicted == NO_NUMBER else predicted)

    return ReportColumn(
        key=key,
        value=lambda cell: getattr(cell.comparison, key),
        title=title,
        page=on_page,
        heading=heading,
        text=lambda comparison: _over(*pair(comparison, "-")),
    )


def _of_check(key: str, value: Callable[[Check], float | str]) -> ReportColumn:
    return ReportColumn(
        key=key, value=lambda cell: None if (c := cell.comparison.check) is None else value(c)
    )


def _of_client(name: str) -> ReportColumn:
    """The column for a duration of tokens where only the clients saw them."""
    return ReportColumn(
        key=f"{name}_ms",
        value=lambda cell: None if (t := _token_time(cell, name)) is None else t.observed.mean * MS,
    )


def _predicted_of_client(name: str) -> ReportColumn:
    return ReportColumn(
        key=f"predicted_{name}_ms",
        value=lambda cell: None if (t := _token_time(cell, name)) is None else _in_ms(t.predicted),
    )


def _token_time(cell: ReportCell, name: str) -> TokenTime | None:
    times = () if cell.client is None else cell.client.token_times
    return next((time for time in times if time.name == name), None)


def _observed_on_page(cell: ReportCell) -> str:
    observed = cell.comparison.quantity.observed
    mean, half = mean_and_half(observed.mean, observed.half_width)
    return with_small(f'<span class="observed">{mean}</span>', f"± {half}")


def _observed_on_terminal(comparison: Comparison) -> str:
    observed = comparison.quantity.observed
    return f"{plain_ms(observed.mean)} ± {plain_ms(observed.half_width):>5}"


def _difference_on_page(cell: ReportCell) -> str:
    check = cell.comparison.check
    if check is None:
        return NO_NUMBER
    half = check.relative_half_width
    width = f"{half * 100:.1f} %" if math.isfinite(half) else "∞"
    return with_small(percent(check.ratio - 1), f"± {width}")


def _difference_on_terminal(comparison: Comparison) -> str:
    check = comparison.check
    if check is None:
        return "-"
    return difference(check, digits=4) + ("!" if check.verdict == "disagree" else "")


def _gateways_share(comparison: Comparison) -> float | None:
    recursion = comparison.quantity.measured_service
    return None if recursion is None else recursion.deviation


def _arrivals_share(comparison: Comparison) -> str:
    """How far the model's mean for these very requests is from that of the steady state."""
    if comparison.of_others:
        return "disturbed"
    check, predicted = comparison.check, comparison.quantity.predicted
    if check is None or predicted is None or not predicted.mean > 0:
        return "-"
    return _signed_percent(check.modelled / predicted.mean - 1)


def _verdict_on_page(cell: ReportCell) -> str:
    kind = "INVALID" if cell.invalid else cell.verdict.kind
    return f'<span class="chip {chip_class(kind)}">{escape(SHORT.get(kind, kind))}</span>'


LEVELS = ("p50", "p90", "p99")
COLUMNS = (
    ReportColumn(
        key="policy",
        value=lambda cell: cell.comparison.policy,
        title="policy",
        page=lambda cell: escape(label(cell)),
        heading="policy",
        text=policy_name,
    ),
    ReportColumn(
        key="load",
        value=lambda cell: cell.load,
        title="load",
        page=lambda cell: number(cell.load, ".2f", NO_NUMBER),
        heading="load",
        text=lambda comparison: number(comparison.load, ".2f"),
    ),
    ReportColumn(key="max_output_tokens", value=lambda cell: cell.max_output_tokens),
    ReportColumn(
        key="n",
        value=lambda cell: cell.comparison.n,
        title="n<br>rate",
        page=lambda cell: with_small(
            f"{cell.comparison.n:,}", f"{short_number(cell.comparison.arrival_rate, 3)}/s"
        ),
        heading="n",
        text=lambda comparison: str(comparison.n),
    ),
    ReportColumn(key="arrival_rate", value=lambda cell: cell.comparison.arrival_rate),
    ReportColumn(
        key="observed_ms",
        value=lambda cell: cell.comparison.quantity.observed.mean * MS,
        title="observed",
        unit="ms",
        page=_observed_on_page,
        heading="observed\n(ms)",
        text=_observed_on_terminal,
    ),
    ReportColumn(
        key="half_width_ms",
        value=lambda cell: cell.comparison.quantity.observed.half_width * MS,
    ),
    ReportColumn(
        key="same_arrivals_ms",
        value=lambda cell: (
            None if (replay := cell.comparison.quantity.same_arrivals) is None else replay.mean * MS
        ),
        title="model, same<br>requests",
        unit="ms",
        page=lambda cell: ms(check.modelled) if (check := cell.comparison.check) else NO_NUMBER,
        heading="model\n(ms)",
        text=lambda comparison: plain_ms(check.modelled) if (check := comparison.check) else "-",
    ),
    ReportColumn(
        key="check_difference_ms",
        value=lambda cell: check.difference * MS if (check := cell.comparison.check) else None,
        title="difference",
        page=_difference_on_page,
        heading="difference",
        text=_difference_on_terminal,
    ),
    _of_check("check_half_width_ms", lambda check: check.half_width * MS),
    _of_check("check_verdict", lambda check: check.verdict),
    ReportColumn(
        key="measured_service_ms",
        value=lambda cell: (
            None
            if (recursion := cell.comparison.quantity.measured_service) is None
            else recursion.mean * MS
        ),
        title="gateway’s<br>share",
        page=lambda cell: percent(_gateways_share(cell.comparison)),
        heading="gateway's\nshare",
        text=lambda comparison: _signed_percent(_gateways_share(comparison)),
    ),
    _estimate("live", "live", "live\n(ms)"),
    _estimate("predicted", "run’s<br>speed", "steady\nstate (ms)", deviation=False),
    _estimate("a_priori", "a priori", "a priori\n(ms)", deviation=False),
    _estimate("paper", "as<br>printed", "as printed\n(ms)"),
    ReportColumn(key="arrivals_share", heading="arrivals'\nshare", text=_arrivals_share),
    ReportColumn(
        key="mean_batch_size",
        heading="batch\nsize",
        text=lambda comparison: number(comparison.batch_size, ".2f"),
    ),
    *map(_quantile, LEVELS),
    *map(_predicted_quantile, LEVELS),
    _beside_prediction("batch_size", "batch<br>size", "batch\nsize"),
    _beside_prediction("utilisation", "in use", "utili-\nsation"),
    ReportColumn(
        key="speed",
        value=lambda cell: speed.factor if (speed := cell.comparison.speed) else None,
        title="speed",
        page=lambda cell: (
            with_small(f"{speed.factor:.3f}", f"cv {speed.cv:.2f}")
            if (speed := cell.comparison.speed)
            else NO_NUMBER
        ),
        heading="speed",
        text=lambda comparison: number(speed.factor, ".3f") if (speed := comparison.speed) else "-",
    ),
    ReportColumn(
        key="cv", value=lambda cell: speed.cv if (speed := cell.comparison.speed) else None
    ),
    *map(_of_client, ("time_to_first_token", "inter_token_latency")),
    *map(_predicted_of_client, ("time_to_first_token", "inter_token_latency")),
    ReportColumn(
        key="server_queueing_delay_ms",
        value=lambda cell: (
            None if (c := cell.client) is None or c.server is None else _in_ms(c.server.mean)
        ),
    ),
    ReportColumn(
        key="verdict",
        value=lambda cell: "INVALID" if cell.invalid else cell.verdict.text,
        title="verdict",
        page=_verdict_on_page,
    ),
)
BY_KEY = {column.key: column for column in COLUMNS}
IN_CSV = tuple((column.key, column.value) for column in COLUMNS if column.value is not None)
ON_PAGE = tuple(column for column in COLUMNS if column.title)
