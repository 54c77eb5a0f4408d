"""The options of `kendall load` as one value, checked before anything is drawn.

Arrivals come from exactly one source: a rate (with burstiness), a text, a ramp, a trace, a saved
timetable; or from none of them under a bound on the requests at once, which is the closed loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kendall.options import option, within
from kendall.policies.durations import Duration
from kendall.policies.text import SpecError, suggest
from kendall.remote import Trust, check_key, check_no_credentials

# panels of the help, in its order
WHERE, WHEN, WHAT, HOW, GOALS, RESULTS = PANELS = (
    "Server",
    "Arrivals",
    "Requests",
    "Sending",
    "Objectives",
    "Results",
)
DATASETS = ("random", "sharegpt", "jsonl", "custom")
SOURCES = (
    "--request-rate, --arrivals, --ramp-up-strategy, --trace, --timetable; or "
    "--max-concurrency alone, a closed loop"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options as given; None: not given."""

    base_url: str = "http://127.0.0.1:8080"  # of --base-url, or of --host and --port
    model: tuple[str, ...] = option(
        WHERE,
        "Name of the model. Default: the first that the server lists. Several, as NAME=SHARE: each "
        "request asks for one of them, drawn by its share.",
        default=(),
    )
    api_key: str | None = option(WHERE, "Key sent as a bearer token; never written to a file.")
    trust: Trust = within(WHERE, Trust)
    header: tuple[str, ...] = option(
        WHERE,
        "Header NAME:VALUE sent with every request; its value is never written to a file. "
        "Repeatable.",
        default=(),
        secret=True,
    )
    ready_check_timeout: float | None = option(
        WHERE,
        (
            "Longest time to wait for the server to become ready (0: send without a check). "
            "Default: it must be ready at once."
        ),
        "--ready-check-timeout",
        "--ready-check-timeout-sec",
        parser=Duration(),
    )
    chat: bool = option(
        WHERE,
        "Use /v1/chat/completions; random prompts are then text of approximately the drawn length.",
        "--chat",
        default=False,
    )
    request_rate: float | None = option(
        WHEN,
        "Requests per second; inf sends all requests at once.",
        "--request-rate",
        "--arrival-rate",
    )
    burstiness: float = option(
        WHEN,
        (
            "With --request-rate: shape of the gamma distribution of gaps (1: Poisson, below 1: "
            "burstier, inf: constant)."
        ),
        default=1.0,
    )
    arrivals: str | None = option(
        WHEN,
        "Arrival process, for example mmpp:rates=5/50,durations=10/1; also piecewise, ramp, gamma.",
    )
    ramp_up_strategy: str | None = option(
        WHEN,
        (
            "Shape of a rate ramp, linear | exponential, over --duration or about --num-prompts "
            "requests."
        ),
    )
    ramp_up_start_rps: float | None = option(WHEN, "Requests per second at the start of the ramp.")
    ramp_up_end_rps: float | None = option(WHEN, "Requests per second at the end of the ramp.")
    trace: Path | None = option(
        WHEN, "Replay the arrivals and lengths of a recorded trace or a run file."
    )
    trace_format: str = option(
        WHEN, "Format of --trace: auto, or the name of a format.", default="auto"
    )
    time_scale: float = option(
        WHEN,
        "Factor applied to the instants of --trace; 0.5 replays it twice as fast.",
        default=1.0,
    )
    timetable: Path | None = option(WHEN, "Replay a saved timetable, with its seed.")
    num_prompts: int | None = option(
        WHEN, "Number of requests. Default: 1000, or as many as arrive within --duration."
    )
    duration: float | None = option(
        WHEN, "Time during which requests arrive; their number is then random.", parser=Duration()
    )
    max_concurrency: int | None = option(
        WHEN,
        (
            "Alone: number of users in a closed loop. With a rate or a trace: largest number of "
            "requests in flight."
        ),
    )
    think_time: float = option(
        WHEN,
        "Closed loop, or --turns: mean think time of a user, exponentially distributed.",
        default=0.0,
        parser=Duration(),
    )
    prompt_tokens: str = option(
        WHAT,
        "Distribution of random prompt lengths in tokens, for example uniform:low=16,high=64.",
        default="deterministic:value=32",
    )
    turns: str | None = option(
        WHAT,
        (
            "Send conversations: `all` turns of those of a dataset, or a distribution of their "
            "number, for example geometric:mean=3. Arrivals and --num-prompts are then those of "
            "conversations; each next turn is sent --think-time after the last answer ended, with "
            "all that was said."
        ),
    )
    output_tokens: str | None = option(
        WHAT,
        (
            "Distribution of output lengths in tokens, for example geometric:mean=64. Default: the "
            "model ends its answers, after at most 128 tokens."
        ),
    )
    ignore_hash_ids: bool = option(
        WHAT,
        "Draw the prompts of a Mooncake or Bailian trace independently: without it, blocks of one "
        "hash id have the same tokens, so that a prefix cache hits as in the trace.",
        "--ignore-hash-ids",
        default=False,
    )
    max_tokens: int | None = option(
        WHAT,
        (
            "max_tokens of every request, and the largest length drawn. Default without a "
            "distribution: 128."
        ),
    )
    ignore_eos: bool = option(
        WHAT,
        (
            "Set each length with max_tokens and ignore_eos, even if the server accepts forced "
            "lengths."
        ),
        "--ignore-eos",
        default=False,
    )
    natural_lengths: bool = option(
        WHAT,
        (
            "Do not force lengths: max_tokens is --max-tokens or the drawn length, and the model "
            "may end earlier."
        ),
        "--natural-lengths",
        default=False,
    )
    extra_body: str | None = option(
        WHAT,
        (
            "JSON object whose fields are added to the body of every request, for example "
            "'{\"top_p\": 0.9}'."
        ),
    )
    dataset_name: str | None = option(
        WHAT, "Source of the prompts: random | sharegpt | jsonl | custom (same as jsonl)."
    )
    dataset_path: Path | None = option(
        WHAT, "File of prompts: ShareGPT, LMSYS-Chat-1M as JSON lines, or JSON lines."
    )
    tokenizer: Path | None = option(
        WHAT, "File tokenizer.json that counts the tokens of a dataset."
    )
    predictor: str | None = option(
        WHAT,
        (
            "Send a predicted length with each request: none | exact | exponential | "
            "lognormal:sigma=0.5 | uniform:low=0.5,high=1.5 | onebit:threshold=200 (tokens) | "
            "joint:path=FILE. Default: none."
        ),
        "--predictor",
        "--length-prediction",
    )
    cancel: float | None = option(
        WHAT,
        "Share of the requests whose client hangs up, from 0 to 1, at the time of --cancel-after.",
    )
    cancel_after: str | None = option(
        WHAT,
        (
            "When it hangs up: a time after sending (2s, exponential:mean=2s, "
            "uniform:low=1s,high=5s), or tokens received (tokens:16, tokens:geometric:mean=16). An "
            "answer that ends before is complete."
        ),
    )
    flows: str | None = option(
        WHAT,
        "Send a fairness id with each request, for order=vtc, drawn by weight: heavy=9,light=1.",
    )
    seed: int | None = option(
        WHEN, "Seed for arrivals, lengths and prompts; gaps scale with the rate. Default: 0."
    )
    processes: int = option(
        HOW, "Number of sender processes, which share one timetable.", default=1
    )
    token_times: bool = option(
        HOW,
        (
            "Record the instant of every token; implied by --save-detailed and by a metric or "
            "condition on itl (inter-token latency)."
        ),
        "--token-times",
        default=False,
    )
    drain_limit: float = option(
        HOW,
        "Longest wait for answers after the last request is sent.",
        default=600.0,
        parser=Duration(),
    )
    max_errors: int = option(
        HOW,
        "Stop after this many consecutive failed requests, not counting 429 and 503 (0: never).",
        default=100,
    )

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
        if self.api_key and any(
            text.partition(":")[0].strip().lower() == "authorization" for text in self.header
        ):
            raise SpecError("got --header authorization with --api-key; expected one of them")
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
        if self.think_time and self.turns is None:
            raise SpecError(
                "got --think-time in an open loop; expected it with --max-concurrency alone, or "
                "with --turns"
            )
        if self.turns is not None and sources[0] in ("--trace", "--timetable"):
            raise SpecError(
                f"got --turns with {sources[0]}; expected arrivals that are drawn: its rows are "
                "requests already"
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
    if not parts.netloc.isascii():
        raise SpecError(
            f"got --base-url {url}; expected a host of ASCII letters: other names are written with "
            "xn--"
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
