"""`kendall predict` and `kendall simulate`: the JSON of the contract, the table, wrong
arguments, unstable queues.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import kendall
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import Timetable, save_timetable
from kendall.queueing.commands.cli import app
from kendall.queueing.commands.optimize_cli import app as optimize_app
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.law import LatencyModel, slow_law
from kendall.queueing.latency.profile import find_profile, load_profile, profile_path

QUANTILES = {"mean", "p50", "p90", "p95", "p99"}
KEYS = {
    "policy",
    "effective_max_batch_size",
    "model",
    "method",
    "stable",
    "load",
    "utilisation",
    "queueing_delay",
    "sojourn_time",
}
KEYS |= {
    "time_to_first_token",
    "inter_token_latency",
    "service_time",
    "batch_size",
    "loss_fraction",
    "served_queueing_delay",
    "request_rate",
    "queue_length",
    "number_in_system",
    "energy_per_request",
    "watts",
    "bounds",
    "assumptions",
}
KEYS |= {"latency_profile"}
COMMON = {
    "--arrival-rate": "60",
    "--output-tokens": "uniform:low=1,high=32",
    "--latency": "k1=3e-4,k2=1.4e-3,k3=25e-6,k4=9.2e-4,cv=0.12",
}


def call(command: str, *arguments: str, **options: str) -> str:
    flags = COMMON | {"--" + name.replace("_", "-"): value for name, value in options.items()}
    result = CliRunner().invoke(
        app,
        [command, *arguments, *(part for pair in flags.items() for part in pair)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(command: str, **options: str) -> dict[str, Any]:
    return dict(json.loads(call(command, "--json", **options)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("policy", "bound", "method"),
    [
        ("single", 1, "exact"),
        ("fixed:batch_size=4", 4, "exact"),
        ("capped:max_batch_size=8", 8, "exact"),
        ("elastic:max_batch_size=64", 16, "exact"),
        ("dynamic", 16, "exact"),
        ("continuous:max_batch_size=4", 4, "approximation"),
    ],
)
def test_predict_prints_the_object_of_the_contract(policy: str, bound: int, method: str) -> None:
    printed = answer("predict", policy=policy, arrival_rate="20", max_num_seqs="16")
    assert set(printed) == KEYS | (
        {"methods", "standard_errors"} if method == "approximation" else set()
    )
    assert printed["policy"] == policy
    assert (printed["effective_max_batch_size"], printed["method"], printed["stable"]) == (
        bound,
        method,
        True,
    )
    assert 0 < printed["load"] < 1
    assert set(printed["queueing_delay"]) == set(printed["sojourn_time"]) == QUANTILES
    assert printed["sojourn_time"]["mean"] > printed["queueing_delay"]["mean"] >= 0
    assert printed["queueing_delay"] == printed["served_queueing_delay"]
    assert printed["loss_fraction"] == 0


TRACE = Path(__file__).parent.parent / "loadgen" / "samples" / "mooncake.jsonl"
OTHERS = {
    "gamma": ["--arrivals", "gamma:rate=20,burstiness=0.5", "--output-tokens", "geometric:mean=9"],
    "steps": [
        *("--arrivals", "piecewise:rates=9/30,durations=9/500ms"),
        *("--output-tokens", "geometric:mean=9"),
    ],
    "trace": ["--trace", str(TRACE)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_other_arrivals_and_traces_print_the_object_of_the_contract(
    command: str, kind: str
) -> None:
    flags = ["--policy", "capped:max_batch_size=8", "--latency", COMMON["--latency"], *OTHERS[kind]]
    result = CliRunner().invoke(app, [command, *flags, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    errors = set() if kind == "trace" else {"standard_errors"}
    assert set(printed) == KEYS | errors
    assert printed["method"] == "simulation"
    assert printed["stable"]
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token"):
        assert set(printed[name]) - {"standard_error"} == QUANTILES
        assert None not in printed[name].values()
        assert ("standard_error" in printed[name]) == (kind != "trace")
    says = {"gamma": "arrivals gamma:rate=20", "steps": "arrivals piecewise:rates=9/30,durations"}
    assert printed["assumptions"][0].startswith(says.get(kind, "arrivals and lengths as recorded"))
    table = CliRunner().invoke(app, [command, *flags], catch_exceptions=False).stdout
    assert "requests/s" in table


OPTIMIZED = ["--output-tokens", "geometric:mean=9", "--latency", COMMON["--latency"]]


def optimized(*flags: str) -> Result:
    return CliRunner().invoke(optimize_app, [*OPTIMIZED, *flags, "--json"])


def test_a_batch_size_is_chosen_for_bursts_by_the_simulation_of_each() -> None:
    process, size = "mmpp:rates=10/90,durations=4/1", ["--target", "batch-size", "--largest", "3"]
    chosen = json.loads(
        optimized(*size, "--policy", "capped:max_batch_size=2", "--arrivals", process).stdout
    )
    assert [point["batch_size"] for point in chosen["curve"]] == [1, 2, 3]
    for point in chosen["curve"]:
        own = kendall.predict(
            f"capped:max_batch_size={point['batch_size']}",
            output_tokens="geometric:mean=9",
            latency=COMMON["--latency"],
            arrivals=process,
        )
        whole = point["batch_size"] == chosen["best"]["batch_size"]  # others by fewer requests
        near = own.queueing_delay.mean if whole else pytest.approx(own.queueing_delay.mean, rel=0.2)
        assert point["score"] == near
    assert chosen["best"]["batch_size"] == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--target", "order", "--arrivals", "gamma:rate=2,burstiness=2"],
            "got --arrivals gamma:rate=2,burstiness=2, with --target order; expected gamma,",
        ),
        (
            ["--target", "policy", "--arrivals", "ramp:start=1,end=2,duration=60"],
            "got --arrivals ramp:start=1,end=2,duration=60, which end; expected gamma",
        ),
        (
            ["--target", "policy", "--arrivals", "poisson:rate=3", "--arrival-rate", "3"],
            "got --arrival-rate 3 and --arrivals poisson:rate=3; expected one of them",
        ),
    ],
)
def test_optimize_refuses_arrivals_that_it_cannot_weigh(flags: list[str], says: str) -> None:
    assert says in str(optimized(*flags).exception)


def test_optimize_takes_a_poisson_process_for_its_rate() -> None:
    flags = ["--target", "batch-size", "--policy", "capped:max_batch_size=2", "--largest", "3"]
    by_rate, by_text = (
        optimized(*flags, *arrivals).stdout
        for arrivals in (("--arrival-rate", "30"), ("--arrivals", "poisson:rate=30"))
    )
    assert by_text == by_rate


DURATIONS = (
    "queueing_delay",
    "served_queueing_delay",
    "sojourn_time",
    "time_to_first_token",
    "inter_token_latency",
    "service_time",
)
SIX = [
    "single",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "dynamic",
    "continuous:max_batch_size=4",
]


PADDED = SIX[1], SIX[2], SIX[4]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", SIX)
@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_every_duration_has_every_key_and_its_numbers_are_finite_and_in_order(
    command: str, policy: str
) -> None:
    """Null only where the method gives no such quantity: JSON has no other way to leave one out."""
    run = {"num_requests": "4000"} if command == "simulate" else {}
    printed = answer(command, policy=policy, arrival_rate="30", max_num_seqs="16", **run)
    for name in DURATIONS:
        assert set(printed[name]) - {"standard_error"} == QUANTILES, name
        levels = [
            value
            for level in ("p50", "p90", "p95", "p99")
            if (value := printed[name][level]) is not None
        ]
        assert levels == sorted(levels), name
        assert all(
            math.isfinite(value) and value >= 0
            for value in printed[name].values()
            if value is not None
        ), name
    whole = {
        "simulate": set(DURATIONS) - ({"inter_token_latency"} if policy in PADDED else set()),
        "predict": {"queueing_delay", "served_queueing_delay", "sojourn_time"},
    }
    for name in DURATIONS if policy.startswith("continuous") else whole[command]:
        assert None not in printed[name].values(), name
    delay, first, sojourn = (
        printed[name]["mean"] for name in ("queueing_delay", "time_to_first_token", "sojourn_time")
    )
    assert 0 < delay < first < sojourn
    assert (printed["inter_token_latency"]["mean"] is None) == (
        policy in PADDED if command == "simulate" else policy.startswith("elastic")
    )
    assert 0 < printed["load"] < 1
    assert 0 < printed["utilisation"] < 1
    assert 1 <= printed["batch_size"]["mean"] <= printed["effective_max_batch_size"]
    assert all(bound >= delay for bound in printed["bounds"].values())


def test_simulate_puts_a_standard_error_beside_each_mean() -> None:
    printed = answer(
        "simulate",
        policy="capped:max_batch_size=4",
        num_requests="2000",
        replications="2",
        seed="5",
    )
    assert set(printed) == KEYS | {"standard_errors"}
    for name in ("queueing_delay", "sojourn_time", "served_queueing_delay", "time_to_first_token"):
        assert set(printed[name]) == QUANTILES | {"standard_error"}
        assert 0 < printed[name]["standard_error"] < printed[name]["mean"]
    assert set(printed["batch_size"]) == {"mean", "standard_error"}
    assert printed["method"] == "simulation"
    assert printed == answer(
        "simulate",
        policy="capped:max_batch_size=4",
        num_requests="2000",
        replications="2",
        seed="5",
    )


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_an_unstable_queue_has_no_delays(command: str) -> None:
    printed = answer(command, policy="single", arrival_rate="100")
    assert printed["stable"] is False
    assert printed["load"] > 1
    for name in DURATIONS:
        assert printed[name] == dict.fromkeys(QUANTILES), name
    assert printed["batch_size"] == {"mean": None}


def test_patience_makes_an_overloaded_queue_stable() -> None:
    printed = answer(
        "simulate", policy="single", arrival_rate="100", patience="0.05", num_requests="3000"
    )
    assert printed["stable"] is True
    assert 0.3 < printed["loss_fraction"] < 0.6
    assert printed["queueing_delay"]["p99"] == pytest.approx(0.05)
    assert printed["served_queueing_delay"]["mean"] < printed["queueing_delay"]["mean"]


def test_a_token_limit_shortens_the_delay() -> None:
    long, short = (
        answer("predict", policy="single", arrival_rate="40", max_output_tokens=limit)
        for limit in ("32", "16")
    )
    assert short["queueing_delay"]["mean"] < long["queueing_delay"]["mean"]


def test_the_table_is_readable_and_names_units() -> None:
    table = call("predict", policy="dynamic", max_num_seqs="8")
    assert "dynamic" in table
    assert "seconds" in table
    assert "UNSTABLE" in call("predict", policy="single", arrival_rate="100")


def test_long_delays_are_printed_without_an_exponent() -> None:
    """Service of 20,000 s at load 0.5: M/D/1 waits 10,000 s on average."""
    slow = {"output_tokens": "deterministic:value=100", "latency": "k1=0,k2=0,k3=0,k4=200"}
    table = call("predict", policy="single", arrival_rate="0.000025", **slow)
    assert "10,000" in table
    assert not re.search(r"\de\+\d", table)
    assert (
        json.loads(call("predict", "--json", policy="single", arrival_rate="0.000025", **slow))[
            "queueing_delay"
        ]["mean"]
        > 9999
    )


def test_the_first_line_says_why_auto_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers did not converge, and where no formula covers the queue; an exact answer
    says nothing of the kind.
    """
    monkeypatch.setattr("kendall.queueing.prediction.steady_state.SIMULATED_REQUESTS", 2000)
    assert call("predict", policy="elastic:max_batch_size=4").splitlines()[0].endswith("(exact)")
    several = call("predict", policy="elastic:max_batch_size=4", servers="2")
    assert several.splitlines()[0].endswith("(simulation, not")  # goes on below at 80 columns
    assert (
        "(simulation, not exact: no formula covers elastic:max_batch_size=4 with 2 servers)"
        in " ".join(several.split())
    )

    def fails(*arguments: object) -> None:
        raise NotConvergedError("the chain", 2.48e-5)

    monkeypatch.setattr("kendall.queueing.prediction.solvers.first_come.solve_batch_chain", fails)
    reason = "simulation, not exact: the chain did not converge: residual 2.48e-05"
    text = " ".join(call("predict", policy="elastic:max_batch_size=4").split())
    assert f"({reason})" in text
    assert text.count("simulation, not exact") == 1
    printed = answer("predict", policy="elastic:max_batch_size=4")
    assert printed["method"] == "simulation"
    assert reason in printed["assumptions"]
    with pytest.raises(NotConvergedError, match="use the method simulation") as caught:
        call("predict", policy="elastic:max_batch_size=4", method="exact")
    assert "lower the load" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("predict", {"policy": "single"}),
        ("predict", {"policy": "capped:max_batch_size=4"}),
        ("simulate", {"policy": "capped:max_batch_size=4", "num_requests": "2000"}),
    ],
)
def test_with_patience_one_note_says_what_each_mean_is_over(
    command: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost request counts as one that waited for its patience; it has no first token. So the
    delay may exceed the time to it.
    """
    monkeypatch.setattr("kendall.queueing.prediction.steady_state.SIMULATED_REQUESTS", 2000)
    given = options | {"patience": "50ms", "arrival_rate": "300"}
    note = (
        "queueing delay: of all requests, a lost one counts as 0.05 s; the other durations: of "
        "the requests that are served"
    )
    printed = answer(command, **given)
    assert printed["time_to_first_token"]["mean"] < printed["queueing_delay"]["mean"]
    assert printed["assumptions"].count(note) == 1
    text = call(command, **given)
    assert " ".join(text.split()).count(note) == 1
    (served,) = re.findall(r"^delay of the served +(\S+)", text, flags=re.MULTILINE)
    assert float(served) == pytest.approx(printed["served_queueing_delay"]["mean"], rel=1e-3)
    assert float(served) < printed["time_to_first_token"]["mean"]
    without = call(command, **options)
    assert "a lost one" not in without
    assert "of the served" not in without


def test_a_dash_has_its_meaning_below_the_table_where_there_is_one() -> None:
    """An exact answer has no standard errors, and no column of dashes for them."""
    meaning = "-: the method does not give this value"
    given = {"policy": "continuous:max_batch_size=8", "arrival_rate": "20"}
    approximate = call("predict", **given, method="approximation")
    assert approximate.splitlines().count(meaning) == 1
    exact = call("predict", policy="capped:max_batch_size=8", arrival_rate="20")
    assert " - " not in exact
    assert meaning not in exact
    assert "std. error" not in exact
    assert "std. error" in call("simulate", policy="single", num_requests="2000", arrival_rate="20")
    assert meaning not in call("predict", policy="single", arrival_rate="100")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"policy": "singel"}, "single"),
        ({"policy": "single", "method": "exakt"}, "expected one of auto"),
        ({"policy": "single", "method": "bound"}, "expected auto, exact, paper or simulation"),
        (
            {"policy": "single", "servers": "2", "method": "exact"},
            "expected auto, approximation or simulation",
        ),
        (
            {"policy": "capped:max_batch_size=2", "patience": "1", "method": "exact"},
            "expected auto or simulation",
        ),
        ({"policy": "single", "arrival_rate": "0"}, "expected requests per second > 0"),
        ({"policy": "single", "servers": "0"}, "at least 1"),
        ({"policy": "single", "max_num_seqs": "0"}, "at least 1"),
        ({"policy": "single", "patience": "0"}, "seconds > 0"),
        ({"policy": "single", "latency": "nowhere"}, "reference"),
        ({"policy": "single", "latency": ""}, "^got an empty latency law; expected k1="),
        ({"policy": "single", "latency": " "}, "^got an empty latency law; expected k1="),
        ({"policy": ""}, "^got an empty policy; expected one of single, "),
        (
            {"policy": "single", "output_tokens": " "},
            "^got an empty distribution; expected one of deterministic, ",
        ),
        (
            {"policy": "single", "output_tokens": "empirical:path="},
            "^got path without a value in 'empirical:path='; expected path=VALUE, for ",
        ),
        (
            {"policy": "single", "output_tokens": "empirical:path= "},
            "^got path without a value in ",
        ),
        ({"policy": "capped:max_batch_size="}, "^got max_batch_size without a value in "),
        (
            {"policy": "single", "latency": "a="},
            "^got a without a value in 'a='; expected a=VALUE$",
        ),
        (
            {"policy": "single", "latency": "a=-1,c=0"},
            "^got a=-1 in 'a=-1,c=0'; expected finite seconds per token >= 0$",
        ),
        ({"policy": "single", "latency": "a=0"}, "^got 'a=0', by which a request takes no time; "),
        ({"policy": "single", "latency": "a=0.02,c=inf"}, "^got c=inf in 'a=0.02,c=inf'; "),
        (
            {"policy": "single", "latency": "a=0.02,cv=-1"},
            "^got cv=-1 in a latency law; expected a coefficient of variation >= 0$",
        ),
        (
            {"policy": "single", "latency": "a=0.02,speed=0"},
            "^got speed=0 in a latency law; expected a factor > 0$",
        ),
        (
            {"policy": "single", "latency": "k1=0,k2=0,k3=0.1,k4=-1"},
            "^got k4=-1 in a latency law; expected seconds >= 0$",
        ),
        (
            {"policy": "single", "latency": "k1=0,k2=0,k3=0,k4=0"},
            "^got k1=k2=k3=k4=kp=0 in a latency law; expected one that takes time",
        ),
        (
            {"policy": "continuous:max_batch_size=4", "latency": "k1=0,k2=1,k3=0,k4=0"},
            "^got k3=0, k4=0 in the latency law of an engine that goes step by step; expected a "
            "step that takes time: one of them > 0, or a policy that forms batches$",
        ),
        (
            {"policy": "single", "latency": "k1=0,k2=0,k3=0,k4=1,stall_share=1.5,stall=2"},
            "^got stall_share=1.5, stall=2 in ",
        ),
        ({"policy": "single", "max_output_tokens": "0"}, "at least 1"),
    ],
)
def test_wrong_arguments_say_what_was_expected(options: dict[str, str], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        call("predict", **options)


def test_a_profile_is_found_by_name_and_by_path_the_users_own_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = load_profile("reference")
    assert "example" in (shipped.note or "")
    slower = type(shipped)(name="reference", law=shipped.law.at_speed(2.0))
    slower.save(profile_path("reference"))
    assert load_profile("reference").law.speed == 2
    slower.save(tmp_path / "other.json")
    assert load_profile(str(tmp_path / "other.json")) == slower
    assert (
        answer("predict", policy="single", arrival_rate="10", latency="reference")["stable"] is True
    )


@pytest.fixture
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing was calibrated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_profiles")
def test_the_profile_of_the_tiny_model_is_shipped_and_names_its_run() -> None:
    found = find_profile("tiny")
    assert found.source == "shipped"
    profile = found.profile
    assert (profile.name, profile.engine, profile.model) == ("tiny", "vllm", "tiny")
    assert profile.machine.keys() == {"cpu", "cores"}
    assert profile.versions.keys() >= {"vllm", "torch", "python"}
    assert profile.date is not None
    assert len(profile.cells) > 50
    assert 0.8 < (profile.r2 or 0) <= 1


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("no_profiles")
@pytest.mark.parametrize(
    ("app", "command", "options"),
    [
        (app, "predict", {"policy": "single"}),
        (app, "simulate", {"policy": "single"}),
        (optimize_app, None, {"target": "batch-size"}),
    ],
)
def test_the_output_names_the_profile_that_was_used(
    app: typer.Typer, command: str | None, options: dict[str, str]
) -> None:
    flags = {
        "arrival-rate": "2",
        "output-tokens": "uniform:low=8,high=24",
        "latency": "tiny",
        "policy": "capped:max_batch_size=4",
    } | options
    arguments = [
        *([command] if command else []),
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]

    def printed(*more: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split()) if not more else result.stdout

    shipped = printed()
    assert (
        "latency profile tiny, shipped with Kendall; `kendall calibrate tiny` measures yours "
        "measured: vllm"
    ) in shipped
    assert re.search(r"measured: vllm \d\S+, tiny, .+, 2 cores, 20\d\d-\d\d-\d\d", shipped)
    assert json.loads(printed("--json"))["latency_profile"]["source"] == "shipped"
    load_profile("tiny").save(profile_path("tiny"))
    assert f"latency profile tiny, {profile_path('tiny')} " in printed()
    assert json.loads(printed("--json"))["latency_profile"]["path"] == str(profile_path("tiny"))


@pytest.mark.usefixtures("no_profiles")
def test_a_command_that_measures_a_profile_is_named_only_where_its_name_is_a_model() -> None:
    assert "`kendall calibrate tiny` measures yours" in find_profile("tiny").describe()[0]
    assert find_profile("reference").describe()[0] == "profile reference, shipped with Kendall"


@pytest.mark.usefixtures("no_profiles")
def test_a_law_given_as_text_has_no_profile() -> None:
    assert answer("predict", policy="single", arrival_rate="10")["latency_profile"] is None
    assert "profile" not in call("predict", policy="single", arrival_rate="10")


POOR = 0.724


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("no_profiles")
@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize(
    ("app", "command", "options"),
    [
        (app, "predict", {}),
        (app, "simulate", {"num-requests": "100"}),
        (optimize_app, None, {"target": "batch-size", "largest": "2"}),
    ],
)
def test_a_profile_that_fits_poorly_is_named_in_one_line_on_stderr_each_time_it_is_used(
    app: typer.Typer, command: str | None, options: dict[str, str], more: tuple[str, ...]
) -> None:
    """With the number that `kendall calibrate` found; a profile without a number, or with a good
    one, says nothing.
    """
    flags = {
        "arrival-rate": "2",
        "output-tokens": "uniform:low=8,high=24",
        "policy": "capped:max_batch_size=4",
    } | options
    tiny = load_profile("tiny")

    def run(r2: float | None) -> Result:
        msgspec.structs.replace(tiny, name="mine", r2=r2).save(profile_path("mine"))
        given = [
            part
            for name, value in (flags | {"latency": "mine"}).items()
            for part in (f"--{name}", value)
        ]
        return CliRunner().invoke(
            app, [*([command] if command else []), *given, *more], catch_exceptions=False
        )

    found = run(POOR)
    assert found.exit_code == 0
    (said,) = found.stderr.splitlines()
    assert said.startswith(
        "kendall: warning: profile mine: the law fits poorly: R2 0.72, where a quiet machine "
        "gives at least 0.9; "
    )
    if more:
        assert json.loads(found.stdout)["latency_profile"]["r2"] == POOR
    assert "R2 0.90" in run(0.8999).stderr
    assert run(0.9).stderr == run(None).stderr == ""


@pytest.mark.parametrize(("step", "said"), [(0.999, False), (1.0, True)])
def test_a_law_of_a_second_per_token_is_doubted(step: float, said: bool) -> None:
    assert (slow_law(LatencyModel(k3=0.001, k4=step - 0.001)) is not None) == said


def test_an_unknown_profile_names_the_command_that_measures_one() -> None:
    with pytest.raises(SpecError, match=r"shipped: .*tiny.*kendall calibrate MODEL"):
        find_profile("nowhere")


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_an_order_that_misses_its_predictions_is_named(command: str, tmp_path: Path) -> None:
    def warned(policy: str, *more: str) -> bool:
        given = ["--policy", policy, "--latency", COMMON["--latency"], *more]
        result = CliRunner().invoke(app, [command, *given], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return "warning: got --predictor none for the order spjf; expected one" in result.stderr

    queue = ["--arrival-rate", "60", "--output-tokens", "uniform:low=1,high=32"]
    assert warned("single:order=spjf", *queue)
    assert not warned("single:order=spjf", "--predictor", "exact", *queue)
    assert not warned("single", *queue)
    instants, tokens = np.arange(200) / 50, 1 + np.arange(200) % 20
    for told in (None, tokens):
        save_timetable(tmp_path / "trace", Timetable(instants, tokens, tokens, told))
        trace = str(tmp_path / "trace")
        assert warned("single:order=spjf", "--trace", trace) == (told is None)
