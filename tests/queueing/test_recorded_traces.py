"""`--trace`: a recorded trace under a policy, against the event-driven simulator on the same
requests; what is refused.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kendall
from kendall.policies import Request, SpecError, parse_policy
from kendall.queueing.arrivals.timetable import Timetable, save_timetable
from kendall.queueing.arrivals.traces import read_trace
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.slots.token_gaps import GapCounter, found
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.simulation.recorded import recorded_model, simulate_recorded
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from kendall.queueing.simulation.simulated_means import TOO_SHORT

SAMPLES = Path(__file__).parent.parent / "loadgen" / "samples"
FILES = ["azure_2023.csv", "azure_2024.csv", "burstgpt_v1.csv", "mooncake.jsonl", "bailian.jsonl"]
# slow enough that requests of the samples wait for each other; prompts take time
LAW = "k1=0.02,k2=0.05,k3=1e-4,k4=9e-3,kp=1e-4"
POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=4,max_wait=2",
    "fixed:batch_size=3",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
    "single:order=spjf",
    "continuous:max_batch_size=2,order=sprpt",
]
DURATIONS = ("queueing_delay", "sojourn_time", "time_to_first_token", "inter_token_latency")
LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def by_events(policy: str, path: Path, limit: int | None = None, seed: int = 0) -> dict[str, Any]:
    """The durations of the reference simulator, driven here with the rows of the file."""
    table = read_trace(path)
    lengths = np.minimum(table.output_tokens, limit or 10**9)
    exact = "order" in policy
    jobs = [
        Job(
            Request(
                id=str(i),
                arrived_at=float(table.intended_at[i]),
                prompt_tokens=int(table.prompt_tokens[i]),
                max_output_tokens=int(lengths.max()),
                predicted_output_tokens=float(lengths[i]) if exact else None,
            ),
            int(lengths[i]),
        )
        for i in range(len(table))
    ]
    rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0].spawn(1)[0])
    gaps = GapCounter({job.request.id for job in jobs})
    engine = SimulatedEngine(parse_law(LAW), gaps=gaps)
    records = simulate_trace(parse_policy(policy), jobs, engine, [rng])
    assert {record.outcome for record in records} == {"completed"}
    several = [r for r in records if (r.output_tokens or 0) > 1]
    return {
        "queueing_delay": [r.queueing_delay for r in records],
        "sojourn_time": [r.sojourn_time for r in records],
        "time_to_first_token": [r.first_token_at - r.arrived_at for r in records],
        "inter_token_latency": [  # of an answer its mean, once for each gap
            gap
            for r in several
            for gap in [(r.released_at - r.first_token_at) / (r.output_tokens - 1)]
            * (r.output_tokens - 1)
        ],
        "single gaps": np.repeat(*found(gaps.counts)).tolist(),
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_mean_and_quantile_is_that_of_the_same_requests_simulated_by_events(
    policy: str, file: str
) -> None:
    options = {"predictor": "exact"} if "order" in policy else {}
    answer = kendall.predict(policy, latency=LAW, trace=SAMPLES / file, **options)
    expected = by_events(policy, SAMPLES / file)
    assert answer.method == "simulation"
    for name in DURATIONS:
        duration = getattr(answer, name)
        interrupted = "sprpt" in policy and name == "time_to_first_token"
        if name == "inter_token_latency" and parse_policy(policy).padded:
            assert duration.mean is None
        if duration.mean is None and (interrupted or parse_policy(policy).padded):
            continue  # not given, as for drawn arrivals
        values = np.array(expected[name])
        singly = np.array(expected["single gaps"]) if name == "inter_token_latency" else values
        assert duration.mean == pytest.approx(values.mean(), abs=1e-9), name
        assert duration.standard_error is None, "one path has none"
        for level, share in LEVELS.items():
            told = getattr(duration, level)
            how = "inverted_cdf" if name == "inter_token_latency" else "linear"
            least = np.quantile(singly, share, method=how)
            assert told == pytest.approx(least, abs=1e-9), (name, level)


def test_the_samples_make_requests_wait() -> None:
    for file in FILES[:2]:
        found = kendall.predict("single", latency=LAW, trace=SAMPLES / file)
        assert (found.queueing_delay.p50 or 0) > 1, file


def test_the_trace_says_its_load_model_and_source() -> None:
    found = kendall.predict(
        "capped:max_batch_size=4", latency=LAW, trace=str(SAMPLES / "burstgpt_v1_2.csv")
    )
    table = read_trace(SAMPLES / "burstgpt_v1_2.csv")
    lengths = kendall.TokenDistribution.from_counts(table.output_tokens)
    prompts = kendall.TokenDistribution.from_counts(table.prompt_tokens)
    largest = kendall.largest_stable_rate(
        "capped:max_batch_size=4", lengths, LAW, prompt_tokens=prompts
    )
    assert found.load == pytest.approx(table.rate / largest)
    assert found.model == "G/G^[1,4]/1"
    assert found.stable
    assert any("(burstgpt): 23 requests in 262 s; 2 rows" in each for each in found.assumptions)
    assert not any(each.startswith("lengths independent") for each in found.assumptions)
    assert sum(each.startswith("arrivals and lengths as rec") for each in found.assumptions) == 1


def test_the_token_limit_clips_the_recorded_answers() -> None:
    path = SAMPLES / "azure_2023.csv"
    found = kendall.predict("dynamic", latency=LAW, trace=path, max_output_tokens=50)
    expected = np.mean(by_events("dynamic", path, limit=50)["sojourn_time"])
    assert found.sojourn_time.mean == pytest.approx(expected, abs=1e-9)
    whole = kendall.predict("dynamic", latency=LAW, trace=path)
    assert (found.sojourn_time.mean or 0) < 0.5 * (whole.sojourn_time.mean or 0)


def test_patience_and_servers_are_those_of_the_queue() -> None:
    path = SAMPLES / "azure_2023.csv"
    impatient = kendall.predict("single", latency=LAW, trace=path, patience=1.0)
    assert 0.2 < (impatient.loss_fraction or 0) < 1
    assert (impatient.queueing_delay.p99 or 9) <= 1
    alone = kendall.predict("single", latency=LAW, trace=path)
    many = kendall.predict("single", latency=LAW, trace=path, servers=40)
    assert (alone.queueing_delay.mean or 0) > 1
    assert many.queueing_delay.mean == 0


def test_simulate_replays_as_predict_does_and_draws_only_the_services_anew() -> None:
    path, noisy = SAMPLES / "azure_2023.csv", f"{LAW},cv=0.3"
    once = kendall.simulate("single", latency=noisy, trace=path)
    assert once == kendall.predict("single", latency=noisy, trace=path)
    other = kendall.simulate("single", latency=noisy, trace=path, seed=1)
    several = kendall.simulate("single", latency=noisy, trace=path, replications=8)
    assert other.queueing_delay != once.queueing_delay
    assert several.queueing_delay.standard_error is not None
    assert 0 < several.queueing_delay.standard_error < 0.5 * (several.queueing_delay.mean or 0)


def test_a_saved_timetable_keeps_its_predictions_and_its_flows(tmp_path: Path) -> None:
    """Of two that wait the one that is predicted to be short goes first, though it is long; under
    vtc the flow that was served less.
    """
    table = Timetable(
        np.array([0.0, 0.1, 0.2]),
        np.array([1, 1, 1]),
        np.array([10, 10, 90]),
        np.array([10, 80, 5]),
        np.array(["a", "a", "b"]),
    )
    path = tmp_path / "made.jsonl"
    save_timetable(path, table)
    law, asked = "a=0.1,c=0", {}
    for policy in ("single", "single:order=spjf", "single:order=vtc"):
        found = kendall.predict(policy, latency=law, trace=path)
        asked[policy] = found.queueing_delay.mean
    first_come, swapped = (0.9 + 1.8) / 3, (0.8 + 9.9) / 3
    assert asked["single"] == pytest.approx(first_come)
    assert asked["single:order=spjf"] == pytest.approx(swapped)
    assert asked["single:order=vtc"] == pytest.approx(swapped)
    drawn = kendall.predict("single:order=spjf", latency=law, trace=path, predictor="exact")
    assert drawn.queueing_delay.mean == pytest.approx(first_come)
    named = kendall.predict("single:order=vtc", latency=law, trace=path, flows="x=1,y=1")
    assert set(named.flows) == {"x", "y"}


def test_requests_of_a_trace_without_a_prediction_count_as_the_longest(tmp_path: Path) -> None:
    """In the first run no request has one, in the second all but the first of the two that wait,
    which the other then overtakes.
    """
    records = [
        Record(
            request_id=str(i),
            outcome="completed",
            arrived_at=0.1 * i,
            prompt_tokens=1,
            output_tokens=tokens,
            predicted_output_tokens=guess,
        )
        for i, (tokens, guess) in enumerate([(10, 0.2), (10, None), (90, 79.6)])
    ]
    bare = [msgspec.structs.replace(each, predicted_output_tokens=None) for each in records]
    delays = []
    for number, run in enumerate((bare, records)):
        path = tmp_path / f"{number}.jsonl"
        write_run(path, Header(writer="gateway"), run)
        told = read_trace(path).predicted_output_tokens
        assert (None if told is None else told.tolist()) == [None, [1, 0, 80]][number]
        found = kendall.predict(
            "single:order=spjf", latency="a=0.1,c=0", trace=path, max_output_tokens=100
        )
        delays.append(found.queueing_delay.mean)
    assert delays == pytest.approx([(0.9 + 1.8) / 3, (0.8 + 9.9) / 3])
    said = "output lengths: the trace's; 1 request without one: the longest"
    assert any(said in each for each in found.assumptions)


def test_absurd_predictions_of_a_trace_are_refused_or_count_as_the_longest(tmp_path: Path) -> None:
    def asked(predicted: float) -> float | None:
        records = [
            Record(
                request_id=str(i),
                outcome="completed",
                arrived_at=0.1 * i,
                prompt_tokens=1,
                output_tokens=10,
                predicted_output_tokens=predicted if i == 1 else 9.0,
            )
            for i in range(3)
        ]
        write_run(tmp_path / "run.jsonl", Header(writer="gateway"), records)
        given = {"latency": "a=0.1,c=0", "trace": tmp_path / "run.jsonl"}
        return kendall.predict("single:order=spjf", **given).queueing_delay.mean  # type: ignore[arg-type]

    assert asked(1e300) == asked(100.0)
    with pytest.raises(SpecError, match="got a predicted length of -3 tokens in the trace"):
        asked(-3.0)


def test_a_single_request_and_a_burst_are_traces_too(tmp_path: Path) -> None:
    for count in (1, 3):
        path = tmp_path / f"{count}.jsonl"
        save_timetable(path, Timetable(np.zeros(count), np.ones(count, int), np.full(count, 10)))
        found = kendall.predict("single", latency="a=0.1,c=0", trace=path)
        assert found.queueing_delay.mean == pytest.approx((count - 1) / 2)
        assert found.load == (0 if count == 1 else math.inf)
        assert found.as_dict()["load"] == (0 if count == 1 else None)


def test_a_trace_without_lengths_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,10,0\n2,12,0\n", encoding="utf-8")
    with pytest.raises(SpecError) as error:
        kendall.predict("single", latency=LAW, trace=path)
    says = "got no request with prompt and output tokens (2 without); expected at least one"
    assert says in str(error.value)
    path.write_text("Timestamp,Request tokens\n1,10\n", encoding="utf-8")
    with pytest.raises(SpecError, match="expected the first line of one of azure, burstgpt"):
        kendall.predict("single", latency=LAW, trace=path)
    with pytest.raises(SpecError, match=r"got trace .*gone: No such file"):
        kendall.predict("single", latency=LAW, trace=tmp_path / "gone")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arrival_rate": 2}, "got arrival_rate=2 and trace="),
        ({"arrivals": "poisson:rate=2"}, "got arrivals=poisson:rate=2 and trace="),
        ({"output_tokens": "geometric:mean=9"}, "got output_tokens=geometric:mean=9 and trace="),
        ({"prompt_tokens": "geometric:mean=9"}, "got prompt_tokens=geometric:mean=9 with a trace"),
        ({"sequences": "uniform:low=1,high=2"}, "got sequences=uniform:low=1,high=2 with a trace"),
        ({"arrival_scv": 2.0}, "got arrival_scv=2.0 with a trace; expected none: the trace has"),
        ({"disaggregated": True}, "got recorded arrivals, which end, and disaggregated; expected"),
        ({"servers": 2, "routing": "random"}, "got routing=random and recorded arrivals; expected"),
        ({"method": "exact"}, "got method 'exact' for a trace; expected auto or simulation"),
        ({"latency": None}, "got no latency; expected a latency law"),
    ],
)
def test_what_a_trace_has_itself_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        kendall.predict(
            "single", **{"latency": LAW, "trace": SAMPLES / "azure_2023.csv", **options}
        )
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_of_requests_is_not_that_of_a_trace() -> None:
    query = PredictionQuery.read("single", LAW, trace=SAMPLES / "azure_2023.csv")
    with pytest.raises(SpecError, match="got num_requests=50 with a trace; expected none"):
        query.simulate(50)
    with pytest.raises(SpecError, match="got replications=0"):
        query.simulate(replications=0)


HUGE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,99999999999
2023-11-16 18:15:48.6805900,396,5
"""


def test_a_huge_length_is_clipped_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text(HUGE)
    found = kendall.predict("single", latency=LAW, trace=path, max_output_tokens=100)
    assert found.queueing_delay.mean is not None
    with pytest.raises(SpecError, match=r"99,999,999,999 output tokens.*set max_output_tokens"):
        kendall.predict("single", latency=LAW, trace=path)


def test_replications_of_one_path_are_refused_and_drawn_ones_are_not() -> None:
    asked = {"latency": LAW, "trace": SAMPLES / "azure_2023.csv"}
    with pytest.raises(SpecError, match=r"got replications=3 .* expected 1"):
        kendall.simulate("single", replications=3, **asked)
    drawn = kendall.simulate("single", replications=3, **asked | {"latency": f"{LAW},cv=0.5"})
    assert drawn.queueing_delay.standard_error is not None


def test_a_last_batch_that_is_not_full_is_named() -> None:
    trace = SAMPLES / "azure_2023.csv"
    left = len(read_trace(trace)) % 7
    assert left
    found = kendall.predict("fixed:batch_size=7", latency=LAW, trace=trace)
    assert any(f"its last {left} requests" in text for text in found.assumptions)
    for policy in ("fixed:batch_size=7,max_wait=1", "capped:max_batch_size=7"):
        others = kendall.predict(policy, latency=LAW, trace=trace).assumptions
        assert not any("not full" in text for text in others)


def test_advice_about_a_short_trace_can_be_followed() -> None:
    found = kendall.predict("dynamic", latency=LAW, trace=SAMPLES / "azure_2023.csv")
    assert not any("ask for more requests" in text for text in found.assumptions)
    assert not any(text.startswith(TOO_SHORT) for text in found.assumptions), "all of it is asked"


def test_the_flows_and_the_predictions_of_a_trace_are_those_that_are_served() -> None:
    rng = np.random.default_rng(3)
    count = 400
    tokens = rng.geometric(0.05, count)
    table = Timetable(
        np.cumsum(rng.exponential(0.3, count)),
        np.full(count, 8),
        tokens,
        tokens,
        np.where(rng.random(count) < 0.9, "heavy", "light"),
    )
    plain = recorded_model(table, "single", LAW)
    fair = simulate_recorded(
        dataclasses.replace(plain, policy=parse_policy("single:order=vtc")), table
    )
    assert "flows: the 2 of the trace" in fair.assumptions
    assert set(fair.flows) == {"heavy", "light"}
    usual = simulate_recorded(plain, table)
    heavy, light = (fair.flows[name].mean for name in ("heavy", "light"))
    assert usual.queueing_delay.mean is not None
    assert heavy is not None
    assert light is not None
    assert light < usual.queueing_delay.mean < heavy
    shortest = simulate_recorded(
        dataclasses.replace(plain, policy=parse_policy("single:order=spjf")), table
    )
    assert any("output lengths: the trace's" in each for each in shortest.assumptions)


def test_a_run_file_as_a_trace_keeps_whose_the_requests_are(tmp_path: Path) -> None:
    write_run(
        tmp_path / "run.jsonl",
        Header(writer="gateway"),
        [
            Record(
                request_id=name,
                outcome="completed",
                arrived_at=float(at),
                prompt_tokens=3,
                output_tokens=4,
                flow=name,
            )
            for at, name in enumerate(("a", "b"))
        ],
    )
    flow = read_trace(tmp_path / "run.jsonl").flow
    assert flow is not None
    assert flow.tolist() == ["a", "b"]
