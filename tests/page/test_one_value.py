"""Every quantity has one value, wherever the page's state has it: in the headline, the tiles, the
charts' last points, the table of what-ifs and the assumptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.queueing.choosing.forecast import WhatIf
from kendall.queueing.estimation.summaries import Judgement
from kendall.queueing.result import Prediction, Quantiles
from kendall.server.page.history import short
from kendall.server.page.minute import MINUTE_COLUMNS
from kendall.server.page.state import COLUMNS, topics
from tests.page.site import becomes, loaded, serving, topics_of
from tests.server.asgi import running
from tests.server.made_answers import what_if
from tests.server.test_live import look_of
from tests.virtual_time import run_virtual

POLICIES = ("capped:max_batch_size=8", "continuous:max_batch_size=8")


def quantities(shown: dict[str, Any]) -> dict[str, list[Any]]:
    """Each quantity, everywhere that it stands."""
    look, row = shown["look"], dict(zip(COLUMNS, shown["now"]["row"], strict=True))
    prediction, mine = look["prediction"], shown["what_if_in_force"] or {}
    found = {
        "epoch": [shown["gateway"]["in_force"]["epoch"]],
        "in service": [row["in_service"], sum(each["size"] for each in shown["now"]["servers"])],
    }
    if shown.get("servers"):
        found["in service"].append(sum(each["in_service"] for each in shown["servers"]))
        serving = sum(each["state"] == "serving" for each in shown["servers"])
        found["servers that serve"] = [shown["gateway"]["serving"], serving]
    if prediction is None:
        return found
    comparison = prediction["comparison"]
    delays = {
        "queueing_delay": ("predicted_delay", "observed_delay"),
        "sojourn_time": ("predicted_sojourn", "observed_sojourn"),
    }
    predicted, observed = delays[prediction["compared"]]
    found["epoch"].append(prediction["epoch"])
    found["load"] = [row["load"]]
    found["observed mean"] = [row[observed], comparison["observed"]["value"]]
    means = [row[predicted], comparison["predicted"]["value"]]
    found["predicted mean"] = [*means, prediction[prediction["compared"]].get("mean")]
    if not (look["outdated"] or look["stopped"]):
        found["arrival rate"] = [row["arrival_rate"], prediction["arrival_rate"]]
    judged = comparison["assumptions"]["stable_queue"]["holds"]
    found["steady state"] = []
    if not look["outdated"]:  # else load and steady state are those of the present rate
        utilisation = [row["predicted_utilisation"], prediction["utilisation"]]
        found["utilisation, predicted"] = utilisation
        found["load"] += [prediction["load"], prediction["load_interval"]["value"]]
        found["steady state"] += [prediction["stable"] is not False, judged is not False]
    if mine:
        found["load"].append(mine["load"])
        found["steady state"].append(mine["stable"] is not False)
        for name, (column, _) in delays.items():
            values = [row[column], (prediction[name] or {}).get("mean")]
            found[f"predicted {name}"] = [*values, (mine[name] or {}).get("mean")]
    return found


def apart(shown: dict[str, Any]) -> dict[str, list[Any]]:
    """Those with more than one value: as the page rounds them."""

    def rounded(value: Any) -> Any:
        return short(value) if isinstance(value, float) else value

    every = {
        name: [rounded(value) for value in values] for name, values in quantities(shown).items()
    }
    return {name: values for name, values in every.items() if len(set(values)) > 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_ifs_of_an_earlier_assessment_give_the_setting_in_force_no_second_value(
    policy: str,
) -> None:
    """They are renewed once a minute, the assessment every few seconds."""

    async def main() -> None:
        async with running(policy) as (_, gateway):
            live = gateway.live_model()
            older = Quantiles(mean=0.321, p99=1.0)
            live.prediction = replace(look_of(policy), at=gateway.now())
            live.what_if_in_force = what_if(
                policy, load=0.3, queueing_delay=older, sojourn_time=older
            )
            live.what_if = []
            shown = topics(gateway, 1e9)
            assert "predicted queueing_delay" in quantities(shown)
            assert apart(shown) == {}
            assert shown["what_if_in_force"]["effective_max_batch_size"] == 8

    run_virtual(main())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_row_of_a_second_is_that_of_the_assessment(policy: str) -> None:
    """Interval and observation of the quantity that is compared alone; instants are Unix time."""
    minute = [float(number) for number in range(len(MINUTE_COLUMNS))]

    async def main() -> None:
        async with running(policy) as (_, gateway):
            live = gateway.live_model()
            live.prediction = look = replace(look_of(policy), at=gateway.now() - 7.0)
            live.what_if_at, live.what_if_left = gateway.now() - 9.0, 3
            rates = live.activity.recent
            for begins in (True, False, False):  # of one call
                rates.saw(gateway.now(), begins_call=begins)
            shown = topics(gateway, 1e9 + 0.26, minute)
            found = dict(zip(COLUMNS, shown["now"]["row"], strict=True))
            assert shown["look"]["at"] == 999_999_993
            state = shown["what_if_state"]
            assert (state["at"], state["left"]) == (999_999_991, 3)
            assert [found.pop(name) for name in MINUTE_COLUMNS] == minute
            assert (found.pop("at"), found.pop("queue_length"), found.pop("in_service")) == (
                (1_000_000_000.3, 0, 0)
            )
            factor, predicted = live.rate_factor, look.predicted
            assert isinstance(predicted, Prediction)
            expected: dict[str, float | None] = {
                "arrival_rate": look.arrival_rate * factor,
                "sequence_rate": 3 * look.arrival_rate * factor,
                "utilisation": 0.0,
                "predicted_utilisation": None if live.outdated else predicted.utilisation,
                "load": predicted.load * factor,
                "predicted_queue_length": None if live.outdated else predicted.queue_length.mean,
            }
            observed = look.comparison.observed
            delay = look.observed_queueing_delay
            sojourns = look.compared == "sojourn_time"
            assert sojourns == policy.startswith("continuous")
            assert delay is not None
            for what, seen, own, compared in (
                ("delay", delay, predicted.queueing_delay, not sojourns),
                ("sojourn", observed if sojourns else None, predicted.sojourn_time, sojourns),
            ):
                ends = {"": None, "_low": None, "_high": None, "_p95": None, "_p99": None}
                if seen is not None:
                    ends |= {
                        "": seen.mean.value,
                        "_low": seen.mean.low,
                        "_high": seen.mean.high,
                        "_p95": seen.quantiles["p95"].value,
                        "_p99": seen.quantiles["p99"].value,
                    }
                expected |= {f"observed_{what}{end}": value for end, value in ends.items()}
                expected |= {
                    f"predicted_{what}": own.mean,
                    f"predicted_{what}_low": look.interval.low if compared else None,
                    f"predicted_{what}_high": look.interval.high if compared else None,
                    f"predicted_{what}_p95": own.p95,
                    f"predicted_{what}_p99": own.p99,
                }
            assert found == {
                name: None if value is None else short(value) for name, value in expected.items()
            }

    run_virtual(main())


def test_without_an_assessment_the_rates_are_those_of_the_last_minute() -> None:
    async def main() -> None:
        async with running("single") as (_, gateway):
            await asyncio.sleep(10 - gateway.now() % 10)
            began = gateway.now()
            for begins in (True, True, False):
                gateway.live_model().activity.recent.saw(began, begins_call=begins)
            shown = topics(gateway, 1e9)
            found = dict(zip(COLUMNS, shown["now"]["row"], strict=True))
            calls, sequences = found["arrival_rate"], found["sequence_rate"]
            assert sequences == pytest.approx(1.5 * calls, rel=1e-5)
            assert calls == pytest.approx(gateway.live_model().activity.arrival_rate(), rel=1e-5)
            assert shown["look"]["prediction"] is None
            assert shown["look"]["reason"].startswith("no prediction yet")
            assert (shown["look"]["at"], shown["what_if"], shown["servers"]) == (None, [], [])
            assert found["load"] is found["predicted_delay"] is found["observed_delay"] is None
            about = shown["gateway"]
            assert (about["state"], about["model"], about["looks"]) == ("serving", "tiny", False)
            assert (about["resizable"], about["serving"], about["restarts"]) == (None, 1, 0)
            assert (about["keyed"], about["law"]) == (False, True)

    run_virtual(main())


def forecast(load: float, **changes: Any) -> WhatIf:
    if load >= 1:
        changes |= {"stable": False, "queueing_delay": None, "sojourn_time": None}
    return what_if(load=load, **changes)


def test_loads_follow_the_arrivals_before_the_predicting_process_has_an_answer() -> None:
    """It may have no processor for minutes: what has no steady state at the present rate is known
    without it, and so is the load of every setting.
    """

    async def main() -> None:
        async with running("single") as (_, gateway):
            live = gateway.live_model()
            look = live.prediction = replace(look_of("single"), at=gateway.now())
            rate, load = look.arrival_rate, look.predicted.load
            live._what_if_basis = look.estimates
            live.what_if_in_force = forecast(load)
            live.what_if = [forecast(each) for each in (0.2, 0.4, 1.2)]
            live.what_if_at = gateway.now()
            for _ in range(400):
                await asyncio.sleep(1 / (4 * rate))
                live.activity.recent.saw(gateway.now(), begins_call=True)
            shown = topics(gateway, 1e9)
            assert shown["look"]["outdated"]
            assert shown["what_if_state"]["outdated"]
            assert apart(shown) == {}
            row = dict(zip(COLUMNS, shown["now"]["row"], strict=True))
            assert row["arrival_rate"] == pytest.approx(4 * rate, rel=0.01)
            assert row["predicted_utilisation"] is None
            assert row["load"] == pytest.approx(4 * load, rel=0.01)
            mine, *others = [shown["what_if_in_force"], *shown["what_if"]]
            assert mine["stable"] is False
            assert [each["load"] for each in others] == pytest.approx([0.8, 1.6, 4.8], rel=0.01)
            assert [each["stable"] for each in others] == [True, False, False]
            gateway.limits.patience = 1.0
            patient = topics(gateway, 1e9)["what_if"]
            assert [each["stable"] for each in patient] == [True, True, None]

    run_virtual(main())


@pytest.mark.parametrize(
    ("holds", "stable", "load", "says"),
    [
        (None, None, 1.02, "whether there is a steady state is not known yet"),
        (True, None, 1.02, "what the gateway refuses keeps the queue finite"),
        (False, False, 0.97, "the queue grows without bound"),
        (True, True, 0.6, "by simulation"),
        (True, None, 0.6, "by simulation"),
        (False, True, 0.6, "by simulation"),
    ],
)
def test_the_setting_in_force_says_of_its_steady_state_what_the_assumption_says(
    holds: bool | None, stable: bool | None, load: float, says: str
) -> None:
    async def main() -> None:
        async with running("single") as (_, gateway):
            live = gateway.live_model()
            look = look_of("single")
            assert isinstance(look.predicted, Prediction)
            predicted: Any = {"stable": stable, "load": load}
            own = "another reason" if says == "by simulation" else says
            judged = {**look.comparison.assumptions, "stable_queue": Judgement(holds, own)}
            live.prediction = replace(
                look,
                at=gateway.now(),
                predicted=replace(look.predicted, **predicted),
                comparison=replace(look.comparison, assumptions=judged),
            )
            live.what_if_in_force = forecast(0.6, notes=("by simulation",))
            assert topics(gateway, 1e9)["what_if_in_force"]["notes"] == [says]

    run_virtual(main())


def test_a_setting_that_could_not_serve_the_rate_before_is_open_at_the_present_one() -> None:
    async def main() -> None:
        async with running("single") as (_, gateway):
            live = gateway.live_model()
            look = live.prediction = replace(look_of("single"), at=gateway.now())
            rate = look.estimates.arrival_rate.scaled(4.0)
            live._what_if_basis = replace(look.estimates, arrival_rate=rate)
            live.what_if_in_force, live.what_if = forecast(2.4), [forecast(2.0)]
            (other,) = topics(gateway, 1e9)["what_if"]
            assert other["load"] == pytest.approx(0.5, rel=0.05)
            assert (other["stable"], other["pending"]) == (None, True)

    run_virtual(main())


@asynccontextmanager
async def assessed(gateway: GatewayProcess, rate: float) -> AsyncIterator[None]:
    """Under that load, with what-ifs."""

    async def there() -> bool:
        shown = await topics_of(gateway.url)
        state = shown.get("what_if_state") or {}
        return bool(shown.get("what_if")) and not state["left"]

    async with loaded(gateway, rate, 240.0):
        await becomes(there)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "single"])
def test_one_value_of_each_quantity_at_any_load_and_after_a_step(
    runner: asyncio.Runner, tmp_path: Path, policy: str
) -> None:
    """Half of what can be served, four times as much, and half again."""

    async def main() -> None:
        async with serving(tmp_path, "--policy", policy) as gateway:
            slow = 4.0 if policy == "single" else 15.0
            for rate in (slow, 4 * slow, slow):
                async with assessed(gateway, rate):
                    for _ in range(12):
                        assert apart(await topics_of(gateway.url)) == {}, rate
                        await asyncio.sleep(1.0)

    runner.run(main())
