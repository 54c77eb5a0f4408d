"""KV memory taken token by token, and calls to tools: against the simulators of the same machine
without them, against what a lone request takes, and against a saturated engine.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.choosing.objective import parse_slos
from kendall.queueing.commands.cli import app, judgement
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.kv_memory import KvMemory, ToolCalls, parse_kv, parse_tool_calls
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction.steady_state import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.queueing.simulation.fast import Trace, replay
from kendall.queueing.simulation.simulated_means import RISING

LAW = LatencyModel(k1=2e-3, k3=1e-3, k4=2e-2, kp=2e-4, kr=3e-3)
OUTPUTS = "lognormal:mu=2.5,sigma=0.9"
FREE = "preempt=swap,setup=0,token=0"


def queue(policy: str = "continuous:max_batch_size=6", **limits) -> Queue:
    given = {"prompt_tokens": "uniform:low=1,high=40", "max_output_tokens": 60, **limits}
    return Queue.read(policy, OUTPUTS, given.pop("law", LAW), **given)


def ordered(order: str, **limits) -> Queue:
    told = {"predictor": "lognormal:sigma=0.5", **limits}
    return queue(f"continuous:max_batch_size=6,order={order}", **told)


def difference(one, other) -> float:
    """In standard errors, which are within 5 % of the means."""
    for each in (one, other):
        assert each.standard_error < 0.05 * each.mean
    return abs(one.mean - other.mean) / math.hypot(one.standard_error, other.standard_error)


# the machine


def test_memory_that_never_binds_is_the_continuous_engine():
    plain, taken = queue(), queue(kv="preempt=recompute", max_context_tokens=599)
    assert taken.on_demand
    for seed in range(3):
        paths = [
            simulate_run(each, 8.0, 2000, np.random.SeedSequence(seed)) for each in (plain, taken)
        ]
        assert paths[1].released_at == pytest.approx(paths[0].released_at, rel=1e-9)
        assert paths[1].first_token_at == pytest.approx(paths[0].first_token_at, rel=1e-9)


def test_calls_of_no_length_change_nothing():
    law = LatencyModel(k3=1e-3, k4=2e-2, kp=2e-4)  # k1 is paid with each entry
    plain = queue(law=law)
    calls = queue(law=law, tool_calls="share=1,mean=0,keep=preserve")
    one, other = (
        simulate_run(each, 8.0, 2000, np.random.SeedSequence(1)) for each in (plain, calls)
    )
    assert other.released_at == pytest.approx(one.released_at, rel=1e-9)


@pytest.mark.parametrize(
    "order",
    ["spjf", "ljf,aging=0.1", "spjf,by=service", "spjf,by=memory", "threshold,threshold=12"],
)
def test_orders_that_interrupt_nobody_are_those_of_the_continuous_engine(order):
    taken = ordered(order, kv="preempt=recompute", max_context_tokens=599)
    assert taken.on_demand
    found = [simulate_model(each, 8.5, num_requests=60_000) for each in (ordered(order), taken)]
    assert difference(found[0].sojourn_time, found[1].sojourn_time) < 4


@pytest.mark.parametrize("order", ["sprpt", "pspjf", "trail,c=0.5"])
@pytest.mark.slow
def test_recomputing_is_what_the_driver_of_the_policies_does(order):
    """There an arrival interrupts within a step, here between two: long answers, short steps."""
    law = LatencyModel(k1=1e-3, k3=1e-5, k4=4e-4, kp=1e-5, kr=2e-3)
    given = {"prompt_tokens": "uniform:low=1,high=40", "predictor": "exact"}
    policy, lengths = f"continuous:max_batch_size=4,order={order}", "uniform:low=100,high=500"
    plain = Queue.read(policy, lengths, law, **given)
    taken = Queue.read(policy, lengths, law, kv="preempt=recompute", **given)
    found = [
        simulate_model(each, 16.0, num_requests=count, seed=2)
        for each, count in ((plain, 15_000), (taken, 60_000))
    ]
    assert found[0].load > 0.5
    assert difference(found[0].sojourn_time, found[1].sojourn_time) < 4


def test_to_keep_is_no_worse_than_to_swap_and_to_swap_no_worse_than_to_recompute():
    kinds = ("preempt=preserve", "preempt=swap,setup=2ms,token=20us", "preempt=recompute")
    found = [simulate_model(ordered("sprpt", kv=kv), 8.0, num_requests=40_000) for kv in kinds]
    means = [each.sojourn_time.mean for each in found]
    assert means == sorted(means)
    assert means[2] > 1.02 * means[0]
    free = simulate_model(ordered("sprpt", kv=FREE), 8.0, num_requests=40_000)
    assert free.sojourn_time.mean == pytest.approx(means[0], rel=1e-9)


@pytest.mark.parametrize("keep", ["preserve", "discard", "swap", "auto"])
def test_a_lone_request_takes_its_steps_its_call_and_what_it_computes_again(keep):
    mean = 0.0 if keep == "auto" else 0.5  # alone, a call of no time wastes nothing
    calls = queue(
        prompt_tokens="deterministic:value=20",
        tool_calls=f"share=0.6,mean={mean},keep={keep}",
        kv="preempt=recompute,setup=50ms,token=10ms",
    )

    def again(context):
        swap = 0.05 + 0.01 * context
        rest = swap - 0.5 * -np.expm1(-swap / 0.5)  # of the way out, once the call is over
        added = {"discard": LAW.kr + LAW.kp * context, "swap": swap + rest}
        return mean + LAW.k1 + added.get(keep, 0.0)

    lengths = calls.requests.output_tokens
    expected = LAW.k1 + LAW.kp * 20 + lengths.mean * LAW.step(1)
    for tokens in range(2, lengths.longest + 1):
        each = float(again(20 + np.arange(1.0, tokens)).mean() if keep in ("discard", "swap")
                     else again(0.0))  # fmt: skip
        expected += 0.6 * lengths.pmf[tokens] * each
    found = simulate_model(calls, 1e-4, num_requests=40_000).sojourn_time
    assert found.standard_error < 0.02 * expected
    assert abs(found.mean - expected) < 4 * found.standard_error


# load


@pytest.mark.parametrize("limits", [
    {"tool_calls": "share=0.5,mean=100ms,keep=discard"},
    {"tool_calls": "share=0.5,mean=100ms,keep=swap", "kv": "preempt=recompute,setup=5ms,token=1ms"},
    {"kv": FREE, "max_context_tokens": 150},
])  # fmt: skip
def test_a_saturated_engine_serves_the_largest_stable_rate(limits):
    given = queue(**limits)
    run = simulate_run(given, 1e6, 20_000, np.random.SeedSequence(3))
    served = len(run.released_at) / run.released_at.max()
    within = (
        0.9 if "max_context_tokens" in limits else 0.99
    )  # memory too small for the next is free
    assert within * given.largest_stable_rate < served < 1.01 * given.largest_stable_rate
    expected = "memory" if "max_context_tokens" in limits else None
    assert given.load_bound == expected


@pytest.mark.slow
def test_memory_held_in_calls_is_part_of_the_load():
    held = queue(tool_calls="share=1,mean=10s,keep=preserve", max_context_tokens=300)
    freed = queue(tool_calls="share=1,mean=10s,keep=discard", max_context_tokens=300)
    assert held.largest_stable_rate < 0.3 * freed.largest_stable_rate
    run = simulate_run(held, 1e6, 20_000, np.random.SeedSequence(3))
    served = len(run.released_at) / run.released_at.max()
    assert 0.7 * held.largest_stable_rate < served < 1.05 * held.largest_stable_rate


def test_interruptions_that_make_too_much_work_are_unstable():
    law = LatencyModel(k1=5e-3, k3=1e-3, k4=2e-2, kp=3e-3)
    taken = ordered("fb", law=law, kv="preempt=recompute")
    assert taken.load(4.0) < 0.9
    with pytest.raises(UnstableQueueError) as error:
        simulate_model(taken, 4.0, num_requests=60_000)
    assert error.value.load > 1
    kept = simulate_model(ordered("fb", law=law, kv="preempt=preserve"), 4.0, num_requests=20_000)
    assert kept.stable


# what is asked


def test_without_calls_and_interruptions_the_formulas_answer():
    plain = predict_model(queue(), 8.0)
    for limits in ({"tool_calls": "share=0,mean=1s"}, {"kv": "preempt=recompute"}):
        found = predict_model(queue(**limits), 8.0)
        assert (found.method, found.sojourn_time) == (plain.method, plain.sojourn_time)


def test_the_command_line_simulates_it_and_says_what_it_assumes():
    asked = (
        "predict --policy continuous:max_batch_size=20 --arrival-rate 2 --output-tokens "
        "geometric:mean=20 --max-output-tokens 60 --latency k1=0,k2=0,k3=0.001,k4=0.02 "
        "--max-context-tokens 120 --kv preempt=recompute,setup=10ms "
        "--tool-calls share=0.5,mean=1s,keep=auto --json"
    )
    found = json.loads(CliRunner().invoke(app, asked.split()).stdout)
    assert (found["method"], found["load_bound"]) == ("simulation", "memory")
    text = " ".join(found["assumptions"])
    assert "KV memory of 120 tokens: a request holds its prompt and the tokens made" in text
    assert "50% of the requests of several tokens call a tool once" in text
    assert found["time_to_first_token"]["p99"] > 0


@pytest.mark.parametrize("text", [
    "preempt=recompute", "preempt=preserve", "preempt=swap,setup=0.01,token=2e-05",
])  # fmt: skip
def test_texts_of_kv_are_read_as_they_are_written(text):
    assert str(parse_kv(text)) == text


def test_texts_of_tool_calls_are_read_as_they_are_written():
    found = parse_tool_calls("share=0.7,mean=100ms/10s,weights=1/3,sigma=0.5,keep=auto")
    assert found == ToolCalls(0.7, ((0.25, 0.1), (0.75, 10.0)), 0.5, "auto")
    assert parse_tool_calls(str(found)) == found
    assert found.mean == pytest.approx(7.525)


@pytest.mark.parametrize(("text", "expected"), [
    ("", "an empty text for kv"),
    ("swap", "got 'swap' in"),
    ("setup=1s", "without preempt; expected recompute, swap or preserve"),
    ("preempt=swap", "without the time of a swap"),
    ("preempt=drop", "got preempt=drop for kv"),
    ("preempt=swap,setup=-1", "expected a duration"),
    ("preempt=swap,setup=inf", "0 to 1,000,000 s"),
    ("preempt=swap,size=4", "got key 'size' for kv; expected preempt, setup, token"),
])  # fmt: skip
def test_impossible_texts_of_kv_are_refused(text, expected):
    with pytest.raises(SpecError, match=expected):
        parse_kv(text)


@pytest.mark.parametrize(("text", "expected"), [
    ("mean=1s", "without share"),
    ("share=0.5", "without mean"),
    ("share=1.5,mean=1s", "got share=1.5"),
    ("share=nan,mean=1s", "got share='nan'"),
    ("share=0.5,mean=1e9s", "0 to 1,000,000 s"),
    ("share=0.5,mean=1s/2s,weights=1", "for 2 kinds"),
    ("share=0.5,mean=1s/2s,weights=0/1", "a number > 0 for each mean"),
    ("share=0.5,mean=1s,weights=nan", "got weights='nan'"),
    ("share=0.5,mean=1s,sigma=-1", "got sigma=-1"),
    ("share=0.5,mean=1s,keep=least", "got keep=least"),
])  # fmt: skip
def test_impossible_tool_calls_are_refused(text, expected):
    with pytest.raises(SpecError, match=expected):
        parse_tool_calls(text)


@pytest.mark.parametrize(("policy", "limits", "expected"), [
    ("dynamic", {}, "for policy dynamic; expected continuous"),
    ("single", {}, "expected continuous"),
    ("continuous:max_batch_size=6,order=hrrn", {}, "order=hrrn; expected none"),
    ("continuous:max_batch_size=6,order=vtc", {}, "order=vtc"),
    ("continuous:max_batch_size=6", {"servers": 2}, "servers=2"),
    ("continuous:max_batch_size=6", {"patience": 1.0}, "patience"),
    ("continuous:max_batch_size=6", {"max_num_queued_reqs": 9}, "max_num_queued_reqs"),
    ("continuous:max_batch_size=6", {"step_tokens": 64}, "step_tokens"),
    ("continuous:max_batch_size=6", {"max_context_tokens": 200, "reserved_tokens": 9},
     "reserved_tokens"),
    ("continuous:max_batch_size=6", {"law": LatencyModel(k4=1, turnaround=0.5)}, "turnaround=0.5"),
    ("continuous:max_batch_size=6", {"max_context_tokens": 99}, "at least 100, the largest prompt"),
    ("continuous:max_batch_size=6", {"tool_calls": "share=1,mean=1,keep=swap"},
     "without the time of a swap"),
])  # fmt: skip
def test_queues_that_it_does_not_model_are_refused(policy, limits, expected):
    with pytest.raises(SpecError, match=expected):
        queue(policy, kv=KvMemory(), **limits)


@pytest.mark.parametrize(("calls", "says"), [
    (None, True),
    ("share=1,mean=1,keep=preserve", True),
    ("share=1,mean=1,keep=auto", False),
])  # fmt: skip
def test_the_time_of_a_swap_where_nothing_is_swapped_is_said_not_to_be_paid(calls, says):
    found = queue(kv="preempt=recompute,setup=1ms", max_context_tokens=200, tool_calls=calls)
    said = "nothing is swapped: setup and token of kv are not paid"
    assert (said in found.assumptions) == says


def test_each_of_several_queues_has_its_memory():
    limits = {"kv": "preempt=recompute", "max_context_tokens": 200}
    one = simulate_model(queue(**limits), 4.0, num_requests=5000)
    two = simulate_model(queue(servers=2, routing="random", **limits), 8.0, num_requests=5000)
    assert two.sojourn_time == one.sojourn_time
    assert any("KV memory of 200 tokens" in text for text in two.assumptions)


def test_a_queue_that_grows_is_said_to_and_keeps_no_slo() -> None:
    """Its load without interruptions is below 1; swaps make it more than can be done."""
    queue = Queue.read(
        "continuous:max_batch_size=8",
        "deterministic:value=100",
        "k1=0.003,k2=0.005,k3=0.001,k4=0.02,kp=0.001,kr=0.05",
        prompt_tokens="deterministic:value=1000",
        max_context_tokens=5000,
        kv="preempt=swap,setup=100ms,token=1ms",
        tool_calls="share=1,mean=2s,keep=auto",
    )
    notes = {}
    for rate in (0.4, 0.5):
        found = simulate_model(queue, rate, num_requests=20_000, replications=4)
        assert queue.load(rate) < 0.9
        notes[rate] = [text for text in found.assumptions if text.startswith(RISING)]
        kept = judgement(found, parse_slos("p99_queueing_delay<=2000s")["slo"])["kept"]
        assert kept is (None if notes[rate] else True)
    assert not notes[0.4]
    assert notes[0.5]


@pytest.mark.parametrize(("kr", "order"), [(0.0, [0, 1, 2]), (1.0, [0, 2, 1])])
def test_by_memory_a_call_that_is_computed_again_counts_with_its_resume(
    kr: float, order: list[int]
) -> None:
    """The second has 10 tokens and a call, the third 12 and none."""
    taken = queue(
        "continuous:max_batch_size=1,order=spjf,by=memory",
        law=LatencyModel(k3=1e-3, k4=2e-2, kr=kr),
        predictor="exact",
        tool_calls="share=0.5,mean=1s,keep=discard",
    )
    arrived = np.array([0.0, 0.001, 0.002])
    outputs = np.array([5, 10, 12])
    trace = Trace(
        arrived,
        outputs,
        np.full(3, 20),
        predicted=outputs.astype(float),
        tool_calls=(np.array([0, 5, 0]), np.array([0.0, 0.1, 0.0]), np.array([0.0, 0.1, 0.0])),
    )
    assert np.argsort(replay(taken, trace, 0).first_token_at).tolist() == order
