"""`import kendall`: the answers of the command line, typed, light to import, with errors that
say what to do.
"""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kendall
import kendall.api
from kendall.policies import Dynamic
from kendall.queueing.commands.cli import app

ROOT = Path(__file__).resolve().parent.parent.parent
LAW = "k1=3e-4,k2=1.4e-3,k3=25e-6,k4=9.2e-4,cv=0.12"
LENGTHS = "uniform:low=1,high=32"
SIX = [
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
]


class Own(Dynamic):
    """A policy that no model describes, though it has every attribute of one."""


def printed(command: str, policy: str, rate: float, **options: Any) -> dict[str, Any]:
    """What the command line answers as JSON, less the profile that it names beside the answer."""
    flags = {
        "policy": policy,
        "arrival_rate": rate,
        "output_tokens": LENGTHS,
        "latency": LAW,
    } | options
    arguments = [
        part
        for name, value in flags.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    result = CliRunner().invoke(app, [command, *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    assert answer.pop("latency_profile") is None, "the law is a text here"
    return answer


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", SIX)
def test_a_prediction_is_the_object_that_the_command_prints(policy: str) -> None:
    limits: kendall.Limits = {"max_num_seqs": 16, "max_output_tokens": 24}
    answer = kendall.predict(policy, 20, LENGTHS, LAW, **limits)
    assert answer.stable
    assert answer.queueing_delay.mean is not None
    assert answer.as_dict() == printed("predict", policy, 20, **limits)
    parsed = (
        kendall.parse_policy(policy),
        20,
        kendall.parse_distribution(LENGTHS),
        kendall.parse_latency(LAW),
    )
    assert kendall.predict(*parsed, **limits) == answer, "parsed objects mean what their texts mean"


@pytest.mark.parametrize("policy", SIX)
def test_a_simulation_is_the_object_that_the_command_prints(policy: str) -> None:
    run = {"num_requests": 500, "seed": 7, "replications": 2}
    answer = kendall.simulate(policy, 20, LENGTHS, LAW, max_num_seqs=16, **run)
    assert answer.queueing_delay.standard_error is not None
    assert answer.as_dict() == printed("simulate", policy, 20, max_num_seqs=16, **run)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "limits",
    [
        {"patience": 0.05},
        {"servers": 2},
        {"prompt_tokens": "deterministic:value=100"},
        {"method": "simulation"},
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_every_limit_of_the_command_is_a_keyword(limits: dict[str, Any]) -> None:
    arguments = ("single", 20, LENGTHS, LAW + ",kp=1e-5")
    answer = kendall.predict(*arguments, **limits)
    assert answer.as_dict() == printed("predict", "single", 20, latency=arguments[-1], **limits)
    assert answer != kendall.predict(*arguments), "the keyword changes the answer"


def test_a_loss_needs_patience_and_patience_keeps_an_overload_stable() -> None:
    answer = kendall.simulate("single", 100, LENGTHS, LAW, patience=0.05, num_requests=500)
    assert answer.load > 1
    assert answer.loss_fraction is not None
    assert answer.loss_fraction > 0.1


@pytest.mark.parametrize("function", [kendall.predict, kendall.simulate])
@pytest.mark.parametrize("policy", SIX)
def test_an_unstable_queue_raises_with_the_load_that_the_command_prints(
    function: Any, policy: str
) -> None:
    with pytest.raises(kendall.UnstableQueueError, match="load below 1") as caught:
        function(policy, 1e5, LENGTHS, LAW, max_num_seqs=16)
    answer = printed(function.__name__, policy, 1e5, max_num_seqs=16)
    assert answer["stable"] is False
    assert answer["load"] == caught.value.load >= 1
    assert isinstance(caught.value, kendall.PredictionError)


@pytest.mark.parametrize("policy", SIX)
def test_the_load_is_one_at_the_largest_stable_rate(policy: str) -> None:
    largest = kendall.largest_stable_rate(policy, LENGTHS, LAW, max_num_seqs=16)
    assert kendall.predict(
        policy, largest / 2, LENGTHS, LAW, max_num_seqs=16
    ).load == pytest.approx(0.5, rel=1e-12)
    with pytest.raises(kendall.UnstableQueueError):
        kendall.predict(policy, largest, LENGTHS, LAW, max_num_seqs=16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"policy": "singel"}, "did you mean 'single'"),
        ({"policy": 8}, "got policy=8; expected one of single, dynamic"),
        ({"policy": Own()}, "expected one of single, dynamic"),
        ({"output_tokens": 64}, "got output_tokens=64; expected a distribution or its text"),
        ({"output_tokens": "unifrom:low=1,high=2"}, "uniform"),
        ({"latency": 0.02}, "got latency=0.02; expected a latency law, its text"),
        ({"latency": "nowhere"}, "the name or file of a profile"),
        ({"arrival_rate": "20"}, "expected requests per second > 0"),
        ({"arrival_rate": 0}, "expected requests per second > 0"),
        ({"arrival_rate": float("nan")}, "expected requests per second > 0"),
        ({"arrival_rate": np.array([1.0, 2.0])}, "expected requests per second > 0"),
        (
            {"max_output_tokens": 2.5},
            "got max_output_tokens=2.5; expected a whole number, at least 1",
        ),
        ({"max_num_seqs": 0}, "got max_num_seqs=0; expected a whole number, at least 1"),
        ({"servers": 1.5}, "got servers=1.5; expected a whole number, at least 1"),
        ({"servers": True}, "got servers=True; expected a whole number"),
        ({"patience": 0}, "got patience=0; expected seconds > 0"),
        ({"patience": "20"}, "expected seconds > 0"),
        ({"prompt_tokens": 5}, "got prompt_tokens=5; expected a distribution or its text"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("function", [kendall.predict, kendall.simulate])
def test_a_wrong_argument_says_what_it_got_and_what_is_expected(
    function: Any, changed: dict[str, Any], message: str
) -> None:
    arguments = {
        "policy": "single",
        "arrival_rate": 20,
        "output_tokens": LENGTHS,
        "latency": LAW,
    } | changed
    with pytest.raises(kendall.SpecError, match=message):
        function(**arguments)
    assert issubclass(kendall.SpecError, ValueError)


PARSERS = {
    "policy": kendall.parse_policy,
    "output_tokens": kendall.parse_distribution,
    "latency": kendall.parse_latency,
}


HUGE = 10**400  # no float holds it


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "arrival_rate",
            HUGE,
            r"got arrival_rate=10{79}\.\.\.; expected requests per second > 0, a finite number$",
        ),
        ("arrival_rate", Fraction(HUGE), r"expected requests per second > 0, a finite number$"),
        ("arrival_rate", Fraction(1, HUGE), r"expected requests per second > 0$"),
        (
            "arrival_rate",
            10**5000,
            "got arrival_rate=a number of thousands of digits; expected requests per second > 0",
        ),
        ("patience", HUGE, r"got patience=10{79}\.\.\.; expected seconds > 0, a finite number$"),
        ("arrival_scv", HUGE, "got arrival_scv=inf; expected 0 "),
        ("arrival_scv", -HUGE, "got arrival_scv=-inf; expected 0 "),
        (
            "servers",
            HUGE,
            r"got servers=10{79}\.\.\.; expected a whole number of at most 39 digits$",
        ),
        (
            "servers",
            10**12,
            "got servers=1000000000000; expected a whole number from 1 to 1,000,000",
        ),
        ("max_num_seqs", HUGE, "expected a whole number of at most 39 digits"),
        ("max_output_tokens", HUGE, "expected a whole number of at most 39 digits"),
        (
            "max_output_tokens",
            -(10**5000),
            (
                "got max_output_tokens=a number of thousands of digits; expected a whole number, "
                "at least 1"
            ),
        ),
    ],
    ids=lambda value: "" if isinstance(value, int) else None,  # pytest cannot write the largest
)
@pytest.mark.parametrize("function", [kendall.predict, kendall.simulate])
def test_a_number_that_is_too_large_is_refused(
    function: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(kendall.SpecError, match=message):
        function(
            **{
                "policy": "single",
                "arrival_rate": 20,
                "output_tokens": LENGTHS,
                "latency": LAW,
                name: value,
            }
        )


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [("single", "geometric:mean=1e9"), ("dynamic", "pareto:alpha=1.5,minimum=20")],
)
def test_advice_names_the_argument_and_not_the_flag(policy: str, lengths: str) -> None:
    for call in (kendall.predict, kendall.simulate):
        with pytest.raises(kendall.SpecError, match=r"set max_output_tokens$") as caught:
            call(policy, 0.001, lengths, LAW)
        assert "--" not in str(caught.value)
        assert call(policy, 0.001, lengths, LAW, max_output_tokens=64).stable


@pytest.mark.parametrize("name", ["num_requests", "seed", "replications"])
def test_a_simulation_of_too_large_a_size_is_refused(name: str) -> None:
    for value in (HUGE, 10**5000):
        with pytest.raises(
            kendall.SpecError, match=f"got {name}=.*; expected a whole number of at most 39 digits"
        ):
            kendall.simulate("single", 20, LENGTHS, LAW, **{name: value})


def test_numbers_of_the_objects_are_checked_too() -> None:
    with pytest.raises(
        kendall.SpecError, match=r"got k1=10{79}\.\.\. in a latency law; expected a finite number"
    ):
        kendall.LatencyModel(k1=HUGE, k4=0.1)
    with pytest.raises(kendall.SpecError, match=r"got k4='0\.1'; expected a number"):
        kendall.LatencyModel(k4="0.1")  # type: ignore[arg-type]
    for value in (2.5, "64", HUGE):
        with pytest.raises(
            kendall.SpecError, match=r"got max_output_tokens=.*; expected a whole number"
        ):
            kendall.parse_distribution(LENGTHS, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 8, b"single"])
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_refuses_what_is_no_text(name: str, given: Any) -> None:
    with pytest.raises(
        kendall.SpecError, match=rf"^got {name}={given!r}; expected a text, for example "
    ):
        PARSERS[name](given)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_calls_an_empty_text_so(name: str) -> None:
    words = {"policy": "policy", "output_tokens": "distribution", "latency": "latency law"}
    with pytest.raises(kendall.SpecError, match=f"^got an empty {words[name]}; expected "):
        PARSERS[name](" ")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_requests": 39}, "got num_requests=39; expected a whole number, at least 40"),
        ({"num_requests": 1e5}, "expected a whole number"),
        ({"seed": -1}, "got seed=-1; expected a whole number, at least 0"),
        ({"replications": 0}, "got replications=0; expected a whole number, at least 1"),
    ],
)
def test_a_wrong_size_of_a_simulation_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(kendall.SpecError, match=message):
        kendall.simulate("single", 20, LENGTHS, LAW, **changed)


def test_a_misspelt_keyword_names_the_right_one() -> None:
    with pytest.raises(
        TypeError, match=r"got the argument 'max_tokens'.*did you mean 'max_output_tokens'"
    ):
        kendall.predict("single", 20, LENGTHS, LAW, max_tokens=3)


def test_numbers_of_numpy_are_numbers() -> None:
    """Also where only numpy's own types would do: no float32 in the arithmetic, no int64 in the
    JSON.
    """
    answer = kendall.predict(
        "dynamic",
        np.float32(20),
        LENGTHS,
        LAW,
        max_output_tokens=np.int64(24),
        max_num_seqs=np.int64(16),
    )
    assert (
        json.loads(json.dumps(answer.as_dict()))
        == kendall.predict(
            "dynamic", 20, LENGTHS, LAW, max_output_tokens=24, max_num_seqs=16
        ).as_dict()
    )


def test_a_result_cannot_be_changed_and_its_json_holds_no_infinity() -> None:
    answer = kendall.predict("single", 20, LENGTHS, LAW)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.load = 0.0
    endless = dataclasses.replace(
        answer,
        queueing_delay=kendall.Quantiles(mean=float("inf")),
        bounds={"queueing_delay_upper": float("inf")},
    )
    text = json.dumps(endless.as_dict(), allow_nan=False)
    assert json.loads(text)["queueing_delay"]["mean"] is None
    assert json.loads(text)["bounds"] == {"queueing_delay_upper": None}


def test_every_public_name_exists_and_there_are_no_others() -> None:
    assert set(kendall.__all__) == {*kendall.api.__all__, "__version__"}
    assert set(kendall.__all__) <= set(dir(kendall))
    for name in kendall.__all__:
        assert getattr(kendall, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'predcit'"):
        kendall.predcit  # noqa: B018
    for name in kendall.api.__all__:
        assert getattr(kendall, name).__doc__, name


@pytest.mark.parametrize("module", ["kendall", "kendall.cli"])
def test_the_import_loads_no_heavy_package(module: str) -> None:
    code = (
        f"import sys, {module}; print(sorted({{'numpy', 'scipy', 'numba', 'msgspec', 'typer', "
        f"'queueing'}} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", [kendall, kendall.api], ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings_run(module: Any) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted >= 3
    assert outcome.failed == 0


@pytest.mark.parametrize("page", ["docs/how-to/python.md", "README.md"])
def test_the_examples_of_the_pages_run(page: str) -> None:
    text = re.sub(
        r"^```.*$", "", (ROOT / page).read_text(), flags=re.MULTILINE
    )  # a fence would be read as output
    outcome = doctest.DocTestRunner().run(
        doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    )
    assert outcome.attempted >= 3
    assert outcome.failed == 0


def test_the_page_names_every_public_name() -> None:
    text = (ROOT / "docs/how-to/python.md").read_text()
    assert [name for name in kendall.api.__all__ if f"`{name}" not in text] == []
    assert [name for name in kendall.Limits.__annotations__ if f"`{name}`" not in text] == []
    assert [
        field.name
        for field in dataclasses.fields(kendall.Prediction)
        if f"`{field.name}`" not in text
    ] == []
