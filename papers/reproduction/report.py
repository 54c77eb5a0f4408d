"""Reproduced artefacts as text, as JSON and as one markdown page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kendall.queueing.measurement.paths import writing
from papers.reproduction.artefact import (
    EXPLAINED,
    FAULT,
    FITTED,
    HOLDS,
    MET,
    TRUNCATED,
    UNPRINTED,
    WITHIN,
    Artefact,
    Panel,
    Statement,
)
from papers.reproduction.simulate import REPLICATIONS, SEED

COMMAND = "kendall reproduce all --output docs/reproduction"
DOCUMENTS = {
    "yang": (
        "Yang et al., A Queueing Theoretic Perspective on Low-Latency LLM Inference with "
        "Variable Token Length"
    ),
    "inoue": (
        "Inoue (2021), Queueing Analysis of GPU-Based Inference Servers with Dynamic "
        "Batching: A Closed-Form Characterization"
    ),
    "chapter": "The serving chapter, Queueing Theory for Serving",
    "slides": (
        "The slides, Mitzenmacher and Shahout (2025), Queueing, Predictions and LLMs: Challenges "
        "and Open Problems"
    ),
}
_HEADER = (
    "# The documents, reproduced\n"
    "\n"
    "Every table and every computed figure of the documents, made anew: what is stated, what we "
    "find, and why they differ where they do.\n"
    "This page, the pictures and the data (one JSON file for each) are written by\n"
    "\n"
    f"    {COMMAND}\n"
    "\n"
    f"Verdicts are computed. **{MET}**: our value, rounded, is the printed one. "
    f"**{TRUNCATED}**: truncated, it is. **{WITHIN}**: of a number that the\n"
    f"document itself has simulated. **{FITTED}**: a value\n"
    "that is not printed was chosen so that this number comes out: no evidence. "
    f"**{HOLDS}**: a claim in\n"
    f"words, checked by the number beside it. **{EXPLAINED}**: not met; the note says what is "
    f"missing. **{FAULT}**: the document contradicts\n"
    f"its own model or the mathematics. **{UNPRINTED}**: our number where the document gives "
    "none.\n"
    "\n"
    "Solid lines are exact, dashed ones approximations, dotted ones the printed formulas; circles "
    "are event-driven simulations with two\n"
    f"standard errors ({REPLICATIONS} replications, seed {SEED} and the name of the point, where "
    "nothing else is said), joined by thin\n"
    "lines where several belong to no other line. Lengths follow the documents' continuous laws.\n"
)
_FOOTER = (
    "## What is not here\n"
    "\n"
    "* Yang et al., Fig. 1 and 2, and Inoue, Fig. 1: a diagram, measurements whose numbers are not "
    "printed, and a sketch of a path.\n"
    "* The slides: diagrams, and measurements of LLM engines by others (response-length "
    "perception, TRAIL, MARS) whose inputs are not printed; what they claim is checked in "
    "simulation.\n"
)


def as_object(artefact: Artefact) -> dict[str, Any]:
    """Plain data, numbers to 8 digits."""
    return {
        "name": artefact.name,
        "title": artefact.title,
        "assumed": list(artefact.assumed),
        "statements": [_statement_object(statement) for statement in artefact.statements],
        "panels": [_panel_object(panel) for panel in artefact.panels],
        "remarks": list(artefact.remarks),
    }


def _statement_object(statement: Statement) -> dict[str, Any]:
    return {
        "quantity": statement.quantity,
        "stated": statement.stated or None,
        "ours": statement.ours if isinstance(statement.ours, str) else _digits(statement.ours),
        "deviation": None if statement.deviation is None else _digits(statement.deviation),
        "verdict": statement.verdict,
        "note": statement.note,
    }


def _panel_object(panel: Panel) -> dict[str, Any]:
    curves = []
    for item in panel.curves:
        values: dict[str, Any] = {
            "label": item.label,
            "kind": item.kind,
            "x": [_digits(x) for x in item.x],
        }
        values["y"] = [None if y is None else _digits(y) for y in item.y]
        if item.error:
            values["standard_error"] = [_digits(error) for error in item.error]
        curves.append(values)
    return {"title": panel.title, "x": panel.x_label, "y": panel.y_label, "curves": curves}


def _digits(value: float) -> float:
    return float(f"{value:.8g}")


def save_data(artefact: Artefact, path: Path) -> None:
    """One JSON file, a line for each statement and curve."""
    item = as_object(artefact)
    lines = [
        f' "{key}": {json.dumps(item[key], ensure_ascii=False)}'
        for key in ("name", "title", "assumed", "remarks")
    ]
    lines.append(f' "statements": {_rows(item["statements"], 2)}')
    panels = [
        (
            f'{{"title": {json.dumps(p["title"], ensure_ascii=False)}, "x": '
            f"{json.dumps(p['x'], ensure_ascii=False)}, "
        )
        for p in item["panels"]
    ]
    ends = [
        f'"y": {json.dumps(p["y"], ensure_ascii=False)}, "curves": {_rows(p["curves"], 4)}}}'
        for p in item["panels"]
    ]
    joined = ",\n  ".join(first + rest for first, rest in zip(panels, ends, strict=True))
    lines.append(f' "panels": [\n  {joined}\n ]' if joined else ' "panels": []')
    with writing(path):
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _rows(rows: Sequence[dict[str, Any]], indent: int) -> str:
    if not rows:
        return "[]"
    pad = "\n" + " " * indent
    return (
        "["
        + pad
        + f",{pad}".join(json.dumps(row, ensure_ascii=False) for row in rows)
        + pad[:-1]
        + "]"
    )


def page(artefacts: Sequence[Artefact]) -> str:
    """The markdown page."""
    parts = [_HEADER, _summary(artefacts)]
    document = ""
    for artefact in artefacts:
        key = artefact.name.partition("-")[0]
        if key != document:
            document = key
            parts.append(f"## {DOCUMENTS[key]}\n")
        parts.append(_section(artefact))
    return "\n".join([*parts, _FOOTER])


def _summary(artefacts: Sequence[Artefact]) -> str:
    verdicts = (MET, TRUNCATED, WITHIN, FITTED, HOLDS, EXPLAINED, FAULT)
    rows = ["| document | " + " | ".join(verdicts) + " |", "|---|" + "---|" * len(verdicts)]
    for key, title in DOCUMENTS.items():
        counts = Counter(
            s.verdict
            for artefact in artefacts
            if artefact.name.startswith(key)
            for s in artefact.statements
        )
        rows.append(
            f"| {title.partition(',')[0]} | "
            + " | ".join(str(counts[verdict]) for verdict in verdicts)
            + " |"
        )
    return "\n".join(rows) + "\n"


def _section(artefact: Artefact) -> str:
    parts = [f"### {artefact.title}\n"]
    if artefact.panels:
        parts.append(f"![{artefact.title}]({artefact.name}.png)\n")
    if artefact.assumed:
        parts.append("Assumed, not printed: " + "; ".join(artefact.assumed) + ".\n")
    if artefact.statements:
        rows = [
            (
                f"| {s.quantity} | {s.stated} | {_shown(s)} | {_deviation(s)} | {s.verdict} | "
                f"{s.note} |"
            )
            for s in artefact.statements
        ]
        parts.append(
            "| quantity | stated | ours | deviation | verdict | note |\n|---|---|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    if artefact.remarks:
        parts.append("\n".join(f"* {remark}" for remark in artefact.remarks) + "\n")
    parts.append(
        f"Data: [{artefact.name}.json]({artefact.name}.json). Again: `kendall reproduce "
        f"{artefact.name}`.\n"
    )
    return "\n".join(parts)


def text(artefact: Artefact) -> str:
    """For a terminal: a line "stated / ours / deviation" for each statement."""
    lines = [f"{artefact.name}  {artefact.title}"]
    lines += [f"  assumed: {assumed}" for assumed in artefact.assumed]
    for statement in artefact.statements:
        lines.append(f"  {statement.quantity}")
        stated = (
            f"stated {statement.stated or '-'} / ours {_shown(statement)} / deviation "
            f"{_deviation(statement) or '-'}"
        )
        lines.append(
            f"      {stated}  [{statement.verdict}]"
            + (f"  {statement.note}" if statement.note else "")
        )
    lines += [f"  * {remark}" for remark in artefact.remarks]
    return "\n".join(lines)


def _shown(statement: Statement) -> str:
    return statement.ours if isinstance(statement.ours, str) else f"{statement.ours:.6g}"


def _deviation(statement: Statement) -> str:
    deviation = statement.deviation
    return (
        "" if deviation is None else f"{100 * deviation:+.2g} %" if abs(deviation) > 5e-7 else "0"
    )
