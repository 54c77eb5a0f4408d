"""Conditions on a result that decide whether a command succeeds:
`--assert "p99_queueing_delay < 2s"`.

    NAME OPERATOR VALUE

    OPERATOR  < <= > >= == !=, and of a statistic of a duration = for <=, as in `--slo`
              (queueing.measurement.slo); several conditions with commas
    VALUE     a duration (policies.durations), a number or a percentage

A name is a statistic and a quantity, in either order (`p99_ttft`, `ttft_p99`), or a single number
(`completed`, `goodput`, `error_rate`, `prediction_error`). Words and short forms are the same
(`mean_time_to_first_token`). A duration must carry its unit, or its name must end in `_ms` as in
vLLM's files: a bare 200 would be 200 seconds and never fail. `prediction_error` is judged by its
absolute value. What was not measured breaks every condition.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kendall.policies.durations import UNITS, seconds_or_nan
from kendall.policies.text import SpecError, short_number
from kendall.queueing.measurement.slo import load_test_name, read_slo, split_slos

Values = Mapping[str, float | None]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_PER_ONE = {unit: 1 / float(seconds) for unit, seconds in UNITS.items()} | {"%": 100.0, "": 1.0}
_FORM = re.compile(r"\s*([A-Za-z][\w.\-]*)\s*(<=|>=|==|!=|<|>|=)\s*(.*?)\s*")
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)")
_LAST_UNIT = re.compile(rf"(?:{'|'.join(UNITS)})$")
_STATISTIC = re.compile(r"mean|median|std|max|p\d+(?:\.\d+)?")
_DURATION = re.compile(r"ttfb|ttft|tpot|itl|e2el|duration|.*_(delay|time|lateness|latency)")
ABSOLUTE = frozenset({"prediction_error"})


@dataclass(frozen=True, slots=True)
class Assertion:
    """One condition; `limit` in the value's own unit (seconds, shares, counts)."""

    text: str
    name: str
    operator: str
    limit: float
    unit: str  # the one it was written in, of several the last

    def holds(self, value: float | None) -> bool:
        """True where a value meets it; what is missing or not a number does not."""
        if value is None or math.isnan(value):
            return False
        return _OPERATORS[self.operator](abs(value) if self.name in ABSOLUTE else value, self.limit)


@dataclass(frozen=True, slots=True)
class Broken:
    """A condition that does not hold, and what was found; `where` names the cell of a sweep."""

    assertion: Assertion
    got: float | None
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        wanted = self.assertion
        size = "an absolute value " if wanted.name in ABSOLUTE else ""
        expected = f"{size}{wanted.operator} {_number(wanted.limit, wanted.unit)}"
        return f"{head}got {wanted.name} {_number(self.got, wanted.unit)}; expected {expected}"


def parse_assertions(texts: Iterable[str]) -> list[Assertion]:
    """Several conditions, also several with commas in one text. Raises SpecError."""
    return [parse_assertion(part) for text in texts for part in text.split(",")]


def parse_objectives(texts: Sequence[str]) -> list[Assertion]:
    """The objectives of `--slo` as conditions on a load run, whose sojourn time is the time end to
    end. Raises SpecError.
    """
    found = []
    for text in split_slos(" ".join(texts)) if texts else ():
        read = read_slo(text)
        quantity = "e2el" if read.quantity == "sojourn_time" else _short(read.quantity)
        name = f"{read.statistic}_{quantity}"
        found.append(Assertion(text.strip(), name, "<=", read.seconds, "ms"))
    return found


def parse_assertion(text: str) -> Assertion:
    """One condition. Raises SpecError; whether the name exists is known only with the values
    (`check`).
    """
    match = _FORM.fullmatch(text)
    value = None if match is None else _limit(match[3])
    name, milliseconds = ("", False) if match is None else canonical(match[1])
    # `=` is that of an objective: of a statistic of a duration
    objective = _quantity(name) != name and _lasts(name)
    if match is None or value is None or (match[2] == "=" and not objective):
        raise SpecError(
            f'got condition {text!r}; expected NAME < VALUE, for example "p99_ttft < 200ms" (< <= '
            f"> >= == !=; {' '.join(UNITS)} %)"
        )
    limit, unit = value
    sign = "<=" if match[2] == "=" else match[2]
    if milliseconds and not unit:
        limit, unit = limit / 1e3, "ms"
    if _lasts(name) and unit not in UNITS:
        raise SpecError(
            f"got condition {text!r} on a duration; expected a unit, as in "
            f"{match[3].lstrip('-').rstrip('% ')}ms"
        )
    return Assertion(text.strip(), name, sign, limit, unit)


def _limit(text: str) -> tuple[float, str] | None:
    """A number, a fraction or seconds, and its unit; None where the text is none of them."""
    if number := _NUMBER.fullmatch(text):
        return (float(number[1]) / 100, "%") if number[2] else (float(number[1]), "")
    unit, seconds = _LAST_UNIT.search(text), seconds_or_nan(text)
    return (seconds, unit[0]) if unit is not None and math.isfinite(seconds) else None


def canonical(written: str) -> tuple[str, bool]:
    """The name as the values have it, and whether it asked for milliseconds."""
    name = written.replace("-", "_")
    milliseconds = name.endswith("_ms")
    name = name.removesuffix("_ms")
    head, _, tail = name.partition("_")
    if not _STATISTIC.fullmatch(head):
        before, _, last = name.rpartition("_")
        if not before or not _STATISTIC.fullmatch(last):
            return _short(name), milliseconds
        head, tail = last, before
    return f"{'p50' if head == 'median' else head}_{_short(tail)}", milliseconds


def percentiles_of(assertions: Iterable[Assertion]) -> set[float]:
    """The percentiles that conditions ask for: what a summary must compute for them."""
    heads = (assertion.name.partition("_")[0] for assertion in assertions)
    return {float(head[1:]) for head in heads if re.fullmatch(r"p\d+(\.\d+)?", head)}


def require_known(assertions: Iterable[Assertion], names: Iterable[str]) -> None:
    """Raise SpecError for a name that no value will have, or a unit it does not: before a run
    rather than after it.
    """
    known = set(names)
    for assertion in assertions:
        if assertion.name not in known:
            mean = f"mean_{assertion.name}"
            close = difflib.get_close_matches(assertion.name, sorted(known), n=1, cutoff=0.5)
            near = mean if mean in known else next(iter(close), None)
            hint = f" (did you mean {near}?)" if near else ""
            raise SpecError(
                f"got {assertion.name} in condition {assertion.text!r}{hint}; expected one of "
                f"{_listed(known)}"
            )
        if assertion.unit in UNITS and not _lasts(assertion.name):
            raise SpecError(
                f"got condition {assertion.text!r} with a unit of time; expected a plain "
                "number or %: it is not a duration"
            )


def check(assertions: Sequence[Assertion], values: Values, where: str = "") -> list[Broken]:
    """The conditions that do not hold. Raises SpecError for a name that is not among the values."""
    require_known(assertions, values)
    return [
        Broken(assertion, values[assertion.name], where)
        for assertion in assertions
        if not assertion.holds(values[assertion.name])
    ]


def broken_lines(assertions: Sequence[Assertion], values: Values, where: str = "") -> list[str]:
    """One line for each condition that does not hold: print them and exit with status 3."""
    return [str(broken) for broken in check(assertions, values, where)]


def _short(name: str) -> str:
    return "request_throughput" if name == "throughput" else load_test_name(name)


def _quantity(name: str) -> str:
    head, _, tail = name.partition("_")
    return tail if _STATISTIC.fullmatch(head) else name


def _lasts(name: str) -> bool:
    return _DURATION.fullmatch(_quantity(name)) is not None


def _listed(names: set[str]) -> str:
    """List all names, those of one quantity together: `(max|mean|p50)_(ttft|itl)`."""
    statistics: dict[str, list[str]] = {}
    for name in sorted(names):
        quantity = _quantity(name)
        statistics.setdefault(quantity, []).extend(
            [name.partition("_")[0]] if quantity != name else []
        )
    together: dict[str, list[str]] = {}
    for quantity, heads in statistics.items():
        together.setdefault("|".join(heads), []).append(quantity)
    return "; ".join(
        f"({heads})_({'|'.join(quantities)})" if heads else ", ".join(quantities)
        for heads, quantities in together.items()
    )


def _number(value: float | None, unit: str) -> str:
    if value is None or math.isnan(value):
        return "unknown (not measured)"
    return f"{short_number(value * _PER_ONE[unit], 6)}{' ' if unit and unit != '%' else ''}{unit}"
