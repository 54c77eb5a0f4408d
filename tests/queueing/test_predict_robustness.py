"""`predict` answers or refuses: durations above zero, tables that fit into memory, any number of
servers, no warnings.
"""

import itertools
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.api import Prediction, SpecError, largest_stable_rate, predict, simulate
from kendall.policies.text import parse_policy
from kendall.queueing.commands.optimize_cli import app as optimize_app
from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import NotConvergedError, OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_laws import ServiceLaws
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.mgc import mmc, solve_servers
from kendall.queueing.prediction.answer_check import checked_answer
from kendall.queueing.result import Quantiles
from tests.memory import peak_memory
from tests.queueing.predict_fuzz import _fault, cases, fault_of, warm_up

LAW = "k1=0.001,k2=0.01,k3=0.00002,k4=0.01"


@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "dynamic",
        "capped:max_batch_size=8",
        "elastic:max_batch_size=8",
        "fixed:batch_size=8",
    ],
)
@pytest.mark.parametrize(
    ("law", "prompts", "blamed"),
    [
        ("k1=-0.9,k2=-0.5,k3=1e-4,k4=1e-3", None, "k1=-0.9, k2=-0.5"),
        ("k1=0,k2=-0.5,k3=1e-4,k4=1e-3", None, "k2=-0.5"),
        ("k1=0,k2=0,k3=1e-4,k4=1e-3,kp=-0.1", "uniform:low=1,high=100", "kp=-0.1"),
    ],
)
def test_a_law_by_which_a_batch_takes_no_time_is_refused_by_name(
    policy: str, law: str, prompts: str | None, blamed: str
) -> None:
    for ask in (predict, simulate):
        with pytest.raises(
            SpecError, match=f"got {blamed} in the latency law.* expected more than 0 s.*: raise k"
        ):
            ask(policy, 0.01, "geometric:mean=20", law, prompt_tokens=prompts)


def test_optimize_refuses_such_a_law_too() -> None:
    flags = (
        "--target",
        "batch-size",
        "--arrival-rate",
        "1",
        "--output-tokens",
        "geometric:mean=20",
        "--policy",
        "capped:max_batch_size=4",
    )
    found = CliRunner().invoke(optimize_app, [*flags, "--latency", "k1=0,k2=-0.5,k3=1e-4,k4=1e-3"])
    assert isinstance(found.exception, SpecError)
    assert "k2=-0.5" in str(found.exception)


@pytest.mark.left_out
def test_a_batch_of_the_largest_size_must_take_time_as_well() -> None:
    law = "k1=-0.002,k2=0.01,k3=1e-5,k4=1e-3"
    assert predict("capped:max_batch_size=4", 1, "uniform:low=4,high=24", law).stable
    with pytest.raises(
        SpecError,
        match=(
            r"a batch of 8 with 4 output tokens each takes -0\.00\d+ s.*bound the batch size "
            r"lower"
        ),
    ):
        predict("capped:max_batch_size=8", 1, "uniform:low=4,high=24", law)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=8",
        "elastic:max_batch_size=8",
        "continuous:max_batch_size=8",
    ],
)
def test_a_fitted_law_with_a_slightly_negative_coefficient_is_answered(policy: str) -> None:
    """An intercept below zero is common where the shortest answer of the fit is long: no batch
    that occurs takes less than no time.
    """
    given = (policy, 0.1, "uniform:low=64,high=256", "k1=2e-3,k2=-0.03,k3=1e-4,k4=2e-3")
    for answer in (predict(*given), simulate(*given, num_requests=1000)):
        assert answer.stable
        assert answer.sojourn_time.mean > 0.1
        assert (
            policy.startswith("continuous") or answer.time_to_first_token.mean is None
        )  # this law puts it before the dispatch


@pytest.mark.parametrize("law", ["k1=0,k2=0,k3=0,k4=1e300", "k1=0,k2=0,k3=0,k4=1e-300"])
def test_coefficients_that_cannot_be_seconds_are_refused(law: str) -> None:
    with pytest.raises(SpecError, match="expected seconds between 1e-12 and 1e\\+12"):
        predict("single", 1.0, "geometric:mean=20", law)


@pytest.mark.parametrize(
    "policy", ["capped:max_batch_size=100000", "elastic:max_batch_size=100000"]
)
def test_a_bound_that_the_queue_never_reaches_is_no_bound(policy: str) -> None:
    """Batches of 3 requests/s are far smaller: the answer is the one of a cap of 256, which is
    solved as a queue with full batches.
    """
    wide, bounded = (
        predict(text, 3, "uniform:low=1,high=120", LAW)
        for text in (policy, policy.replace("100000", "256"))
    )
    assert (wide.method, wide.effective_max_batch_size) == ("exact", 100_000)
    assert wide.queueing_delay.mean == pytest.approx(bounded.queueing_delay.mean, rel=1e-7)
    assert wide.sojourn_time.p99 == pytest.approx(bounded.sojourn_time.p99, rel=2e-3)


def test_a_table_out_of_reach_is_an_error_of_exact_and_a_simulation_of_auto() -> None:
    given = (
        "capped:max_batch_size=100000",
        1.5e4,
        "geometric:mean=20",
        "k1=1e-5,k2=1,k3=0,k4=1e-2",
    )
    with pytest.raises(NotConvergedError):
        predict(*given, method="exact")
    answer = predict(*given)
    assert answer.method == "simulation"
    assert answer.batch_size.mean > 10_000


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("servers", "load"), list(itertools.product((65, 1000, 100_000), (0.3, 0.95, 0.999)))
)
def test_any_number_of_servers_has_an_answer(servers: int, load: float) -> None:
    """Exponential service: M/M/c is exact. Near the atom at 0 a lattice cannot tell quantiles
    apart: there the mean only.
    """
    mean = 2.0
    levels = (np.arange(4000) + 0.5) / 4000
    service = ServiceTime(-mean * np.log1p(-levels), np.full(4000, 1 / 4000))
    rate = load * servers / service.mean
    exact, found = mmc(rate, service.mean, servers), solve_servers(service, rate, servers)
    assert found.delay.mean == pytest.approx(exact.mean_delay, rel=0.01, abs=1e-30)
    assert found.delay.p99 == pytest.approx(
        exact.delay_quantile(0.99), rel=0.02 if load < 0.99 else 0.1, abs=1e-6
    )
    assert found.sojourn.p50 >= service.mean * math.log(2) * 0.999


def test_the_documents_own_law_needs_no_limit() -> None:
    """lognormal(7, 0.7) against its closed form, Pollaczek-Khinchine; rounding to counts moves
    neither moment by 1e-6.
    """
    mean, second = (math.exp(k * 7 + (k * 0.7) ** 2 / 2) for k in (1, 2))
    answer = predict("single", 0.5 / (0.01 * mean), "lognormal:mu=7,sigma=0.7", "a=0.01,c=0")
    assert answer.load == pytest.approx(0.5, rel=1e-6)
    assert answer.queueing_delay.mean == pytest.approx(
        0.5 / mean * 0.01 * second / (2 * 0.5), rel=1e-5
    )
    assert predict("single", 0.05, "lognormal:mu=6,sigma=1", "a=0.01,c=0").queueing_delay.p99 > 0


@pytest.mark.slow
@pytest.mark.parametrize(("load", "alpha"), [(0.3, 1.5), (0.5, 2.5), (0.7, 1.5)])
def test_quantiles_of_capped_batches_of_clipped_pareto_lengths(load: float, alpha: float) -> None:
    """Most of the mean delay follows a few long answers, so its law is long: lattices of several
    lengths, against sixteen runs.
    """
    given = ("capped:max_batch_size=8", f"pareto:alpha={alpha},minimum=20", LAW)
    rate = load * largest_stable_rate(*given, max_output_tokens=10_000)
    exact = predict(
        given[0], rate, *given[1:], max_output_tokens=10_000, method="exact"
    ).queueing_delay
    runs = [
        simulate(
            given[0], rate, *given[1:], max_output_tokens=10_000, num_requests=1_000_000, seed=seed
        )
        for seed in range(16)
    ]
    for level in ("mean", "p50", "p90", "p95", "p99"):
        values = np.array([getattr(run.queueing_delay, level) for run in runs])
        noise = values.std(ddof=1) / 4 / values.mean()
        assert noise < 0.03
        assert getattr(exact, level) == pytest.approx(values.mean(), rel=max(0.02, 4 * noise)), (
            level
        )


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_quantiles_of_clipped_pareto_lengths_are_finite_and_ordered(load: float) -> None:
    """Those of the delay by the exact law; what no law gives is simulated, and the answer says
    so first.
    """
    given = ("capped:max_batch_size=8", "pareto:alpha=1.5,minimum=20", LAW)
    rate = load * largest_stable_rate(*given, max_output_tokens=10_000)
    exact, answer = (
        predict(given[0], rate, *given[1:], max_output_tokens=10_000, method=method)
        for method in ("exact", "auto")
    )
    assert answer.method == "exact"
    for name in ("queueing_delay", "sojourn_time"):
        found, known = getattr(answer, name), getattr(exact, name)
        assert found.mean == known.mean
        assert all(
            math.isfinite(value)
            for value in (found.mean, found.p50, found.p90, found.p95, found.p99)
        ), name
        assert 0 <= found.p50 < found.p90 < found.p95 < found.p99
    assert answer.queueing_delay == exact.queueing_delay
    missing = "their law could not be computed accurately"
    if exact.sojourn_time.p50 is None:
        assert answer.fallback == (
            "exact means, but quantiles of the sojourn time from a simulation of 300,000 "
            f"requests: {missing}"
        )
        assert exact.fallback == f"exact means, but no quantiles of the sojourn time: {missing}"
    else:
        assert (answer.fallback, exact.fallback) == (None, None)
        assert answer.sojourn_time == exact.sojourn_time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lengths", "law", "rate"),
    [
        (
            "elastic:max_batch_size=2",
            "pareto:alpha=3,minimum=11.9",
            "k1=-0.0001466,k2=0.0006391,k3=0.0007344,k4=0.001957",
            6.85,
        ),
        (
            "capped:max_batch_size=8",
            "pareto:alpha=3,minimum=2.834",
            "k1=0,k2=0.0001067,k3=1.984e-06,k4=0",
            34403.0,
        ),
    ],
)
def test_powers_far_beyond_the_end_of_a_law_and_endless_rows_of_arrivals(
    policy: str, lengths: str, law: str, rate: float
) -> None:
    assert 0 < predict(policy, rate, lengths, law).queueing_delay.mean < math.inf


def test_a_simulation_in_which_everyone_is_lost_says_so() -> None:
    answer = predict(
        "capped:max_batch_size=8",
        28.62,
        "normal:mean=318.4,std=13.93",
        "a=0.0389,c=1e6",
        patience=15.55,
    )
    assert answer.loss_fraction == 1
    assert answer.utilisation is None


@pytest.mark.parametrize("replications", [1, 20])
def test_a_simulation_of_more_than_a_gigabyte_is_refused(replications: int) -> None:
    with pytest.raises(SpecError, match="expected at most 10000000 in all"):
        simulate(
            "single",
            1.0,
            "geometric:mean=20",
            LAW,
            num_requests=20_000_000 // replications,
            replications=replications,
        )


def test_numbers_that_cannot_be_right_are_no_answer() -> None:
    answer = predict("single", 1, "geometric:mean=20", "a=0.01,c=0.1")

    def with_delay(**values: float) -> Prediction:
        return checked_answer(
            lambda: Prediction(**{**vars(answer), "queueing_delay": Quantiles(**values)})
        )

    assert with_delay(mean=-1e-15).queueing_delay.mean == 0
    for wrong in ({"mean": -0.1}, {"mean": math.nan}, {"mean": 1.0, "p99": -1.0}):
        with pytest.raises(NotConvergedError, match="of the queueing delay"):
            with_delay(**wrong)
    with pytest.raises(OutOfReachError, match="overflow"):
        checked_answer(
            lambda: Prediction(**{**vars(answer), "load": float(np.exp(np.array([1e4]))[0])})
        )


def test_prompts_beside_outputs_need_little_memory() -> None:
    """3,300 outputs times 6,800 prompts, each pair with a probability of its own, would be 2 GB."""
    lengths, prompts = (
        parse_distribution(text) for text in ("normal:mean=180,std=440", "exponential:mean=249")
    )
    with peak_memory() as peak:
        service = ServiceTime.of(LatencyModel(k4=1e-2, kp=1e-3), lengths, prompts)
    assert service.mean == pytest.approx(1e-2 * lengths.mean + 1e-3 * prompts.mean, rel=1e-12)
    assert service.second_moment - service.mean**2 == pytest.approx(
        1e-4 * lengths.variance + 1e-6 * prompts.variance, rel=1e-9
    )
    assert peak.value < 400e6


def test_a_table_of_padded_batches_with_prompts_takes_little_more_than_itself() -> None:
    """Four copies at once of a table of 0.3 GB were over 1 GB."""
    lengths, prompts = (
        parse_distribution(text) for text in ("normal:mean=39,std=5", "lognormal:mu=3,sigma=0.5")
    )
    law = LatencyModel(k3=1e-3, k4=1e-2, kp=1e-4)
    builder = ServiceLaws(
        law=law,
        outputs=CallLengths(lengths),
        prompt_tokens=prompts,
        largest=256,
        width=1e-3,
        points=8192,
    )
    with peak_memory() as peak:
        table = builder.padded()
    assert table.shape == (256, 8192)
    assert peak.value < 1.5 * table.nbytes


@pytest.mark.slow
def test_policies_with_thousands_of_slots_answer() -> None:
    for policy in (
        "continuous:max_batch_size=4096",
        "continuous:max_batch_size=100000",
        "continuous",
    ):
        answer = predict(
            policy, 14.0, "lognormal:mu=5,sigma=0.5", "k1=1e-4,k2=0,k3=1e-4,k4=2e-3,turnaround=0.05"
        )
        assert answer.queueing_delay.mean == pytest.approx(0, abs=1e-12)
        assert answer.sojourn_time.mean == pytest.approx(0.515, rel=0.01)
    assert (
        predict(
            parse_policy("continuous:max_batch_size=100000"),
            1.0,
            "geometric:mean=60",
            LAW,
            patience=0.1,
        ).method
        == "simulation"
    )


@pytest.mark.parametrize("method", ["auto", "exact", "simulation"])
def test_a_mean_that_is_infinite_is_said_to_be_whatever_the_lengths(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbounded batches with cv = 1 at load 0.85: a Kesten recursion of which no second moment
    exists.
    """
    monkeypatch.setattr(
        "kendall.queueing.models.batches.batch_chain._LARGEST_BATCH", 64
    )  # a larger chain takes seconds, and does not cut the tail either
    monkeypatch.setattr("kendall.queueing.prediction.steady_state.SIMULATED_REQUESTS", 100_000)
    given = ("dynamic", 0.85, "deterministic:value=1", "k1=1,k2=0,k3=0,k4=1e-9,cv=1")
    if method == "exact":
        with pytest.raises(
            NotConvergedError,
            match=r"the mean delay is infinite: batch sizes have no bound.*; bound the batch size",
        ):
            predict(*given, method=method)
        return
    answer = predict(*given, method=method)
    assert (answer.queueing_delay.mean, answer.sojourn_time.mean) == (None, None)
    assert 0 < answer.queueing_delay.p50 < answer.queueing_delay.p99 < math.inf
    assert any(each.startswith("the mean delay is infinite") for each in answer.assumptions)
    assert predict(*given, patience=5.0).queueing_delay.mean < 5


CAPS = [
    (f"{name}:max_batch_size={cap}", tokens)
    for name in ("capped", "elastic")
    for cap in (512, 8192, 100_000)
    for tokens in (48, 4096)
]
UNBOUND = [("elastic", 4096), ("elastic", 32_768), ("dynamic", 4096), ("dynamic", 32_768)]


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.95])
@pytest.mark.parametrize(("policy", "limit"), [*CAPS, *UNBOUND])
def test_large_caps_and_long_answers_are_answered_or_refused_in_ten_seconds_and_a_gigabyte(
    policy: str, limit: int, load: float
) -> None:
    """An unbounded padded or elastic queue is answered at the same shares of its own largest
    stable rate.
    """
    warm_up()
    line = [
        "--json",
        f"--policy={policy}",
        f"--output-tokens=geometric:mean={limit / 4:g}",
        f"--max-output-tokens={limit}",
    ]
    rate = load * largest_stable_rate(
        policy, f"geometric:mean={limit / 4:g}", LAW, max_output_tokens=limit
    )
    for method in ("auto", "exact"):
        assert (
            fault_of([*line, f"--latency={LAW}", f"--arrival-rate={rate!r}", f"--method={method}"])
            is None
        )


TOOK_LONG = (
    (
        "--max-output-tokens=4096 --sequences=geometric:mean=1 "
        "--latency=k1=0.002204,k2=-0.007558,k3=0,k4=0.01291,cv=0.003453,speed=0.6829,"
        "stall_share=0.05218,stall=0.3125 "
        "--policy=elastic:max_batch_size=16 --output-tokens=pareto:alpha=2.5,minimum=1.364 "
        "--arrival-rate=0.02455 --json"
    ),
    (
        "--json --policy=elastic:max_batch_size=8192 --latency=k1=0.008035,k2=0,k3=2.223e-05,k4=0 "
        "--output-tokens=exponential:mean=1125 --arrival-rate=1.5131450364837316"
    ),
    (
        "--arrival-rate=7113.268865109306 --servers=1000 --json "
        "--latency=k1=0.003149,k2=0,k3=2.175e-05,k4=0.01062,turnaround=0.000338,speed=0.7116,"
        "stall_share=0.2143,stall=0.04216 "
        "--output-tokens=exponential:mean=8.594 --policy=capped:max_batch_size=3"
    ),
    (
        "--sequences=deterministic:value=8 "
        "--latency=k1=-4.909e-05,k2=0.02643,k3=1.034e-05,k4=5.289e-05 "
        "--arrival-rate=0.4435 --json --policy=single "
        "--output-tokens=mixture:weights=0.439+0.5609999999999999,"
        "parts=uniform:low=2.541:high=2293+exponential:mean=1411"
    ),
    (
        "--prompt-tokens=exponential:mean=3.342 --arrival-rate=80408.87340381813 --servers=1000 "
        "--json --output-tokens=lognormal:mu=3,sigma=0.5 --policy=capped:max_batch_size=8 "
        "--latency=k1=1.333e-05,k2=0.0473,k3=0,k4=1.874e-05,speed=2.043,"
        "stall_share=0.001815,stall=0.02305"
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("line", TOOK_LONG)
def test_command_lines_that_took_minutes_or_gigabytes_do_so_no_more(line: str) -> None:
    """The spectra of thousands of lengths, the gaps between the stalls of 1,000 servers, 300,000
    sequences in the generic simulator.
    """
    warm_up()
    assert fault_of(line.split()) is None


@pytest.mark.parametrize(
    ("printed", "fault"),
    [
        ('{"load": 0.5, "bounds": {}}', None),
        ('{"load": -0.5}', ".load = -0.5"),
        ('{"load": NaN}', ".load = nan"),
        ('{"delay": {"mean": Infinity}}', ".delay.mean = inf"),
        (
            "single  M/G/1  (exact)\nload          0.5\nseconds  mean\n"
            "queueing delay  1.2e-05  -\nassumes  -42 % of inf\n",
            None,
        ),
        (
            "single  M/G/1  (simulation, not exact:\n              residual inf)\n"
            "load          0.5\nseconds  mean\n",
            None,
        ),
        ("single  M/G/1  (exact)\nload          0.5\nqueueing delay  -1.2\n", "-1.2 in"),
        ("single  M/G/1  (exact)\nload          nan\nqueueing delay  1.2\n", "nan in"),
        ("single  M/G/1  (exact)\n", "no numbers in"),
    ],
)
def test_the_fuzz_sees_a_number_that_cannot_be_right(printed: str, fault: str | None) -> None:
    found = _fault(0, printed, "", None)
    assert found is None if fault is None else found is not None and found.startswith(fault)
    assert _fault(0, printed, "a warning\n", None) == "on stderr: ['a warning']"
    assert (
        _fault(2, "", "kendall: got x; expected y\n", None),
        _fault(2, "", "Traceback\n", None),
    ) == (
        None,
        "not a clear line: ['Traceback']",
    )


@pytest.mark.slow
def test_six_random_command_lines_answer_or_refuse() -> None:
    _expect_no_fault(6, seed=5)


@pytest.mark.slow
def test_two_thousand_random_command_lines_answer_or_refuse() -> None:
    _expect_no_fault(2000, seed=1)


def _expect_no_fault(count: int, seed: int) -> None:
    warm_up()
    faults = [(fault, line) for line in cases(count, seed) if (fault := fault_of(line))]
    assert not faults, faults
