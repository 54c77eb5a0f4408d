"""What-ifs and advice: right at the window's estimates, silent where nothing is known, and never
unstable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kendall.policies import Request, parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.advice.advise import TARGETS, UNASKED, parse_objective
from kendall.queueing.choosing.advice.searches import search
from kendall.queueing.choosing.advice.sentence import sentence
from kendall.queueing.choosing.answer import own_error, precise
from kendall.queueing.choosing.candidates import usual_policies
from kendall.queueing.choosing.choices import best_batch_size
from kendall.queueing.choosing.forecast import Advice, Forecast, Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.estimation_error import Response
from kendall.queueing.choosing.gain.known_lengths import known_lengths
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.choosing.phrases import HALF_A_PERCENT
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.prediction import predict
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Quantiles
from kendall.queueing.simulation.experiment import simulate_model
from tests.queueing.advised import POLICY, advise, capacity, forecast, what_ifs
from tests.queueing.estimation_runs import LAW, LENGTHS, Engine, poisson, seen, serve
from tests.queueing.made import prediction_of
from tests.server.harness import replay
from tests.virtual_time import run_virtual

LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))
LONG = parse_distribution("lognormal:mu=2.5,sigma=0.7", 400)
DELAY = Objective(name="delay")
STABLE = prediction_of()
NAMES = {"single", "dynamic", "fixed", "capped", "elastic", "continuous"}
N = 4000


def clipped(records: list[Record], limit: int) -> list[Record]:
    """As the gateway marks them: those that would have gone beyond the limit."""
    import msgspec

    return [
        msgspec.structs.replace(
            each,
            clipped=(each.output_tokens or 0) > limit,
            output_tokens=min(each.output_tokens or 0, limit),
        )
        for each in records
    ]


class Clipping(Engine):
    """Stops every answer at the limit."""

    limit: int = 10**9

    def duration(
        self, at: float, batch: int, lengths: Sequence[int], rng: np.random.Generator
    ) -> float:
        return super().duration(at, batch, [min(each, self.limit) for each in lengths], rng)


@cache
def window(
    load: float = 0.6,
    limit: int | None = None,
    seed: int = 1,
    policy: str = POLICY,
    long: bool = False,
) -> Estimates:
    """The estimates of a run of `N` requests, `load` of the capacity under the limit."""
    tokens, engine = LONG if long else LENGTHS, Clipping(most=8)
    if limit is not None:
        object.__setattr__(engine, "limit", limit)
    rate = load * capacity(policy, tokens if limit is None else tokens.clip(limit))
    records = serve(poisson(rate, N, seed), engine, seed, lengths=tokens)
    return estimate(
        seen(records if limit is None else clipped(records, limit), policy),
        parse_policy(policy),
        LAW,
    )


def delay(found: Forecast) -> float:
    assert found.prediction is not None
    assert found.prediction.queueing_delay.mean is not None
    return found.prediction.queueing_delay.mean


# what if


def test_a_forecast_is_the_prediction_at_the_estimates() -> None:
    """Of the policy in force and of others; the interval covers the truth at the run's own rate
    and law, and moves with the rate's.
    """
    found = window()
    rate = found.arrival_rate.value
    for policy in (POLICY, "fixed:batch_size=8"):
        what_if = forecast(found, LAW, Setting(policy=policy), LIMITS)
        expected = predict(
            parse_policy(policy), rate, found.output_tokens.law(), found.law(LAW), max_num_seqs=16
        )
        assert delay(what_if) == pytest.approx(expected.queueing_delay.mean, rel=1e-9)
        assert 0.01 < what_if.mean.relative < 0.1, policy
    truth = predict(
        parse_policy(POLICY), 0.6 * capacity(), LENGTHS, LAW, max_num_seqs=16
    ).queueing_delay.mean
    assert truth is not None
    sure = forecast(found, LAW, Setting(policy=POLICY), LIMITS).mean
    assert sure.covers(truth)
    unsure = replace(found, arrival_rate=symmetric(rate, 0.15 * rate, 100.0))
    wide = forecast(unsure, LAW, Setting(policy=POLICY), LIMITS).mean
    there = [
        predict(parse_policy(POLICY), rate * end, found.output_tokens.law(), found.law(LAW))
        for end in (0.85, 1.15)
    ]
    assert (wide.low, wide.high) == pytest.approx(
        [each.queueing_delay.mean for each in there], rel=0.10
    )


def test_an_unstable_what_if_has_its_load_and_a_reason() -> None:
    what_if = forecast(window(), LAW, Setting(policy="single"), LIMITS)
    assert what_if.load > 1
    assert what_if.prediction is None
    assert not what_if.stable
    assert "a steady state needs a load below 1" in what_if.notes[-1]


def test_what_a_run_under_one_clip_says_of_a_smaller_one() -> None:
    """A4, quick: run at the 90th percentile; the what-if for a clip at the median, against a run
    there: within 10 %.
    """
    limit, smaller = LONG.quantile(0.9), LONG.quantile(0.5)
    found = window(limit=limit, long=True)
    what_if = forecast(found, LAW, Setting(policy=POLICY, max_output_tokens=smaller), LIMITS)
    there = simulate_model(
        Queue.read(POLICY, LONG.clip(smaller), LAW),
        0.6 * capacity(tokens=LONG.clip(limit)),
        seed=5,
        num_requests=40_000,
    )
    assert there.queueing_delay.mean is not None
    assert delay(what_if) == pytest.approx(there.queueing_delay.mean, rel=0.10)
    assert what_if.mean.covers(there.queueing_delay.mean)
    assert what_if.clipped_fraction == pytest.approx(LONG.survival[smaller], abs=0.03)
    assert what_if.notes == ()


def test_beyond_the_clip_nothing_is_said_without_a_family_and_with_one_it_is_marked() -> None:
    """A4, quick, the other way: run at the median; at the 90th percentile only under a family,
    and the interval covers the truth.
    """
    limit, larger = LONG.quantile(0.5), LONG.quantile(0.9)
    found = window(limit=limit, long=True, load=0.3)
    silent = forecast(found, LAW, Setting(policy=POLICY, max_output_tokens=larger), LIMITS)
    assert silent.prediction is None
    assert not silent.mean.known
    assert silent.clipped_fraction is None
    assert "name a family" in silent.notes[0]
    assert json_object(silent)["load"] is None
    told = forecast(
        found, LAW, Setting(policy=POLICY, max_output_tokens=larger), LIMITS, family="lognormal"
    )
    assert told.notes[0].startswith("extrapolated: ")
    truth = predict(
        parse_policy(POLICY), 0.3 * capacity(tokens=LONG.clip(limit)), LONG.clip(larger), LAW
    ).queueing_delay.mean
    assert truth is not None
    assert told.mean.covers(truth)
    assert told.mean.relative < 0.5
    inside = forecast(found, LAW, Setting(policy=POLICY, max_output_tokens=limit), LIMITS)
    assert inside.notes == ()
    assert told.mean.relative > inside.mean.relative  # the family's parameters are uncertain too


def test_answers_that_end_by_themselves_at_the_limit_do_not_hide_that_others_go_on() -> None:
    """Some end with the very token at which others are cut: the law is still unknown beyond."""
    limit = LONG.quantile(0.5)
    sample = window(limit=limit, long=True, load=0.3).output_tokens
    assert sample.unknown_mass == pytest.approx(LONG.survival[limit], abs=0.03)
    assert sample.law(limit).pmf[limit] == pytest.approx(LONG.clip(limit).pmf[limit], abs=0.03)


def test_a_family_that_there_is_not_is_refused_and_one_that_cannot_fit_is_noted() -> None:
    found = window(limit=LONG.quantile(0.5), long=True, load=0.3)
    with pytest.raises(SpecError, match="did you mean 'lognormal'"):
        forecast(found, LAW, Setting(policy=POLICY), LIMITS, family="lognormall")
    noted = forecast(found, LAW, Setting(policy=POLICY), LIMITS, family="deterministic")
    assert noted.prediction is None
    assert "deterministic could not be fitted" in noted.notes[0]


def test_too_few_answers_are_said_to_be_too_few() -> None:
    assert known_lengths(lengths([3, 4] * 24 + [3])) is None
    assert known_lengths(lengths([3, 4] * 25)) is not None
    few = estimate(
        seen(serve(poisson(20.0, 12, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW
    )
    found = forecast(few, LAW, Setting(policy=POLICY), LIMITS)
    assert "expected at least 50" in found.notes[0]
    assert json.loads(json.dumps(json_object(found), allow_nan=False))["stable"] is False


def test_known_lengths_put_what_is_unknown_one_token_further() -> None:
    known = known_lengths(lengths([2] * 30 + [5] * 30, [False] * 30 + [True] * 30))
    assert known is not None
    assert known.whole.pmf.tolist() == pytest.approx([0, 0, 0.5, 0, 0, 0, 0.5])
    assert known.law(5).pmf.tolist() == pytest.approx([0, 0, 0.5, 0, 0, 0.5])
    assert (known.clipped_fraction(2), known.clipped_fraction(4)) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
    )
    assert known.clipped_fraction(5) is None  # between 0 and a half
    assert known.refusal(5) is None
    assert known.refusal(6) is not None
    assert known.refusal(None) is not None


def test_the_usual_what_ifs_turn_one_knob_at_a_time() -> None:
    found = window(limit=LONG.quantile(0.9), long=True)
    current = Setting(policy=POLICY, max_output_tokens=LONG.quantile(0.9))
    answers = what_ifs(found, LAW, current, LIMITS)
    turned = [
        (each.setting.policy != current.policy)
        + (each.setting.max_output_tokens != current.max_output_tokens)
        for each in answers
    ]
    assert turned == [1] * len(answers)
    names = {each.setting.policy.partition(":")[0] for each in answers}
    assert names == NAMES
    assert sum(each.setting.max_output_tokens != current.max_output_tokens for each in answers) >= 2
    assert len({each.setting for each in answers}) == len(answers)
    for each in answers:
        json.dumps(json_object(each), allow_nan=False)
        assert each.stable == (each.load < 1)
        assert each.mean.known == each.stable


def test_usual_policies_keep_the_size_in_force_within_the_engines_bound() -> None:
    assert "elastic:max_batch_size=6" in usual_policies(
        Setting(policy="capped:max_batch_size=6"), LIMITS.engine.max_num_seqs
    )
    assert "continuous:max_batch_size=4" in usual_policies(Setting(policy="dynamic"), 4)
    assert "capped:max_batch_size=8" in usual_policies(Setting(policy="single"), 16)
    assert "elastic" in usual_policies(Setting(policy="elastic"), 16)


@pytest.mark.slow
def test_the_intervals_of_what_ifs_cover_the_truth() -> None:
    """Of policies that did not run, from 60 runs at load 0.6: 95 % intervals, covering in 88 %
    or more.
    """
    policies = ("elastic:max_batch_size=8", "fixed:batch_size=8")
    truths = [
        predict(
            parse_policy(text), 0.6 * capacity(), LENGTHS, LAW, max_num_seqs=16
        ).queueing_delay.mean
        for text in policies
    ]
    current = Setting(policy=POLICY)
    found = [
        what_ifs(
            window(seed=seed), LAW, current, LIMITS, policies=policies, token_limits=(), sizes=()
        )
        for seed in range(60)
    ]
    for place, truth in enumerate(truths):
        assert truth is not None
        assert sum(answers[place].mean.covers(truth) for answers in found) >= 0.88 * 60, policies[
            place
        ]
        assert np.median([answers[place].mean.relative for answers in found]) < 0.1, policies[place]


@pytest.mark.slow
def test_the_intervals_beyond_the_clip_cover_the_truth() -> None:
    """Clipped at the median, asked at the 90th percentile under the family of the lengths: 21 of
    24.
    """
    limit, larger = LONG.quantile(0.5), LONG.quantile(0.9)
    truth = predict(
        parse_policy(POLICY), 0.3 * capacity(tokens=LONG.clip(limit)), LONG.clip(larger), LAW
    ).queueing_delay.mean
    assert truth is not None
    setting = Setting(policy=POLICY, max_output_tokens=larger)
    found = [
        forecast(window(0.3, limit, seed, long=True), LAW, setting, LIMITS, family="lognormal")
        for seed in range(24)
    ]
    assert sum(each.mean.covers(truth) for each in found) >= 21
    assert np.median([each.mean.relative for each in found]) < 0.1


# advice


def asked(
    objective: Objective = DELAY,
    *,
    load: float = 0.6,
    current: Setting | None = None,
    **options: Any,
) -> list[Advice]:
    return advise(
        window(load),
        LAW,
        current or Setting(policy=POLICY),
        options.pop("limits", LIMITS),
        objective,
        **options,
    )


def test_advice_is_what_the_optimisers_find_on_the_estimated_model() -> None:
    """Advice simulates where the optimisers are exact: its size is as good within 1 %; where
    there is a formula it is the same limit.
    """
    found, bound = window(0.3), QueueLimits(engine=EngineBounds(max_num_seqs=5))
    (size,) = asked(
        current=Setting(policy="capped:max_batch_size=2"),
        load=0.3,
        limits=bound,
        targets=["batch-size"],
    )
    rate, tokens, law = found.arrival_rate.value, found.output_tokens.law(), found.law(LAW)
    best = best_batch_size(
        Queue.read(POLICY, tokens, law, max_num_seqs=5),
        rate,
        DELAY,
        5,
    ).best
    assert size.best is not None
    assert delay(size.best) <= 1.01 * best["queueing_delay"]
    assert size.best.prediction is not None
    assert size.best.prediction.method == "exact"
    (limit,) = asked(
        Objective(name="v1", theta=0.05),
        load=0.2,
        current=Setting(policy="single"),
        targets=["max-output-tokens"],
    )
    light = window(0.2)
    model = Queue.read("single", light.output_tokens.law(), light.law(LAW))
    cut = best_token_limit(model, light.arrival_rate.value, Objective(name="v1", theta=0.05)).best[
        "max_output_tokens"
    ]
    assert limit.best is not None
    assert limit.best.setting.max_output_tokens == cut


def test_a_policy_that_is_better_is_advised_and_its_gain_covers_the_true_one() -> None:
    """From fixed batches of 8, which wait for company: the gain of the best policy at the true
    rate, lengths and law.
    """
    current = Setting(policy="fixed:batch_size=8")
    (found,) = asked(current=current, targets=["policy"])
    assert found.best is not None
    rate = 0.6 * capacity()
    before, after = (
        predict(
            parse_policy(each.setting.policy), rate, LENGTHS, LAW, max_num_seqs=16
        ).sojourn_time.mean
        for each in (found.current, found.best)
    )
    assert before
    assert after is not None
    assert found.gain.covers(1 - after / before)
    assert found.gain.low > 0.3
    assert found.compared == "sojourn_time"
    assert found.says.startswith(
        f"set {found.best.setting.policy} instead of fixed:batch_size=8: mean sojourn time "
    )
    assert "; mean queueing delay " in found.says


def test_a_gain_is_known_better_than_the_delays() -> None:
    """Both stand at the same estimates: differencing independent intervals would give several
    times the width.
    """
    (found,) = asked(current=Setting(policy="capped:max_batch_size=6"), targets=["policy"])
    assert found.best is not None
    ratio = 1 - found.gain.value
    apart = ratio * math.hypot(found.current.mean.relative, found.best.mean.relative)
    assert (found.gain.high - found.gain.low) / 2 < 0.75 * apart


def test_the_best_in_force_is_left_in_peace() -> None:
    best = asked(targets=["policy"])[0].best
    assert best is not None
    (again,) = asked(current=best.setting, targets=["policy"])  # the same window
    assert again.best is not None
    assert again.best.setting == best.setting
    assert again.gain.value == 0
    assert "is the best choice already" in again.says


def test_a_gain_that_may_be_none_is_no_reason_to_change() -> None:
    """At light load a cap of 15 instead of 16 changes nothing that could be known."""
    (found,) = asked(
        current=Setting(policy="capped:max_batch_size=15"), load=0.6, targets=["batch-size"]
    )
    assert found.gain.low <= 0 or found.gain.value == 0
    assert "no change is worth making" in found.says or "is the best choice already" in found.says


@pytest.mark.parametrize(("value", "low"), [(0.001, 0.0006), (0.03, 0.004), (0.03, -0.01)])
def test_a_gain_that_prints_as_0_is_no_reason_to_change(value: float, low: float) -> None:
    here, there = (
        Forecast(
            setting=Setting(policy=f"capped:max_batch_size={size}"),
            load=0.5,
            prediction=STABLE,
            mean=UNKNOWN,
            clipped_fraction=0.0,
        )
        for size in (8, 9)
    )
    gain = Estimate(value, low, 0.06, 900.0)
    found = Advice(
        target="batch-size",
        objective="delay",
        current=here,
        best=there,
        gain=gain,
        curve=(),
        says="",
    )
    said = sentence(found, there, DELAY, Criterion(DELAY), (0.0831, 0.083))
    means = (
        "mean queueing delay 83.1 ms with capped:max_batch_size=8, 83 ms with "
        "capped:max_batch_size=9"
    )
    unsure = "" if value < HALF_A_PERCENT else "; the gain is uncertain and may be none"
    assert said == f"no change is worth making: {means}{unsure}"
    worth = replace(found, gain=Estimate(0.03, 0.02, 0.06, 900.0))
    assert sentence(worth, there, DELAY, Criterion(DELAY), (0.0831, 0.0806)).startswith(
        "set capped:max_batch_size=9 instead of "
    )
    slo = Objective(name="slo", slo=parse_slo("p99_queueing_delay=2s"))
    met = sentence(found, there, slo, Criterion(slo), (0.0831, 0.083))
    assert met.startswith(
        "capped:max_batch_size=8 meets the SLO; no change is worth making: p99 of the queueing "
        "delay 83.1 ms with "
    )


@pytest.mark.parametrize("target", ["batch-size", "max-output-tokens", "policy", "servers"])
@pytest.mark.parametrize("name", ["delay", "throughput", "v1", "slo"])
def test_a_change_that_is_not_advised_has_no_percentage_and_names_its_quantity(
    target: str, name: str
) -> None:
    """Nor what it would cut, nor what else it would change: only the quantity that decided, of
    both settings.
    """
    objective = Objective(
        name=name, slo=parse_slo("p99_queueing_delay=2s") if name == "slo" else None
    )
    stable = prediction_of()
    here, there = (
        Forecast(
            setting=Setting(
                policy=f"capped:max_batch_size={size}", max_output_tokens=size, servers=size
            ),
            load=0.5,
            prediction=stable,
            mean=UNKNOWN,
            clipped_fraction=0.02,
        )
        for size in (8, 9)
    )
    gain = Estimate(0.1, -0.05, 0.25, 900.0)
    found = Advice(
        target=target,
        objective=name,
        current=here,
        best=there,
        gain=gain,
        curve=(),
        says="",
        compared="sojourn_time",
    )
    measure = Criterion(objective, "queueing_delay" if name == "slo" else "sojourn_time")
    said = sentence(found, there, objective, measure, (0.0831, 0.0748))
    assert "%" not in said or said.startswith("the token limit 9 is enough"), said
    assert measure.name in said
    assert "no change is worth making: " in said or name == "slo"


@pytest.mark.parametrize(
    ("load", "policy", "slo"),
    [(0.3, "continuous:max_batch_size=16", None), (0.6, POLICY, "p99_queueing_delay=5s")],
)
def test_every_sentence_of_advice_names_what_its_percentages_are_of(
    load: float, policy: str, slo: str | None
) -> None:
    objective = DELAY if slo is None else Objective(name="slo", slo=parse_slo(slo))
    for each in asked(objective, load=load, current=Setting(policy=policy)):
        quantities = ("queueing delay", "sojourn time", "of the answers", "stalls hold")
        for part in each.says.split(";"):
            assert "%" not in part or any(name in part for name in quantities), each.says
        assert "less" not in each.says or each.says.startswith(("set ", "one more server")), (
            each.says
        )


def test_an_unstable_setting_is_left_and_never_advised() -> None:
    (found,) = asked(current=Setting(policy="single"), targets=["policy"])
    assert not found.current.stable
    assert found.best is not None
    assert found.best.stable
    assert (found.gain.value, found.gain.high) == (1, 1)
    assert "the current single has no steady state" in found.says
    every = advise(
        window(load=2.5),
        LAW,
        Setting(policy=POLICY),
        QueueLimits(engine=EngineBounds(max_num_seqs=8)),
        DELAY,
        targets=["policy", "batch-size"],
    )
    for each in every:
        assert each.best is None or each.best.load < 1
    for each in every:
        if each.best is None:
            assert each.says.startswith(f"no choice of {each.target}: ")
            assert "none is stable" in each.says


def test_a_token_limit_for_the_delay_cuts_no_more_than_is_allowed() -> None:
    objective = Objective(name="delay", max_clipped_fraction=0.1)
    (found,) = asked(
        objective, load=0.2, current=Setting(policy="single"), targets=["max-output-tokens"]
    )
    assert found.best is not None
    assert found.best.clipped_fraction is not None
    assert 0.05 < found.best.clipped_fraction <= 0.1
    assert found.gain.low > 0
    assert len(found.curve) <= 80


def test_a_limit_in_force_that_cuts_too_much_is_said_to() -> None:
    limit = LONG.quantile(0.5)
    estimates, current = (
        window(limit=limit, long=True, load=0.3),
        Setting(policy=POLICY, max_output_tokens=limit),
    )
    (blind,) = advise(estimates, LAW, current, LIMITS, DELAY, targets=["max-output-tokens"])
    assert blind.best is None
    assert "none keeps the constraint" in blind.says
    assert "name a family" in blind.says
    (found,) = advise(
        estimates, LAW, current, LIMITS, DELAY, targets=["max-output-tokens"], family="lognormal"
    )
    assert found.best is not None
    assert found.best.setting.max_output_tokens == pytest.approx(LONG.quantile(0.95), rel=0.15)
    assert "of the answers, more than 5.0%" in found.says
    assert "; extrapolated: " in found.says


def test_servers_for_an_slo_are_the_fewest() -> None:
    objective = parse_objective({"slo": "p90_queueing_delay=60ms"})
    (found,) = asked(objective, current=Setting(policy="single"), targets=["servers"])
    assert found.best is not None
    assert found.best.setting.servers >= 2
    broken = [point for point in found.curve if point["servers"] == found.best.setting.servers - 1]
    assert all(point["score"] is None for point in broken)
    assert "servers" in found.says


def test_without_an_slo_one_more_server_is_shown() -> None:
    (found,) = asked(targets=["servers"])
    assert found.best is not None
    assert found.best.setting.servers == 2
    assert found.says.startswith("one more server (2): mean queueing delay ")
    assert found.gain.low > 0.3


@pytest.mark.parametrize(
    ("policy", "best"), [(POLICY, "capped:max_batch_size=12"), ("dynamic", "dynamic")]
)
def test_the_engines_bound_is_the_size_in_force_of_a_policy_without_one_and_of_no_other(
    policy: str, best: str
) -> None:
    """At 90 % of what a cap of 8 serves, the bound of 12 is the best size."""
    (found,) = asked(
        load=0.9,
        current=Setting(policy=policy),
        limits=QueueLimits(engine=EngineBounds(max_num_seqs=12)),
        targets=["batch-size"],
    )
    assert found.best is not None
    assert found.best.setting.policy == best
    assert ("is the best choice already" in found.says) == (best == policy)


def test_single_has_no_batch_size() -> None:
    (found,) = asked(load=0.2, current=Setting(policy="single"), targets=["batch-size"])
    assert found.best is None
    assert "takes one request at a time" in found.says


def test_an_slo_on_a_quantile_that_an_approximation_lacks_is_simulated() -> None:
    found = window(0.8)
    rate, given = found.arrival_rate.value, (found.output_tokens.law(), found.law(LAW))
    assert (
        predict(parse_policy("continuous:max_batch_size=8"), rate, *given).queueing_delay.p99
        is None
    )
    (advice,) = asked(
        parse_objective({"slo": "p99_queueing_delay=200ms"}), load=0.8, targets=["policy"]
    )
    assert advice.best is not None
    assert advice.best.setting.policy == "continuous:max_batch_size=8"
    assert {str(point["policy"]).partition(":")[0] for point in advice.curve} == NAMES


def test_errors_that_both_settings_share_do_not_widen_a_gain() -> None:
    def moves(*smooth: float) -> Response:
        return Response(
            smooth=np.array(smooth), loads=np.zeros(2), load=0.5, pole=False, needs_stability=True
        )

    gain = moves(0.3, 0.1).gain(2.0, moves(0.3, 0.0), 4.0, 100.0)
    assert (gain.low, gain.value, gain.high) == pytest.approx(
        (1 - 0.5 * math.exp(0.1), 0.5, 1 - 0.5 * math.exp(-0.1))
    )
    same = moves(0.3, 0.0).gain(2.0, moves(0.3, 0.0), 4.0, 100.0)
    assert (same.low, same.high) == pytest.approx((0.5, 0.5))


def test_nothing_is_advised_for_what_cannot_be_forecast() -> None:
    """The limit was just taken away: the longest answers are not known yet."""
    limit = LONG.quantile(0.5)
    estimates, current = window(limit=limit, long=True, load=0.3), Setting(policy=POLICY)
    for each in advise(estimates, LAW, current, LIMITS, DELAY, targets=["policy", "servers"]):
        assert each.best is None
        assert "nothing is known without a token limit" in each.says
        assert not each.gain.known


def test_near_saturation_the_interval_is_open_above() -> None:
    """Some fifth of the lengths alone would be too much: no end can be given."""
    found = window()
    load = forecast(found, LAW, Setting(policy=POLICY), LIMITS).load
    heavy = replace(found, arrival_rate=found.arrival_rate.scaled(0.996 / load))
    near = forecast(heavy, LAW, Setting(policy=POLICY), LIMITS)
    assert near.stable
    assert math.isinf(near.mean.high)
    assert 0 < near.mean.low < 0.3 * near.mean.value
    assert json_object(near)["interval"]["high"] is None
    (away,) = advise(heavy, LAW, Setting(policy=POLICY), LIMITS, DELAY, targets=["policy"])
    assert away.best is not None
    assert away.best.load < 0.9
    assert (away.gain.low > 0.5, away.gain.high) == (
        True,
        1.0,
    )  # only what is in force may be unstable


@pytest.mark.parametrize("name", ["delay", "throughput", "v1", "clipped", "slo"])
def test_every_objective_speaks_json(name: str) -> None:
    objective = parse_objective(
        {"objective": name} | ({"slo": "mean_queueing_delay=30ms"} if name == "slo" else {})
    )
    targets = ["policy"] if name == "slo" else ["policy", "max-output-tokens"]
    for each in asked(objective, load=0.2, current=Setting(policy="single"), targets=targets):
        plain = json.loads(json.dumps(json_object(each), allow_nan=False))
        assert plain["objective"] == name
        assert plain["says"]
        assert each.best is None or each.best.stable


def test_every_target_has_an_advice_and_its_numbers_are_there_and_in_order() -> None:
    found = asked()
    assert [each.target for each in found] == list(UNASKED)
    for each in found:
        plain = json.loads(json.dumps(json_object(each), allow_nan=False))
        gain = plain["gain"]
        assert gain["low"] <= gain["value"] <= gain["high"] <= 1, each.target
        assert plain["curve"]
        for about in (plain["current"], plain["best"]):
            assert about["stable"]
            assert 0 < about["load"] < 1
            assert 0 <= about["clipped_fraction"] < 1
            assert (
                0
                < about["queueing_delay"]["mean"]
                < about["time_to_first_token"]["mean"]
                < about["sojourn_time"]["mean"]
            )
            for duration, interval in (
                ("queueing_delay", "interval"),
                ("sojourn_time", "sojourn_interval"),
            ):
                assert about[interval]["value"] == pytest.approx(about[duration]["mean"])
                assert about[interval]["low"] < about[interval]["value"] < about[interval]["high"]
                levels = [level for name in LEVELS if (level := about[duration][name]) is not None]
                assert levels == sorted(levels), (each.target, duration)


@pytest.mark.parametrize("off", [-0.1, 0.1])
@pytest.mark.parametrize("policy", [POLICY, "elastic:max_batch_size=8"])
def test_a_what_if_at_a_wrong_rate_leaves_the_simulation_by_what_the_rate_does(
    policy: str, off: float
) -> None:
    """The comparison can fail: of a policy that does not run too, above it and below it by the
    exact delays' ratio.
    """
    rate, found = 0.6 * capacity(), window()
    true, wrong = (
        replace(found, arrival_rate=symmetric(at, 0.01 * at, 4000.0))
        for at in (rate, rate * (1 + off))
    )
    there = simulate_model(
        Queue.read(policy, LENGTHS, LAW, max_num_seqs=16), rate, seed=5, num_requests=60_000
    ).queueing_delay.mean
    assert there is not None
    right, astray = (forecast(each, LAW, Setting(policy=policy), LIMITS) for each in (true, wrong))
    assert delay(right) == pytest.approx(there, rel=0.06)
    moved = [
        predict(parse_policy(policy), at, LENGTHS, LAW, max_num_seqs=16).queueing_delay.mean
        or math.nan
        for at in (rate, rate * (1 + off))
    ]
    assert delay(astray) / there - 1 == pytest.approx(moved[1] / moved[0] - 1, abs=0.06)
    assert (delay(astray) - there) * off > 0
    assert not astray.mean.covers(there)


@pytest.mark.parametrize(("size", "method"), [(64, "exact"), (65, "simulation")])
def test_batches_of_up_to_64_are_forecast_exactly(size: int, method: str) -> None:
    assert (
        precise(
            Queue.read(f"capped:max_batch_size={size}", LENGTHS, LAW),
            100.0,
        ).method
        == method
    )


@pytest.mark.parametrize(("share", "error"), [(0.0199, 0.8), (0.0201, 0.04)])
def test_an_approximate_delay_is_less_sure_where_hardly_anyone_waits(
    share: float, error: float
) -> None:
    """Below 2 % of the sojourn; the sojourn has as much of that error as there is delay in it,
    and 1.5 % of its own.
    """
    found = replace(
        STABLE,
        method="approximation",
        queueing_delay=Quantiles(mean=share),
        sojourn_time=Quantiles(mean=1.0),
    )
    assert own_error(found) == error
    assert own_error(found, "sojourn_time") == pytest.approx(math.hypot(error * share, 0.015))
    assert own_error(replace(found, method="exact")) == 0.0
    assert (
        own_error(
            replace(
                found, method="simulation", queueing_delay=Quantiles(mean=2.0, standard_error=0.1)
            )
        )
        == 0.05
    )


def test_wrong_questions_are_refused() -> None:
    for params, message in (
        ({"objective": "speed"}, "expected one of delay"),
        ({"theta": "0.3"}, "theta with the objective delay; expected it with v1 or v2"),
        ({"objective": "v1", "theta": "much"}, "expected a number"),
        ({"objektive": "v1"}, "did you mean 'objective'"),
        ({"slo": "fast"}, "expected mean_QUANTITY=TIME"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_objective(params)
    with pytest.raises(SpecError, match="did you mean 'policy'"):
        asked(targets=["polcy"])
    with pytest.raises(SpecError, match="v2 without a patience"):
        asked(Objective(name="v2"), targets=["max-output-tokens"])


def test_an_objective_is_read_from_a_query() -> None:
    assert parse_objective({}) == DELAY
    assert parse_objective(
        {"objective": "v2", "theta": "0.9", "loss_cost": "3", "family": "lognormal"}
    ) == Objective(name="v2", theta=0.9, loss_cost=3.0)
    assert parse_objective({"slo": "p99_queueing_delay=2s", "target": "servers"}).name == "slo"
    assert parse_objective({"max_clipped_fraction": "0.2"}).max_clipped_fraction == 0.2


# the gateway itself, on virtual time


def gateway_run(limit: int, rate: float, seed: int, count: int = 8000) -> list[Record]:
    """The gateway's batcher on the emulated engine; it marks itself what the limit cut."""
    rng = np.random.default_rng(seed)
    arrivals, drawn = np.cumsum(rng.exponential(1 / rate, count)), LONG.sample(rng, count)
    jobs = [
        (
            Request(id=str(i), arrived_at=float(at), prompt_tokens=32, max_output_tokens=limit),
            int(tokens),
        )
        for i, (at, tokens) in enumerate(zip(arrivals, drawn, strict=True))
    ]
    return run_virtual(replay(parse_policy(POLICY), jobs, LAW, seed=seed))


def observed(records: list[Record]) -> Estimate:
    """Mean delay with the interval of the run itself."""
    found = mean_interval(
        np.array(
            [
                each.queueing_delay or 0.0
                for each in sorted(records, key=lambda each: each.arrived_at or 0.0)
            ]
        )
    )
    return symmetric(found.mean, found.half_width, found.effective_n)


@pytest.mark.slow
def test_a_what_if_for_a_smaller_clip_is_met_by_the_gateway_there() -> None:
    """A4 on the emulated engine: estimated at the 90th percentile, run at the median, and the
    other way under a family.
    """
    large, small = LONG.quantile(0.9), LONG.quantile(0.5)
    rate = 0.6 * capacity(tokens=LONG.clip(large))
    runs = {limit: gateway_run(limit, rate, seed) for seed, limit in enumerate((large, small))}
    met = {limit: observed(records) for limit, records in runs.items()}
    found = {
        limit: estimate(seen(records, POLICY), parse_policy(POLICY), LAW)
        for limit, records in runs.items()
    }
    down = forecast(found[large], LAW, Setting(policy=POLICY, max_output_tokens=small), LIMITS)
    assert delay(down) == pytest.approx(met[small].value, rel=0.10)
    assert (
        forecast(
            found[small], LAW, Setting(policy=POLICY, max_output_tokens=large), LIMITS
        ).prediction
        is None
    )
    up = forecast(
        found[small],
        LAW,
        Setting(policy=POLICY, max_output_tokens=large),
        LIMITS,
        family="lognormal",
    )
    assert up.notes[0].startswith("extrapolated: ")
    truth = predict(
        parse_policy(POLICY), rate, LONG.clip(large), LAW, max_num_seqs=16
    ).queueing_delay.mean
    assert truth is not None
    assert up.mean.covers(truth)
    apart = abs(
        up.mean.value - met[large].value
    )  # a run of 8,000 requests is itself known within 4 % only
    assert apart <= math.hypot(
        up.mean.relative * up.mean.value, met[large].relative * met[large].value
    )


@pytest.mark.parametrize("target", ["batch-size", "max-output-tokens", "servers", "order"])
def test_an_order_that_is_driven_step_by_step_is_not_searched_and_says_who_has_the_time(
    target: str,
) -> None:
    point = OperatingPoint(estimates=window(), shape=LAW, limits=LIMITS)
    policy = "continuous:max_batch_size=4,order=sprpt,by=service,prompt_weight=0.5"
    result = search(point, Setting(policy=policy, max_output_tokens=400), DELAY, target)
    assert result.setting is None
    assert "is simulated step by step, which takes too long here" in result.why
    assert f"kendall optimize --target {target}" in result.why


# orders of service


SLOTS = Setting(policy="continuous:max_batch_size=2")


@cache
def order_advice(predictor: str | None, policy: str = SLOTS.policy) -> Advice:
    """At load 0.85 of two slots."""
    estimates = replace(window(long=True), predictor=predictor)
    rate = 0.85 * capacity("continuous:max_batch_size=2", LONG)
    estimates = replace(estimates, arrival_rate=symmetric(rate, 0.02 * rate, 900.0))
    (found,) = advise(estimates, LAW, Setting(policy=policy), LIMITS, DELAY, targets=("order",))
    return found


def test_an_order_that_pays_is_advised_with_what_it_does_to_the_tail() -> None:
    found = order_advice("exact")
    assert found.best is not None
    assert found.best.setting.policy.startswith("continuous:max_batch_size=2,order=")
    assert found.change
    assert found.gain.low > 0
    assert "p99 of the queueing delay, simulated: " in found.says
    orders = {parse_policy(point["policy"]).order for point in found.curve}  # type: ignore[attr-defined]
    assert {"fcfs", "spjf", "threshold", "boost"} <= orders
    assert not orders & {"sprpt", "fb"}, "of slots, those that interrupt nobody"


def test_without_predictions_no_order_by_length_is_compared() -> None:
    found = order_advice(None)
    assert [point["policy"] for point in found.curve] == [SLOTS.policy]
    assert found.best is not None
    assert found.best.setting == SLOTS
    assert "orders by predicted lengths are not compared: too few requests" in found.says


def test_orders_are_advised_on_request_only() -> None:
    assert "order" in TARGETS
    found = advise(window(), LAW, Setting(policy=POLICY), LIMITS, DELAY)
    assert [each.target for each in found] == [each for each in TARGETS if each != "order"]
