"""The optimisers against known optima, brute force and their own constraints; the command's JSON
and exit statuses.
"""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from kendall import cli
from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.candidates import usual_policies
from kendall.queueing.choosing.choices import best_batch_size, best_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.search import Optimum, choose, near_scores, near_sojourns
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.choosing.words import legend
from kendall.queueing.commands.optimize_cli import print_optimum
from kendall.queueing.commands.terminal import console
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import NoStableChoiceError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_profile
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from tests.queueing.made import made_queue

YANG = LatencyModel(k2=0.7764, k4=0.022032)
TOKENS = parse_distribution("lognormal:mu=7,sigma=0.7", 20_000)
ENGINE = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
SHORT = parse_distribution("uniform:low=1,high=32")
ARGUMENTS = [
    "--output-tokens",
    "uniform:low=1,high=32",
    "--latency",
    "k1=3e-4,k2=1.4e-3,k3=25e-6,k4=9.2e-4",
]


def queue(policy: str = "single", **values: Any) -> Queue:
    return made_queue(**{"policy": policy, "output_tokens": SHORT, "law": ENGINE} | values)


@pytest.mark.parametrize(("theta", "limit"), [(119 / 120, 1324), (199 / 200, 1600)])
def test_yangs_first_objective_has_its_optimum_where_theory_puts_it(
    theta: float, limit: int
) -> None:
    """THEORY a: 1324 with theta = 119/120 as printed, 1600 with 199/200; the rounding to whole
    tokens moves it by one or two.
    """
    model = Queue.read("single", TOKENS, YANG)
    best = best_token_limit(model, 1 / 40, Objective(name="v1", theta=theta)).best
    assert abs(best["max_output_tokens"] - limit) <= 2


@pytest.mark.slow
def test_yangs_second_objective_as_printed_rewards_waiting() -> None:
    """THEORY b, exact loss, served delay: 1265 with the printed `+`, 408 (hardly a loss) with
    the sane `-`.
    """
    model = Queue.read("single", TOKENS, YANG, patience=60.0)
    printed = best_token_limit(
        model, 1 / 25, Objective(name="v2", theta=0.95, loss_cost=4, sign=+1), largest=4000
    ).best
    sane = best_token_limit(
        model, 1 / 25, Objective(name="v2", theta=0.95, loss_cost=4), largest=4000
    ).best
    assert printed["max_output_tokens"] == pytest.approx(1265, abs=15)
    assert sane["max_output_tokens"] == pytest.approx(408, abs=15)
    assert sane["loss_fraction"] < 0.001


def test_the_utility_is_the_share_of_an_answer_that_is_kept() -> None:
    law = parse_distribution("geometric:mean=5", 40)
    for limit in (1, 3, 20, law.longest):
        expected = float(law.pmf[1:] @ np.minimum(1, limit / law.counts[1:]))
        assert law.utilities[limit] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["delay", "v1", "clipped"])
def test_every_limit_at_once_scores_as_prediction_does(name: str) -> None:
    law = LatencyModel(k1=1e-3, k2=2e-3, k4=1e-3, kp=1e-5, cv=0.2)
    model = queue(law=law, prompt_tokens=parse_distribution("uniform:low=5,high=40"))
    found = best_token_limit(model, 40.0, Objective(name=name, theta=0.8))
    for point in found.curve[4::9]:
        clipped = Queue.read(
            model.policy,
            SHORT,
            law,
            max_output_tokens=point["max_output_tokens"],
            prompt_tokens=model.requests.prompt_tokens,
        )
        assert point["queueing_delay"] == pytest.approx(
            predict_model(clipped, 40.0).queueing_delay.mean, rel=1e-9
        )
        kept = sum(
            SHORT.pmf[length] * min(1.0, point["max_output_tokens"] / length)
            for length in range(1, 33)
        )
        assert point["utility"] == pytest.approx(kept)
        if name == "v1":
            assert point["score"] == pytest.approx(-(0.8 * kept - 0.2 * point["queueing_delay"]))
    shorter = best_token_limit(model, 40.0, Objective(name=name, theta=0.8), largest=31)
    assert shorter.curve == found.curve[:31]
    allowed = [point for point in found.curve if point["score"] is not None]
    assert found.best["score"] == min(point["score"] for point in allowed)
    if name == "clipped":
        assert all(point["clipped_fraction"] <= 0.05 for point in allowed)
        assert found.best["max_output_tokens"] == min(
            point["max_output_tokens"] for point in allowed
        )


def test_a_refined_grid_finds_what_brute_force_finds() -> None:
    model = queue("capped:max_batch_size=4", law=LatencyModel(k1=1e-3, k2=4e-3, k3=1e-4, k4=1e-3))
    found = best_token_limit(model, 100.0, Objective(name="v1", theta=0.05))
    useful, scores = SHORT.utilities, {}
    for limit in range(1, 33):
        clipped = Queue.read(model.policy, SHORT, model.engine.law, max_output_tokens=limit)
        if clipped.load(100.0) < 1:
            scores[limit] = -(
                0.05 * useful[limit]
                - 0.95 * (predict_model(clipped, 100.0).queueing_delay.mean or 0.0)
            )
    assert found.best["max_output_tokens"] == min(scores, key=lambda limit: scores[limit])


@pytest.mark.parametrize(
    ("ratio", "size"),
    [
        (1.1, 1),
        (1.5, 2),
        (2.0, 3),
        (2.4, 4),
        (2.8, 5),
        (3.3, 6),
        (3.6, 7),
        (4.0, 8),
        (4.4, 9),
        (4.8, 10),
    ],
)
def test_the_batch_size_of_most_throughput_for_heavy_tails(ratio: float, size: int) -> None:
    """THEORY d: lognormal(7, .7), k1 = k2 = 0: b* depends on k4 / k3 only."""
    tokens = parse_distribution("lognormal:mu=7,sigma=0.7", 60_000)
    model = Queue.read("fixed:batch_size=2", tokens, LatencyModel(k3=1e-3, k4=1e-3 * ratio))
    found = best_batch_size(model, 0.01, Objective(name="throughput"), largest=20)
    assert found.best["batch_size"] == size
    assert found.note is None


def test_light_tails_have_no_finite_batch_size_of_most_throughput() -> None:
    found = best_batch_size(
        queue("fixed:batch_size=2"), 10.0, Objective(name="throughput"), largest=30
    )
    assert found.best["batch_size"] == 30
    assert "no finite optimum" in (found.note or "")


def test_the_batch_size_is_the_smallest_within_the_tolerances_wherever_the_search_ends() -> None:
    model = queue("capped:max_batch_size=8").but(
        law=load_profile("reference").law,
        output_tokens=parse_distribution("lognormal:mu=4,sigma=0.6").clip(256),
    )
    found = [
        best_batch_size(model, 40.0, Objective(name="delay"), largest=largest)
        for largest in (32, 48, 64)
    ]
    assert {each.best["batch_size"] for each in found} == {20}
    less = predict_model(
        dataclasses.replace(model, policy=parse_policy("capped:max_batch_size=19")), 40.0
    )
    assert less.queueing_delay.mean > 1.001 * min(
        point["score"] for point in found[0].curve if point["score"] is not None
    )


def test_a_table_says_how_many_choices_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--policy", "capped:max_batch_size=8", "--arrival-rate", "30", "--latency", "tiny"]
    lengths = ["--output-tokens", "uniform:low=8,high=24"]
    assert run("--target", "batch-size", "--json", *given, *lengths) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    curve = [best | {"batch_size": size} for size in range(1, 41)]
    print_optimum(Optimum("batch-size", "delay", curve[4], curve), console())
    found = capsys.readouterr().out
    assert "40 choices were tried; --json has those that are not shown" in found
    assert len(re.findall(r"^>? +\d+ ", found, re.MULTILINE)) < 30


def test_the_best_batch_size_grows_with_the_rate_and_is_the_best_of_its_curve() -> None:
    heavy = queue("fixed:batch_size=2")
    sizes = [
        best_batch_size(heavy, rate, Objective(name="delay"), largest=16).best["batch_size"]
        for rate in (20.0, 60.0, 150.0)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    found = best_batch_size(heavy, 60.0, Objective(name="delay"), largest=16)
    assert found.best["queueing_delay"] <= 1.001 * min(
        point["queueing_delay"] for point in found.curve if point["score"] is not None
    )


def test_the_best_policy_is_the_one_that_waits_least() -> None:
    found = best_policy(
        queue(),
        ["single", "dynamic", "elastic", "fixed:batch_size=8"],
        30.0,
        Objective(name="delay"),
    )
    delays = {point["policy"]: point["queueing_delay"] for point in found.curve}
    assert found.best["policy"] == "elastic"
    assert delays["elastic"] <= delays["dynamic"] < delays["fixed:batch_size=8"]


def test_the_fewest_servers_keep_the_slo_and_one_fewer_breaks_it() -> None:
    slo = parse_slo("p99_queueing_delay=20ms")
    found = fewest_servers(queue(), 150.0, Objective(name="slo", slo=slo))
    count = found.best["servers"]
    assert slo.kept(predict_model(queue(servers=count), 150.0))
    fewer = queue(servers=count - 1)
    assert fewer.load(150.0) >= 1 or not slo.kept(predict_model(fewer, 150.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["single", "capped:max_batch_size=8", "elastic:max_batch_size=8", "fixed:batch_size=4"],
)
def test_the_largest_rate_keeps_the_slo_and_two_percent_more_breaks_it(policy: str) -> None:
    slo, model = parse_slo("p99_queueing_delay=150ms"), queue(policy)
    rate = largest_rate(model, Objective(name="slo", slo=slo)).best["arrival_rate"]
    assert slo.kept(predict_model(model, rate))
    assert not slo.kept(predict_model(model, 1.02 * rate))


def test_without_an_slo_the_largest_rate_is_the_stable_one() -> None:
    model = queue("capped:max_batch_size=8")
    assert (
        largest_rate(model, Objective(name="throughput")).best["arrival_rate"]
        == model.largest_stable_rate
    )


def test_no_stable_choice_says_why() -> None:
    with pytest.raises(NoStableChoiceError, match="none is stable") as caught:
        best_batch_size(
            queue("capped:max_batch_size=2"), 10_000.0, Objective(name="delay"), largest=8
        )
    assert caught.value.load > 1
    with pytest.raises(NoStableChoiceError, match="none keeps the constraint"):
        largest_rate(
            queue("fixed:batch_size=8"),
            Objective(name="slo", slo=parse_slo("mean_queueing_delay=1ms")),
        )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--target", "batch"], "expected one of max-output-tokens"),
        (["--target", "policy", "--objective", "fast"], "expected one of delay"),
        (
            ["--target", "policy", "--objective", "slo"],
            "without an SLO; expected one, for example p99_queueing_delay=2s",
        ),
        (
            ["--target", "servers", "--objective", "delay", "--slo", "p99_queueing_delay=2s"],
            "expected the objective slo, the one that has an SLO",
        ),
        (
            ["--target", "max-output-tokens", "--arrival-rate", "5"],
            "the delay always falls with a lower limit",
        ),
        (
            ["--target", "max-output-tokens", "--arrival-rate", "5", "--objective", "throughput"],
            "--objective clipped",
        ),
        (
            [
                "--target",
                "max-output-tokens",
                "--arrival-rate",
                "5",
                "--objective",
                "v1",
                "--theta",
                "0",
            ],
            "v1 with --theta 0 for",
        ),
        (["--target", "policy", "--slo", "p99=2"], "for example p99_queueing_delay=2s"),
        (
            ["--target", "batch-size", "--arrival-rate", "5"],
            "expected fixed, capped, elastic or continuous",
        ),
        (["--target", "policy", "--objective", "v1", "--arrival-rate", "5"], "weighs token limits"),
        (
            ["--target", "servers", "--arrival-rate", "5"],
            "expected slo, for example --slo p99_queueing_delay=2s",
        ),
        (["--target", "policy"], "expected requests per second"),
        (
            ["--target", "max-output-tokens", "--arrival-rate", "5", "--theta", "2"],
            "got theta=2; expected a number from 0 to 1",
        ),
        (
            ["--target", "max-output-tokens", "--arrival-rate", "5", "--theta", "0.2"],
            "expected --objective v1 or v2",
        ),
        (
            ["--target", "servers", "--arrival-rate", "5", "--candidates", "single"],
            "expected --target policy",
        ),
        (
            ["--target", "max-output-tokens", "--arrival-rate", "5", "--largest", "0"],
            "expected at least 1",
        ),
        (
            ["--target", "policy", "--arrival-rate", "5", "--largest", "4"],
            "for a limit, batch size or servers",
        ),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments: list[str], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        cli.command_of("optimize").main([*arguments, *ARGUMENTS], standalone_mode=False)


def run(*arguments: str) -> int:
    """Exit status of the command as the shell sees it."""
    return cli.run_command("optimize", [*arguments, *ARGUMENTS])


@pytest.mark.parametrize(("given", "size"), [((), 8), (("--policy", "capped:max_batch_size=3"), 3)])
def test_policies_are_chosen_among_those_of_the_advice(
    given: tuple[str, ...], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--target", "policy", *given, "--arrival-rate", "60", "--json") == 0
    found = [point["policy"] for point in json.loads(capsys.readouterr().out)["curve"]]
    in_force = Setting(policy=given[1] if given else "single")
    assert found == list(usual_policies(in_force, None))
    assert f"fixed:batch_size={size}" in found


def test_the_command_prints_the_object_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            "--target",
            "batch-size",
            "--policy",
            "capped:max_batch_size=2",
            "--arrival-rate",
            "60",
            "--largest",
            "6",
            "--json",
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"target", "objective", "compared", "best", "curve", "latency_profile"}
    assert printed["compared"] == "queueing_delay"
    assert (printed["target"], printed["objective"]) == ("batch-size", "delay")
    assert printed["best"] in printed["curve"]
    assert [point["batch_size"] for point in printed["curve"]] == [1, 2, 3, 4, 5, 6]
    assert not printed["curve"][0]["stable"]
    for point in printed["curve"]:
        assert point["stable"] == (point["load"] < 1) == (point["score"] is not None)
        if point["stable"]:
            assert (
                0 < point["queueing_delay"] < point["time_to_first_token"] < point["sojourn_time"]
            )
            assert point["queueing_delay"] < point["p99_queueing_delay"]
            assert (point["score"], point["loss_fraction"], point["method"]) == (
                point["queueing_delay"],
                0.0,
                "exact",
            )
    assert printed["best"]["score"] <= 1.001 * min(
        point["score"] for point in printed["curve"] if point["stable"]
    )


def choices(*values: tuple[float, float | None]) -> list[dict[str, Any]]:
    """Points of these scores and sojourns."""
    return [{"load": 0.5, "score": score, "sojourn_time": sojourn} for score, sojourn in values]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        # a thousandth of the least score
        ([(1.0, None), (1.0009, None), (1.0011, None)], 2),
        ([(-1.0, None), (-0.9991, None), (-0.9989, None)], 2),
        # and a millionth of the shortest sojourn, of 100 s
        ([(0.0, 100.0), (0.99e-4, 100.0), (1.01e-4, 200.0)], 2),
        ([(1.0, 100.0), (1.00109, 100.0), (1.00111, 200.0)], 2),
    ],
)
def test_scores_that_differ_by_less_than_the_tolerances_are_one(
    values: list[tuple[float, float | None]], kept: int
) -> None:
    points = choices(*values)
    assert near_scores(points) == near_scores(points[::-1])[::-1] == points[:kept]


def test_of_near_scores_the_shortest_sojourn_is_chosen_and_of_near_sojourns_the_first() -> None:
    goal = Objective(name="delay")
    for second, first in ((0.9991, True), (0.9989, False)):  # nearer than a thousandth or not
        curve = choices((1.0005, 1.0), (1.0, second))
        assert choose("policy", goal, curve, by_sojourn=True).best is curve[0 if first else 1]
        assert near_sojourns(curve) == (curve if first else curve[1:])
        assert choose("policy", goal, curve).best is curve[1], "by the score alone"
    far = choices((1.002, 1.0), (1.0, 2.0))
    assert choose("policy", goal, far, by_sojourn=True).best is far[1]


def test_the_table_marks_the_best_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            "--target",
            "policy",
            "--arrival-rate",
            "20",
            "--candidates",
            "single",
            "--candidates",
            "elastic",
        )
        == 0
    )
    assert "> " in next(line for line in capsys.readouterr().out.splitlines() if "elastic" in line)


@pytest.mark.parametrize("size", [8, 29, 64])
def test_the_table_has_the_batch_size_that_was_asked_about(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 64 sizes a grid is tried, which has neither 8 nor 29."""
    assert (
        run(
            "--target",
            "batch-size",
            "--policy",
            f"capped:max_batch_size={size}",
            "--arrival-rate",
            "20",
        )
        == 0
    )
    shown = [
        line.lstrip("> ").split()[0]
        for line in capsys.readouterr().out.splitlines()
        if re.match(r"[> ] *\d+ +\d", line)
    ]
    assert str(size) in shown


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_result_is_a_sentence_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            "--target",
            "batch-size",
            "--policy",
            "elastic",
            "--arrival-rate",
            "100",
            "--largest",
            "8",
        )
        == 0
    )
    text = said(capsys)
    assert "best: batch size 8, the shortest mean queueing delay >" in text
    assert (
        "> marks the best choice; score: the mean queueing delay in seconds (less is better); - "
        "as a score: unstable"
    ) in text


def test_of_batch_sizes_with_one_delay_the_sentence_says_that_it_is_the_smallest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(
            "--target",
            "batch-size",
            "--policy",
            "capped:max_batch_size=2",
            "--arrival-rate",
            "20",
            "--largest",
            "20",
            "--json",
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    near = [
        point
        for point in found["curve"]
        if point["score"] <= 1.001 * min(point["score"] for point in found["curve"])
    ]
    assert len(near) > 1
    assert (
        run(
            "--target",
            "batch-size",
            "--policy",
            "capped:max_batch_size=2",
            "--arrival-rate",
            "20",
            "--largest",
            "20",
        )
        == 0
    )
    size = found["best"]["batch_size"]
    reason = (
        f"the smallest of {len(near)} choices with the shortest mean queueing delay, within 0.1 %"
    )
    assert f"best: batch size {size}, {reason}" in said(capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence", "score"),
    [
        (
            "--target servers --objective slo --slo p99_queueing_delay=2s --arrival-rate 20",
            "1 server, the fewest that keep the SLO",
            "",
        ),
        (
            "--target servers --slo p99_queueing_delay=2s --arrival-rate 20",
            "1 server, the fewest that keep the SLO",
            "",
        ),
        (
            "--target arrival-rate --objective throughput",
            "requests per second, the highest stable rate",
            "",
        ),
        (
            "--target arrival-rate --objective slo --slo p99_queueing_delay=2s",
            "the largest that keeps the SLO",
            "",
        ),
        (
            "--target max-output-tokens --objective clipped --arrival-rate 20",
            "the shortest mean queueing delay with no more clipped answers than allowed",
            "in seconds",
        ),
        (
            "--target policy --objective throughput",
            "dynamic, the highest stable rate",
            "minus the largest stable rate",
        ),
    ],
)
def test_every_target_has_its_sentence_and_its_score(
    arguments: str, sentence: str, score: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments.split()) == 0
    text = said(capsys)
    assert sentence in text[text.index("best: ") :]
    assert score in text[text.index("> marks") :]


def test_what_an_slo_decides_is_shown_as_kept_or_not_rather_than_by_a_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--target", "arrival-rate", "--slo", "p99_queueing_delay=300ms") == 0
    text = capsys.readouterr().out
    assert "score" not in text
    assert "kept" in text
    assert {
        line.split()[-1]
        for line in text.splitlines()
        if line.split() and line.split()[-1] in ("yes", "no")
    } == {"yes", "no"}


def test_the_dash_of_a_stable_choice_has_its_word_in_the_legend() -> None:
    values = {"stable": True, "queueing_delay": 1.0, "sojourn_time": 2.0}
    curve = [
        values | {"score": 1.0, "p99_queueing_delay": 3.0},
        values | {"score": 2.0, "p99_queueing_delay": None},
    ]
    assert "- as a duration of a stable choice: " in legend(
        Optimum("batch-size", "delay", curve[0], curve)
    )
    assert "- as a duration of a stable choice: " not in legend(
        Optimum("batch-size", "delay", curve[0], curve[:1])
    )


def test_no_stable_choice_exits_3_and_wrong_arguments_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--target", "policy", "--arrival-rate", "1e6", "--candidates", "single") == 3
    assert "none is stable" in capsys.readouterr().err
    assert run("--target", "nothing", "--arrival-rate", "1") == 2


def test_every_option_has_an_environment_twin() -> None:
    options = {parameter.name: parameter.envvar for parameter in cli.command_of("optimize").params}
    assert options["max_clipped_fraction"] == "KENDALL_MAX_CLIPPED_FRACTION"


@pytest.mark.parametrize(
    ("policy", "load"), [("capped", 0.02), ("capped", 0.3), ("elastic", 0.3), ("continuous", 0.3)]
)
def test_rounding_does_not_choose_the_batch_size(policy: str, load: float) -> None:
    """At low load delay and sojourn are flat from a small size on; the smallest within 0.1 % is
    chosen, not the noise's favourite.
    """
    rate = load * queue().largest_stable_rate
    curve = best_batch_size(
        queue(f"{policy}:max_batch_size=2"), rate, Objective(name="delay"), largest=24
    )
    least = min(point["sojourn_time"] for point in curve.curve)
    assert curve.best["batch_size"] <= 7
    assert curve.best["sojourn_time"] <= 1.0011 * least


def test_with_patience_one_server_may_be_enough_above_its_capacity() -> None:
    """Nobody waits longer than the patience: the load does not bound the servers from below."""
    objective = Objective(name="slo", slo=parse_slo("p99_queueing_delay=1s"))
    assert fewest_servers(queue(patience=0.05), 150.0, objective).best["servers"] == 1


@pytest.mark.slow
def test_a_target_that_no_number_of_servers_meets_is_found_out_early() -> None:
    """A fixed batch forms as slowly before 64 servers as before one."""
    objective = Objective(name="slo", slo=parse_slo("mean_queueing_delay=1ms"))
    with pytest.raises(
        NoStableChoiceError, match=r"tried [1-7] choices of servers: none keeps the constraint"
    ):
        fewest_servers(queue("fixed:batch_size=2"), 20.0, objective, largest=64)


def test_servers_up_to_the_largest_are_tried_and_none_beyond() -> None:
    objective = Objective(name="slo", slo=parse_slo("p99_queueing_delay=1s"))
    with pytest.raises(NoStableChoiceError, match="none is stable") as caught:
        fewest_servers(queue(), 9000.0, objective, largest=10)
    assert caught.value.load == pytest.approx(queue(servers=10).load(9000.0))


def test_a_bisection_finds_the_servers_that_a_scan_finds() -> None:
    slo = parse_slo("p99_queueing_delay=0.2ms")
    objective = Objective(name="slo", slo=slo)
    found = fewest_servers(queue(), 400.0, objective)
    kept = [
        servers
        for servers in range(7, 20)
        if slo.kept(predict_model(queue(servers=servers), 400.0))
    ]
    assert found.best["servers"] == kept[0] > 9
    assert kept == list(range(kept[0], 20))


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "above"), [("mean", 1.0005), ("p99", 1.002)])
def test_a_narrow_valley_of_fixed_batches_is_found(metric: str, above: float) -> None:
    """The delay of fixed batches falls and rises; an SLO just above its floor holds between two
    loads of the scan.
    """
    model = queue("fixed:batch_size=8")
    rates = np.linspace(0.6, 0.9, 61) * model.largest_stable_rate
    delays = [float(getattr(predict_model(model, rate).queueing_delay, metric)) for rate in rates]
    slo = parse_slo(f"{metric}_queueing_delay={above * min(delays)!r}")
    rate = largest_rate(model, Objective(name="slo", slo=slo)).best["arrival_rate"]
    assert slo.kept(predict_model(model, rate))
    assert rate >= 0.998 * rates[int(np.argmin(delays))]


def test_with_patience_the_slo_may_hold_above_the_stable_rate() -> None:
    slo, model = parse_slo("mean_queueing_delay=40ms"), queue(patience=0.05)
    found = largest_rate(model, Objective(name="slo", slo=slo)).best
    assert found["load"] > 1
    assert slo.kept(predict_model(model, found["arrival_rate"]))
    assert not slo.kept(predict_model(model, 1.02 * found["arrival_rate"]))


def test_with_patience_there_is_no_largest_stable_rate_and_a_longer_slo_says_nothing() -> None:
    with pytest.raises(SpecError, match="every rate is stable"):
        largest_rate(queue(patience=1.0), Objective(name="throughput"))
    with pytest.raises(SpecError, match="no request waits longer"):
        largest_rate(
            queue(patience=1.0), Objective(name="slo", slo=parse_slo("p99_queueing_delay=2s"))
        )


def test_the_largest_throughput_is_no_choice_where_it_is_not_stable() -> None:
    with pytest.raises(NoStableChoiceError, match="none is stable"):
        best_batch_size(queue("fixed:batch_size=2"), 1e5, Objective(name="throughput"), largest=20)
    assert (
        best_batch_size(
            queue("fixed:batch_size=2"), None, Objective(name="throughput"), largest=20
        ).best["batch_size"]
        == 20
    )
    with pytest.raises(SpecError, match="expected --arrival-rate"):
        best_batch_size(queue("fixed:batch_size=2"), None, Objective(name="delay"), largest=20)


@pytest.mark.parametrize("largest", [0, -1])
def test_the_largest_choice_is_at_least_one(largest: int) -> None:
    objective = Objective(name="slo", slo=parse_slo("p99_queueing_delay=1s"))
    with pytest.raises(SpecError, match="at least 1"):
        best_token_limit(queue(), 5.0, objective, largest)
    with pytest.raises(SpecError, match="at least 1"):
        fewest_servers(queue(), 5.0, objective, largest)
    with pytest.raises(SpecError, match="at least 1"):
        best_batch_size(queue("capped:max_batch_size=2"), 5.0, objective, largest)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_loss_cost_is_a_finite_number(cost: float) -> None:
    with pytest.raises(SpecError, match="expected a finite number >= 0"):
        Objective(name="v2", loss_cost=cost)


def test_the_second_objective_needs_patience() -> None:
    with pytest.raises(SpecError, match="without a patience"):
        best_token_limit(queue(), 5.0, Objective(name="v2"))


def test_a_given_limit_bounds_the_search_and_does_not_hide_what_it_clips(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of uniform(1, 32) exceeds 16: 16 is no limit that clips 5 %."""
    arguments = [
        "--target",
        "max-output-tokens",
        "--objective",
        "clipped",
        "--arrival-rate",
        "5",
        "--max-output-tokens",
        "16",
    ]
    assert run(*arguments) == 3
    assert "none keeps the constraint" in capsys.readouterr().err
    assert run(*arguments, "--max-clipped-fraction", "0.6", "--json") == 0
    curve = json.loads(capsys.readouterr().out)["curve"]
    assert curve[-1]["max_output_tokens"] == 16
    assert curve[-1]["clipped_fraction"] == pytest.approx(0.5, abs=0.02)


def test_a_law_without_end_needs_no_limit_where_the_limit_is_sought(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--target",
        "max-output-tokens",
        "--objective",
        "v1",
        "--theta",
        str(119 / 120),
        "--arrival-rate",
        "0.025",
        "--json",
    ]
    law = ["--output-tokens", "lognormal:mu=7,sigma=0.7", "--latency", "a=0.022032,c=0.7764"]
    assert cli.run_command("optimize", [*arguments, *law]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["max_output_tokens"] == pytest.approx(
        1324, abs=2
    )
