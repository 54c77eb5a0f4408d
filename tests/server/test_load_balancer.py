"""What a load balancer would cost, of a gateway with several servers on virtual time: in the
prediction, the advice and the topics of the page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI

from kendall.server.gateway import Gateway
from kendall.server.live import model, prediction_worker
from kendall.server.page.state import topics
from tests.server.asgi import Call, call, running
from tests.server.test_autopilot_manual import InThisProcess, loaded
from tests.virtual_time import run_virtual

CAPPED = "capped:max_batch_size=4"
RATE = 60.0  # requests/s of 32 tokens: a load of about 0.7 at two servers


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PredictorClient", InThisProcess)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())


def serving(
    servers: int, work: Callable[[FastAPI, Gateway], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    """A gateway that has answered half a minute of load."""

    async def main() -> None:
        slow = {"prediction_interval": 5.0, "what_if_interval": 1e6} | settings
        async with running(CAPPED, servers=servers, **slow) as (app, gateway):
            await loaded(gateway, RATE, 20.0)
            await work(app, gateway)

    run_virtual(main())


async def asked(app: FastAPI, path: str, query: bytes = b"") -> Any:
    made = Call(app, "GET", path, query=query)
    await made.task
    assert made.status == 200, made.body
    return made.json()


@pytest.mark.slow
def test_it_is_in_the_prediction_and_on_the_page_with_the_what_ifs() -> None:
    async def work(app: FastAPI, gateway: Gateway) -> None:
        found = await asked(app, "/admin/prediction", b"what_if=true")
        balanced, mine = found["load_balancer"], found["what_if_in_force"]
        assert (balanced["servers"], balanced["policy"]) == (2, CAPPED)
        assert balanced["central"]["queueing_delay"] == mine["queueing_delay"]
        assert balanced["central"]["sojourn_time"] == mine["sojourn_time"]
        assert [each["routing"] for each in balanced["routings"]] == ["random", "round_robin"]
        for each in balanced["routings"]:
            assert each["more"]["queueing_delay"] > 0
        assert json.loads(json.dumps(topics(gateway, 0.0)["load_balancer"])) == balanced
        again = await asked(app, "/admin/prediction")
        assert again["load_balancer"] == balanced
        gateway.limits.begin_epoch()
        assert (await asked(app, "/admin/prediction"))["load_balancer"] is None

    serving(2, work)


@pytest.mark.slow
def test_what_ifs_at_another_rate_are_steady_states_of_that_rate() -> None:
    async def work(app: FastAPI, gateway: Gateway) -> None:
        now = await asked(app, "/admin/prediction", b"what_if=true")
        more = await asked(app, "/admin/prediction", b"rate_factor=1.25")
        assert more["rate_factor"] == 1.25
        here, there = now["what_if_in_force"], more["what_if_in_force"]
        assert there["load"] == pytest.approx(1.25 * here["load"], rel=1e-6)
        assert there["queueing_delay"]["mean"] > here["queueing_delay"]["mean"]
        assert here["gain"] == 0.0
        assert there["gain"] is None, "other requests would come"
        assert {each["policy"] for each in more["what_if"]} >= {"dynamic", "single"}
        again = await asked(app, "/admin/prediction")
        assert again["what_if_in_force"] == here, "they stay as they are"
        for bad in (b"0", b"nan", b"x", b"-1"):
            made = Call(app, "GET", "/admin/prediction", query=b"rate_factor=" + bad)
            await made.task
            assert made.status == 400
            assert "expected a" in made.json()["error"]["message"]

    serving(2, work)


@pytest.mark.slow
def test_an_advice_has_it_for_the_routing_that_is_asked_for() -> None:
    async def work(app: FastAPI, gateway: Gateway) -> None:
        target = b"target=batch-size"
        usual = await asked(app, "/admin/advice", target)
        assert [each["routing"] for each in usual["load_balancer"]["routings"]] == [
            "random",
            "round_robin",
        ]
        named = await asked(app, "/admin/advice", target + b"&routing=least_requests")
        (fewest,) = named["load_balancer"]["routings"]
        assert (fewest["routing"], fewest["method"]) == ("least_requests", "simulation")
        wrong = Call(app, "GET", "/admin/advice", query=b"routing=fewest")
        await wrong.task
        error = wrong.json()["error"]
        assert (wrong.status, error["code"]) == (400, "invalid_objective")
        assert error["param"] == "routing"

    serving(2, work)


@pytest.mark.slow
def test_with_one_server_it_is_left_out() -> None:
    async def work(app: FastAPI, gateway: Gateway) -> None:
        found = await asked(app, "/admin/prediction", b"what_if=true")
        assert found["what_if"]
        assert found["load_balancer"] is None
        assert (await asked(app, "/admin/advice", b"target=batch-size"))["load_balancer"] is None
        assert topics(gateway, 0.0)["load_balancer"] is None

    serving(1, work)


def test_before_there_is_anything_to_go_by_there_is_none() -> None:
    async def main() -> None:
        async with running(CAPPED, servers=2) as (app, gateway):
            await asyncio.sleep(1.0)
            assert (await call(app, "GET", "/admin/prediction")).json()["load_balancer"] is None
            found = await asked(app, "/admin/advice")
            assert (found["advice"], found["load_balancer"]) == ([], None)
            assert gateway.live_model().load_balancer is None

    run_virtual(main())
