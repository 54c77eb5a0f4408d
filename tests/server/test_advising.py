"""`kendall advise` against a stub gateway: the table, the JSON, the exit statuses, and what it
asks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kendall import cli
from kendall.queueing.choosing.forecast import Advice, Forecast, Setting
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.json_form import json_object
from tests.queueing.made import prediction_of

STABLE = prediction_of()


def forecast(policy: str) -> Forecast:
    return Forecast(
        setting=Setting(policy=policy),
        load=0.5,
        prediction=STABLE,
        mean=UNKNOWN,
        clipped_fraction=0.0,
    )


def advice(target: str = "policy", *, best: bool = True) -> dict[str, Any]:
    gain = Estimate(0.34, 0.28, 0.4, 900.0) if best else UNKNOWN
    says = (
        "set elastic instead of dynamic: mean queueing delay 12 ms -> 8 ms, 34 % less (95 %: "
        "28 to 40 % less)"
    )
    found = Advice(
        target=target,
        objective="delay",
        current=forecast("dynamic"),
        best=forecast("elastic") if best else None,
        gain=gain,
        curve=({"policy": "elastic", "queueing_delay": 0.008},),
        change=best,
        says=says if best else f"no choice of {target}: none is stable",
    )
    return json_object(found)


class Stub:
    """A gateway that always gives the same answer, and remembers the question."""

    def __init__(self) -> None:
        self.status, self.body = 200, json.dumps({"advice": [advice()], "reason": None})
        self.path = ""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.path = self.path
                self.send_response(stub.status)
                self.end_headers()
                self.wfile.write(stub.body.encode())

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answers(self, body: object, status: int = 200) -> None:
        self.status, self.body = status, body if isinstance(body, str) else json.dumps(body)


@pytest.fixture
def stub() -> Iterator[Stub]:
    found = Stub()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["advise", *arguments])
    return int(stop.value.code or 0)


def test_a_table_and_the_sentence(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub.url) == 0
    shown = capsys.readouterr().out
    for part in (
        "dynamic",
        "elastic",
        "34 %",
        "28 % to 40 %",
        "policy: set elastic instead of dynamic",
    ):
        assert part in shown
    assert "gain: reduction of the quantity named in the sentence below" in shown


def test_one_json_object_and_nothing_else(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub.url, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "advice": [advice()],
        "load_balancer": None,
        "rate": None,
        "reason": None,
    }


def test_the_question_is_the_contracts(stub: Stub) -> None:
    flags = [
        "--objective",
        "v2",
        "--theta",
        "0.9",
        "--loss-cost",
        "3",
        "--family",
        "lognormal",
        "--target",
        "max-output-tokens",
        "--routing",
        "round_robin",
    ]
    assert run(stub.url + "/", *flags) == 0
    asked = urlsplit(stub.path)
    assert asked.path == "/admin/advice"
    expected = {
        "objective": "v2",
        "theta": "0.9",
        "loss_cost": "3.0",
        "family": "lognormal",
        "target": "max-output-tokens",
        "routing": "round_robin",
    }
    assert {name: values[0] for name, values in parse_qs(asked.query).items()} == expected
    assert run(stub.url, "--slo", "p99_queueing_delay=2s", "--json") == 0
    assert parse_qs(urlsplit(stub.path).query) == {"slo": ["p99_queueing_delay=2s"]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objective", "speed"], "expected one of delay"),
        (["--target", "polcy"], "expected one of batch-size"),
        (["--theta", "0.3"], "expected it with v1 or v2"),
        (["--slo", "soon"], "expected mean_QUANTITY=TIME"),
        (["--routing", "central"], "expected random, round_robin or least_requests"),
    ],
)
def test_wrong_arguments_are_exit_2_without_asking(
    stub: Stub, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stub.url, *flags) == 2
    assert message in capsys.readouterr().err
    assert stub.path == ""


def test_an_url_that_is_no_gateway_is_exit_2(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    for body, status in (
        ("<html>", 200),
        ({"detail": "Not Found"}, 404),
        ({"pages": []}, 200),
        ([1], 200),
    ):
        stub.answers(body, status)
        assert run(stub.url) == 2
        assert "expected the URL of a running `kendall serve`" in capsys.readouterr().err
    for url, status in (
        ("localhost:8080", 2),
        ("not a url", 2),
        ("http://127.0.0.1:9", 1),
    ):  # nobody listens: not the arguments' fault
        assert run(url) == status
        assert "expected the URL of a running `kendall serve`" in capsys.readouterr().err


def test_what_the_gateway_refuses_is_exit_2_in_its_words(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers(
        {
            "error": {
                "message": "got v2 without patience",
                "type": "invalid_request_error",
                "param": None,
                "code": "bad",
            }
        },
        400,
    )
    assert run(stub.url, "--objective", "v2") == 2
    assert "answered 400: got v2 without patience" in capsys.readouterr().err


def test_no_stable_choice_is_exit_3(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answers(
        {"advice": [advice("policy", best=False), advice("batch-size", best=False)], "reason": None}
    )
    assert run(stub.url) == 3
    shown = capsys.readouterr().out
    assert "none is stable" in shown
    assert "gain: reduction" not in shown
    stub.answers({"advice": [advice("policy"), advice("batch-size", best=False)], "reason": None})
    assert run(stub.url) == 0


@pytest.mark.parametrize(
    ("says", "best", "word"),
    [
        (
            "dynamic meets the SLO; no change is worth making: mean 12 ms with dynamic, 9 ms with "
            "elastic; the gain is uncertain",
            "elastic",
            "keep",
        ),
        ("dynamic is the best choice already: mean queueing delay 12 ms", "dynamic", "keep"),
        (
            "set elastic instead of dynamic: mean queueing delay 12 ms -> 8 ms, 34 % less",
            "elastic",
            "set",
        ),
    ],
)
def test_the_table_advises_what_the_sentence_advises(
    says: str, best: str, word: str, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was found best may not be worth the change: the row says so, too."""
    found = advice("policy") | {"says": says, "change": word == "set"}
    found["best"]["policy"] = best
    stub.answers({"advice": [found], "reason": None})
    assert run(stub.url) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("policy  ") and "%" in line]
    assert row.split()[-1] == word
    assert ("keep: the setting in force is as good" in text) == (word == "keep")
    assert "best found" in text


def test_what_stands_in_place_of_a_number_has_its_word_below_the_tables(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    open_below = advice("policy")
    open_below["gain"]["low"] = None
    open_below["says"] += " (95 %: minus much to 40 % less)"
    stub.answers({"advice": [open_below, advice("batch-size", best=False)], "reason": None})
    assert run(stub.url) == 0
    text = capsys.readouterr().out
    assert "?" not in text
    for mark in ("unknown: ", "-: ", "minus much: "):
        assert f"\n{mark}" in text


def test_a_gateway_that_says_how_many_requests_have_ended_is_to_be_asked_again(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers(
        {
            "advice": [],
            "reason": "3 requests of this epoch have ended in the last 300 s; 50 are needed",
        }
    )
    assert run(stub.url) == 1
    assert (
        "3 requests of this epoch have ended in the last 300 s; 50 are needed; ask again then"
        in capsys.readouterr().err
    )


def test_a_gateway_that_knows_too_little_yet_is_exit_1_with_its_reason(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers({"advice": [], "reason": "50 requests so far; 200 are needed"})
    assert run(stub.url) == 1
    assert "no advice: 50 requests so far; 200 are needed" in capsys.readouterr().err
    assert run(stub.url, "--json") == 1
    assert json.loads(capsys.readouterr().out)["advice"] == []


def balanced(routing: str = "random", reason: str | None = None) -> dict[str, Any]:
    """What a gateway with two servers says of a load balancer."""
    delay, sojourn = {"mean": 0.8}, {"mean": 2.0}
    routed = {"routing": routing, "method": "exact", "reason": reason}
    routed |= {
        "queueing_delay": {"mean": 1.9},
        "sojourn_time": {"mean": 2.9},
        "more": {"queueing_delay": 1.1, "sojourn_time": 0.9},
    }
    nothing = dict.fromkeys(("method", "queueing_delay", "sojourn_time", "more"))
    return {
        "servers": 2,
        "policy": "dynamic",
        "compared": "queueing_delay",
        "central": {"method": "exact", "queueing_delay": delay, "sojourn_time": sojourn},
        "routings": [routed if reason is None else routed | nothing],
    }


def test_what_a_load_balancer_costs_is_shown_with_several_servers(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers({"advice": [advice()], "load_balancer": balanced(), "reason": None})
    assert run(stub.url) == 0
    shown = capsys.readouterr().out
    assert "behind a load balancer, with a queue at each of 2 servers" in shown
    rows = [line.split("  ") for line in shown.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["one queue, as here", "800 ms", "2 s"] in cells
    assert ["a server by chance", "1.9 s", "+1.1 s", "2.9 s", "+900 ms"] in cells
    assert run(stub.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["load_balancer"] == balanced()
    stub.answers({"advice": [advice()], "load_balancer": None, "reason": None})
    assert run(stub.url) == 0
    assert "load balancer" not in capsys.readouterr().out
    assert run(stub.url, "--routing", "random") == 0
    assert "random: not compared: there is one server" in capsys.readouterr().out


def test_a_routing_without_numbers_has_its_reason(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    found = balanced("least_requests", "a simulation takes too long")
    stub.answers({"advice": [advice()], "load_balancer": found, "reason": None})
    assert run(stub.url, "--routing", "least_requests") == 0
    assert parse_qs(urlsplit(stub.path).query) == {"routing": ["least_requests"]}
    shown = capsys.readouterr().out
    assert "least_requests: a simulation takes too long" in shown
    assert "one queue, as here" in shown
