"""The options of `kendall load` as one value, checked before anything is drawn.

Arrivals come from exactly one source: a rate (with burstiness), a text, a ramp, a trace, a saved
timetable; or from none of them under a bound on the requests at once, which is the closed loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kendall.policies.text import SpecError, suggest
from kendall.remote import Trust, check_key, check_no_credentials

DATASETS = ("random", "sharegpt", "jsonl", "custom")
SOURCES = (
    "--request-rate, --arrivals, --ramp-up-strategy, --trace, --timetable; or "
    "--max-concurrency alone, a closed loop"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options as given; None: not given."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    insecure: bool = False
    cacert: Path | None = None
    ready_check_timeout: float | None = None
    chat: bool = False
    request_rate: float | None = None
    burstiness: float = 1.0
    arrivals: str | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    trace: Path | None = None
    trace_format: str = "auto"
    time_scale: float = 1.0
    timetable: Path | None = None
    num_prompts: int | None = None
    duration: float | None = None
    max_concurrency: int | None = None
    think_time: float = 0.0
    prompt_tokens: str = "deterministic:value=32"
    output_tokens: str | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    natural_lengths: bool = False
    dataset_name: str | None = None
    dataset_path: Path | None = None
    tokenizer: Path | None = None
    predictor: str | None = None  # of output lengths
    flows: str | None = None
    seed: int | None = None
    processes: int = 1
    token_times: bool = False
    drain_limit: float = 600.0
    max_errors: int = 100

    def check(self) -> None:
        """Raises SpecError: a URL or a key that cannot be sent, a number out of range, flags
        that exclude one another.
        """
        check_base_url(self.base_url)
        check_key(self.api_key, "--api-key")
        for flag, value, least in (
            ("--max-tokens", self.max_tokens, 1),
            ("--num-prompts", self.num_prompts, 1),
            ("--max-concurrency", self.max_concurrency, 1),
            ("--processes", self.processes, 1),
            ("--max-errors", self.max_errors, 0),
        ):
            if value is not None and value < least:
                raise SpecError(f"got {flag} {value}; expected a whole number >= {least}")
        if not self.drain_limit >= 0 or not self.think_time >= 0:
            raise SpecError(
                f"got --drain-limit {self.drain_limit}, --think-time {self.think_time}; expected "
                "seconds >= 0"
            )
        if self.ready_check_timeout is not None and not 0 <= self.ready_check_timeout < math.inf:
            raise SpecError(
                f"got --ready-check-timeout {self.ready_check_timeout}; expected seconds >= 0"
            )
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise SpecError(f"got --duration {self.duration}; expected seconds > 0")
        self._check_choices()

    def _check_choices(self) -> None:
        if self.ignore_eos and self.natural_lengths:
            raise SpecError("got --ignore-eos with --natural-lengths; expected one of them")
        Trust(self.cacert, self.insecure)
        if self.dataset_name not in (None, *DATASETS):
            raise SpecError(
                f"got --dataset-name {self.dataset_name!r}; expected "
                f"{', '.join(DATASETS)}{suggest(self.dataset_name, DATASETS)}"
            )
        if self.dataset_name is not None and (self.dataset_path is None) != (
            self.dataset_name == "random"
        ):
            path = (
                "without --dataset-path"
                if self.dataset_path is None
                else f"with --dataset-path {self.dataset_path}"
            )
            raise SpecError(
                f"got --dataset-name {self.dataset_name} {path}; expected a file for all but random"
            )

    @property
    def closed(self) -> bool:
        """Whether the loop is closed: a bound on the requests at once, and no arrivals."""
        return self.max_concurrency is not None and not self._sources()

    def _sources(self) -> list[str]:
        given = {
            "--request-rate": self.request_rate,
            "--arrivals": self.arrivals,
            "--ramp-up-strategy": self.ramp_up_strategy,
            "--trace": self.trace,
            "--timetable": self.timetable,
        }
        return [flag for flag, value in given.items() if value is not None]

    def source(self) -> str:
        """The one flag that says when requests come. Raises SpecError."""
        sources = self._sources()
        if self.closed:
            return "--max-concurrency"
        if len(sources) != 1:
            raise SpecError(
                f"got {' and '.join(sources) or 'no arrivals'}; expected one of {SOURCES}"
            )
        if self.think_time:
            raise SpecError(
                "got --think-time in an open loop; expected it with --max-concurrency alone"
            )
        if self.burstiness != 1.0 and sources != ["--request-rate"]:
            raise SpecError(f"got --burstiness with {sources[0]}; expected it with --request-rate")
        return sources[0]


def check_base_url(url: str) -> None:
    """Raises SpecError; a message never repeats a password."""
    check_no_credentials(url, "--base-url")
    parts = urlsplit(url)
    if not url.strip():
        raise SpecError(f"got --base-url {url!r}; expected http://HOST:PORT")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise SpecError(
            f"got --base-url {url}; expected "
            f"http://HOST:PORT{f', for example http://{url}' if '://' not in url else ''}"
        )
    if parts.query or parts.fragment:
        raise SpecError(
            f"got --base-url {url}; expected http://HOST:PORT without a query or fragment"
        )
    for path in ("/completions", "/models"):
        if parts.path.rstrip("/").endswith(path):
            root = url.rstrip("/").removesuffix(path).removesuffix("/chat")
            raise SpecError(
                f"got --base-url {url}; expected the URL without the endpoint's path: {root}"
            )
