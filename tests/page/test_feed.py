"""The page's server side on virtual time: what is sent, when, to whom, and how much of it."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
from typing import Any

import pytest

from kendall.queueing.estimation.summaries import SecondMeans
from kendall.queueing.latency.profile import Profile
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.live.answers import DelayCharts
from kendall.server.page.assets import load_assets
from kendall.server.page.feed import MOST_FROM_ONE, MOST_VIEWERS, Feed
from kendall.server.page.history import COARSE, FINE, History, short
from kendall.server.page.state import COLUMNS, MEMBERS, row, servers, topics
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual


def events(body: bytes) -> list[tuple[str, Any]]:
    """Name and data of each."""
    found = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_the_document_is_asked_for_again_and_its_files_are_kept() -> None:
    async def main() -> None:
        async with running() as (app, _):
            version = load_assets().version
            first = await call(app, "GET", "/", headers={"accept-encoding": "gzip"})
            assert first.headers["cache-control"] == "no-cache"
            assert first.headers["content-security-policy"].startswith("default-src 'self'")
            assert version in gzip.decompress(first.body).decode()
            again = await call(app, "GET", "/", headers={"if-none-match": first.headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            script = await call(app, "GET", f"/live/static/{version}/app.js")
            assert script.headers["content-type"].startswith("text/javascript")
            assert "immutable" in script.headers["cache-control"]
            assert b"follow(" in script.body
            for path in (
                f"/live/static/{version}/absent.js",
                "/live/static/old/app.js",
                f"/live/static/{version}/../state.py",
            ):
                assert (await call(app, "GET", path)).status == 404

    run_virtual(main())


def test_every_file_that_the_document_names_is_there_and_no_other_host_is_named() -> None:
    assets = load_assets()
    document = assets.document.plain.decode()
    named = [part.split('"')[0] for part in document.split(f"live/static/{assets.version}/")[1:]]
    assert len(named) > 15
    assert set(named) <= set(assets.files)
    modules = {name for name in assets.files if name.endswith(".js") and "/" not in name}
    assert modules == {name for name in named if name.endswith(".js") and "/" not in name}, (
        "each is loaded ahead"
    )
    ours = [
        asset.plain.decode()
        for name, asset in assets.files.items()
        if name.endswith((".js", ".css")) and not name.startswith("vendor/")
    ]
    assert not [text for text in [document, *ours] if "https:" in text or "//cdn" in text]
    assert "@VERSION@" not in document


def test_a_viewer_gets_everything_first_and_then_what_changed() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            await asyncio.sleep(1.0)  # the first tick may still have seen it start
            viewer = Call(app, "GET", "/live/events")
            await viewer.started.wait()
            await asyncio.sleep(3.5)
            found = events(viewer.body)
            assert {
                "hello",
                "gateway",
                "now",
                "look",
                "what_if",
                "checks",
                "autopilot",
                "switches",
            } <= {name for name, _ in found}
            assert found[0][0] == "hello"
            names = [name for name, _ in found]
            assert names.count("now") == 4
            assert names.count("gateway") == 1, "it did not change"
            gateway.limits.begin_epoch()
            await asyncio.sleep(1.0)
            later = events(viewer.body)[len(found) :]
            assert {name for name, _ in later} >= {"now", "gateway", "switches"}
            (switches,) = (data for name, data in later if name == "switches")
            assert [each["first"] for each in switches] == [True, False]
            viewer.leave()
            await viewer.task

    run_virtual(main())


def test_a_switch_says_whether_the_law_is_another_one() -> None:
    """A calibration begins an epoch under the same setting; so do changes that are undone within
    a second.
    """

    async def main() -> None:
        async with running() as (_, gateway):
            feed = Feed(gateway)
            feed.tick()
            gateway.limits.change(PolicyChange(max_output_tokens=32))
            gateway.limits.change(PolicyChange(max_output_tokens=None))
            feed.tick()
            assert gateway.latency.law is not None
            measured = dataclasses.replace(gateway.latency.law)
            gateway.latency.adopt(Profile(name="tiny", law=measured))
            gateway.limits.begin_epoch()
            feed.tick()
            gateway.limits.begin_epoch()
            feed.tick()
            (switches,) = (data for name, data in events(feed.everything()) if name == "switches")
            assert [each["calibrated"] for each in switches] == [False, False, True, False]
            assert len({each["max_output_tokens"] for each in switches}) == 1

    run_virtual(main())


def test_viewers_are_written_the_same_bytes_and_counted() -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            feed = Feed(gateway)
            feed.tick()
            streams = [feed.follow() for _ in range(20)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            assert feed.viewers == 20
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0)
            feed.tick()
            found = await asyncio.gather(*waiting)
            assert len({id(chunk) for chunk in found}) == 1
            for stream in streams:
                await stream.aclose()
            assert feed.viewers == 0

    run_virtual(main())


def test_viewers_from_one_address_are_bounded_and_others_are_not_shut_out() -> None:
    async def main() -> None:
        async with running() as (app, _):
            viewers = [Call(app, "GET", "/live/events") for _ in range(MOST_FROM_ONE)]
            for viewer in viewers:
                await viewer.started.wait()
            assert {viewer.status for viewer in viewers} == {200}
            refused = await call(app, "GET", "/live/events")
            assert (refused.status, refused.json()["error"]["code"]) == (429, "too_many_viewers")
            assert refused.headers["retry-after"]
            elsewhere = Call(app, "GET", "/live/events", client="192.0.2.1")
            await elsewhere.started.wait()
            assert elsewhere.status == 200
            viewers[0].leave()
            await viewers[0].task
            again = Call(app, "GET", "/live/events")
            await again.started.wait()
            assert again.status == 200
            for viewer in (*viewers[1:], elsewhere, again):
                viewer.leave()
                await viewer.task

    run_virtual(main())


def test_viewers_are_bounded_in_all_and_no_address_is_kept() -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            feed = Feed(gateway)
            taken = [
                f"2001:db8::{number:x}"
                for number in range(MOST_VIEWERS + 5)
                if feed.enter(f"2001:db8::{number:x}")
            ]
            assert len(taken) == MOST_VIEWERS
            for address in taken:
                feed.leave(address)
            assert not feed._seats
            assert feed.enter("2001:db8::1")

    run_virtual(main())


def test_who_was_too_slow_gets_everything_again() -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            feed = Feed(gateway)
            feed.tick()
            stream = feed.follow()
            await anext(stream)
            gateway.limits.begin_epoch()
            feed.tick()  # the news of this second pass the viewer by
            feed.tick()
            assert {"hello", "gateway", "switches"} <= {
                name for name, _ in events(await anext(stream))
            }
            await stream.aclose()

    run_virtual(main())


def test_the_stream_ends_once_the_gateway_leaves_and_not_while_it_answers() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            await asyncio.sleep(1.0)  # the first tick may still have seen it start
            viewer = Call(app, "GET", "/live/events")
            requests = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=1500)) for _ in range(3)
            ]
            await asyncio.sleep(1.5)
            assert gateway.batcher.unanswered > 0
            gateway.lifecycle.drain()
            await asyncio.sleep(1.2)
            assert not viewer.task.done()
            assert [data["state"] for name, data in events(viewer.body) if name == "gateway"] == [
                "serving",
                "draining",
            ]
            await asyncio.gather(*(request.task for request in requests))
            await asyncio.sleep(1.1)
            assert viewer.task.done()

    run_virtual(main())


def test_a_gateway_that_is_not_ready_is_shown_too() -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            gateway.lifecycle.fail("it fell over")
            found = topics(gateway, 5.0)
            assert found["gateway"]["state"] == "lost"
            assert found["gateway"]["reason"] == "it fell over"
            assert len(found["now"]["row"]) == len(COLUMNS)

    run_virtual(main())


def test_what_is_in_service_is_shown_up_to_a_bound() -> None:
    async def main() -> None:
        async with running("continuous", engine_args={"max_num_seqs": 100}) as (app, gateway):
            calls = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=400 + index))
                for index in range(60)
            ]
            await asyncio.sleep(0.2)
            (server,) = servers(gateway)
            assert server["size"] == gateway.batcher.in_service
            assert len(server["members"]) == min(MEMBERS, server["size"])
            assert all(
                0 < tokens <= limit and not done for tokens, limit, done in server["members"]
            )
            assert {limit for _, limit, _ in server["members"]} <= set(range(400, 460))
            numbers = dict(zip(COLUMNS, row(gateway, 1.0), strict=True))
            assert numbers["in_service"] == gateway.batcher.in_service
            assert numbers["observed_delay"] is None
            for each in calls:
                each.leave()
            await asyncio.gather(*(each.task for each in calls))

    run_virtual(main())


@pytest.mark.slow
def test_a_switch_of_the_policy_leaves_no_mark_on_the_arrival_rate_and_the_utilisation() -> None:
    async def main() -> list[tuple[float, float]]:
        shown = []
        async with running("continuous:max_batch_size=4") as (app, gateway):
            for second in range(100):
                if second == 80:
                    gateway.limits.begin_epoch()
                answer = asyncio.create_task(
                    call(app, "POST", "/v1/completions", completion(max_tokens=500))
                )
                await asyncio.sleep(0.01)
                numbers = dict(zip(COLUMNS, row(gateway, float(second)), strict=True))
                shown.append((numbers["arrival_rate"] or 0.0, numbers["utilisation"] or 0.0))
                await answer
                await asyncio.sleep(1.0 - (gateway.now() % 1.0))
        return shown

    shown = run_virtual(main())
    rates, busy = zip(*shown[70:], strict=True)
    assert rates == pytest.approx([1.0] * len(rates), rel=0.03), (
        "one a second, before the switch and after it"
    )
    assert max(busy) - min(busy) < 0.02


def test_a_padded_member_that_met_its_end_is_shown_as_done() -> None:
    async def main() -> None:
        async with running("capped:max_batch_size=2") as (app, gateway):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=2000))
            second = Call(app, "POST", "/v1/completions", completion(max_tokens=5))
            third = Call(app, "POST", "/v1/completions", completion(max_tokens=1000))
            await first.task
            await asyncio.sleep(0.3)
            (server,) = servers(gateway)
            assert [(limit, done) for _, limit, done in server["members"]] == [(5, 1), (1000, 0)]
            await asyncio.gather(second.task, third.task)

    run_virtual(main())


def test_history_is_bounded_and_grows_coarser() -> None:
    history = History(("at", "value"))
    for second in range(COARSE * 10 + 100):
        history.add((float(second), None if second % 20 < 10 else 4.0))
    found = history.shown()
    last = COARSE * 10 + 100
    assert found["columns"] == ("at", "value")
    assert found["fine"][0] == list(range(last - FINE, last))
    assert found["fine"][1] == [None if second % 20 < 10 else 4.0 for second in found["fine"][0]]
    assert found["coarse"][0] == [float(f"{10 * ten + 4.5:.4g}") for ten in range(10, last // 10)]
    assert found["coarse"][1] == [None, 4.0] * (COARSE // 2)


def test_a_coarse_row_is_the_mean_of_what_is_known() -> None:
    history = History(("value",))
    for value in (1.0, 2.0, None, None, 4.00001, None, None, None, None, None):
        history.add((value,))
    shown = history.shown()
    assert (shown["fine"], shown["coarse"]) == ([[1, 2, None, None, 4, *[None] * 5]], [[2.333]])


def test_numbers_of_the_page_have_six_digits_and_instants_a_tenth_of_a_second() -> None:
    found = [short(value) for value in (1.23456789, 99_999_990.0, 1e8, 100_000_000.26)]
    assert found == [1.23457, 1e8, 1e8, 100_000_000.3]


def test_history_is_json_by_column() -> None:
    async def main() -> None:
        async with running() as (app, _):
            found: dict[str, Any] = {"fine": []}
            async with asyncio.timeout(60):
                while not found["fine"]:  # the first second
                    answer = await call(
                        app, "GET", "/live/history", headers={"accept-encoding": "gzip"}
                    )
                    assert answer.headers["content-encoding"] == "gzip"
                    found = json.loads(gzip.decompress(answer.body))
                    await asyncio.sleep(0.05)
            plain = await call(app, "GET", "/live/history", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            assert plain.json()["columns"] == found["columns"]
            assert tuple(found["columns"]) == COLUMNS
            assert len(found["fine"]) == len(COLUMNS)
            assert len(found["fine"][0]) >= 1
            assert found["coarse"] == [], "ten seconds are not over"

    asyncio.run(main())  # it is made in a thread


def test_a_state_that_cannot_be_put_together_is_said_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            viewer = Call(app, "GET", "/live/events")
            await asyncio.sleep(1.5)
            real, gateway.live_model = gateway.live_model, lambda: 1 / 0  # type: ignore[assignment,return-value]
            await asyncio.sleep(5)
            gateway.live_model = real  # type: ignore[method-assign]
            before = len(viewer.chunks)
            await asyncio.sleep(2)
            assert len(viewer.chunks) == before + 2
            viewer.leave()
            await viewer.task

    run_virtual(main())
    assert (
        len([record for record in caplog.records if "could not be computed" in record.message]) == 1
    )


def test_the_autopilot_is_refused_where_nothing_is_predicted() -> None:
    async def main() -> None:
        async with running() as (app, _):
            answer = await call(app, "PUT", "/admin/autopilot", {"mode": "act"})
            assert answer.status == 409
            assert "--prediction-interval" in answer.json()["error"]["message"]
            assert (await call(app, "PUT", "/admin/autopilot", {"mode": "sometimes"})).status == 400

    run_virtual(main())


@pytest.mark.parametrize("high", [None, [0.30004, 0.4]])
def test_the_pairs_of_a_chart_are_rounded_and_one_draw_has_no_interval(
    high: list[float] | None,
) -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            low = None if high is None else [0.1, 0.2]
            pairs = SecondMeans(
                at=[1.0, 2.0],
                n=[3, 4],
                observed=[0.12345678, 1.0],
                modelled=[0.2, 0.3],
                low=low,
                high=high,
            )
            drawn = DelayCharts(compared="queueing_delay", epoch=0, assessed_at=0.0, pairs=pairs)
            live = gateway.live_model()

            async def answer() -> DelayCharts:
                return drawn

            live.drawn = answer
            feed = Feed(gateway)
            feed._epoch = None
            await feed._drawn()
            assert feed._pairs is not None
            shown = feed._pairs["high"], feed._pairs["observed"]
            assert shown == (high and [0.3, 0.4], [0.1235, 1.0])

    asyncio.run(main())
