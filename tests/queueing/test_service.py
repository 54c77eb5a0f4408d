"""The service process: jumping from change to change and moving step by step are the same to the
last bit, and H obeys the law.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kendall.policies.core import UNBOUNDED
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.service import Member, ServiceProcess

LAW = LatencyModel(
    k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=7e-6, cv=0.3, turnaround=1.55e-3, speed=1.3
)


@dataclass(frozen=True)
class Event:
    """What happens to the process from outside: `members` enter, or one of them leaves (removed
    > 0).
    """

    after: float
    members: tuple[tuple[int, int], ...]  # prompt and output tokens
    removed: int = 0


lengths = st.tuples(st.integers(0, 40), st.integers(1, 12))
admissions = st.builds(
    Event, st.floats(0, 0.03), st.lists(lengths, min_size=1, max_size=4).map(tuple)
)
removals = st.builds(Event, st.floats(0, 0.03), st.just(()), st.integers(1, 20))
schedules = st.lists(st.one_of(admissions, removals), min_size=1, max_size=14)


def play(
    schedule: list[Event],
    *,
    jump: bool,
    joining: bool,
    padded: bool,
    law: LatencyModel = LAW,
    step_tokens: int = UNBOUNDED,
) -> list[tuple[str, float, float | None, float | None]]:
    """Ends as (id, instant, first token, last token)."""
    process = ServiceProcess(law, np.random.default_rng(5), step_tokens=step_tokens)
    now, names, ends = 0.0, 0, []

    def due() -> float:
        return process.next_change_at() if jump else process.next_step_at()

    def run_to(instant: float) -> None:
        while due() <= instant and due() < math.inf:
            at = due()
            ends.extend(
                (m.id, at, m.first_token_at, m.last_token_at)
                for m in process.advance(to_change=jump)
            )

    for event in [*schedule, Event(math.inf, ())]:
        now += event.after
        run_to(now)
        if event.removed:
            process.remove(str(names - event.removed), now)
        elif event.members and (joining or process.idle):
            members = [
                Member(str(names + i), prompt, output)
                for i, (prompt, output) in enumerate(event.members)
            ]
            names += len(members)
            process.admit(now, members, padded=padded, joining=joining)
    assert process.idle
    return ends


@given(schedules)
def test_jumping_equals_stepping_for_a_continuous_engine(schedule: list[Event]) -> None:
    ends = play(schedule, jump=True, joining=True, padded=False)
    assert ends == play(schedule, jump=False, joining=True, padded=False)
    assert all(at == last for _, at, _, last in ends)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("law", [LAW, replace(LAW, turnaround=0.0), replace(LAW, k4=0.0)])
@given(schedules, st.integers(1, 60))
def test_jumping_equals_stepping_where_prompts_take_several_steps(
    law: LatencyModel, schedule: list[Event], step_tokens: int
) -> None:
    ends = play(schedule, jump=True, joining=True, padded=False, law=law, step_tokens=step_tokens)
    assert ends == play(
        schedule, jump=False, joining=True, padded=False, law=law, step_tokens=step_tokens
    )
    assert all(at == last for _, at, _, last in ends)


@example(  # one leaves in the instant in which it entered, and another comes then
    [Event(0.0, ((0, 1),)), Event(0.015625, ((1, 1),)), Event(0.0, (), 1), Event(0.0, ((0, 1),))]
)
@given(schedules)
def test_a_step_with_room_for_all_prompts_is_as_one_without_a_bound(schedule: list[Event]) -> None:
    assert play(schedule, jump=True, joining=True, padded=False) == play(
        schedule, jump=True, joining=True, padded=False, step_tokens=10_000
    )


def test_a_prompt_that_does_not_fit_one_step_takes_several() -> None:
    """Of 10 tokens a step: one that decodes takes one of them, the prompts the others in order."""
    law = LatencyModel(k1=100.0, k3=1.0, k4=10.0, kp=1.0)
    process = ServiceProcess(law, np.random.default_rng(0), step_tokens=10)
    process.admit(0.0, [Member("short", 4, 30)], padded=False, joining=True)
    first, _ = process.step()
    assert ([each.id for each in first], process.next_step_at()) == (["short"], 115.0 + 11.0)
    process.admit(115.0, [Member("long", 14, 2), Member("next", 5, 1)], padded=False, joining=True)
    ends, prompts = [process.next_step_at()], []
    for _ in range(4):
        running, _ = process.step()
        prompts.append([each.id for each in running])
        ends.append(process.next_step_at())
    assert prompts == [
        ["short"],  # 9 tokens of the long prompt
        ["short", "long"],  # its last 5, 4 of the next one
        ["short", "long", "next"],  # 1
        ["short"],
    ]
    # two admissions in the first of these steps; 9, 9 and 1 prompt tokens
    assert np.diff(ends).tolist() == [12.0 + 9.0, 13.0 + 1.0, 11.0, 11.0]
    assert ends[0] == 115.0 + 11.0 + 200.0 + 9.0


@given(schedules)
def test_jumping_equals_stepping_for_an_unpadded_batch(schedule: list[Event]) -> None:
    assert play(schedule, jump=True, joining=False, padded=False) == play(
        schedule, jump=False, joining=False, padded=False
    )


@given(schedules)
def test_jumping_equals_stepping_for_a_padded_batch(schedule: list[Event]) -> None:
    """A jump reports all ends with the last, a walk each at its own: the instants of the tokens
    are the same.
    """
    jumped, walked = (
        play(schedule, jump=jump, joining=False, padded=True) for jump in (True, False)
    )
    tokens = {name: (first, last) for name, _, first, last in walked}
    assert all(tokens[name] == (first, last) for name, _, first, last in jumped)
    assert all(at == last for _, at, _, last in walked)


@pytest.mark.parametrize("padded", [True, False])
def test_a_batch_takes_what_the_law_says(padded: bool) -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    residual = LAW.residual(np.random.default_rng(9))
    outputs, prompts = [7, 3, 12, 3], [10, 0, 5, 20]
    members = [
        Member(str(i), prompt, output)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    process.admit(2.0, members, padded=padded, joining=False)
    end = 2.0
    while not process.idle:
        end = process.next_change_at()
        process.advance(to_change=True)
    law = (
        LAW.padded(4, 12, sum(prompts))
        if padded
        else LAW.unpadded(4, sum(outputs), 12, sum(prompts))
    )
    assert end - 2.0 == pytest.approx(residual * law, rel=1e-12)


def test_a_request_on_an_empty_continuous_engine_pays_its_turnaround_once() -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    process.admit(1.0, [Member("a", 10, 6)], padded=False, joining=True)
    expected = 1.0 + LAW.turnaround * LAW.speed + LAW.admission(1, 10) + 6 * LAW.step(1)
    assert process.next_change_at() == pytest.approx(expected, rel=1e-12)


def test_a_batch_needs_an_empty_engine() -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    process.admit(1.0, [Member("a", 10, 6)], padded=True, joining=False)
    with pytest.raises(ValueError, match="not empty"):
        process.admit(1.0, [Member("b", 10, 6)], padded=True, joining=False)


def test_removing_the_last_that_needs_a_token_ends_a_padded_batch() -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    process.admit(0.0, [Member("short", 0, 1), Member("long", 0, 50)], padded=True, joining=False)
    first = process.next_step_at()
    process.remove("long", first * 1.5)
    assert process.idle
    process.remove("long", first * 1.5)  # unknown by now: no error


def test_catching_up_leaves_the_next_end_to_whoever_handles_it() -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    members = [Member("short", 0, 3), Member("long", 0, 50)]
    process.admit(0.0, members, padded=False, joining=False)
    end = process.next_change_at()
    for later in (0.0, 0.5):
        process.catch_up(end + later)
        assert [member.produced for member in members] == [2, 2]
        assert process.next_step_at() == process.next_change_at() == end
    assert process.advance(to_change=True) == members[:1]


def test_who_is_pending_enters_no_earlier_than_the_last_in_service_was_removed() -> None:
    process = ServiceProcess(LAW, np.random.default_rng(9))
    process.admit(0.0, [Member("first", 0, 5)], padded=False, joining=True)
    in_flight = process.next_step_at()
    delay = LAW.turnaround * LAW.speed
    process.admit(0.1 * in_flight, [Member("second", 0, 1)], padded=False, joining=True)
    removed_at = 0.1 * in_flight + delay + 0.3 * (0.9 * in_flight - delay)
    process.remove("first", removed_at)
    whole = LAW.admission(1, 0) + LAW.step(1)
    assert process.next_step_at() == pytest.approx(removed_at + whole, rel=1e-12)


def test_a_law_is_rounded_to_4_digits_for_people_only() -> None:
    law = LatencyModel(k1=0.00022452035740040918, k2=1.5e-3 / 7, k3=0.0, k4=1.0, cv=1 / 3)
    assert law.rounded() == "k1=0.0002245,k2=0.0002143,k3=0,k4=1,cv=0.3333"
    assert parse_law(str(law)) == law
