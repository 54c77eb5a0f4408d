"""The text of `--length-predictor`: `name[:key=value{,key=value}]`.

none        as the client says; without, the token limit
max_tokens  the token limit, whatever the client says
sent        as the client says, corrected by its own record; keys: whose predictions count
history     of like prompts; quantile: which one is the prediction
learned     from the words of the prompt; path: the model is kept there
http        a service at the url answers within the deadline, else as history
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kendall.policies.durations import parse_duration
from kendall.policies.text import SpecError, check_keys, split_spec, suggest
from kendall.queueing.measurement.paths import is_folder

EXAMPLES = {
    "none": "none",
    "max_tokens": "max_tokens",
    "sent": "sent:keys=1a2b3c4d+5e6f7a8b",
    "history": "history:quantile=0.9",
    "learned": "learned:path=lengths.npz,quantile=0.9",
    "http": "http:url=http://127.0.0.1:9000/lengths,deadline=50ms,quantile=0.9",
}
DEADLINE, SHORTEST, LONGEST = 0.05, 0.001, 1.0  # seconds
MEDIAN = 0.5
_KEY_NAME = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class LengthPredictorText:
    """What a text says; `deadline` in seconds, `keys`: names of API keys, all where empty."""

    name: str = "none"
    url: str = ""
    deadline: float = DEADLINE
    path: Path | None = None
    quantile: float = MEDIAN
    keys: frozenset[str] = frozenset()


def parse_length_predictor(text: str) -> LengthPredictorText:
    """Raises SpecError: unknown or missing name or key, value out of range."""
    if not text.strip():
        raise SpecError(f"got no length predictor; expected {' | '.join(EXAMPLES)}")
    name, pairs = split_spec(text, EXAMPLES)
    if name not in EXAMPLES:
        raise SpecError(
            f"got length predictor {name!r}; expected {' | '.join(EXAMPLES)}"
            f"{suggest(name, EXAMPLES)}"
        )
    keys = tuple(split_spec(EXAMPLES[name])[1])
    check_keys(pairs, keys, f"length predictor {name}")
    if name == "http" and "url" not in pairs:
        raise SpecError(f"got {text!r}; expected url too, for example {EXAMPLES[name]}")
    values: dict[str, Any] = {key: _READ[key](pairs[key]) for key in pairs}
    return LengthPredictorText(name=name, **values)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise SpecError(f"got url={text}; expected url=URL, for example {EXAMPLES['http']}")
    return text


def _deadline(text: str) -> float:
    seconds = parse_duration(text)
    if not SHORTEST <= seconds <= LONGEST:
        raise SpecError(
            f"got deadline={text}; expected a deadline from 1ms to 1s: a request waits for it"
        )
    return seconds


def _path(text: str) -> Path:
    if is_folder(text):
        raise SpecError(f"got the folder path={text}; expected path=FILE, for example lengths.npz")
    return Path(text)


def _quantile(text: str) -> float:
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not 0.01 <= level <= 0.99:
        raise SpecError(f"got quantile={text}; expected a quantile from 0.01 to 0.99")
    return level


def _keys(text: str) -> frozenset[str]:
    names = text.split("+")
    for name in names:
        if not _KEY_NAME.fullmatch(name):
            raise SpecError(
                f"got {name!r} in keys={text}; expected names of API keys as the log has them: "
                "eight hexadecimal digits, joined by +"
            )
    return frozenset(names)


_READ = {"url": _url, "deadline": _deadline, "path": _path, "quantile": _quantile, "keys": _keys}


class LengthPredictorOption:
    """The type of the option: a text that was read without a complaint."""

    __name__ = "text"

    def __call__(self, value: str) -> str:
        """The text. Raises SpecError."""
        parse_length_predictor(value)
        return value
