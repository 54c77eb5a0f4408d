"""The order inside vLLM, on a scheduler that keeps requests and no more; on vLLM's own in
test_inside.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kendall


class Status(Enum):
    """The states of vLLM's requests that the scheduler distinguishes."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3


@dataclass(eq=False)
class EngineRequest:
    """As much of vLLM's as is read."""

    request_id: str
    max_tokens: int
    extra_args: dict[str, Any] | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    priority: float = 5
    arrival_time: float = 3.0
    num_prompt_tokens: int = 7
    status: Status = Status.WAITING

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(extra_args=self.extra_args)


class SyncScheduler:
    """Two slots; the queue is in the order of priorities."""

    def __init__(self, vllm_config: Any) -> None:
        self.policy = vllm_config.scheduler_config.policy
        self.max_num_running_reqs = 2
        self.running: list[EngineRequest] = []
        self.requests: dict[str, EngineRequest] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()

    @property
    def waiting(self) -> list[EngineRequest]:
        waits = [each for each in self.requests.values() if each not in self.running]
        return sorted(waits, key=lambda each: each.priority)

    def add_request(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> list[str]:
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            self.running.append(self.waiting[0])
        names = [each.request_id for each in self.running]
        self.prev_step_scheduled_req_ids = set(names)
        return names

    def _preempt_request(self, request: EngineRequest, at: float) -> None:
        assert request not in self.running
        assert at > 0
        request.status, request.num_preemptions = Status.PREEMPTED, request.num_preemptions + 1


class AsyncScheduler(SyncScheduler):
    """Schedules ahead."""


@dataclass
class Engine:
    """Makes schedulers."""

    made: Callable[..., Any]
    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=False)
        )
    )

    def scheduler(self) -> Any:
        return self.made(self.config)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    for name, values in {
        "core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "core.sched.scheduler": {"Scheduler": SyncScheduler},
        "request": {"Request": EngineRequest, "RequestStatus": Status},
    }.items():
        module = ModuleType(f"vllm.v1.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    place = Path(kendall.__file__).with_name("inside.py")
    spec = importlib.util.spec_from_file_location("inside_what_stands_for_vllm", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("KENDALL_POLICY", raising=False)
    return Engine(module.Scheduler)


def predicted(name: str, tokens: float, **more: Any) -> EngineRequest:
    return EngineRequest(name, 1000, {"predicted_output_tokens": tokens}, **more)


def test_first_come_changes_nothing(engine: Engine) -> None:
    scheduler = engine.scheduler()
    request = EngineRequest("a", 10)
    scheduler.add_request(request)
    assert (scheduler.policy, request.priority) == ("fcfs", 5)
    assert (scheduler.schedule(), scheduler.max_num_running_reqs) == (["a"], 2)


def test_steps_that_are_scheduled_ahead_have_vllms_scheduler_of_them(engine: Engine) -> None:
    assert not isinstance(engine.scheduler(), AsyncScheduler)
    engine.config.scheduler_config.async_scheduling = True
    assert isinstance(engine.scheduler(), AsyncScheduler)


@pytest.mark.parametrize(
    ("most", "running"), [("", 2), (",max_batch_size=1", 1), (",max_batch_size=9", 2)]
)
def test_the_policys_batch_is_a_bound_beside_the_engines(
    most: str, running: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_POLICY", f"continuous:order=spjf{most}")
    scheduler = engine.scheduler()
    assert scheduler.policy == "priority"
    assert scheduler.max_num_running_reqs == running
    assert scheduler.max_num_active_reqs >= running


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({"predicted_output_tokens": 120}, 120),
        ({"predicted_output_tokens": 0.5}, 0.5),
        ({"predicted_output_tokens": 5000}, 1000),  # no more than the limit
        ({"predicted_output_tokens": 0}, 1000),
        ({"predicted_output_tokens": -1}, 1000),
        ({"predicted_output_tokens": float("inf")}, 1000),
        ({"predicted_output_tokens": "120"}, 1000),
        ({}, 1000),
        (None, 1000),
    ],
)
def test_a_request_is_ranked_by_the_prediction_that_came_with_it_else_by_its_limit(
    given: dict[str, Any] | None, rank: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=spjf")
    scheduler, request = engine.scheduler(), EngineRequest("a", 1000, given)
    scheduler.add_request(request)
    assert request.priority == rank


def serving(scheduler: Any, *requests: EngineRequest) -> None:
    """These are in service; ten tokens of each are made."""
    for request in requests:
        scheduler.add_request(request)
    scheduler.schedule()
    for request in requests:
        request.num_output_tokens, request.status = 10, Status.RUNNING


def test_whoever_is_outranked_waits_at_the_rank_of_what_is_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest of those that wait takes the slot of the longest, the next the other."""
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=sprpt")
    scheduler = engine.scheduler()
    serving(scheduler, predicted("long", 100), predicted("middle", 50))
    for name, tokens in (("third", 60), ("first", 20), ("second", 30)):
        scheduler.add_request(predicted(name, tokens))
    assert sorted(scheduler.schedule()) == ["first", "second"]
    waiting = [(each.request_id, each.priority, each.num_preemptions) for each in scheduler.waiting]
    assert waiting == [("middle", 40, 1), ("third", 60, 0), ("long", 90, 1)]


def test_one_that_goes_on_is_not_preempted_for_what_it_had_left_at_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 5 of 100 tokens left and takes the place of the longest; the next, of 50, waits."""
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=sprpt")
    scheduler = engine.scheduler()
    serving(scheduler, predicted("long", 210), predicted("middle", 50))
    scheduler.add_request(predicted("goes on", 100, num_output_tokens=95))
    scheduler.add_request(predicted("next", 50))
    assert scheduler.schedule() == ["middle", "goes on"]


def test_one_that_outranks_nobody_takes_no_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the longer one, 40, is more than 30 and less than 45."""
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=sprpt")
    scheduler = engine.scheduler()
    serving(scheduler, predicted("short", 20), predicted("middle", 50))
    scheduler.add_request(predicted("later", 45))
    assert scheduler.schedule() == ["short", "middle"]
    scheduler.add_request(predicted("first", 30))
    before = scheduler.prev_step_scheduled_req_ids
    assert scheduler.schedule() == ["short", "first"]
    assert before == {"short"}, "vLLM sends all tokens of one that is new or comes back"


def test_nobody_is_preempted_where_a_slot_is_free_or_the_first_cannot_start(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=sprpt")
    scheduler = engine.scheduler()
    serving(scheduler, predicted("long", 100))
    scheduler.add_request(predicted("first", 20))
    assert scheduler.schedule() == ["long", "first"]
    remote = predicted("remote", 5)
    remote.status = Status.WAITING_FOR_REMOTE_KVS
    scheduler.add_request(remote)
    assert scheduler.schedule() == ["long", "first"]
    remote.status = Status.WAITING
    assert scheduler.schedule() == ["first", "remote"]


def test_a_request_is_preempted_so_often_and_no_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_POLICY", "continuous:order=sprpt,max_preemptions=1")
    scheduler = engine.scheduler()
    serving(scheduler, predicted("long", 100, num_preemptions=1), predicted("middle", 50))
    scheduler.add_request(predicted("first", 20))
    scheduler.add_request(predicted("second", 30))
    assert scheduler.schedule() == ["long", "first"]
