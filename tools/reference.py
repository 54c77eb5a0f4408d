"""Write docs/reference from the code: `python tools/reference.py` (`make reference`).

`options.md` has the options of every command, `metrics.md` the metrics of a running gateway,
`record.md` the fields of a run file. A test compares the files with what this would write.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
GENERATED = "<!-- written by `make reference` -->"
# label values that are the same in every gateway
FIXED_LABELS = ("check", "outcome", "reason", "stage", "verdict")
NAMES_OF_TYPES = {"str": "text", "float": "number", "int": "whole number", "bool": "true or false"}


def main() -> None:
    """Write every page."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


def pages() -> dict[str, str]:
    """Every generated page: file name and text."""
    return {"options.md": options_page(), "metrics.md": metrics_page(), "record.md": record_page()}


def options_page() -> str:
    """The options of every command."""
    from kendall.cli import COMMANDS
    from kendall.help import DURATIONS, VARIABLES

    parts = [
        f"# Options\n\n{GENERATED}\n\n{_cell(VARIABLES)} Where an option has another meaning in "
        "one command, its row names the variable. The keys of a file of `kendall serve --config` "
        f"are the names of the flags. {DURATIONS} ↻ marks options that SIGHUP puts in force."
    ]
    parts += [_command(name, about) for name, (_, about) in COMMANDS.items()]
    return "\n\n".join(parts) + "\n"


def _command(name: str, about: str) -> str:
    from kendall.cli import command_of

    command = command_of(name)
    reloaded = _reloaded() if name == "serve" else frozenset()
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["kendall", name, *(f"[{each.metavar}]" for each in arguments), "[OPTIONS]"])
    lines = [f"## kendall {name}", "", f"`{usage}`: {_cell(about)}."]
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        panel = getattr(parameter, "rich_help_panel", None) or "General"
        panels.setdefault("Arguments" if parameter in arguments else panel, []).append(parameter)
    lines += ["", "| option | value | default | meaning |", "|---|---|---|---|"]
    for panel, parameters in panels.items():
        lines += [f"| **{panel}** | | | |"] if len(panels) > 1 else []
        for each in parameters:
            mark = " ↻" if each.name in reloaded else ""
            lines.append(
                f"| {_names(each)}{mark} | {_cell(each.metavar)} | {_default(each)} | "
                f"{_cell(each.help)} |"
            )
    return "\n".join(lines)


def _reloaded() -> frozenset[str]:
    """The names of the parameters of `serve` that SIGHUP takes up."""
    from kendall.options import flag_of
    from kendall.server.settings import Settings

    def fields_of(kind: Any) -> Iterator[dataclasses.Field[Any]]:
        from typing import get_type_hints

        hints = get_type_hints(kind)
        for each in dataclasses.fields(kind):
            if dataclasses.is_dataclass(hints[each.name]):
                yield from fields_of(hints[each.name])
            else:
                yield each

    return frozenset(
        flag_of(each).removeprefix("--").replace("-", "_")
        for each in fields_of(Settings)
        if each.metadata.get("reloaded")
    )


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    return f"`{parameter.opts[0]}`"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or value in ("", [], ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g} s" if parameter.metavar == "DURATION" else f"{value:g}"
    return f"`{value}`"


def metrics_page() -> str:
    """The metrics of a gateway with every option that adds one."""
    lines = [
        "# Metrics",
        "",
        GENERATED,
        "",
        "Kendall's own metrics on `/metrics`. Times are in seconds. The label `policy` holds the "
        "text of a policy, at most 32 of them, then `other`. A gauge without a value is absent or "
        "NaN. `kendall_record_*` are of `kendall watch URL`. What to look at first: "
        "[dashboards](../how-to/observe.md#read-the-charts).",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, about in asyncio.run(_metrics()):
        lines.append(f"| `{name}` | {kind} | {labels} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


async def _metrics() -> list[tuple[str, str, str, str]]:
    """Name, type, labels and help of each metric, by name."""
    from kendall.queueing.latency.law import parse_law
    from kendall.server.admission.settings import OverloadSettings
    from kendall.server.engines.emulated import EmulatedEngine
    from kendall.server.gateway import Gateway
    from kendall.server.http.app import create_app
    from kendall.server.http.descriptors import Room
    from kendall.server.settings import Settings
    from kendall.server.watch.record_metrics import RecordMetrics

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            model="tiny",
            served_model_name="tiny",
            prediction_interval=0,
            record_file=Path(folder, "records.jsonl"),
            overload=OverloadSettings(adaptive_concurrency=True),
            length_predictor="history",
        )
        gateway = Gateway(settings, EmulatedEngine(parse_law("k1=1e-3,k2=1e-3,k3=0,k4=1e-3")))
        app = create_app(gateway)
        async with app.router.lifespan_context(app):
            while not gateway.supervisor.serving:  # noqa: ASYNC110 - it has no event for this
                await asyncio.sleep(0.01)
            registry = gateway.metrics.registry
            Room(registry)
            RecordMetrics(registry)
            families = sorted(registry.collect(), key=lambda family: str(family.name))
            return [_metric(registry, family) for family in families]


def _metric(registry: Any, family: Any) -> tuple[str, str, str, str]:
    from kendall.server.admission.rejections import EARLY, LIMITS

    # the library names the labels of its instruments in private attributes only
    instrument = registry._names_to_collectors.get(family.name)
    names = list(getattr(instrument, "_labelnames", getattr(family, "_labelnames", ())))
    shown = []
    for name in names:
        values = {sample.labels[name] for sample in family.samples if name in sample.labels}
        if family.name == "kendall_rejections":  # its series exist once they count
            values = {*LIMITS, *EARLY}
        fixed = sorted(values) if name in FIXED_LABELS else []
        shown.append(f"`{name}`" + (f": {', '.join(fixed)}" if fixed else ""))
    suffix = "_total" if family.type == "counter" else ""
    return family.name + suffix, family.type, "; ".join(shown), family.documentation


def record_page() -> str:
    """The header and the records of a run file, from their classes."""
    from kendall.queueing.measurement import record

    about = " ".join((inspect.getdoc(record) or "").split("\n\n", 1)[1].split())
    lines = [
        "# Run files",
        "",
        GENERATED,
        "",
        f"`kendall serve --record-file` and `kendall load` write run files. {about} Schema version "
        f"{record.SCHEMA_VERSION}; [versions](versions.md) says what a new version may change.",
    ]
    for kind in (record.Record, record.Header):
        lines += ["", f"## {kind.__name__}", "", " ".join((inspect.getdoc(kind) or "").split())]
        lines += ["", "| field | type | meaning |", "|---|---|---|"]
        for name, annotation, about in _fields(kind):
            lines.append(f"| `{name}` | {_type(annotation)} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, annotation and comment of each field, in the order of the source."""
    source = textwrap.dedent(inspect.getsource(kind))
    text = source.splitlines()
    (body,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = _comments_above(text, node.lineno - 1)
            inside = [_comment(text[line]) for line in range(node.lineno - 1, node.end_lineno or 0)]
            about = " ".join(filter(None, [*above, *inside]))
            yield node.target.id, ast.unparse(node.annotation), about


def _comments_above(text: list[str], line: int) -> list[str]:
    found: list[str] = []
    while line > 0 and text[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, _comment(text[line]))
    return found


def _comment(line: str) -> str:
    return line.partition("#")[2].strip()


def _type(annotation: str) -> str:
    """In words; every field of a record but its id and outcome may be null."""
    plain = annotation.replace(" | None", "")
    if choices := re.findall(r"'(\w+)'", plain):
        return ", ".join(f"`{choice}`" for choice in choices)
    if plain == "Outcome":
        from typing import get_args

        from kendall.queueing.measurement.record import Outcome

        return ", ".join(f"`{choice}`" for choice in get_args(Outcome))
    if plain.startswith("list["):
        return "list of numbers"
    return NAMES_OF_TYPES.get(plain, "object")


def _cell(text: str | None) -> str:
    """A text in a cell of a table: options and texts in angle brackets as they are written."""
    shown = (text or "").replace("\\[", "[").replace("|", "\\|").replace("<", "\\<")
    return _coded(" ".join(shown.split()))


def _coded(text: str) -> str:
    """Flags in code, unless they are in code already."""
    parts: Iterable[str] = text.split("`")
    return "`".join(
        re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", part) if number % 2 == 0 else part
        for number, part in enumerate(parts)
    )


if __name__ == "__main__":
    main()
