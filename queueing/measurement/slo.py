"""The texts of service-level objectives, which `--slo`, KENDALL_SLO, `--assert` and `--goodput`
read alike:

    p99_queueing_delay<=2s        a quantile, above p0 and up to p99.99, of a duration of requests
    mean_sojourn_time=500ms       or its mean; `=`, `<=` and `<` mean the same
    p90_ttft<1s, mean_e2el<2s     several with commas; short names and `ttft_p90` are read too
    ttft<=100ms                   without a statistic, of `--goodput`: of every request

A command that cannot answer all of them says so behind the reading: predictions have the durations
of `PREDICTED`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kendall.policies.durations import parse_duration
from kendall.policies.text import SpecError, suggest
from kendall.queueing.result import Quantity

QUANTITIES: tuple[Quantity, ...] = ("queueing_delay", "sojourn_time", "time_to_first_token")
SHORT = {  # the names that load tests know
    "ttfb": "time_to_first_byte",
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2el": "end_to_end",
}
ALSO = {"queue": "queueing_delay", "service": "service_time", "lateness": "send_lateness"}
PREDICTED: tuple[Quantity, ...] = (*QUANTITIES, "inter_token_latency", "service_time")
RECORDED = tuple(
    dict.fromkeys(
        (*QUANTITIES, "service_time", "batch_forming_delay", "send_lateness", *SHORT.values())
    )
)
SIGN = r"\s*(?:<=?|=)\s*"
FORM = "mean_QUANTITY=TIME or pNN_QUANTITY=TIME, for example p99_queueing_delay=2s"
_STATISTIC = r"mean|median|p\d{1,2}(?:\.\d{1,2})?"
_NAME = rf"({_STATISTIC})_([a-z_\d]+?)|([a-z_\d]+?)_({_STATISTIC})"
_TEXT = re.compile(rf"(?:{_NAME}){SIGN}(.+)", re.ASCII)
_ABOVE = re.compile(rf"(?:{_NAME})\s*>.*", re.ASCII)
_QUANTILE = re.compile(r"(?:.*_)?p[\d.]+(?:_.*)?", re.ASCII)
_BETWEEN = re.compile(r"[,\s]+(?=[a-z][\w.]*\s*[<=])")


@dataclass(frozen=True, slots=True)
class SloText:
    """`statistic` ("mean", "p99", "p99.9") of `quantity`, by its full name, is to be at most
    `seconds`.
    """

    statistic: str
    level: float | None  # of a quantile, in (0, 1); None: the mean
    quantity: str
    seconds: float


def split_slos(text: str) -> list[str]:
    """The single objectives of a text with several, each once. Raises SpecError where two bound
    the same differently.
    """
    inner = text.strip(", \t\n")
    texts: dict[str, str] = {}
    for each in _BETWEEN.split(inner) if inner else [text]:
        try:
            read = read_slo(each)
        except SpecError:
            texts[each] = each  # its reader says what is wrong with it
            continue
        name = f"{read.statistic} {read.quantity.replace('_', ' ')}"
        first = texts.setdefault(name, each)
        if read_slo(first).seconds != read.seconds:
            raise SpecError(f"got --slo {first!r} and {each!r}; expected one bound of the {name}")
    return list(texts.values())


def read_slo(text: str, name: str = "--slo ") -> SloText:
    """One objective. `name`: of the option or the argument, as errors say it. Raises SpecError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"got {name}{text!r}; expected {_form(text.strip())}")
    statistic, quantity = match[1] or match[4], full_name(match[2] or match[3])
    if quantity not in RECORDED:
        raise SpecError(
            f"got {name}{text!r}; expected one of "
            f"{', '.join(RECORDED)}{suggest(quantity, RECORDED)}"
        )
    try:
        seconds = parse_duration(match[5])
    except SpecError:
        raise SpecError(
            f"got {name}{text!r}; expected a duration such as 2s or 100ms behind the sign"
        ) from None
    if not 0 < seconds < math.inf or _percent(statistic) == 0:
        raise SpecError(f"got {name}{text!r}; expected finite seconds > 0 and a quantile above p0")
    if statistic == "mean":
        return SloText("mean", None, quantity, seconds)
    return SloText(*_level(statistic), quantity, seconds)


def _form(text: str) -> str:
    """What is expected of a text that is none."""
    if _ABOVE.fullmatch(text):
        return f"an upper bound, {FORM}"
    if _QUANTILE.fullmatch(re.split(SIGN, text)[0]):
        return f"{FORM}, a quantile above p0 and at most p99.99"
    return FORM


def level_of(name: str) -> tuple[str, float]:
    """The canonical name of a quantile and its level: `p99.9`, 0.999. Raises SpecError."""
    if re.fullmatch(_STATISTIC, name := name.strip()) is None or not _percent(name):
        raise SpecError(f"got quantile {name!r}; expected p50, p99.9, ..., at most p99.99")
    return _level(name)


def _percent(statistic: str) -> float | None:
    """None: the mean."""
    if statistic[0] == "m":
        return {"mean": None, "median": 50.0}[statistic]
    return float(statistic[1:])


def _level(statistic: str) -> tuple[str, float]:
    percent = _percent(statistic)
    assert percent is not None
    # 0.999 for p99.9, not 0.9990000000000001
    return f"p{percent:g}", round(percent / 100, 6)


def full_name(name: str) -> str:
    """`time_to_first_token` for `ttft`; another name as it is."""
    return (SHORT | ALSO).get(name, name)


def load_test_name(name: str) -> str:
    """`ttft` for `time_to_first_token`; another name as it is."""
    return {full: short for short, full in SHORT.items()}.get(name, ALSO.get(name, name))
