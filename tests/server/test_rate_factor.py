"""The rate as a setting of an advice: of a gateway on virtual time, and in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fastapi import FastAPI

from kendall.queueing.choosing.advice.rates import rate_sentences
from kendall.queueing.choosing.forecast import RateBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.interval import Estimate
from kendall.server.gateway import Gateway
from kendall.server.live import model, prediction_worker
from tests.server.asgi import Call
from tests.server.test_autopilot_manual import InThisProcess
from tests.server.test_load_balancer import asked, serving


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PredictorClient", InThisProcess)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())


@pytest.mark.slow
def test_an_advice_at_another_rate_is_of_that_rate_and_says_what_the_setting_can_serve() -> None:
    async def work(app: FastAPI, gateway: Gateway) -> None:
        slo = b"target=batch-size&slo=p99_queueing_delay%3D500ms"
        now = await asked(app, "/admin/advice", slo)
        more = await asked(app, "/admin/advice", slo + b"&rate_factor=1.25")
        fewer = await asked(app, "/admin/advice", b"target=batch-size&rate_factor=0.5")
        assert gateway.batcher.policy.name == "capped"
        rate, here, there = now["rate"], *(each["advice"][0]["current"] for each in (now, more))
        assert (rate["factor"], more["rate"]["factor"]) == (1.0, 1.25)
        assert there["load"] == pytest.approx(1.25 * here["load"], rel=0.01)
        assert there["queueing_delay"]["mean"] > here["queueing_delay"]["mean"]
        # largest rates are of the setting, whatever is asked about
        stable = rate["observed"]["value"] / here["load"]
        assert rate["largest_stable"] == pytest.approx(stable, rel=1e-6)
        assert more["rate"]["largest_stable"] == pytest.approx(stable, rel=0.01)
        kept = rate["largest_within_slo"]
        assert 0 < kept < stable
        assert more["rate"]["largest_within_slo"] == pytest.approx(kept, rel=0.03)
        at_most = kept / rate["observed"]["value"]
        for factor, keeps in ((0.9 * at_most, True), (1.1 * at_most, False)):
            query = slo + f"&rate_factor={factor:.4f}".encode()
            found = (await asked(app, "/admin/advice", query))["advice"][0]["current"]
            p99 = found["queueing_delay"]["p99"] if found["stable"] else 9.0
            assert (p99 is None or p99 <= 0.5) == keeps, (factor, p99)
        grows = (await asked(app, "/admin/advice", slo + b"&rate_factor=2"))["advice"][0]
        assert not grows["current"]["stable"]  # it had no value to compare: 500
        assert grows["best"]["queueing_delay"]["mean"] < 0.5
        assert (fewer["rate"]["slo"], fewer["rate"]["largest_within_slo"]) == (None, None)
        wrong = Call(app, "GET", "/admin/advice", query=b"rate_factor=-2")
        await wrong.task
        assert wrong.status == 400
        assert "got rate_factor=-2; expected a factor on the observed rate" in wrong.body.decode()
        assert wrong.json()["error"]["param"] == "rate_factor"

    serving(1, work)


def test_an_advice_says_that_the_gateway_refuses_calls() -> None:
    """What it is for is the rate of the others."""

    async def work(app: FastAPI, gateway: Gateway) -> None:
        found = await asked(app, "/admin/advice", b"target=batch-size")
        assert found["rate"]["refused"] is None
        last = prediction_worker._memory.last
        assert last is not None
        says = "41.2% of the calls were refused by limits of the gateway (slo 41.2%): and so on"
        compared = dataclasses.replace(
            last.compared, assumptions=(Assumption("all_admitted", False, 0.412, says),)
        )
        prediction_worker._memory.last = dataclasses.replace(last, compared=compared)
        rate = prediction_worker.ask_rates({})
        assert rate is not None
        assert rate.refused == says.partition(":")[0]
        assert f"only admitted calls are counted: {rate.refused}" in rate.says

    serving(1, work)


def found(**changes: Any) -> RateBounds:
    observed = Estimate(12.1, 11.34, 12.96, 900.0)
    bounds = RateBounds(observed=observed, largest_stable=18.27, slo=None)
    return dataclasses.replace(bounds, **changes)


def test_in_words() -> None:
    assert rate_sentences(found()) == (
        "12.1 requests/s observed (95 %: 11.3 to 13)",
        "the setting in force has a steady state up to 18.3 requests/s, 1.51 times the observed "
        "rate",
    )
    slo = "p99_queueing_delay=2s"
    asked, kept, _ = rate_sentences(found(factor=1.5, slo=slo, largest_within_slo=14.02))
    assert asked == "18.1 requests/s, 1.5 times 12.1 requests/s observed (95 %: 11.3 to 13)"
    assert kept == (
        f"the setting in force keeps {slo} up to 14 requests/s, 1.16 times the observed rate"
    )
    _, refused, _ = rate_sentences(found(refused="41.2% of the calls were refused by limits"))
    assert refused == ("only admitted calls are counted: 41.2% of the calls were refused by limits")
    *_, none = rate_sentences(found(slo=slo, reason="no load keeps it", largest_stable=None))
    assert none == "no rate is known at which the setting in force keeps it: no load keeps it"
