"""The words of a report: its title, its verdict in one sentence, what the run was, what a reader
must know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.report.html.data import ReportData
from kendall.loadgen.report.numbers import label, load_text
from kendall.loadgen.report.report import check_sentence
from kendall.policies.text import short_number
from kendall.queueing.latency.law import LatencyModel

# kind of a verdict -> the identified cause that it names
CAUSES = {
    "predictor": "predicted lengths",
    "speed": "machine’s speed",
    "scatter": "scatter",
    "shape": "law’s shape",
    "process": "arrival process",
    "arrivals": "arrivals",
    "sender": "sender",
    "gateway": "gateway",
    "theory": "theory",
    "differ": "differ",
}


def title(data: ReportData) -> str:
    """Say in one line what was measured."""
    texts = {cell.comparison.policy for cell in data.cells}
    policies = len(texts | {missing.policy for missing in data.missing})
    loads = len({round(cell.load or 0.0, 2) for cell in data.cells})
    engine, model = data.configuration.get("engine"), data.configuration.get("model")
    what = _count(policies, "policy", "policies") + (
        f" at {_count(loads, 'load', 'loads')}" if data.cells else ""
    )
    where = " on " + (f"{engine} ({model})" if model else str(engine)) if engine else ""
    return what + where


def headline(cells: Sequence[ReportCell]) -> str:
    """The check of all requests, and the cells that disagree; without a law the verdicts of the
    predictions.
    """
    return check_sentence([cell.comparison for cell in cells]) or steady_state(cells)


def steady_state(cells: Sequence[ReportCell]) -> str:
    """The verdicts of the predictions before the run in one sentence."""
    if not cells:
        return "Nothing was measured."
    kinds = Counter(
        cell.verdict.kind for cell in cells if cell.counts and cell.verdict.kind != "no prediction"
    )
    judged = kinds.total()
    # why cells are not judged, each once
    reasons = (
        (sum(c.comparison.of_others > 0 and not c.invalid for c in cells), "disturbed"),
        (sum(c.invalid for c in cells), "invalid"),
        (
            sum(c.counts and c.verdict.kind == "no prediction" for c in cells),
            "without a prediction",
        ),
    )
    why = ", ".join(f"{count} {reason}" for count, reason in reasons if count)
    if not judged:
        return f"{_count(len(cells), 'cell', 'cells')}, and none can be judged: {why}."
    text = (
        f"The steady state predicted before the run agrees with {kinds['agree']} of "
        f"{_count(judged, 'cell', 'cells')}"
    )
    if noise := kinds["sampling noise"]:
        more = _count(noise, "more differs", "more differ")
        text += f"; {more} by no more than sampling error"
    if others := judged - kinds["agree"] - noise:
        causes = [
            f"{CAUSES[kind]} ({count})" for kind, count in kinds.most_common() if kind in CAUSES
        ]
        differ = _count(others, "differs", "differ")
        text += f"; {differ} for an identified cause: {', '.join(causes)}"
    if left_out := len(cells) - judged:
        return f"{text}. {left_out} of {len(cells)} cannot be judged: {why}."
    return f"{text}."


def accuracy(cells: Sequence[ReportCell]) -> list[tuple[str, str, int]]:
    """Measure how near each theory came: label, median of |deviation|, number of cells. The steady
    states over the cells that are long enough for them.
    """
    medians = []
    undisturbed = [cell for cell in cells if not cell.comparison.of_others]
    long_enough = [cell for cell in cells if cell.counts]
    for key, name, used in (
        ("same_arrivals", "model, same requests", undisturbed),
        ("measured_service", "recursion on measured services", undisturbed),
        ("predicted", "steady state at the run’s speed", long_enough),
        ("a_priori", "steady state a priori", long_enough),
    ):
        estimates = [getattr(cell.comparison.quantity, key) for cell in used]
        errors = sorted(abs(estimate.deviation) for estimate in estimates if estimate is not None)
        if errors:
            middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
            medians.append((name, f"{middle * 100:.1f} %", len(errors)))
    return medians


def facts(data: ReportData) -> list[tuple[str, str]]:
    """The run in pairs of name and value."""
    configuration = data.configuration
    emulated = "emulated" if configuration.get("emulated", False) else None
    pairs = {"engine": _joined(configuration.get("engine"), emulated)}
    for key in ("model", "output_tokens", "prompt_tokens", "max_num_seqs", "servers"):
        pairs[key.replace("_", " ")] = _text(configuration.get(key))
    if data.headers:
        header, hardware = data.headers[0], data.headers[0].hardware
        cores = f"{hardware['cores']} core(s)" if "cores" in hardware else None
        pairs["seed"] = _text(header.seed)
        pairs["gateway's machine"] = _joined(hardware.get("cpu"), cores)
        versions = [f"{name} {version}" for name, version in header.versions.items()]
        pairs["versions"] = ", ".join(versions)
    if data.law is not None:
        pairs["law"] = law_text(data.law)
    if data.profile is not None and data.profile.r2 is not None:
        pairs["fit of the law"] = (
            f"R² {data.profile.r2:.4f}; cells within {data.profile.mape or 0:.1%} on average"
        )
    if data.date:
        pairs["calibrated"] = data.date.replace("T", " ")[:16]
    return [(name, value) for name, value in pairs.items() if value and value != "-"]


def law_text(law: LatencyModel) -> str:
    """The law's coefficients to four digits, with their units."""
    names = ("k1", "k2", "k3", "k4", "kp", "kr", "turnaround")
    times = {name: getattr(law, name) for name in names}
    shown = [f"{name} {short_number(value * 1e3)} ms" for name, value in times.items() if value]
    return ", ".join([*shown, f"cv {law.cv:.3g}", f"speed {law.speed:.4g}"])


def causes(cells: Sequence[ReportCell]) -> list[tuple[str, str]]:
    """List the cells that do not agree, and why."""
    return [
        (f"{label(cell)}, {load_text(cell.load)}", cell.verdict.text)
        for cell in cells
        if cell.counts and cell.verdict.kind not in ("agree", "no prediction")
    ]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
