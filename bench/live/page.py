"""docs/live-validation.md from the cells' files: every number on it is computed here."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.live.design import Rules
from bench.live.judgement import CELLS, RULE, Judged, counts, judge, out_of_time, source_of
from bench.live.picture import draw
from bench.live.results import best, read_results

NAME = "live-validation"
PICTURE = "observed-and-predicted.png"
# a line of the page ends where a \n stands
INTRODUCTION = (
    "# The live prediction on a real engine\n"
    "\n"
    "`bench/live_validation.py` starts a gateway with the tiny model, calibrates the law's shape "
    "once, and sends every policy stationary\nPoisson load. "
    "While it serves, the gateway estimates rate, lengths, speed and residual from its own window "
    "and predicts\nthe mean and the quantiles of the queueing delay; no delay enters. "
    "The last prediction is made while requests still arrive\n"
    "and is compared with the gateway's records of the same window. "
    "For continuous the sojourn time is compared, because the wait\n"
    "for the engine's next step counts as service there. "
    "All numbers below are computed from the files in [live-validation/](live-validation/).\n"
)
TABLE_SAYS = (
    "load: asked, in brackets what the live model took it for. "
    "n: requests. "
    "s: seconds of load (t: ended by time). "
    "observed: mean with its\n95 % interval. "
    "predicted: live, at a constant speed, with the interval that the estimates leave; "
    "error: observed over predicted. "
    "at its\nspeeds: the same prediction with what the changes of the engine's speed within the "
    "cell do to it, by simulation with the speeds of its\nbatches second by second. "
    "band: what holds 95 % of the means of cells of the planned length on an engine that goes at "
    "the speeds of all\ncells before, stated before the cell was measured; it counts the chance "
    "of arrivals and lengths, not that the engine goes at other speeds\nthan before. "
    "Neither decides whether the cell holds. "
    "gateway: observed over measured service, the recursion on the run's own arrivals,\n"
    "batches and service times. "
    "p99: observed / predicted; of continuous that of the sojourn, predicted by simulation at the "
    "same estimates,\nas the live approximation has none. "
    "live verdict: what the live model itself said of the window, with the assumptions it named. "
    "* the\nmachine was not quiet. "
    "The estimates with their intervals are in the files.\n"
)

LONGER_SAYS = "As long as `queueing.simulation.run_length` advises; not counted above."
HEAD = (
    *(
        "policy",
        "load",
        "lengths",
        "n",
        "s",
        "observed (ms)",
        "predicted (ms)",
        "error",
        "at its speeds (ms)",
    ),
    *("band (ms)", "gateway", "p99 (ms)", "live verdict", "result"),
)


def write_page(folder: Path, docs: Path) -> Path:
    """Page, data and picture under `docs`; the page's path."""
    everything = read_results(folder.joinpath("cells").glob("*.json"))
    cells = [judge(result) for result in best(everything)]
    data = docs / NAME
    copy_data(folder, data)
    draw(_of_table(cells), data / PICTURE)
    parts = [
        INTRODUCTION,
        _counts(cells),
        _table(cells),
        f"![observed beside predicted]({NAME}/{PICTURE})\n",
        _waiting(cells),
        _named(cells, everything),
        _failures(cells),
        _offline(cells),
        _configuration(cells),
    ]
    page = docs / f"{NAME}.md"
    page.write_text("\n".join(part for part in parts if part), encoding="utf-8")
    return page


def copy_data(folder: Path, data: Path) -> None:
    """The cells' files and the calibration go with the page."""
    if folder.resolve() == data.resolve():
        return
    shutil.rmtree(data / "cells", ignore_errors=True)
    data.joinpath("cells").mkdir(parents=True)
    for path in [*folder.joinpath("cells").glob("*.json"), *folder.glob("profile.json")]:
        shutil.copyfile(path, data / path.relative_to(folder))


def _counts(cells: Sequence[Judged]) -> str:
    rows = []
    for count in counts(cells):
        shown = f"{count.found:.1%}" if count.of is None else f"{count.found:.0f} of {count.of}"
        asked = f"at most {count.asked:.0%}" if count.of is None else f"at least {count.asked:.0f}"
        rows.append([count.says, shown, asked, "yes" if count.holds else "**no**"])
    table = _of_table(cells)
    found = Counter(cell.says for cell in table)
    measured = "" if len(table) == CELLS else f"Measured: {len(table)} of {CELLS} cells. "
    return "\n".join(
        [
            f"## {cells_that_hold(found['holds'], len(table), found['too short'])}",
            "",
            RULE,
            "",
            markdown_table(["asked", "found", "wanted", "met"], rows),
            "",
            f"{measured}A cell that is too short does not hold.",
            "",
        ]
    )


def cells_that_hold(held: int, of: int, too_short: int) -> str:
    """The heading of a page: the number that its sentences have."""
    short = f", {too_short} {'is' if too_short == 1 else 'are'} too short" if too_short else ""
    return f"{held} of {of} cells hold{short}"


def _of_table(cells: Sequence[Judged]) -> list[Judged]:
    return [cell for cell in cells if not cell.result.get("longer")]


def _table(cells: Sequence[Judged]) -> str:
    parts = ["## Every cell", "", markdown_table(HEAD, map(_row, _of_table(cells))), "", TABLE_SAYS]
    longer = [cell for cell in cells if cell.result.get("longer")]
    if longer:
        parts += [
            "## Longer cells",
            "",
            LONGER_SAYS,
            "",
            markdown_table(HEAD, map(_row, longer)),
            "",
        ]
    return "\n".join(parts)


def _row(cell: Judged) -> list[str]:
    result = cell.result
    live, service = source_of(result), result["measured_service"]
    interval = live["interval"]
    comparison = live["comparison"]
    reasons = f" ({', '.join(comparison['reasons'])})" if comparison["reasons"] else ""
    half_width = cell.half_width / cell.observed if cell.observed else None
    return [
        result["policy"] + (" *" if not cell.quiet else ""),
        f"{result['load']:g} ({live['load_interval']['value']:.2f})",
        _lengths(result),
        f"{result['n']:,}",
        f"{result['seconds']:.0f}" + (" t" if out_of_time(result) else ""),
        f"{_ms(cell.observed)} ± {_percent(half_width, digits=0, sign=False)}",
        f"{_ms(cell.predicted)} ({_ms(interval['low'])} to {_ms(interval['high'])})",
        _percent(cell.error),
        _ms(cell.at_its_speeds),
        _band(result.get("stated_band")),
        _percent(
            service["observed"] / service["recursion"] - 1 if service["recursion"] else None,
            digits=2,
        ),
        ""
        if cell.p99 is None
        else f"{_ms(cell.p99[0])} / {_ms(cell.p99[1])} ({_percent(cell.p99_error, digits=0)})",
        comparison["verdict"] + reasons,
        cell.says if cell.holds or cell.too_short else f"**{cell.says}**",
    ]


def _lengths(result: Mapping[str, Any]) -> str:
    """The law's name; of calls of several also their number."""
    name, sequences = result["output_tokens"].partition(":")[0], result.get("sequences", 1)
    return name if sequences == 1 else f"{name}, n = {sequences}"


def _band(band: Mapping[str, Any] | None) -> str:
    return "" if band is None else f"{_ms(band['low'])} to {_ms(band['high'])}"


def _waiting(cells: Sequence[Judged]) -> str:
    rows = [
        [
            f"{cell.result['load']:g}",
            _share(found["observed"]),
            _share(found["predicted"]),
            f"{found['n']:,}",
        ]
        for cell in cells
        if (found := cell.result["waiting"]) is not None
    ]
    if not rows:
        return ""
    said = (
        "Who waits for a slot (observed: more than 1 ms), beside P(Wq > 0) at the same estimates:"
    )
    return (
        f"## Continuous: who waits\n\n{said}\n\n"
        f"{markdown_table(['load', 'observed', 'predicted', 'n'], rows)}\n"
    )


def _named(cells: Sequence[Judged], everything: Sequence[dict[str, Any]]) -> str:
    late = [cell for cell in cells if out_of_time(cell.result)]
    noisy = [cell for cell in cells if not cell.quiet]
    twice = sorted({result["cell"] for result in everything if result["attempt"] > 1})
    lines = ["## Stopped by time, or outside the noise gate", ""]
    lines += [
        f"- Ended by the time limit (t), mean not yet known well enough: {_names(late)}.",
        f"- Outside the noise gate (*): {_names(noisy)}.",
        "- Measured once more, because the first attempt was too short: "
        f"{', '.join(twice) or 'none'}. The attempt with the narrower "
        "interval of the observed mean counts; whether observed and predicted agree has no say.",
        "",
    ]
    lines += [f"  - {cell.result['cell']}: {'; '.join(cell.result['noise'])}" for cell in noisy]
    return "\n".join(lines) + "\n"


def _failures(cells: Sequence[Judged]) -> str:
    failing = [cell for cell in cells if cell.holds is False or not cell.gateway_holds]
    if not failing:
        return ""
    lines = ["## Cells that do not hold", ""]
    for cell in failing:
        live = source_of(cell.result)
        failed = [
            f"{name}: {each['says']}"
            for name, each in live["comparison"]["assumptions"].items()
            if each["holds"] is False
        ]
        said = "; ".join(failed) or "no assumption fails"
        lines.append(
            f"- {cell.result['cell']}, error {_percent(cell.error)}. The live model: {said}."
        )
    return "\n".join(lines) + "\n"


def _offline(cells: Sequence[Judged]) -> str:
    both = [
        (cell.result["live"]["interval"]["value"], cell.result["offline"]["interval"]["value"])
        for cell in cells
        if cell.result["live"] is not None
    ]
    apart = [abs(live / offline - 1) for live, offline in both if live and offline]
    if not apart:
        return (
            "No live prediction was given by the gateway: the predictions above were made "
            "afterwards, from its run file.\n"
        )
    without = len(cells) - len(both)
    said = (
        f" In {without} the gateway gave no live prediction; the offline one stands above."
        if without
        else ""
    )
    return (
        "The same estimators on the run file afterwards give the live mean within "
        f"{max(apart):.2%} (median {sorted(apart)[len(apart) // 2]:.2%}).{said}\n"
    )


def _configuration(cells: Sequence[Judged]) -> str:
    if not cells:
        return ""
    first, results = cells[0].result, [cell.result for cell in cells]
    rules = msgspec.convert(first["rules"], Rules)
    speeds = [speed for result in results for speed in result["speeds"] if speed is not None]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first["versions"].items()))
    late = max(
        (result["lateness"]["p99"] for result in results if result["lateness"]), default=math.nan
    )
    dates = sorted(result["date"] for result in results)
    loaded = all("speed_under_load" in result for result in results)
    measured_at = (
        f"of a pilot under load, {rules.pilot:g} s, just before the cell"
        if loaded
        else "measured just before the cell"
    )
    lines = [
        "## How",
        "",
        f"- Measured from {dates[0]} to {dates[-1]} (UTC), "
        f"{sum(result['seconds'] for result in results) / 60:.0f} minutes of load.",
        "- Hardware: "
        f"{', '.join(f'{name} {value}' for name, value in first['hardware'].items())}. "
        f"Engine: {first['engine']}.",
        f"- Versions: {versions}.",
        f"- Law (shape calibrated once, {rules.repeats} times every cell): `{first['law']}`.",
        f"- Speed against the law around the cells: {min(speeds):.3f} to {max(speeds):.3f}.",
        "- Output tokens: "
        f"{', '.join(f'`{t}`' for t in dict.fromkeys(r['output_tokens'] for r in results))}; "
        f"prompts `{first['prompt_tokens']}`; max_num_seqs {first['max_num_seqs']}.",
        "- Load: the asked rate over the largest stable one under the law at the speed "
        f"{measured_at}.",
        f"- A cell ends when the half width of its mean is {rules.half_width:.0%}, "
        "or with its share of the time.",
        f"- The measured epoch begins {rules.settle:g} s after the load; "
        f"the load generator was late by {late * 1e3:.2g} ms at most (p99).",
        f"- Noise gate: every {rules.block:g}-s block's speed within "
        f"{rules.block_deviation:.0%} of the cell's, the calibrations of "
        f"{rules.bracket:g} s before and after within {rules.bracket_deviation:.0%} of each other.",
        f"- Each cell has a timetable of its own, seeds {min(r['seed'] for r in results)} "
        f"to {max(r['seed'] for r in results)}.",
        "",
        "    .venv/bin/python bench/live_validation.py",
        "",
    ]
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _names(cells: Sequence[Judged]) -> str:
    return ", ".join(cell.result["cell"] for cell in cells) or "none"


def _ms(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    return f"{seconds * 1e3:.3g}" if abs(seconds) < 1 else f"{seconds * 1e3:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _percent(value: float | None, digits: int = 1, *, sign: bool = True) -> str:
    return (
        "-"
        if value is None or not math.isfinite(value)
        else f"{100 * value:{'+' if sign else ''}.{digits}f} %"
    )
