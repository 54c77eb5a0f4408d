"""A policy from outside serves; one that fails costs nobody an answer, and the operator is told."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kendall.policies import SpecError
from kendall.policies.registry import use_modules
from kendall.server.page.state import topics
from kendall.server.queue.policy_failures import FAULTY
from tests.policies.outside import SHORTEST, installed, module, nothing_known
from tests.server.asgi import Call, call, completion, running
from tests.server.test_http import counted
from tests.virtual_time import run_virtual

REST = SHORTEST[SHORTEST.index("        ordered =") :]
FAULTS = {
    "raises": ("raise KeyError('oops')", " raised KeyError: 'oops'"),
    "nothing": ("return None", ": got None; expected a Dispatch, a Preempt or"),
    "stranger": ('return Dispatch(("nobody",), 0)', "got a dispatch of 'nobody'; expected waiting"),
    "empty": ("return Dispatch((), 0)", "got Dispatch((), ...); expected a tuple with one id"),
    "elsewhere": (
        "return Dispatch((state.waiting[0].request.id,), 9)",
        "got a dispatch to server 9; expected one of state.servers",
    ),
    "too many": (
        "return Dispatch(tuple(w.request.id for w in state.waiting), 0)",
        "got 3 together on server 0; expected at most 2",
    ),
    "past": ("return WaitUntil(now)", "expected a later instant"),
    "not a number": ("return WaitUntil(float('nan'))", "got WaitUntil(nan) at"),
}
TURNS = """        running = [each for each in state.servers[0].in_service if each.preemptible]
        if running:
            return Preempt((running[0].request.id,))
"""


def known(folder: Any, decision: str = "", *, text: str = SHORTEST) -> None:
    """`shortest`, which answers so where something waits."""
    own = text.replace(REST, f"        {decision}\n") if decision else text
    use_modules([module(folder, own)])


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with nothing_known() as patch:
        yield patch


def outcomes(gateway: Any) -> Counter[str]:
    names = ("completed", "failed", "rejected", "abandoned", "cancelled")
    return Counter({name: int(counted(gateway, name)) for name in names if counted(gateway, name)})


def test_it_serves_in_its_own_order(tmp_path: Any) -> None:
    known(tmp_path)

    async def main() -> None:
        async with running("shortest:max_batch_size=1") as (app, gateway):
            lengths = (8, 20, 4, 12)
            calls = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=length))
                for length in lengths
            ]
            ended: list[int] = []
            for made, length in zip(calls, lengths, strict=True):
                made.task.add_done_callback(lambda _, length=length: ended.append(length))
            await asyncio.gather(*(made.task for made in calls))
            assert ended == [8, 4, 12, 20]
            assert outcomes(gateway) == {"completed": 4}
            assert "x-kendall-predicted-wait-ms" not in calls[1].headers

    run_virtual(main())


def test_it_is_put_in_force_while_the_gateway_serves(tmp_path: Any) -> None:
    known(tmp_path)

    async def main() -> None:
        async with running() as (app, gateway):
            changed = await call(app, "PUT", "/admin/policy", {"policy": "shortest"})
            assert changed.json()["policy"] == "shortest"
            assert changed.json()["effective_max_batch_size"] == 8
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            refused = await call(app, "PUT", "/admin/policy", {"policy": "shortest:size=2"})
            assert refused.status == 400
            assert "expected max_batch_size" in refused.json()["error"]["message"]
            assert outcomes(gateway) == {"completed": 1}

    run_virtual(main())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_fails_is_replaced_and_every_request_is_answered_once(
    fault: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decision, says = FAULTS[fault]
    known(tmp_path, decision)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with running("shortest:max_batch_size=2") as (app, gateway):
            began = loop.time()
            made = await call(app, "POST", "/v1/completions", completion(n=3))
            assert made.status == 200
            assert len(made.json()["choices"]) == 3
            assert FAULTY <= loop.time() - began < 2 * FAULTY + 1
            assert outcomes(gateway) == {"completed": 3}
            assert gateway.batcher.policy_failures.error is None
            told = (await call(app, "GET", "/admin/policy")).json()
            assert told["policy"] == "continuous"
            assert told["fault"].startswith("continuous replaced shortest:max_batch_size=2: ")
            assert says in told["fault"]
            await call(app, "PUT", "/admin/policy", {"policy": "single"})
            assert "fault" not in (await call(app, "GET", "/admin/policy")).json()

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    replaced = [each.getMessage() for each in caplog.records if "is replaced by" in each.message]
    assert len(replaced) == 1
    assert "policy shortest:max_batch_size=2 is replaced by continuous: " in replaced[0]


def test_a_policy_that_fails_now_and_then_stays(tmp_path: Any) -> None:
    """It is asked again at the next event, and after a second."""
    known(
        tmp_path,
        text=SHORTEST.replace(
            REST,
            """        if now < FAILS_UNTIL:
            raise KeyError("not yet")
"""
            + REST,
        ).replace("@dataclass", "FAILS_UNTIL = 0.0\n\n\n@dataclass"),
    )

    async def main() -> None:
        from kendall.policies import registry

        (found,) = registry._modules.values()
        decide: Any = found["shortest"].decide
        async with running("shortest") as (app, gateway):
            decide.__globals__["FAILS_UNTIL"] = asyncio.get_running_loop().time() + 1.5
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert gateway.limits.policy_text == "shortest"
            assert gateway.limits.fault is None

    run_virtual(main())


def test_a_policy_that_fails_every_second_time_is_counted_and_does_not_flood_the_log(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    text = SHORTEST.replace(
        REST,
        """        ASKED.append(now)
        if len(ASKED) % 2:
            raise KeyError(f"not this time: {len(ASKED)}")
"""
        + REST,
    ).replace("@dataclass", "ASKED = []\n\n\n@dataclass")
    known(tmp_path, text=text)

    async def main() -> bytes:
        async with running("shortest") as (app, gateway):
            for _ in range(10):
                assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert gateway.limits.policy_text == "shortest"
            await asyncio.sleep(60)
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            return (await call(app, "GET", "/metrics")).body

    with caplog.at_level(logging.ERROR):
        metrics = run_virtual(main()).decode()
    failed = [each for each in caplog.records if "decision failed" in each.getMessage()]
    assert [each.exc_info is not None for each in failed] == [True, True]
    assert [each.getMessage() for each in failed] == [
        "a dispatch decision failed; the queue continues with the next event",
        "a dispatch decision failed (and 9 times since the last traceback, not logged); "
        "the queue continues with the next event",
    ]
    assert 'kendall_policy_faults_total{policy="shortest"} 11.0' in metrics


def test_a_policy_that_preempts_for_ever_does_not_stop_the_gateway(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    text = SHORTEST.replace("        server = state.empty", TURNS + "        server = state.empty")
    text = text.replace("Policy, QueueState", "Policy, Preempt, QueueState")
    known(
        tmp_path,
        text=text.replace("    max_b", "    joins_running: ClassVar[bool] = True\n    max_b"),
    )

    async def main() -> None:
        async with running("shortest:max_batch_size=2") as (app, gateway):
            began = asyncio.get_running_loop().time()
            calls = [Call(app, "POST", "/v1/completions", completion()) for _ in range(3)]
            await asyncio.gather(*(made.task for made in calls))
            assert [made.status for made in calls] == [200] * 3
            assert outcomes(gateway) == {"completed": 3}
            assert asyncio.get_running_loop().time() - began < 2 * FAULTY
            metrics = (await call(app, "GET", "/metrics")).body.decode()
            preempted = re.findall(r"kendall_preemptions_total{.*} (\d+)", metrics)
            assert 0 < sum(map(int, preempted)) <= 20  # one or two each time that it is asked

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    tracebacks = [each for each in caplog.records if each.exc_info]
    assert len(tracebacks) == 1
    again = "policy shortest:max_batch_size=2: got a second dispatch of '"
    assert again in caplog.text
    assert "at one instant; expected a WaitUntil" in caplog.text


@pytest.mark.slow
def test_a_policy_that_hangs_for_a_while_is_told(tmp_path: Any) -> None:
    """In real time: its own second keeps everybody waiting, and it is replaced."""
    slow = SHORTEST.replace(REST, "        import time\n        time.sleep(1.05)\n" + REST)
    known(tmp_path, text=slow)

    async def main() -> None:
        async with running("shortest") as (app, gateway):
            answer = await call(app, "POST", "/v1/completions", completion())
            assert answer.status == 200
            assert "s to decide; expected less than 1 s" in str(gateway.limits.fault)

    began = time.perf_counter()
    asyncio.run(main())
    assert time.perf_counter() - began < 60


def test_a_drain_under_a_policy_that_fails_ends(tmp_path: Any) -> None:
    known(tmp_path, "raise KeyError('oops')")

    async def main() -> None:
        async with running("shortest") as (app, gateway):
            made = Call(app, "POST", "/v1/completions", completion())
            await asyncio.sleep(0.1)
            assert await gateway.drain()
            await made.task
            assert made.status == 200

    run_virtual(main())


def test_the_page_lists_it_with_its_parameters(tmp_path: Any) -> None:
    known(tmp_path)

    async def main() -> None:
        async with running("shortest") as (_, gateway):
            listed = topics(gateway, 0.0)["gateway"]["policies"]
            assert [each["name"] for each in listed] == [
                *("single", "dynamic", "fixed", "capped", "elastic", "continuous", "shortest")
            ]
            (size,) = listed[-1]["parameters"]
            assert (size["name"], size["size"], size["default"]) == ("max_batch_size", True, 8)
            by_name = {each["name"]: each["parameters"] for each in listed}
            required = {each["name"]: each["required"] for each in by_name["fixed"]}
            assert list(required)[:3] == ["batch_size", "max_wait", "order"]
            assert [name for name, needed in required.items() if needed] == ["batch_size"]

    run_virtual(main())


def test_a_broken_package_is_logged_and_stops_no_gateway(
    tmp_path: Any, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch.syspath_prepend(tmp_path)
    module(tmp_path, "raise RuntimeError('no')", "broken_of_a_gateway.py")
    installed(tmp_path, {"short-of-test": {"shortest": "broken_of_a_gateway:Shortest"}})

    async def main() -> None:
        async with running("dynamic") as (app, gateway):
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert "shortest" not in [each["name"] for each in gateway.limits.policies]
            refused = await call(app, "PUT", "/admin/policy", {"policy": "shortest"})
            assert refused.status == 400
            assert "cannot be imported" in refused.json()["error"]["message"]

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    warned = "policy shortest of short-of-test cannot be used"
    assert any(warned in each.getMessage() for each in caplog.records)
    with pytest.raises(SpecError, match="cannot be imported"):
        run_virtual(started("shortest"))


async def started(policy: str) -> None:
    async with running(policy):
        pass
