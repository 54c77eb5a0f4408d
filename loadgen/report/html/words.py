"""The words of a report: its title, its verdict in one sentence, what the run was, what a reader
must know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadgen.compare.cells import ReportCell
from loadgen.report.html.data import ReportData
from loadgen.report.html.numbers import label, load_text
from loadgen.report.report import check_sentence
from policies.text import short_number
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Header

GROUPS = {
    "agree": "agree",
    "disturbed": "short",
    "sampling noise": "noise",
    "no prediction": "short",
}  # kind -> class of the chip; others "off"
KINDS = {
    "agree": ("agree", "the prediction a priori lies in the observed interval, or within 10 %"),
    "sampling noise": (
        "sampling noise",
        "they differ, but by no more than sampling error allows in a run of this length",
    ),
    "disturbed": ("disturbed", "requests of other clients were in the queue: not judged"),
    "predictor": (
        "predicted lengths",
        "predicted lengths were better or worse than the predictor that was asked for",
    ),
    "speed": ("machine’s speed", "the machine was faster or slower than when it was calibrated"),
    "scatter": ("scatter", "service times vary more or less than when calibrated"),
    "shape": (
        "law’s shape",
        "service times do not follow the form of the law, or the speed drifted",
    ),
    "process": (
        "arrival process",
        "the requested arrivals are not Poisson, for which predictions are made",
    ),
    "arrivals": ("arrivals", "the arrivals do not follow the requested process"),
    "sender": ("sender", "requests were not sent on schedule"),
    "gateway": ("gateway", "time was lost before dispatches"),
    "theory": ("theory", "the formula is an approximation, and inaccurate here"),
    "differ": ("differ", "no simulator for this queue: the difference could not be split"),
    "no prediction": ("no prediction", "no law was given, or there is no steady state"),
}


def chip_class(kind: str) -> str:
    """How a verdict is coloured."""
    return GROUPS.get(kind, "off")


def title(data: ReportData) -> str:
    """What was measured, in one line."""
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
    if not judged:
        return f"{_count(len(cells), 'cell', 'cells')}, and none can be judged{_not_judged(cells)}."
    within = kinds["agree"] + kinds["sampling noise"]
    others = judged - within
    text = (
        f"The steady state predicted before the run agrees with {kinds['agree']} of "
        f"{_count(judged, 'cell', 'cells')}"
    )
    if kinds["sampling noise"]:
        text += (
            f"; {_count(kinds['sampling noise'], 'more differs', 'more differ')} by no more than "
            "sampling error"
        )
    if others:
        causes = [
            f"{KINDS[kind][0]} ({count})"
            for kind, count in kinds.most_common()
            if chip_class(kind) == "off"
        ]
        text += (
            f"; {_count(others, 'differs', 'differ')} for an identified cause: {', '.join(causes)}"
        )
    left_out = len(cells) - judged
    return (
        text
        + "."
        + (f" {left_out} of {len(cells)} cannot be judged{_not_judged(cells)}." if left_out else "")
    )


def _not_judged(cells: Sequence[ReportCell]) -> str:
    """Why, each cell once."""
    invalid = sum(cell.invalid for cell in cells)
    disturbed = sum(cell.comparison.of_others > 0 and not cell.invalid for cell in cells)
    bare = sum(cell.counts and cell.verdict.kind == "no prediction" for cell in cells)
    reasons = (
        (disturbed, "disturbed"),
        (invalid, "invalid"),
        (bare, "without a prediction"),
    )
    return ": " + ", ".join(f"{count} {why}" for count, why in reasons if count)


def accuracy(cells: Sequence[ReportCell]) -> list[tuple[str, str, int]]:
    """How near each theory came: label, median of |deviation|, number of cells. The steady states
    over the cells that are long enough for them.
    """
    found = []
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
            found.append((name, f"{middle * 100:.1f} %", len(errors)))
    return found


def facts(data: ReportData) -> list[tuple[str, str]]:
    """The run in pairs of name and value."""
    configuration = data.configuration
    emulated = "emulated" if configuration.get("emulated", False) else None
    found = {"engine": _joined(configuration.get("engine"), emulated)}
    for key in ("model", "output_tokens", "prompt_tokens", "max_num_seqs", "servers"):
        found[key.replace("_", " ")] = _text(configuration.get(key))
    if data.headers:
        found |= _header_facts(data.headers[0])
    if data.law is not None:
        found["law"] = law_text(data.law)
    if data.profile is not None and data.profile.r2 is not None:
        found["fit of the law"] = (
            f"R² {data.profile.r2:.4f}; cells within {data.profile.mape or 0:.1%} on average"
        )
    if data.date:
        found["calibrated"] = data.date.replace("T", " ")[:16]
    return [(name, value) for name, value in found.items() if value and value != "-"]


def _header_facts(header: Header) -> dict[str, str]:
    hardware = header.hardware
    cores = f"{hardware['cores']} core(s)" if "cores" in hardware else None
    return {
        "seed": _text(header.seed),
        "gateway's machine": _joined(hardware.get("cpu"), cores),
        "versions": ", ".join(f"{name} {version}" for name, version in header.versions.items()),
    }


def law_text(law: LatencyModel) -> str:
    """The law's coefficients to four digits, with their units."""
    times = {
        "k1": law.k1,
        "k2": law.k2,
        "k3": law.k3,
        "k4": law.k4,
        "kp": law.kp,
        "kr": law.kr,
        "turnaround": law.turnaround,
    }
    said = [f"{name} {short_number(value * 1e3)} ms" for name, value in times.items() if value]
    return ", ".join([*said, f"cv {law.cv:.3g}", f"speed {law.speed:.4g}"])


def causes(cells: Sequence[ReportCell]) -> list[tuple[str, str]]:
    """Those that do not agree, and why."""
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
