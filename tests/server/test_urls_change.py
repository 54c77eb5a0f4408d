"""Servers behind the gateway are added and removed while it serves: whole conversations over
sockets, on virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kendall.server.http.api.servers import is_own
from kendall.server.settings import Settings
from tests.server.asgi import Call
from tests.server.passing_gateway import Before, before
from tests.server.upstream_stub import Stub, play, streams

PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 40}
URLS = [f"http://stub-{index}" for index in range(3)]


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://localhost:8000", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.0.0.5:8000", True),  # the address that it listens on
        ("http://10.0.0.6:8000", False),
        ("http://localhost:8001", False),
        ("http://localhost", False),
    ],
)
def test_a_gateway_knows_its_own_url(url: str, *, own: bool) -> None:
    settings = Settings(model="m", served_model_name="m", host="10.0.0.5", port=8000)
    assert is_own(url, settings) is own
    for scheme, port in (("http", 80), ("https", 443)):
        usual = Settings(model="m", served_model_name="m", port=port)
        assert is_own(f"{scheme}://localhost", usual)
        assert not is_own(f"{scheme}://localhost:{port + 1}", usual)


async def change(kendall: Before, body: Any) -> Call:
    made = Call(kendall.app, "PUT", "/admin/servers", body)
    await made.task
    return made


async def states(kendall: Before) -> dict[str, str]:
    said = await kendall.get("/admin/servers")
    return {server["url"]: server["state"] for server in said["servers"]}


def test_one_that_is_added_gets_work_once_it_answers_and_one_removed_ends_what_it_has() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = streams(tokens=30)
        async with before(
            one, of=(one, other), engine={"at_first": 1, "max_num_seqs": 2}
        ) as kendall:
            batcher = kendall.gateway.batcher
            calls = [kendall.call(PROMPT | {"stream": True}) for _ in range(4)]
            await asyncio.sleep(1)
            assert (batcher.in_service, batcher.queue_length) == (2, 2)
            epoch = batcher.epoch
            said = (await change(kendall, {"urls": URLS[:2]})).json()
            assert [server["state"] for server in said["servers"]] == ["serving", "starting"]
            assert said["servers"][1]["last_fault"] == "it has not answered yet"
            await asyncio.sleep(5)
            assert (batcher.in_service, batcher.epoch) == (2, epoch), "it is not there yet"
            await other.up()
            await asyncio.sleep(10)
            assert (batcher.in_service, batcher.queue_length) == (4, 0)
            assert (batcher.epoch, batcher.capabilities.servers) == (epoch + 1, 2)
            said = (await change(kendall, {"urls": URLS[1:2]})).json()
            assert [server["state"] for server in said["servers"]] == ["draining", "serving"]
            assert [server["in_service"] for server in said["servers"]] == [2, 2]
            assert (said["replicas"], batcher.epoch) == (1, epoch + 2)
            calls += [kendall.call(PROMPT | {"stream": True}) for _ in range(2)]
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200] * 6
            assert sorted(record.server_id for record in kendall.records) == [0, 0, 1, 1, 1, 1]
            assert {record.interruptions for record in kendall.records} == {0}
            assert await states(kendall) == {URLS[1]: "serving"}
            asked = len(one.asked)
            await asyncio.sleep(60)
            assert len(one.asked) == asked, "it is not probed any more"

    play(test, stubs=2)


def test_one_that_leaves_with_nothing_in_service_is_gone_at_once_and_may_come_again() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other, engine={"max_num_seqs": 1}) as kendall:
            await change(kendall, {"urls": URLS[:1]})
            assert await states(kendall) == {URLS[0]: "serving"}
            await change(kendall, {"urls": URLS[:2]})
            await asyncio.sleep(2)
            assert await states(kendall) == dict.fromkeys(URLS[:2], "serving")
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.gather(*(call.task for call in calls))
            assert {record.server_id for record in kendall.records} == {0, 1}

    play(test, stubs=2)


def test_the_log_says_which_servers_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = streams(tokens=5)
        async with before(one, other, of=(one, other), engine={"at_first": 1}) as kendall:
            call = kendall.call(PROMPT)
            await asyncio.sleep(0.5)
            await change(kendall, {"urls": URLS[:2]})
            await asyncio.sleep(1)
            await change(kendall, {"urls": URLS[1:2]})
            await change(kendall, {"urls": URLS[1:2]})
            await call.task
            await asyncio.sleep(1)

    with caplog.at_level(logging.INFO, "kendall.engine"):
        play(test, stubs=2)
    assert [text for text in caplog.messages if text.startswith("server ")] == [
        "server 1 (http://stub-1) is new: it gets work once it answers",
        "server 1 (http://stub-1) serves: it answers",
        "server 0 (http://stub-0) is removed: it ends what it has",
        "server 0 (http://stub-0) was removed",
    ]


def test_one_that_leaves_and_is_asked_again_meanwhile_stays() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = streams(tokens=30)
        async with before(one, other, engine={"max_num_seqs": 1}) as kendall:
            calls = [kendall.call(PROMPT | {"stream": True}) for _ in range(2)]
            await asyncio.sleep(1)
            await change(kendall, {"urls": URLS[1:2]})
            assert (await states(kendall))[URLS[0]] == "draining"
            await change(kendall, {"urls": URLS[:2]})
            assert (await states(kendall))[URLS[0]] == "serving"
            await asyncio.gather(*(call.task for call in calls))
            assert await states(kendall) == dict.fromkeys(URLS[:2], "serving")
            assert {record.outcome for record in kendall.records} == {"completed"}

    play(test, stubs=2)


def test_one_that_leaves_and_is_lost_gives_its_calls_back() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = streams(first=30)
        async with before(one, other, engine={"max_num_seqs": 1}) as kendall:
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.sleep(0.1)
            await change(kendall, {"urls": URLS[1:2]})
            one.down()
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200, 200]
            assert {record.server_id for record in kendall.records} == {1}
            assert await states(kendall) == {URLS[1]: "serving"}

    play(test, stubs=2)


def test_where_all_are_lost_others_take_their_place() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = streams(first=5)
        async with before(one, of=(one, other), engine={"at_first": 1}) as kendall:
            calls = [kendall.call(PROMPT)]
            await asyncio.sleep(1)
            one.down()
            await asyncio.sleep(1)
            assert not kendall.gateway.lifecycle.ready
            calls.append(kendall.call(PROMPT))
            assert (await change(kendall, {"urls": URLS[1:2]})).status == 200
            await asyncio.sleep(30)
            assert not any(call.task.done() for call in calls)
            await other.up()
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200, 200]
            assert await states(kendall) == {URLS[1]: "serving"}
            assert kendall.gateway.supervisor.restarts == 1
            await asyncio.sleep(60)
            assert await states(kendall) == {URLS[1]: "serving"}

    play(test, stubs=2)


def test_servers_that_are_silent_do_not_hold_up_the_one_that_is_there() -> None:
    """As by SIGSTOP of all; their state says so, and why."""

    async def test(one: Stub, other: Stub, third: Stub) -> None:
        one.behave = other.behave = streams(first=5)
        async with before(one, other, of=(one, other, third), engine={"at_first": 2}) as kendall:
            one.frozen = other.frozen = True
            while kendall.gateway.lifecycle.ready:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.5)
            await asyncio.sleep(11)
            said = (await kendall.get("/admin/servers"))["servers"]
            assert [server["state"] for server in said] == ["lost", "lost"]
            assert [server["last_fault"] for server in said] == ["no answer in time"] * 2
            await third.up()
            await change(kendall, {"urls": URLS})
            began = asyncio.get_running_loop().time()
            made = await kendall.answer(PROMPT)
            assert made.status == 200
            assert asyncio.get_running_loop().time() - began < 15, "not two looks at silent ones"
            assert (await states(kendall))[URLS[2]] == "serving"
            assert (await states(kendall))[URLS[0]] == "lost"

    play(test, stubs=3)


def test_what_is_assumed_of_servers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other) as kendall:
            for urls in (URLS[:1], URLS[:2], URLS[1:2], URLS[:2]):
                assert (await change(kendall, {"urls": urls})).status == 200
                await asyncio.sleep(5)

    play(test, stubs=2)
    said = [each.getMessage() for each in caplog.records if "64 are assumed" in each.getMessage()]
    assert len(said) == 1


def test_a_server_that_serves_has_no_fault() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other, engine={"at_first": 1}) as kendall:
            await change(kendall, {"urls": URLS[:2]})
            await asyncio.sleep(5)
            said = (await kendall.get("/admin/servers"))["servers"]
            assert [(each["state"], each["last_fault"]) for each in said] == [("serving", None)] * 2

    play(test, stubs=2)


def test_a_calibration_ends_in_plain_words_where_its_server_leaves() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = streams(tokens=60)
        async with before(one, other) as kendall:
            asked = Call(kendall.app, "POST", "/admin/calibrate", {"max_batch_size": 4})
            await asyncio.sleep(3)
            await change(kendall, {"urls": URLS[1:2]})
            await asked.task
            assert asked.status == 503
            assert "other servers serve now" in asked.json()["error"]["message"]

    play(test, stubs=2)


def test_servers_change_while_the_gateway_drains() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = streams(tokens=60)
        async with before(one, other, engine={"at_first": 1, "max_num_seqs": 1}) as kendall:
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.sleep(1)
            draining = asyncio.ensure_future(kendall.gateway.drain())
            assert (await change(kendall, {"urls": URLS[:2]})).status == 200
            await asyncio.gather(*(call.task for call in calls))
            assert await draining
            assert {record.server_id for record in kendall.records} == {0, 1}

    play(test, stubs=2)


def test_one_with_another_model_gets_no_work(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        other.routes["/v1/models"] = (200, {"data": [{"id": "another"}]})
        async with before(one, other, of=(one, other), engine={"at_first": 1}) as kendall:
            await change(kendall, {"urls": URLS[:2]})
            await asyncio.sleep(30)
            said = (await kendall.get("/admin/servers"))["servers"][1]
            assert said["state"] == "starting"
            assert said["last_fault"].startswith("got model 'another' from http://stub-1; expected")

    play(test, stubs=2)
    warned = [each for each in caplog.records if "is not given work" in each.getMessage()]
    assert len(warned) == 1, "not at each probe"


def test_the_gateway_itself_is_known_by_its_own_probe() -> None:
    """By whatever name: its address cannot be told from the text."""

    async def test(one: Stub, other: Stub) -> None:
        other.routes["/health"] = (508, None)
        async with before(one, other, of=(one, other), engine={"at_first": 1}) as kendall:
            passing = kendall.gateway.proxying
            assert passing is not None
            for sender, status in ((passing.sender, 508), ("another", 200)):
                probe = Call(kendall.app, "GET", "/health", headers={"x-kendall-gateway": sender})
                await probe.task
                assert probe.status == status
            assert one.asked[0].headers["x-kendall-gateway"] == passing.sender
            await change(kendall, {"urls": URLS[:2]})
            await asyncio.sleep(30)
            said = (await kendall.get("/admin/servers"))["servers"][1]
            assert (said["state"], said["last_fault"]) == ("starting", "it is this gateway itself")
            assert (await change(kendall, {"urls": URLS[1:2]})).status == 409

    play(test, stubs=2)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (
            {"urls": URLS[2:]},
            409,
            "got http://stub-2, of which none serves this queue now; expected one of "
            "http://stub-0, http://stub-1 among them: remove it once a new one serves",
        ),
        ({"urls": []}, 400, "urls: List should have at least 1 item"),
        (
            {"urls": ["stub-0"]},
            400,
            "got url 'stub-0'; expected http:// or https://, a host and a port",
        ),
        ({"urls": [URLS[0], URLS[0] + "/v1/"]}, 400, "got url http://stub-0 twice; expected"),
        ({"urls": ["HTTP://Stub-0", URLS[0]]}, 400, "got url http://stub-0 twice; expected"),
        ({"urls": [URLS[0], "http://stub-1:0"]}, 400, "got url 'http://stub-1:0'; expected"),
        ({"urls": [URLS[0], "http://stub-1/ x"]}, 400, "got url 'http://stub-1/ x'; expected"),
        ({"urls": [URLS[0], "http://stub..1"]}, 400, "got url 'http://stub..1'; expected"),
        (
            {"urls": [URLS[0], "http://me:secret@stub-1"]},
            400,
            "got url 'stub-1' with a user name before it; expected a key by --engine-api-key",
        ),
        ([], 400, "got '[]'; expected a JSON object"),
        (
            {"urls": [URLS[0], "http://localhost:8080"]},
            400,
            "got url http://localhost:8080, which is this gateway; expected a server behind it",
        ),
        ({}, 400, "got neither of replicas and urls; expected"),
        ({"replicas": 2, "urls": URLS}, 400, "got both of replicas and urls; expected"),
        ({"replicas": 2}, 409, "got replicas 2 for a gateway that starts one engine, or none"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(body: Any, status: int, said: str) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other) as kendall:
            epoch = kendall.gateway.batcher.epoch
            refused = await change(kendall, body)
            assert refused.status == status
            assert said in refused.json()["error"]["message"]
            assert await states(kendall) == dict.fromkeys(URLS[:2], "serving")
            assert kendall.gateway.batcher.epoch == epoch

    play(test, stubs=2)
