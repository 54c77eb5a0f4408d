"""One text of a service-level objective, read alike by every command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kendall.loadgen.compare.assertions import parse_assertions
from kendall.loadgen.measures.goodput import Limit, parse_goodput
from kendall.loadgen.sweep.slo import parse_slo as of_sweep
from kendall.policies.text import SpecError
from kendall.queueing.choosing.gain.criterion import parse_objective
from kendall.queueing.choosing.objective import parse_slo as of_predictions
from kendall.queueing.commands.optimize_cli import objective_of
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.slo import RECORDED, SloText, full_name, read_slo, split_slos
from kendall.server.admission.settings import OverloadSettings, delay_target, delay_targets


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("p99_queueing_delay=2s", SloText("p99", 0.99, "queueing_delay", 2.0)),
        ("p99.9_queueing_delay=100ms", SloText("p99.9", 0.999, "queueing_delay", 0.1)),
        ("p99.99_sojourn_time <= 1m", SloText("p99.99", 0.9999, "sojourn_time", 60.0)),
        ("p1_time_to_first_token<0.5", SloText("p1", 0.01, "time_to_first_token", 0.5)),
        (" mean_sojourn_time =500ms ", SloText("mean", None, "sojourn_time", 0.5)),
        ("p90.0_queueing_delay=2s", SloText("p90", 0.9, "queueing_delay", 2.0)),
        ("median_ttft<1s", SloText("p50", 0.5, "time_to_first_token", 1.0)),
        ("tpot_p99<=20ms", SloText("p99", 0.99, "time_per_output_token", 0.02)),
        ("mean_e2el=1m30s", SloText("mean", None, "end_to_end", 90.0)),
        ("p95_service<2s", SloText("p95", 0.95, "service_time", 2.0)),
    ],
)
def test_a_text_is_a_statistic_a_quantity_and_a_time(text: str, read: SloText) -> None:
    found = read_slo(text)
    assert found == SloText(
        read.statistic, read.level and pytest.approx(read.level), read.quantity, read.seconds
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("99_queueing_delay=2s", "expected mean_QUANTITY=TIME or pNN_QUANTITY=TIME"),
        ("p99_queueing_delay", "expected mean_QUANTITY=TIME"),
        ("p100_queueing_delay=2s", "a quantile above p0 and at most p99.99"),
        ("p99.999_ttft=2s", "a quantile above p0 and at most p99.99"),
        ("p99_queueing_delay>=2s", "an upper bound, mean_QUANTITY=TIME"),
        ("p99_ttft 2s", "expected mean_QUANTITY=TIME or pNN_QUANTITY=TIME"),
        (",", "expected mean_QUANTITY=TIME or pNN_QUANTITY=TIME"),
        ("p0_queueing_delay=2s", "a quantile above p0"),
        ("p99_queueing_delay=0s", "finite seconds > 0"),
        ("p99_queueing_delay=inf", "finite seconds > 0"),
        ("p99_queueing_delay=soon", "a duration such as 2s or 100ms"),
        ("p99_queuing_delay=2s", "did you mean 'queueing_delay'"),
    ],
)
def test_every_command_refuses_a_text_in_the_same_words(text: str, says: str) -> None:
    messages = set()
    for read in (read_slo, of_sweep, of_predictions, delay_target):
        with pytest.raises(SpecError) as raised:
            read(text)
        messages.add(str(raised.value).replace("got slo=", "got --slo "))
    (message,) = messages
    assert message.startswith(f"got --slo {text!r}; ")
    assert says in message


@pytest.mark.parametrize(
    "read", [delay_targets, split_slos, lambda text: objective_of("slo", {"slo": text})]
)
def test_one_bound_of_a_quantile(read: Callable[[str], object]) -> None:
    with pytest.raises(
        SpecError, match="'ttft_p99=2s'; expected one bound of the p99 time to first"
    ):
        read("p99_ttft=1s, p90_ttft=1s, ttft_p99=2s")


def test_the_same_objective_twice_is_one() -> None:
    assert split_slos("p99_ttft=1s,p99_ttft=1s") == ["p99_ttft=1s"]
    assert split_slos(",") == [","]


def by_serve(text: str) -> list[tuple[float | None, str, float]]:
    return [(each.level, each.quantity, each.seconds) for each in delay_targets(text)]


def by_advise(text: str) -> list[tuple[float | None, str, float]]:
    slos = parse_objective({"slo": text}).slos
    return [(slo.level, slo.field, slo.seconds) for slo in slos]


def by_optimize(text: str) -> list[tuple[float | None, str, float]]:
    slos = objective_of("slo", {"slo": text}).slos
    return [(slo.level, slo.field, slo.seconds) for slo in slos]


def by_sweep(text: str) -> list[tuple[float | None, str, float]]:
    found = [of_sweep(each) for each in split_slos(text)]
    return [(each.level, each.quantity, each.bound) for each in found]


def by_load(text: str) -> list[tuple[float | None, str, float]]:
    found = parse_assertions([text])
    parts = [each.name.partition("_") for each in found]
    assert {each.operator for each in found} <= {"<", "<="}
    return [
        (None if head == "mean" else float(head[1:]) / 100, full_name(name), each.limit)
        for (head, _, name), each in zip(parts, found, strict=True)
    ]


COMMANDS = (by_serve, by_advise, by_optimize, by_sweep, by_load)


@pytest.mark.parametrize(
    "text",
    [
        "p99_queueing_delay=2s",
        "p99_queueing_delay<=2s",
        " p99_queueing_delay < 2000ms ",
        "queueing_delay_p99 <= 2s",
        "p99_queue=2s",
        "p99.0_queueing_delay<=0.0333333333333333333333333min",
    ],
)
def test_one_text_is_read_alike_by_serve_advise_optimize_sweep_and_load(text: str) -> None:
    for read in COMMANDS:
        assert read(text) == [(0.99, "queueing_delay", pytest.approx(2.0))], read.__name__
    goodput = text.replace("p99.0_", "").replace("p99_", "").replace("_p99", "")
    assert parse_goodput([goodput]) == (Limit("queueing_delay", pytest.approx(2.0)),)


def test_several_with_commas_are_as_many_objectives() -> None:
    text = "p99.9_queueing_delay<=1m 30s, mean_queueing_delay=500ms"
    several = [(pytest.approx(0.999), "queueing_delay", 90.0), (None, "queueing_delay", 0.5)]
    for read in COMMANDS:
        assert read(text) == several, read.__name__
    assert parse_goodput(["ttft<=100ms, e2el < 1s"]) == parse_goodput(["ttft:100 e2el:1s"])
    assert len(OverloadSettings(slo=text).slo or "") == len(text)


@pytest.mark.parametrize("quantity", RECORDED)
def test_every_recorded_duration_is_read_and_who_cannot_answer_says_so(quantity: str) -> None:
    text = f"p95_{quantity}<=2s"
    assert read_slo(text).quantity == quantity
    for read in COMMANDS:
        error = ""
        try:
            found = read(text)
        except SpecError as raised:
            error = str(raised)
        else:
            assert found == [(0.95, quantity, 2.0)], read.__name__
        assert not error or any(
            words in error for words in (f"have no {quantity}", f"predicts no {quantity}")
        )


def test_a_variable_of_spaces_is_one_objective_in_a_sweep() -> None:
    """Click splits a variable of a repeatable option at white space."""
    words = ["p99_queueing_delay", "<=", "2s"]
    assert by_sweep(" ".join(words)) == by_serve("p99_queueing_delay <= 2s")


def test_what_a_command_cannot_answer_it_says_behind_the_reading() -> None:
    fine = "p99.9_queueing_delay=2s"
    assert delay_target(fine).level == pytest.approx(0.999)
    assert of_sweep(fine).level == pytest.approx(0.999)
    assert of_predictions(fine).level == pytest.approx(0.999)
    assert of_predictions("p95_sojourn_time=2s").field == "sojourn_time"
    assert of_sweep("p95_sojourn_time=2s").quantity == "sojourn_time"
    assert delay_target("p95_sojourn_time=2s").quantity == "sojourn_time"
    with pytest.raises(SpecError, match="admission predicts no send_lateness"):
        delay_target("p95_send_lateness=2s")
    with pytest.raises(SpecError, match="predictions have no send_lateness"):
        of_predictions("p95_send_lateness=2s")


def test_a_fine_quantile_of_a_sweep_is_that_of_its_records() -> None:
    records = [
        Record(request_id=str(i), outcome="completed", queueing_delay=i / 1000) for i in range(2000)
    ]
    assert of_sweep("p99.9_queueing_delay=2s").observed(records) == pytest.approx(1.997)
