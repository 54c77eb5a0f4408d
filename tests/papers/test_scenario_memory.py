"""KV memory and calls: the compiled engine against a slow one, and its degenerate cases."""

import dataclasses
import itertools

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.kv_memory import DISCARD, PRESERVE, SWAP, wastes
from kendall.queueing.latency.kv_memory import ToolCalls as Calls
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.token_gaps import no_gaps
from kendall.queueing.models.soap.orders import SHORTEST_FIRST
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.predictors.laws import ExactPrediction
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.predictors.sizes import token_sizes
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import memory_kernels
from kendall.queueing.simulation.fast import Trace, replay
from kendall.queueing.simulation.memory_kernels import Work
from papers.scenarios.memory import (
    HANDLINGS,
    ORDERS,
    UNBOUNDED,
    MemoryEngine,
    MemoryWork,
    Ranking,
    memory_time,
    ranking,
    run_memory,
    simulate_memory,
)
from papers.scenarios.runs import Replications
from tests.papers.scenario_paths import SlowMemory

LAW = LatencyModel(k1=2e-3, k3=1e-3, k4=2e-2, kp=1e-3)
PROMPTS = parse_distribution("geometric:mean=12", 30)
OUTPUTS = parse_distribution("lognormal:mu=2.5,sigma=0.9", 50)
CALLS = Calls(share=0.6, kinds=((0.5, 0.05), (0.5, 2.0)), sigma=0.5)
WORK = MemoryWork(
    arrival_rate=4.0,
    prompt_tokens=PROMPTS,
    output_tokens=OUTPUTS,
    predictor=PredictorText("lognormal", 0.5),
    calls=CALLS,
)


def engine(**settings):
    given = {"slots": 6, "memory": 150, "swap_setup": 0.01, "swap_token": 2e-4, "law": LAW}
    return MemoryEngine(**{**given, **settings})


def requests(arrived_at, prompt, output, **calls):
    count = len(output)
    none = np.zeros(count, dtype=np.int64)
    given = {
        "call_after": none,
        "call_seconds": np.zeros(count),
        "predicted_call": np.zeros(count),
        "handling": none,
    }
    whole = {"prompt": np.array(prompt), "output": np.array(output)}
    arrays = {name: np.array(value) for name, value in calls.items()}
    return Work(np.array(arrived_at, dtype=float), **{**given, **whole, **arrays})


def first_come(count):
    return Ranking(np.zeros(count), 0.0, np.zeros(count))


# the path


@pytest.mark.thinned(17)
@pytest.mark.parametrize("preempt", [DISCARD, PRESERVE, SWAP])
@pytest.mark.parametrize("memory", [80, 150, UNBOUNDED])
@pytest.mark.parametrize("handling", HANDLINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_an_engine_with_bounded_memory_follows_one_made_step_by_step(
    order, handling, memory, preempt
):
    seed = [ORDERS.index(order), HANDLINGS[handling], memory % 7, preempt]
    work = dataclasses.replace(WORK, handling=handling)
    drawn, predicted = work.drawn(np.random.default_rng(seed), 150)
    machine = engine(memory=memory)
    compiled = machine.compiled()._replace(preempt=preempt, kr=0.013)
    ranks = ranking(order, drawn, predicted, machine, 0.5)
    gaps = no_gaps(since=50)
    path, waste = memory_kernels.run_memory(drawn, ranks.order, compiled, gaps)
    slow = SlowMemory(drawn, ranks, compiled).run()
    assert path.waited == pytest.approx(np.array(slow.waited), rel=1e-9, abs=1e-9)
    assert (path.dispatch.tolist(), path.size.tolist()) == (slow.dispatch, slow.size)
    assert gaps.times.sum() == sum(map(len, slow.gaps[50:]))
    assert gaps.longest.max() == pytest.approx(max(map(max, filter(None, slow.gaps[50:]))))
    assert path.ended_at == pytest.approx(np.array(slow.ended), rel=1e-9)
    assert path.first_token_at == pytest.approx(np.array(slow.first), rel=1e-9)
    assert path.lost_memory.tolist() == slow.lost
    assert waste == pytest.approx([slow.idle_waste, slow.stall_waste], rel=1e-9, abs=1e-12)


def test_the_paths_that_are_compared_lose_memory_swap_and_compute_again():
    """Else the comparison above would show nothing."""
    drawn, predicted = WORK.drawn(np.random.default_rng(1), 300)
    for order in ORDERS:
        machine = engine(memory=80)
        path, waste = run_memory(
            drawn, ranking(order, drawn, predicted, machine), machine.compiled()
        )
        assert path.lost_memory.max() > 1
        assert (waste > 1).all()


def test_one_slot_and_no_prompts_is_a_queue_in_an_order():
    """M/G/1 under SPJF, exact."""
    law = LatencyModel(k3=0.01, k4=0.03)
    tokens = parse_distribution("lognormal:mu=2.5,sigma=0.9", 100)
    exact = solve_order(SHORTEST_FIRST, token_sizes(tokens, law), 1.0, ExactPrediction())
    work = MemoryWork(
        arrival_rate=1.0,
        prompt_tokens=parse_distribution("deterministic:value=1"),
        output_tokens=tokens,
    )
    found = simulate_memory(
        work, "shortest", MemoryEngine(law=law, slots=1), Replications(20_000, 24, 5)
    )
    assert exact.load > 0.6
    assert found.sojourn.standard_error < 0.02 * exact.sojourn
    assert abs(found.sojourn.mean - exact.sojourn) < 4 * found.sojourn.standard_error


def test_without_a_bound_it_is_continuous_batching():
    work = dataclasses.replace(WORK, calls=Calls(share=0, kinds=((1.0, 0.0),)), arrival_rate=9.0)
    drawn, _ = work.drawn(np.random.default_rng(3), 3000)
    model = Queue.read("continuous:max_batch_size=6", OUTPUTS, LAW, prompt_tokens=PROMPTS)
    trace = Trace(drawn.arrived_at, drawn.output, drawn.prompt, [np.random.default_rng(0)])
    expected = replay(model, trace)
    path, waste = run_memory(drawn, first_come(3000), engine(memory=UNBOUNDED).compiled())
    assert path.ended_at == pytest.approx(expected.released_at, rel=1e-9)
    assert path.first_token_at == pytest.approx(expected.first_token_at, rel=1e-9)
    assert not path.lost_memory.any()
    assert waste.tolist() == [0, 0]


@pytest.mark.parametrize("handling", ["preserve", "least-waste"])
def test_calls_of_no_length_change_nothing(handling):
    calls = Calls(share=1.0, kinds=((1.0, 0.0),))
    law = dataclasses.replace(LAW, k1=0.0)  # which the return to the engine would pay again
    drawn, _ = dataclasses.replace(WORK, calls=calls, handling=handling).drawn(
        np.random.default_rng(3), 500
    )
    without = drawn._replace(call_after=np.zeros_like(drawn.call_after))
    assert drawn.call_after.any()
    machine = engine(law=law, memory=UNBOUNDED).compiled()
    paths = [run_memory(each, first_come(500), machine)[0] for each in (drawn, without)]
    assert paths[0].ended_at == pytest.approx(paths[1].ended_at, rel=1e-12)


def test_a_batch_that_outgrows_the_memory_loses_its_last_member_who_computes_all_again():
    """Two requests of 4 + 6 tokens in a memory of 15, steps of 1 s, 0.1 s a token computed."""
    law = LatencyModel(k4=1.0, kp=0.1)
    work = requests([0, 0], [4, 4], [6, 6])
    path, waste = run_memory(
        work, first_come(2), MemoryEngine(law=law, slots=4, memory=15).compiled()
    )
    # both enter (4 + 4 computed), 1.8 s; 3 steps fit (14 tokens), the 4th would need 16: the second
    # waits until the first has ended at 6.8 s, then computes 4 + 3 tokens again
    assert path.first_token_at == pytest.approx([1.8, 1.8])
    assert path.ended_at == pytest.approx([6.8, 6.8 + 0.7 + 3])
    assert path.lost_memory.tolist() == [0, 1]
    assert waste == pytest.approx([0.0, 0.7 * 7])


@pytest.mark.parametrize(("keep", "delay"), [(False, 0.1 * (5 + 2)), (True, 0.0)])
def test_an_interrupted_request_computes_again_or_keeps_its_memory(keep, delay):
    law = LatencyModel(k4=1.0, kp=0.1)
    work = requests([0, 1.6], [5, 1], [9, 2])
    ranks = Ranking(np.array([9.0, 2.0]), -1.0, np.full(2, np.inf))
    machine = MemoryEngine(law=law, slots=1, keep=keep)
    path, waste = run_memory(work, ranks, machine.compiled())
    # steps end at 1.5 and 2.5; the short one serves 2.5 .. 4.6, the long one goes on behind it
    assert path.ended_at == pytest.approx([4.6 + 7 + delay, 4.6])
    assert path.lost_memory.tolist() == [1 - keep, 0]
    assert waste == pytest.approx([7 * 2.1 * keep, 7 * delay])


@pytest.mark.parametrize(("share", "ends"), [(0.8, [7, 5]), (0.5, [6, 7])])
def test_what_has_made_its_share_is_not_interrupted(share, ends):
    """4 of 6 tokens are made when the short request comes, and 2 are left."""
    work = requests([0, 3.5], [1, 1], [6, 1])
    machine = MemoryEngine(law=LatencyModel(k4=1.0), slots=1)
    ranks = ranking("trail", work, np.array([6.0, 1.0]), machine, share)
    path, _ = run_memory(work, ranks, machine.compiled())
    assert path.ended_at == pytest.approx(ends)


@pytest.mark.slow
@pytest.mark.parametrize("handling", ["preserve", "discard", "swap"])
def test_the_waste_of_a_call_is_the_formula(handling):
    """One request alone: 10 + 3 tokens of context, then a call of 4 s."""
    law = LatencyModel(k4=0.1, kp=0.02)
    work = requests(
        [0], [10], [5], call_after=[3], call_seconds=[4.0], handling=[HANDLINGS[handling]]
    )
    machine = MemoryEngine(law=law, slots=1, swap_setup=0.5, swap_token=0.01)
    path, waste = run_memory(work, first_come(1), machine.compiled())
    context = np.array([13])
    times = machine.forward(context), machine.swap(context)
    expected = wastes(np.array([4.0]), context, *times, context)[HANDLINGS[handling], 0]
    # while nobody is in service the way out of a swap costs no memory
    half = 0.5 if handling == "swap" else 1.0
    assert waste.sum() == pytest.approx(expected * half)
    again = {"preserve": 0.0, "discard": 0.02 * 13, "swap": 0.5 + 0.01 * 13}[handling]
    assert path.ended_at == pytest.approx([0.2 + 0.3 + 4 + again + 0.2])


def test_a_swap_takes_no_time_where_none_is_given():
    machine = MemoryEngine(law=LatencyModel(k4=0.1, kp=0.02), slots=1)
    assert machine.swap(np.array([0.0, 1000.0])).tolist() == [0.0, 0.0]


def test_the_least_wasteful_handling_follows_the_length_of_the_call():
    machine = engine(law=LatencyModel(k1=0.01, k4=1, kp=1e-3), swap_setup=0.1, swap_token=1e-4)
    calls, contexts = np.array([0.01, 9.0, 9.0]), np.array([100.0, 100.0, 2000.0])
    times = machine.forward(contexts), machine.swap(contexts)
    found = wastes(calls, contexts, *times, np.full(3, 1000.0))
    assert found[0] == pytest.approx(calls * contexts)
    assert found[1] == pytest.approx((0.01 + 1e-3 * contexts) * 1000)
    assert found[2] == pytest.approx(2 * (0.1 + 1e-4 * contexts) * 1000)
    assert found.argmin(axis=0).tolist() == [0, 1, 2]


def test_the_order_by_memory_is_that_of_mars():
    """The product's queue in that order, with the requests and calls of the scenario."""
    machine = engine(memory=300)
    law = dataclasses.replace(LAW, kr=0.0)
    queue = Queue.read(
        "continuous:max_batch_size=6,order=spjf,by=memory",
        "lognormal:mu=2.5,sigma=0.9",
        law,
        max_output_tokens=50,
        prompt_tokens=PROMPTS,
        predictor="lognormal:sigma=0.5",
        max_context_tokens=machine.memory,
        kv="preempt=recompute,setup=10ms,token=200us",
        tool_calls=dataclasses.replace(CALLS, keep="auto"),
    )
    rng = np.random.default_rng(3)
    work = dataclasses.replace(WORK, arrival_rate=9.0, handling="least-waste")
    drawn, predicted = work.drawn(rng, 3000)
    path, _ = run_memory(
        drawn, ranking("memory-time", drawn, predicted, machine, 0.8), machine.compiled()
    )
    trace = Trace(
        drawn.arrived_at,
        drawn.output,
        drawn.prompt,
        predicted=predicted,
        tool_calls=(drawn.call_after, drawn.call_seconds, drawn.predicted_call),
    )
    assert replay(queue, trace, 0).released_at == pytest.approx(path.ended_at, rel=1e-9)


# ranks and draws


def test_memory_time_is_the_sum_of_the_tokens_held_in_each_step():
    machine = engine()
    step = machine.full_step
    assert step == pytest.approx(6 * 1e-3 + 2e-2)
    work = requests(
        [0, 0], [10, 7], [4, 9], call_after=[0, 5], call_seconds=[0, 3], predicted_call=[0, 2.5]
    )
    plain = [step * sum(10 + j for j in range(1, 5)), step * sum(7 + j for j in range(1, 10))]
    added = {
        "preserve": 12 * 2.5,
        "discard": 12 * (2e-3 + 1e-3 * 12),
        "swap": 12 * 2 * (0.01 + 2e-4 * 12),
    }
    for handling, extra in {**added, "least-waste": added["discard"]}.items():
        asked = work._replace(handling=np.full(2, HANDLINGS[handling]))
        found = memory_time(asked, np.array([4.0, 9.0]), machine)
        assert found == pytest.approx([plain[0], plain[1] + extra])


def test_without_calls_memory_time_ranks_by_length_where_prompts_are_equal():
    predicted = np.array([5.0, 2.0, 9.0, 7.0])
    work = requests([0] * 4, [10] * 4, [1] * 4)
    assert np.argsort(memory_time(work, predicted, engine())).tolist() == [1, 0, 3, 2]


def test_ranks_are_those_of_the_predictions():
    work = requests([0, 0], [1, 1], [1, 1], predicted_call=[3.0, 0.0])
    predicted, machine = np.array([6.0, 4.0]), engine()
    assert ranking("fcfs", work, predicted, machine).value.tolist() == [0, 0]
    for order, slope, limit in (("shortest", 0, [0, 0]), ("remaining", -1, [np.inf] * 2)):
        ranks = ranking(order, work, predicted, machine)
        assert (ranks.value.tolist(), ranks.slope) == ([6, 4], slope)
        assert ranks.limit.tolist() == limit
    assert ranking("trail", work, predicted, machine, 0.5).limit.tolist() == [3, 2]
    with_call = ranking("with-call", work, predicted, machine).value
    assert with_call == pytest.approx([machine.full_step * 6 + 3, machine.full_step * 4])
    with pytest.raises(SpecError, match=r"got order='long'; expected fcfs, .*memory-time"):
        ranking("long", work, predicted, machine)


def test_calls_are_drawn_with_their_share_and_lengths():
    output = np.full(50_000, 11)
    before, seconds, told = CALLS.drawn(np.random.default_rng(1), output)
    called = before > 0
    assert called.mean() == pytest.approx(0.6, abs=0.01)
    assert set(before[called]) == set(range(1, 11))
    assert seconds[called].mean() == pytest.approx(0.5 * 0.05 + 0.5 * 2.0, rel=0.03)
    assert not np.concatenate([seconds[~called], told[~called]]).any()
    errors = np.log(told[called] / seconds[called])
    assert (errors.mean(), errors.std()) == pytest.approx((0.0, 0.5), abs=0.01)
    assert not CALLS.drawn(np.random.default_rng(1), np.ones(100))[0].any()  # no room for a call


def test_the_handling_changes_no_draw():
    drawn = [
        dataclasses.replace(WORK, handling=handling).drawn(np.random.default_rng(1), 50)
        for handling in HANDLINGS
    ]
    for (one, _), (other, _) in itertools.pairwise(drawn):
        assert all(np.array_equal(a, b) for a, b in zip(one[:6], other[:6], strict=True))
    assert [int(work.handling[0]) for work, _ in drawn] == [0, 1, 2, 3]


def test_predicted_lengths_follow_the_predictor():
    drawn, predicted = WORK.drawn(np.random.default_rng(1), 20_000)
    exact = dataclasses.replace(WORK, predictor=PredictorText("exact"))
    assert np.array_equal(
        *(
            exact.drawn(np.random.default_rng(1), 100)[0].output,
            exact.drawn(np.random.default_rng(1), 100)[1],
        )
    )
    assert drawn.arrived_at[-1] == pytest.approx(5000, rel=0.03)
    assert np.log(predicted / drawn.output).std() == pytest.approx(0.5, rel=0.2)


def test_means_are_those_of_the_paths():
    runs = Replications(400, 3, 9)
    machine = engine()
    found = simulate_memory(WORK, "shortest", machine, runs)
    means = []
    for stream in np.random.SeedSequence(9).spawn(3):
        drawn, predicted = WORK.drawn(np.random.default_rng(stream), 400)
        path, waste = run_memory(
            drawn, ranking("shortest", drawn, predicted, machine), machine.compiled()
        )
        kept = slice(40, 380)
        means.append(
            [
                (path.ended_at - drawn.arrived_at)[kept].mean(),
                (path.first_token_at - drawn.arrived_at)[kept].mean(),
                path.lost_memory[kept].mean(),
                *(waste / 400),
            ]
        )
    expected = np.mean(means, axis=0)
    values = [getattr(found, field.name).mean for field in dataclasses.fields(found)]
    assert values == pytest.approx(expected)


# bad input


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"slots": 0}, "slots=0"),
        ({"memory": 0}, "memory=0"),
        ({"swap_setup": -1.0}, "swap_setup=-1"),
        ({"swap_token": -1.0}, "swap_token=-1"),
    ],
)
def test_impossible_engines_are_refused(settings, expected):
    with pytest.raises(SpecError, match=expected):
        engine(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"share": 1.1, "kinds": ((1.0, 1.0),)}, "0 to 1"),
        ({"share": 0.5, "kinds": ((0.9, 1.0),)}, "add up to 1"),
        ({"share": 0.5, "kinds": ((1.0, 1.0),), "sigma": -0.1}, "sigma=-0.1"),
    ],
)
def test_impossible_calls_are_refused(settings, expected):
    with pytest.raises(SpecError, match=expected):
        Calls(**settings)


def test_unknown_handlings_and_requests_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="got handling='keep'; expected preserve, discard"):
        dataclasses.replace(WORK, handling="keep")
    with pytest.raises(SpecError, match="got memory=79; expected 80 tokens"):
        simulate_memory(WORK, "fcfs", engine(memory=79), Replications(10, 2))
    simulate_memory(WORK, "fcfs", engine(memory=80), Replications(10, 2))
