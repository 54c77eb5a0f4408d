"""Raw samples from a Prometheus: instant queries whose expression is a range selector.

Such a query gives each sample as it was scraped, all counters of one scrape at one instant.
`rate()` and `increase()` extrapolate, and a range query samples again: none of them is used. Every
request has a bound on its time and on the size of its answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec
import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.measurement.server_signals import ALL_NAMES
from kendall.remote import (
    REFUSED,
    check_key,
    check_no_credentials,
    key_refusal,
    parse_headers,
    unanswered,
)
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.signals import Series

CONNECT, ANSWER = 5.0, 60.0  # seconds
MOST_BYTES = 256 * 2**20  # of one answer
A_PROMETHEUS = "expected the URL of a Prometheus, for example http://127.0.0.1:9090"
BEFORE = 300.0  # seconds before a stretch, for the scrape that it begins with


class _Found(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Found] = []


class _QueryAnswer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


class _Labels(msgspec.Struct):
    status: str
    data: list[dict[str, str]] = []
    error: str = ""


_Kind = TypeVar("_Kind", _QueryAnswer, _Labels)


def headers_of(options: WatchOptions) -> dict[str, str]:
    """With the key; no message repeats a value, which may be one. Raises SpecError."""
    headers = dict(parse_headers(options.header))
    if options.api_key and "authorization" in headers:
        raise SpecError("got --header authorization with --api-key; expected one of them")
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    return headers


def client_of(options: WatchOptions, url: str) -> httpx.Client:
    """A client with the options' key, headers and trust. Raises SpecError."""
    check_no_credentials(url, "a URL")
    check_key(options.api_key, "--api-key")
    if not url.lower().startswith(("http://", "https://")):
        raise SpecError(f"got {url}; expected http://HOST:PORT")
    return httpx.Client(
        headers=headers_of(options),
        verify=options.trust.verification(url),
        timeout=httpx.Timeout(ANSWER, connect=CONNECT),
        trust_env=False,
    )


def get(client: httpx.Client, url: str, params: Mapping[str, str] | None = None) -> httpx.Response:
    """An answer within the bounds of time and size. Raises CommandError: nobody answers, or the
    answer is too large; SpecError: the key is refused.
    """
    try:
        with client.stream("GET", url, params=params) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise CommandError(
                        f"got an answer of more than {MOST_BYTES >> 20} MiB from {url}; expected "
                        "less: name fewer servers with --match"
                    )
            status = response.status_code
    except httpx.HTTPError as error:
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else ""
        raise CommandError(f"cannot reach {url}: {why or unanswered(error, url)}") from None
    if status in REFUSED:
        raise SpecError(
            key_refusal(url, status, "the key is not accepted", "--api-key or --header")
        )
    return httpx.Response(status, content=bytes(body))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus, or what answers like one."""

    url: str
    client: httpx.Client
    match: str = ""  # label matchers, without braces

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()

    def labels(self, start: float, end: float) -> list[dict[str, str]]:
        """The label sets of all series that a known server has, between these instants."""
        answer = self._get(
            "series",
            {"match[]": self._selector(ALL_NAMES), "start": f"{start:.3f}", "end": f"{end:.3f}"},
            _Labels,
        )
        return answer.data

    def samples(self, names: Iterable[str], start: float, end: float) -> list[Series]:
        """The raw samples of these series from `BEFORE` the start to the end."""
        seconds = math.ceil(end - start + BEFORE)
        query = f"{self._selector(names)}[{seconds}s]"
        answer = self._get("query", {"query": query, "time": f"{end:.3f}"}, _QueryAnswer)
        found = [] if answer.data is None else answer.data.result
        return [
            Series(
                each.metric.get("__name__", ""),
                each.metric,
                np.array([at for at, _ in each.values]),
                np.array([float(value) for _, value in each.values]),
            )
            for each in found
        ]

    def _selector(self, names: Iterable[str]) -> str:
        parts = [f'__name__=~"{"|".join(sorted(names))}"']
        if matchers := self.match.strip().removeprefix("{").removesuffix("}").strip().strip(","):
            parts.append(matchers)
        return f"{{{','.join(parts)}}}"

    def _get(self, path: str, params: Mapping[str, str], kind: type[_Kind]) -> _Kind:
        where = f"{self.url.rstrip('/')}/api/v1/{path}"
        response = get(self.client, where, params)
        try:
            answer = msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError:
            raise SpecError(
                f"got an answer of status {response.status_code} from {where} that is not a "
                f"Prometheus'; {A_PROMETHEUS}"
            ) from None
        if answer.status != "success":
            raise SpecError(
                f"got {answer.error!r:.300} from {where}; expected samples: is --match "
                f"{self.match!r} a list of label matchers, such as 'job=\"vllm\"'?"
            )
        return answer
