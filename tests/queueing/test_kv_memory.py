"""KV memory of a continuous engine by the gateway's own rule: a request holds its prompt and the
token limit from its dispatch on, and the first in the queue waits until it fits.
"""

import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kendall
from kendall.policies.core import Request
from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.distributions.packing import POINTS, Reservations
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.queueing.simulation.fast import SimulatedRun, Trace, is_compiled, replay
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

PLAIN = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
FULL = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, turnaround=1.55e-3, speed=1.1)
WHOLE = (  # seconds
    LatencyModel(k1=1.0, k3=0.0, k4=1.0),
    LatencyModel(k1=0.0, k3=1.0, k4=0.0, kp=1.0, turnaround=1.0),
    LatencyModel(k1=1.0, k3=0.0, k4=1.0, turnaround=2.0, speed=2.0),
)
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("uniform:low=10,high=250")
COLUMNS = (
    *("dispatched_at", "released_at", "first_token_at", "server_free_at"),
    *("server_id", "batch_id", "batch_size"),
)
TEXT = "k1=0.3e-3,k2=1.4e-3,k3=25e-6,k4=0.92e-3"


def model(memory: int | None, policy: str = "continuous:max_batch_size=16", **given) -> Queue:
    limits = {"prompt_tokens": PROMPTS, "max_context_tokens": memory} | given
    lengths, law = limits.pop("output_tokens", LENGTHS), limits.pop("law", PLAIN)
    return Queue.read(policy, lengths, law, **limits)


def both(queue: Queue, rate: float, requests: int) -> tuple[SimulatedRun, SimulatedRun]:
    fast_run, slow = (
        simulate_run(queue, rate, requests, np.random.SeedSequence(5), generic=generic)
        for generic in (False, True)
    )
    return fast_run, slow


@pytest.mark.parametrize("patience", [None, 0.2])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("law", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize(("memory", "reserved"), [(314, None), (700, 10), (1500, None), (3000, 1)])
@pytest.mark.thinned(32)
def test_the_kernel_is_the_policys_own_sample_path(memory, reserved, law, servers, patience):
    queue = model(memory, law=law, servers=servers, patience=patience, reserved_tokens=reserved)
    assert is_compiled(queue)
    for load in (0.5, 1.1):
        found, expected = both(queue, load * queue.largest_stable_rate, 1500)
        assert np.array_equal(found.lost, expected.lost)
        for name in COLUMNS:
            values = (getattr(run, name)[~run.lost] for run in (found, expected))
            assert np.array_equal(*values), name


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 9)), min_size=5, max_size=40
    ),
    law=st.sampled_from(WHOLE),
    servers=st.integers(1, 3),
    memory=st.integers(16, 60),
)
def test_ties_are_broken_as_the_driver_breaks_them(steps, law, servers, memory):
    """Whole seconds: arrivals, completions and entries fall on one instant."""
    lengths, prompts = (parse_distribution(f"uniform:low=1,high={high}") for high in (6, 9))
    queue = model(
        memory,
        "continuous:max_batch_size=5",
        law=law,
        servers=servers,
        output_tokens=lengths,
        prompt_tokens=prompts,
    )
    arrived = np.cumsum([float(gap) for gap, _, _ in steps])
    outputs, inputs = (np.array([step[i] for step in steps]) for i in (1, 2))
    rngs = np.random.default_rng(0).spawn(servers)
    found = replay(queue, Trace(arrived, outputs, inputs, rngs))
    jobs = [
        Job(Request(str(i), at, int(inputs[i]), 6), int(outputs[i]))
        for i, at in enumerate(arrived.tolist())
    ]
    engine = SimulatedEngine(law, max_context_tokens=memory)
    for record in simulate_trace(queue.policy, jobs, engine, rngs):
        for name in COLUMNS:
            assert getattr(found, name)[int(record.request_id)] == getattr(record, name), name


@pytest.mark.parametrize(
    ("limit", "reserved", "held"), [(96, None, 96), (96, 80, 80), (48, 80, 48)]
)
def test_a_request_holds_its_token_limit_also_where_no_answer_reaches_it(limit, reserved, held):
    """Lengths that end at 64 under `--max-output-tokens 96`: the gateway reserves 96."""
    given = {"max_context_tokens": 1500, "reserved_tokens": reserved, "prompt_tokens": PROMPTS}
    queue = Queue.read(
        "continuous:max_batch_size=16", LENGTHS, PLAIN, max_output_tokens=limit, **given
    )
    asked = Request("0", 0.0, 10, limit, reserved_tokens=reserved or 2**62)
    assert held + 10 == asked.context_tokens
    expected = Reservations(1500, held, PROMPTS).chances(16)
    assert queue.in_saturation == pytest.approx(expected)
    found, slow = both(queue, 0.8 * queue.largest_stable_rate, 1500)
    for name in COLUMNS:
        assert np.array_equal(getattr(found, name), getattr(slow, name)), name


def test_more_memory_held_than_used_lengthens_the_delay():
    """Answers of at most 64 tokens wait as if each were to have its whole limit of 160."""
    given = {"max_context_tokens": 1500, "prompt_tokens": PROMPTS}
    exact, wide = (
        Queue.read("continuous:max_batch_size=16", LENGTHS, PLAIN, max_output_tokens=limit, **given)
        for limit in (64, 160)
    )
    rate = 0.8 * wide.largest_stable_rate
    short, long = (predict_model(queue, rate).queueing_delay for queue in (exact, wide))
    assert short.mean is not None
    assert long.mean is not None
    assert long.mean > 1.5 * short.mean
    assert wide.assumptions[-2].startswith(
        "KV memory of 1,500 tokens: a request holds its prompt and the token limit of 160 from"
    )


def test_the_first_in_the_queue_waits_for_memory_and_all_behind_it_for_it():
    """20 tokens, limit 4: `a` holds 14, `b` needs 9 and waits for it; `c` would fit and waits."""
    law, four = LatencyModel(k4=1.0), parse_distribution("uniform:low=1,high=4")
    prompts = parse_distribution("uniform:low=1,high=10")
    queue = model(
        20, "continuous:max_batch_size=3", law=law, output_tokens=four, prompt_tokens=prompts
    )
    trace = Trace(
        np.array([0.0, 0.5, 0.6]),
        np.array([4, 2, 1]),
        np.array([10, 5, 1]),
        [np.random.default_rng(0)],
    )
    assert replay(queue, trace).dispatched_at.tolist() == [0.0, 4.0, 4.0]
    assert replay(model(23, queue.text, law=law, output_tokens=four, prompt_tokens=prompts), trace)


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("memory", [12, 13, 20, 31])
def test_how_many_fit_is_counted_request_by_request(memory, slots):
    """Every sequence of prompts enumerated."""
    prompts = TokenDistribution(np.array([0.0, 0.5, 0.0, 0.3, 0.0, 0.0, 0.2]))
    found = Reservations(memory, 3, prompts).chances(slots)
    expected: dict[int, float] = {}
    longest = memory // 4 + 1
    for drawn in itertools.product((1, 3, 6), repeat=longest):
        fitting = int(np.sum(np.cumsum(np.array(drawn) + 3) <= memory))
        number = fitting if slots is None else min(fitting, slots)
        chance = math.prod(float(prompts.pmf[prompt]) for prompt in drawn)
        expected[number] = expected.get(number, 0.0) + chance
    assert found.keys() == expected.keys()
    for number, chance in expected.items():
        assert found[number] == pytest.approx(chance, abs=1e-12)


def test_a_memory_beyond_the_lattice_is_that_of_drawn_requests():
    memory, rng = 40 * POINTS + 17, np.random.default_rng(3)
    prompts = parse_distribution("geometric:mean=500")
    found = Reservations(memory, 1024, prompts).chances(None)
    held = 1024 + prompts.sample(rng, 8_000_000).reshape(20_000, 400)
    numbers = (np.cumsum(held, axis=1) <= memory).sum(axis=1)
    error = float(np.std(1 / numbers)) / math.sqrt(20_000)
    inverse = sum(chance / number for number, chance in found.items())
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-8)
    assert inverse == pytest.approx(float(np.mean(1 / numbers)), abs=4 * error)
    assert error < 1e-3 * inverse


def test_requests_of_one_size_leave_so_many_slots():
    """No prompts: 3000 tokens are 46 requests of 64."""
    queue = model(3000, "continuous:max_batch_size=64", prompt_tokens=None)
    slots = model(None, "continuous:max_batch_size=46", prompt_tokens=None)
    assert queue.in_saturation == {46: 1.0}
    assert queue.largest_stable_rate == pytest.approx(slots.largest_stable_rate, rel=1e-12)
    rate = 0.8 * queue.largest_stable_rate
    held, slotted = (simulate_model(each, rate, num_requests=5000) for each in (queue, slots))
    assert held.queueing_delay == slotted.queueing_delay
    assert (held.load_bound, slotted.load_bound) == ("memory", None)


def test_where_the_memory_cannot_bind_the_formula_answers():
    largest = 250 + 64
    enough, less = (model(memory, law=FULL) for memory in (16 * largest, 16 * largest - 1))
    plain = model(None, law=FULL)
    assert [each.memory_limited for each in (enough, less, plain)] == [False, True, False]
    assert methods(enough) == methods(plain)
    assert methods(less) == ("simulation",)
    assert enough.largest_stable_rate == plain.largest_stable_rate
    rate = 0.7 * plain.largest_stable_rate
    found, expected = predict_model(enough, rate), predict_model(plain, rate)
    assert found.queueing_delay == expected.queueing_delay
    assert (found.load_bound, expected.load_bound) == ("slots", None)
    note = "KV memory of 5,024 tokens does not bind: those in service hold 5,024 at most"
    assert note in found.assumptions


@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=4", "elastic:max_batch_size=4"]
)
def test_a_batch_that_fits_whole_is_as_without_the_bound(policy):
    found, expected = (predict_model(model(memory, policy), 8.0) for memory in (4 * 314, None))
    assert found.queueing_delay == expected.queueing_delay
    assert found.method == "exact"


def test_it_binds_smoothly_and_the_answer_says_what_does():
    rates = [model(memory).largest_stable_rate for memory in range(314, 5100, 99)]
    slots = model(None).largest_stable_rate
    assert rates == sorted(rates)
    assert rates[0] < 0.25 * slots
    assert rates[-1] == slots
    bounds = [model(memory).load_bound for memory in (1000, 3000, 4000, 5024)]
    assert bounds == ["memory", "memory", "slots", "slots"]
    assert model(None).load_bound is None


def drift(queue: Queue, rate: float, requests: int) -> float:
    """By how much the delay grows from one half of a run to the other, of the mean of both."""
    delay = simulate_run(queue, rate, requests, np.random.SeedSequence(2)).queueing_delay
    halves = delay[: requests // 2].mean(), delay[requests // 2 :].mean()
    return float((halves[1] - halves[0]) / (halves[0] + halves[1]))


def served(queue: Queue, requests: int) -> float:
    """Requests/s that leave while the queue never empties."""
    run = simulate_run(queue, 3 * queue.largest_stable_rate, requests, np.random.SeedSequence(4))
    last = run.released_at[-1]
    return float((run.released_at <= last).sum() / last)


CELLS = {
    "chat": ("lognormal:mu=4.6,sigma=0.8", 512, "uniform:low=10,high=1500", 20_000, 64),
    "few": ("uniform:low=8,high=256", 256, "uniform:low=10,high=2000", 5_000, 16),
    "alike": ("deterministic:value=128", 128, "uniform:low=10,high=1500", 8_000, 64),
    "near": ("geometric:mean=60", 256, "uniform:low=10,high=500", 8_000, 16),
    "no slots": ("geometric:mean=60", 256, "geometric:mean=200", 30_000, None),
}


def cell(name: str, law: LatencyModel = PLAIN) -> Queue:
    lengths, limit, prompts, memory, slots = CELLS[name]
    return model(
        memory,
        "continuous" if slots is None else f"continuous:max_batch_size={slots}",
        law=law,
        output_tokens=parse_distribution(lengths, limit),
        prompt_tokens=parse_distribution(prompts),
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("law", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("name", CELLS)
def test_the_largest_stable_rate_is_what_a_full_queue_is_served_at(name, law):
    queue = cell(name, law)
    assert queue.memory_limited
    assert served(queue, 60_000) == pytest.approx(queue.largest_stable_rate, rel=0.02)


@pytest.mark.parametrize("name", ["chat", "few"])
def test_the_queue_is_stable_just_below_it_and_grows_just_above(name):
    queue = cell(name)
    below, above = (
        drift(queue, factor * queue.largest_stable_rate, 400_000) for factor in (0.97, 1.03)
    )
    assert below < 0.25
    assert above == pytest.approx(0.5, abs=0.12)  # a line from 0


ARGUMENTS = (
    *("--policy", "continuous:max_batch_size=16", "--arrival-rate", "100"),
    *("--output-tokens", "uniform:low=1,high=64", "--prompt-tokens", "uniform:low=10,high=250"),
    *("--latency", TEXT),
)


def printed(command: str, *arguments: str) -> str:
    given = (command, *ARGUMENTS, *arguments)
    return CliRunner().invoke(app, given, catch_exceptions=False).stdout


FEW = ("--num-requests", "2000")


def test_the_command_line_takes_it_and_says_what_binds():
    held = ("--max-context-tokens", "2000")
    assert "(bound by memory)" in printed("simulate", *held, *FEW)
    found = json.loads(printed("simulate", *held, "--json", *FEW))
    assert (found["load_bound"], found["method"]) == ("memory", "simulation")
    assert any(each.startswith("KV memory of 2,000 tokens: a req") for each in found["assumptions"])
    plain = json.loads(printed("simulate", "--json", *FEW))
    assert "load_bound" not in plain
    assert found["load"] > 1.2 * plain["load"]


def test_a_queue_that_only_the_memory_makes_unstable_says_so():
    text = printed("predict", "--max-context-tokens", "500")
    assert "(bound by memory)  UNSTABLE" in text


def test_the_python_api_takes_it_too():
    given = ("continuous:max_batch_size=16", "uniform:low=1,high=64", TEXT)
    limits = {"prompt_tokens": "uniform:low=10,high=250", "max_context_tokens": 2000}
    rate = kendall.largest_stable_rate(*given, **limits)
    found = kendall.simulate(given[0], rate / 2, *given[1:], num_requests=2000, **limits)
    assert found.load == pytest.approx(0.5)
    assert found.load_bound == "memory"
    predicted = kendall.predict(given[0], rate / 2, *given[1:], **limits)
    assert (predicted.method, predicted.load_bound) == ("simulation", "memory")
    assert "with one server, KV memory of 2,000 tokens" in (predicted.fallback or "")


@pytest.mark.parametrize(
    ("policy", "lengths", "memory", "message"),
    [
        ("continuous", "uniform:low=1,high=64", 0, "got max_context_tokens=0; expected a whole"),
        ("continuous", "uniform:low=1,high=64", 2.5, "got max_context_tokens=2.5; expected a wh"),
        (
            "single",
            "uniform:low=1,high=64",
            313,
            "got max_context_tokens=313; expected at least 314, the largest prompt (250) and the "
            "token limit (64): give more memory, or set a smaller max_output_tokens",
        ),
        (
            "continuous",
            "pareto:alpha=2.5,minimum=20",
            10**6,
            "got max_context_tokens=1000000 for output lengths without a limit, which no memory "
            "holds; expected max_output_tokens too",
        ),
        (
            "capped:max_batch_size=4",
            "uniform:low=1,high=64",
            1255,
            "got max_context_tokens=1255 for policy capped:max_batch_size=4; expected policy "
            "continuous, or memory for its largest batch, 4 x 314 tokens: batches that memory cuts",
        ),
        (
            "dynamic",
            "uniform:low=1,high=64",
            10**6,
            "got max_context_tokens=1000000 for policy dynamic; expected policy continuous, or "
            "memory for its largest batch: batches",
        ),
    ],
)
def test_what_it_cannot_be_is_said(policy, lengths, memory, message):
    with pytest.raises(SpecError, match="^" + re.escape(message)):
        Queue.read(
            policy,
            lengths,
            TEXT,
            prompt_tokens="uniform:low=10,high=250",
            max_context_tokens=memory,
        )


@pytest.mark.parametrize(("order", "compiled"), [("spjf", True), ("sprpt", False)])
def test_another_order_of_service_is_simulated(order, compiled):
    """The gateway's own choice and preemption."""
    queue = model(1500, f"continuous:max_batch_size=16,order={order}")
    assert is_compiled(queue) == compiled
    rate = 0.8 * queue.largest_stable_rate
    held = simulate_model(queue, rate, num_requests=2000)
    free = simulate_model(model(None, queue.text), rate, num_requests=2000)
    assert held.queueing_delay.mean > 2 * free.queueing_delay.mean


def test_each_server_has_a_memory_of_its_own():
    one, four = (model(1500, servers=servers) for servers in (1, 4))
    assert four.largest_stable_rate == 4 * one.largest_stable_rate
    routed = model(1500, servers=4, routing="random")
    rate = 0.7 * four.largest_stable_rate
    found = simulate_model(routed, rate, num_requests=2000)
    alone = simulate_model(one, rate / 4, num_requests=2000)
    assert found.queueing_delay == alone.queueing_delay
    assert found.load == pytest.approx(0.7)
    fewest = simulate_model(
        model(1500, servers=4, routing="least_requests"), rate, num_requests=400
    )
    assert fewest.load_bound == "memory"


def test_a_memory_beyond_all_counts_is_refused() -> None:
    with pytest.raises(SpecError, match=r"got max_context_tokens=1\d{30}; expected at most"):
        kendall.simulate(
            "continuous:max_batch_size=8",
            2,
            "geometric:mean=9",
            "k1=1e-3,k2=0,k3=0,k4=1e-3",
            max_output_tokens=64,
            max_context_tokens=10**30,
        )


def test_what_is_reserved_is_held_in_place_of_a_larger_limit():
    def rate(memory, reserved, limit=64):
        lengths = parse_distribution("lognormal:mu=2.5,sigma=0.7", limit)
        queue = model(memory, output_tokens=lengths, reserved_tokens=reserved)
        return queue.largest_stable_rate

    assert rate(900, 64) == rate(900, 1000) == rate(900, None)
    assert rate(900, 64) < rate(900, 20) < rate(900, 1) < rate(None, None)
    held = Reservations(900, 20, PROMPTS).chances(16)
    assert model(900, reserved_tokens=20).in_saturation == pytest.approx(held)


def test_a_reservation_without_a_memory_is_refused_and_one_with_is_told():
    arguments = ["predict", "--policy", "continuous:max_batch_size=16", "--arrival-rate", "10"]
    arguments += ["--output-tokens", "uniform:low=1,high=64", "--latency", TEXT]
    arguments += ["--prompt-tokens", "uniform:low=10,high=250", "--reserved-tokens", "20"]
    refused = CliRunner().invoke(app, arguments)
    assert "without max_context_tokens" in str(refused.exception)
    told = CliRunner().invoke(app, [*arguments, "--max-context-tokens", "900", "--json"])
    assert told.exit_code == 0, told.output
    said = " ".join(json.loads(told.stdout)["assumptions"])
    assert "a request holds its prompt and 20 tokens for its answer" in said
