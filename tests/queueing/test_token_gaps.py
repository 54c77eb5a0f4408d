"""Gaps between tokens, counted step by step, are those that every token's instant gives."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies.core import UNBOUNDED, Request
from kendall.queueing.choosing.answer import rough
from kendall.queueing.choosing.objective import parse_slo
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.slots.token_gaps import BINS, GapCounter, bin_of, found
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.experiment import (
    begin_of,
    driven_run,
    simulate_model,
    simulate_run,
)
from kendall.queueing.simulation.fast import Trace, draw_trace
from kendall.queueing.simulation.reference import Job

LAW = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6)
SECONDS = LatencyModel(k4=1.0)  # a token
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("lognormal:mu=4.5,sigma=1.0", 1000)


def model(policy: str, law: LatencyModel = LAW, **given: object) -> Queue:
    limits = {"prompt_tokens": PROMPTS, "max_num_seqs": 8} | given
    return Queue.read(policy, limits.pop("output_tokens", LENGTHS), law, **limits)


def walked(queue: Queue, trace: Trace) -> dict[int, list[float]]:
    """The gaps of each request of a continuous engine, step by step."""
    law, slots, bound = queue.engine.law, queue.bound or 1, queue.step_tokens or UNBOUNDED
    waiting, active, now = deque(range(len(trace.arrived_at))), list[int](), 0.0
    made = dict.fromkeys(waiting, 0)
    prompt, token_at = trace.prompt_tokens.tolist(), dict[int, list[float]]()
    while waiting or active:
        now = now if active else max(now, float(trace.arrived_at[waiting[0]]))
        entered = 0
        while waiting and len(active) < slots and trace.arrived_at[waiting[0]] <= now:
            active.append(waiting.popleft())
            entered += 1
        room = bound - sum(prompt[each] == 0 for each in active)
        parts = 0
        for each in active:
            part = min(prompt[each], max(room, 0))
            prompt[each], room, parts = prompt[each] - part, room - part, parts + part
        ready = [each for each in active if prompt[each] == 0]
        now += law.k1 * entered + law.kp * parts + law.k3 * max(1, len(ready)) + law.k4
        for each in ready:
            token_at.setdefault(each, []).append(now)
            made[each] += 1
        active = [each for each in active if made[each] < trace.output_tokens[each]]
    return {each: [b - a for a, b in pairwise(at)] for each, at in token_at.items()}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step_tokens", [None, 16, 128])
@pytest.mark.parametrize("since", [0, 150])
def test_they_are_those_of_a_walk_token_by_token(step_tokens: int | None, since: int) -> None:
    queue = model("continuous:max_batch_size=8", step_tokens=step_tokens)
    rate, seed = 0.8 * queue.largest_stable_rate, np.random.SeedSequence(5)
    run = simulate_run(queue, rate, 400, seed, since=since)
    every = walked(queue, draw_trace(queue, rate, 400, np.random.SeedSequence(5)))
    gaps = np.sort([gap for each, of in every.items() if each >= since for gap in of])
    assert run.gaps is not None
    assert run.gaps.times.sum() == len(gaps)
    assert np.repeat(np.sort(run.gaps.seconds), run.gaps.times[np.argsort(run.gaps.seconds)]) == (
        pytest.approx(gaps, rel=0.002)
    )


def test_a_simulation_has_their_quantiles_and_the_mean_of_all() -> None:
    queue = model("continuous:max_batch_size=8", step_tokens=16)
    rate = 0.8 * queue.largest_stable_rate
    found = simulate_model(queue, rate, num_requests=400, seed=5).inter_token_latency
    (stream,) = np.random.SeedSequence(5).spawn(1)
    begin = begin_of(queue, rate, 400)
    every = walked(queue, draw_trace(queue, rate, begin.requests, stream))
    gaps = [gap for each, of in every.items() if each >= begin.warm_up for gap in of]
    assert found.mean == pytest.approx(np.mean(gaps), rel=1e-9)
    for name, level in LEVELS.items():
        own = np.quantile(gaps, level, method="inverted_cdf")
        assert getattr(found, name) == pytest.approx(own, rel=0.002)


def test_an_slo_on_them_bounds_single_gaps() -> None:
    queue = model("continuous:max_batch_size=8")
    rate = 0.5 * queue.largest_stable_rate
    slos = [parse_slo("p99_inter_token_latency<=50ms")]
    run = simulate_run(queue, rate, 2000, np.random.SeedSequence(0), since=200)
    assert run.gaps is not None
    order = np.argsort(run.gaps.seconds)
    reached = np.cumsum(run.gaps.times[order]) / run.gaps.times.sum()
    expected = run.gaps.seconds[order][np.searchsorted(reached, 0.99)]
    assert rough(queue, rate, slos, 2000).inter_token_latency.p99 == expected


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("elastic:max_batch_size=5", {}),
        ("elastic:max_batch_size=5,order=spjf", {"servers": 2}),
        ("single", {"servers": 2, "patience": 0.05}),
        ("single:order=spjf", {"patience": 0.05}),
        ("continuous:max_batch_size=4,order=ljf", {}),
    ],
)
@pytest.mark.parametrize(
    "more",
    ["", ",cv=0.3", ",turnaround=0.002,speed=1.5", ",stall_share=0.05,stall=0.02"],
)
def test_every_kernel_counts_them_as_the_driven_policy(
    policy: str, given: dict[str, object], more: str
) -> None:
    law = parse_law(f"k1=0.0003,k2=0.0014,k3=0.000025,k4=0.00092,kp=0.000005{more}")
    queue = model(policy, law, **given)
    rate = 0.9 * queue.largest_stable_rate
    fast, slow = (
        simulate_run(queue, rate, 600, np.random.SeedSequence(3), generic=generic)
        for generic in (False, True)
    )
    assert fast.gaps is not None
    assert slow.gaps is not None
    assert fast.gaps.times.sum() == (fast.output_tokens[~fast.lost] - 1).sum()
    assert fast.gaps.times.tolist() == slow.gaps.times.tolist()
    assert fast.gaps.seconds == pytest.approx(slow.gaps.seconds, rel=1e-9)


def job(number: int, at: float, tokens: int) -> Job:
    request = Request(str(number), at, 5, 64, predicted_output_tokens=float(tokens))
    return Job(request, tokens)


def test_a_gap_lasts_through_an_interruption() -> None:
    """A token at 1 s, then another one's from 1.5 to 2.5 s."""
    queue = model("single:order=sprpt", SECONDS, prompt_tokens=None)
    run = driven_run(queue, [job(0, 0.0, 4), job(1, 1.5, 1)], [np.random.default_rng(0)])
    assert run.gaps is not None
    assert run.gaps.seconds.tolist() == [1.0, 2.5]
    assert run.gaps.times.tolist() == [2, 1]


def test_a_request_that_is_interrupted_before_its_first_token_has_no_gap_from_before() -> None:
    queue = model("single:order=sprpt", SECONDS, prompt_tokens=None)
    run = driven_run(queue, [job(0, 0.0, 3), job(1, 0.5, 1)], [np.random.default_rng(0)])
    assert run.gaps is not None
    assert (run.gaps.seconds.tolist(), run.gaps.times.tolist()) == ([1.0], [2])


def test_an_interruption_right_after_another_one_counts_from_the_last_token() -> None:
    """Interrupted at 1.5 s for one, again at 2.7 s, before another token, for the next."""
    queue = model("single:order=sprpt", SECONDS, prompt_tokens=None)
    jobs = [job(0, 0.0, 3), job(1, 1.5, 1), job(2, 2.7, 1)]
    run = driven_run(queue, jobs, [np.random.default_rng(0)])
    assert run.gaps is not None
    assert run.gaps.seconds.tolist() == pytest.approx([1.0, 3.7])
    assert run.gaps.times.tolist() == [1, 1]


def test_who_goes_on_beside_one_that_is_interrupted_has_the_step_in_flight() -> None:
    queue = model("continuous:max_batch_size=2,order=sprpt", SECONDS, prompt_tokens=None)
    jobs = [job(0, 0.0, 3), job(1, 0.0, 9), job(2, 1.5, 1)]
    run = driven_run(queue, jobs, [np.random.default_rng(0)])
    assert run.gaps is not None
    total = (run.gaps.seconds * run.gaps.times).sum()
    assert total == pytest.approx((run.released_at - run.first_token_at).sum())
    assert run.gaps.times.sum() == 2 + 8


def test_padded_batches_have_none() -> None:
    for generic in (False, True):
        run = simulate_run(
            model("capped:max_batch_size=4"), 20.0, 100, np.random.SeedSequence(1), generic=generic
        )
        assert run.gaps is None


def test_where_all_gaps_of_an_answer_are_alike_its_mean_is_each_of_them() -> None:
    queue, seed = model("single"), np.random.SeedSequence(5)
    rate = 0.5 * queue.largest_stable_rate
    assert simulate_run(queue, rate, 100, seed).gaps is None
    found = simulate_model(queue, rate, num_requests=2000).inter_token_latency
    assert [found.p50, found.p99, found.mean] == pytest.approx([LAW.step(1)] * 3)


@given(st.floats(1e-12, 8e6), st.floats(1.0, 1.01))
def test_a_bin_is_at_most_a_five_hundredth_wide_and_longer_gaps_come_later(
    seconds: float, times: float
) -> None:
    assert bin_of(seconds) <= bin_of(seconds * times)
    if times >= 1 + 1 / 500:
        assert bin_of(seconds) < bin_of(seconds * times)


def test_what_is_out_of_bounds_is_in_the_first_or_last_bin() -> None:
    assert [bin_of(x) for x in (-1.0, 0.0, 1e-300, 2.0**-41)] == [0, 0, 0, 0]
    assert [bin_of(x) for x in (2.0**23, 1e300)] == [BINS - 1, BINS - 1]
    assert bin_of(math.nextafter(2.0**23, 0)) == BINS - 1


def test_a_counter_keeps_the_longest_of_each_bin() -> None:
    counter = GapCounter({"a"})
    for seconds, times in ((1.0, 2), (1.0005, 1), (1.0002, 4), (3.0, 0), (7.0, 1)):
        counter.add(seconds, times)
    seconds, times = found(counter.counts)
    assert (seconds.tolist(), times.tolist()) == ([1.0005, 7.0], [7, 1])
