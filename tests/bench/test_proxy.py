"""The proxies' bench: its stub, its slices and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.gateway_cost import proxy, turns
from bench.gateway_cost.proxy import (
    ENVOY,
    KINDS,
    LEVELS,
    LITELLM,
    OURS,
    Added,
    findings,
    measure,
    ours,
    request,
)
from bench.gateway_cost.servers import Server, serving
from bench.gateway_cost.stub import TOKENS
from bench.gateway_cost.turns import Counted
from bench.gateway_cost.wire import Connection, WireError


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Server]:
    with serving("stub", ["bench.gateway_cost.stub", "{port}"], tmp_path) as server:
        yield server


def answered(port: int, request: bytes) -> bytes:
    connection = Connection(port)
    with connection.socket as socket:
        socket.settimeout(30)
        connection.ask(request)
        while not connection.read():
            pass
        return bytes(connection.answer)


def test_the_stub_answers_whole_and_streamed_one_after_the_other(stub: Server) -> None:
    assert answered(stub.port, request("whole")).count(b'"finish_reason": "length"') == 1
    streamed = answered(stub.port, request("stream"))
    assert streamed.count(b"data: ") == TOKENS + 2
    assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    with pytest.raises(WireError, match="404"):
        answered(stub.port, b"POST /v1/other HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.slow
def test_the_gateway_passes_every_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another stub that stands for a proxy; at most 300 calls are under way."""
    monkeypatch.setattr(turns, "WARM_UP", 0.0)
    monkeypatch.setattr(proxy, "SLICES", 1)
    monkeypatch.setattr(proxy, "MODERATE", 0.1)

    def another(folder: Path, _: int) -> AbstractContextManager[Server]:
        return serving(ENVOY, ["bench.gateway_cost.stub", "{port}"], folder)

    found = list(measure(tmp_path, 1, 1, {OURS: ours, ENVOY: another}, seconds=0.05))
    passed = [each for each in found if isinstance(each, Counted)]
    assert {(each.server, each.kind) for each in passed} == {
        (name, kind) for name in (OURS, ENVOY) for kind in ("whole", "stream")
    }
    assert all(each.count > 0 and each.cpu > 0 for each in passed)
    assert {each.proxy for each in found if isinstance(each, Added)} == {OURS, ENVOY}


def rounds(calls: dict[str, float], added: float) -> Iterator[Counted | Added]:
    for name, rate in calls.items():
        for kind in KINDS:
            yield Counted(name, kind, round(rate), 1.0, 1.0, 1.0, 0.5)
        straight = dict.fromkeys(LEVELS, 1.0)
        yield Added(name, rate / 2, dict.fromkeys(LEVELS, 1.0 + added), straight)


@pytest.mark.parametrize(
    ("theirs", "added", "broken"),
    [
        (100.0, 0.5, set()),
        (101.0, 0.5, {"calls", "tokens"}),
        (100.0, 2.0, {"p50"}),
        (100.0, 6.0, {"p50", "p99"}),
    ],
)
def test_the_bounds(theirs: float, added: float, broken: set[str]) -> None:
    every = [
        each
        for _ in range(6)
        for each in rounds({OURS: 1000.0, LITELLM: theirs, ENVOY: 5000.0}, added)
    ]
    judged = findings(every)
    said = [each.what for each in judged if each.holds is False]
    words = ("calls", "tokens", "p50", "p99")
    assert {word for word in words for what in said if word in what} == broken
    beside = {each.what: each for each in judged}
    ratio = beside[f"{OURS} / {ENVOY}: calls by processor second"]
    assert (ratio.found.value, ratio.holds) == (pytest.approx(0.2), None)
