"""The autopilot after an operator's switch: it keeps the kind of policy that was chosen last, on
a gateway on virtual time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.state import FailedSetting, State
from kendall.queueing.choosing.forecast import Setting
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.gateway import Gateway
from kendall.server.live import model, prediction_worker
from kendall.server.live.pilot import Pilot, SavedPilot, autopilot_bounds
from kendall.server.runtime.errors import ApiError
from kendall.server.telemetry.metrics import Metrics
from tests.server.asgi import call, completion, running
from tests.server.harness import Immediate, engine_request_of
from tests.virtual_time import run_virtual

SLOW = "capped:max_batch_size=1"  # about 31 requests/s are the most


class InThisProcess:
    """The predictor without its process: answers at once, on virtual time."""

    busy = True  # so that the gateway's end waits for no last look

    def __init__(self, begin: Callable[[Any, int], Awaitable[None]]) -> None:
        self._begin = begin
        self._begun = False

    async def start(self) -> None:
        if not self._begun:
            self._begun = True
            await self._begin(self.ask, 1)

    async def ask(self, function: str, *arguments: Any) -> Any:
        await self.start()
        return getattr(prediction_worker, function)(*arguments)

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PredictorClient", InThisProcess)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())


async def loaded(gateway: Gateway, rate: float, seconds: float) -> None:
    """Poisson arrivals of answers between 4 and 60 tokens."""
    rng, loop = np.random.default_rng(1), asyncio.get_running_loop()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(rng.exponential(1 / rate))
        request = Request(
            id=f"{loop.time()}-{number}",
            arrived_at=loop.time(),
            prompt_tokens=8,
            max_output_tokens=64,
        )
        consumer = Immediate()
        (consumer.sequence,) = gateway.batcher.submit(
            [engine_request_of(request, int(rng.integers(4, 60)))], [consumer]
        )


@pytest.mark.slow
@pytest.mark.parametrize(("by_hand", "kind"), [(True, "capped"), (False, "elastic")])
def test_it_keeps_the_kind_of_policy_that_an_operator_switched_to(
    *, by_hand: bool, kind: str
) -> None:
    """The start was elastic. After a manual switch to a queue without a steady state it enlarges
    the batch, of that kind.

    Where nobody chose the policy in force, the same autopilot moves back to the kind of the start.
    """

    async def main() -> None:
        async with running(
            "elastic:max_batch_size=4",
            autopilot="act",
            prediction_interval=2.0,
            what_if_interval=1e6,
        ) as (app, gateway):
            assert gateway.live is not None
            await loaded(gateway, 10.0, 1.0)
            if by_hand:
                answer = await call(app, "PUT", "/admin/policy", {"policy": SLOW})
                assert answer.status == 200, answer.body
            else:
                gateway.limits.begin_epoch(parse_policy(SLOW))
            await loaded(gateway, 45.0, 10.0)
            pilot = gateway.live.pilot.shown()
            turned = [each for each in pilot.decisions if each.kind == "change"]
            assert turned
            assert {parse_policy(each.after.policy).name for each in turned} == {kind}
            assert pilot.bounds.policies == (kind,)

    run_virtual(main())


def saved(state: State) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(state))


@pytest.mark.slow
def test_its_own_changes_leave_the_bounds(tmp_path: Path) -> None:
    """From dynamic it may turn to capped, and back; the state file has the policy that an
    operator chose, for the next start.
    """

    async def main() -> None:
        file = tmp_path / "state.json"
        async with running("single", autopilot="act", state_file=file) as (app, gateway):
            assert gateway.live is not None
            await call(app, "PUT", "/admin/policy", {"policy": "dynamic"})
            gateway.limits.change(PolicyChange(policy="capped:max_batch_size=8"), by_autopilot=True)
            assert gateway.live.pilot.shown().bounds.policies == ("dynamic", "capped")
            gateway.live.pilot.state = saved(State())
            gateway.live.saved.save()
        async with running("single", autopilot="act", state_file=file) as (_, gateway):
            assert gateway.live is not None
            assert gateway.batcher.policy_text == "capped:max_batch_size=8"
            assert gateway.live.pilot.shown().bounds.policies == ("dynamic", "capped")

    run_virtual(main())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ["act", "advise"])
@pytest.mark.parametrize("of", ["knobs", "memory", "followed"])
def test_a_remembered_policy_that_is_not_installed_is_said_and_stops_no_start(
    mode: Any, of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state.json"
    known = "capped:max_batch_size=8"

    async def main() -> None:
        async with running("single", autopilot=mode, state_file=file) as (_, gateway):
            assert gateway.live is not None
            tried = Setting(policy="gone" if of == "memory" else known)
            failure = FailedSetting(knobs=tried, until=9.0, times=1, rate=1.0)
            gateway.live.pilot.state = saved(State(failures=(failure,)))
            gateway.live.saved.save()
        state = json.loads(file.read_bytes())
        if of == "followed":
            state["followed"] = "gone"
        if of == "knobs":
            state["knobs"]["policy"] = "gone"
        file.write_text(json.dumps(state))
        async with running("single", autopilot=mode, state_file=file) as (app, gateway):
            assert gateway.live is not None
            assert gateway.batcher.policy_text == "single"
            used = mode == "act" or of == "memory"
            assert (gateway.live.pilot.state is None) is used
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
            assert len(warned) == used
            for each in warned:
                assert f"--state-file {file} (got policy 'gone'; expected" in each.getMessage()
                assert "it begins anew with policy single" in each.getMessage()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())


def test_a_list_of_policies_outlasts_a_manual_switch() -> None:
    async def main() -> None:
        async with running("single", autopilot_policies=("single", "elastic")) as (app, gateway):
            assert gateway.live is not None
            await call(app, "PUT", "/admin/policy", {"policy": "dynamic"})
            assert gateway.live.pilot.shown().bounds.policies == ("single", "elastic")

    run_virtual(main())


class Piloted:
    """A gateway of which an autopilot turns the knobs, and the process in which it decides."""

    def __init__(self, mode: str, policy: str = "single", **settings: Any) -> None:
        usual: dict[str, Any] = {"autopilot_policies": (), "max_clipped_fraction": 0.05}
        usual |= {"autopilot": mode, "policy": policy, "prediction_interval": 5.0}
        self.settings = SimpleNamespace(**usual | settings)
        self.metrics = Metrics()
        self.turned: list[tuple[PolicyChange, bool]] = []
        self.limits = SimpleNamespace(change=self.change, max_output_tokens=64)
        capabilities = SimpleNamespace(servers=2)
        self.batcher = SimpleNamespace(policy_text="dynamic", capabilities=capabilities)
        self.asked: list[tuple[Any, ...]] = []

    def now(self) -> float:
        return 100.0

    def change(self, change: PolicyChange, *, by_autopilot: bool) -> None:
        self.turned.append((change, by_autopilot))

    async def ask(self, *question: Any) -> None:
        self.asked.append(question)

    def pilot(self) -> Pilot:
        host: Any = self
        return Pilot(host, host)


def decision(kind: Any, at: float = 0.0) -> Decision:
    after = Setting(policy="capped:max_batch_size=8", max_output_tokens=32)
    return Decision(
        at=at, kind=kind, knob="policy", before=Setting(policy="single"), after=after, reason="why"
    )


@pytest.mark.parametrize(
    ("mode", "kind", "turns"),
    [("act", "change", 1), ("act", "rollback", 1), ("act", "kept", 0), ("advise", "change", 0)],
)
def test_a_decision_is_logged_kept_and_carried_out_where_it_acts(
    mode: str, kind: str, turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = Piloted(mode), decision(kind)
    pilot = host.pilot()
    with caplog.at_level(logging.INFO):
        pilot.carry_out(made)
    assert made.says in caplog.text
    assert pilot.shown().decisions == (made,)
    change = PolicyChange(policy="capped:max_batch_size=8", max_output_tokens=32)
    assert host.turned == [(change, True)] * turns
    text = host.metrics.exposition().decode()
    assert f'kendall_autopilot_decisions_total{{kind="{kind}"}} 1.0' in text


def test_the_last_hundred_decisions_are_kept() -> None:
    pilot = Piloted("advise").pilot()
    for number in range(103):
        pilot.carry_out(decision("kept", float(number)))
    assert [each.at for each in pilot.shown().decisions] == list(range(3, 103))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "allowed", "bounds"),
    [
        ("dynamic", (), ("dynamic", "capped")),
        ("capped:max_batch_size=4", (), ("capped",)),
        ("elastic:max_batch_size=4", (), ("elastic",)),
        ("single", ("single", "dynamic"), ("single", "dynamic")),
    ],
)
def test_what_it_may_turn(policy: str, allowed: tuple[str, ...], bounds: tuple[str, ...]) -> None:
    found = autopilot_bounds(policy, allowed, 0.02)
    assert (found.policies, found.max_clipped_fraction) == (bounds, 0.02)


def test_another_mode_is_told_to_the_process_that_decides() -> None:
    host = Piloted("act")
    pilot = host.pilot()
    asyncio.run(pilot.start(host.ask))
    pilot.remember(msgspec.Raw(b"1"))
    shown = asyncio.run(pilot.steer("off"))
    assert (shown.mode, shown.bounds.max_clipped_fraction, pilot.on) == ("off", 0.05, False)
    asyncio.run(pilot.start(host.ask))
    assert host.asked == [("start_pilot", "act", None, 0.0), ("steer_pilot", "off")]
    blind = Piloted("off", prediction_interval=0.0).pilot()
    with pytest.raises(ApiError, match="got --prediction-interval 0; expected an interval > 0"):
        asyncio.run(blind.steer("act"))


@pytest.mark.parametrize(("mode", "acts"), [("act", True), ("advise", False), ("off", None)])
def test_what_an_earlier_life_remembered(mode: str, acts: bool | None) -> None:
    """Its instants are of a clock that showed 60 seconds less."""
    host = Piloted(mode)
    pilot, memory = host.pilot(), msgspec.Raw(b'{"failures":[]}')
    knobs = Setting(policy="capped:max_batch_size=8", max_output_tokens=32)
    pilot.restore(SavedPilot(autopilot=memory, clock=40.0, knobs=knobs, followed="dynamic"))
    asyncio.run(pilot.start(host.ask))
    if acts is None:
        assert (pilot.state, host.asked, host.turned) == (None, [], [])
        return
    assert host.asked == [("start_pilot", mode, memory, 60.0)]
    change = PolicyChange(policy=knobs.policy, max_output_tokens=32)
    assert host.turned == ([(change, True)] if acts else [])
    assert pilot.shown().bounds.policies == (("dynamic", "capped") if acts else ("single",))
    saved = pilot.saved()
    assert (saved.autopilot, saved.clock, saved.followed) == (
        (memory, 100.0, "dynamic" if acts else "single")
    )
    assert saved.knobs == Setting(policy="dynamic", max_output_tokens=64, servers=2)


def test_nothing_was_remembered() -> None:
    host = Piloted("act")
    pilot = host.pilot()
    pilot.restore(SavedPilot(followed="dynamic"))
    assert (pilot.state, host.turned, pilot.saved().followed) == (None, [], "single")
    assert bytes(pilot.saved().autopilot) == b"null"
