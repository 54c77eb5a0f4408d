"""One text of a service-level objective, read alike by every command."""

from __future__ import annotations

import pytest

from loadgen.sweep.slo import parse_slo as of_sweep
from policies.text import SpecError
from queueing.measurement.record import Record
from queueing.measurement.slo import SloText, read_slo
from queueing.optimization.objective import parse_slo as of_predictions
from server.admission.limits import delay_target


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("p99_queueing_delay=2s", SloText("p99", 0.99, "queueing_delay", 2.0)),
        ("p99.9_queueing_delay=100ms", SloText("p99.9", 0.999, "queueing_delay", 0.1)),
        ("p99.99_sojourn_time <= 1m", SloText("p99.99", 0.9999, "sojourn_time", 60.0)),
        ("p1_time_to_first_token<0.5", SloText("p1", 0.01, "time_to_first_token", 0.5)),
        (" mean_sojourn_time =500ms ", SloText("mean", None, "sojourn_time", 0.5)),
        ("p90.0_queueing_delay=2s", SloText("p90", 0.9, "queueing_delay", 2.0)),
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
        ("p100_queueing_delay=2s", "expected mean_QUANTITY=TIME"),
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


def test_what_a_command_cannot_answer_it_says_behind_the_reading() -> None:
    fine = "p99.9_queueing_delay=2s"
    assert delay_target(fine).level == pytest.approx(0.999)
    assert of_sweep(fine).level == pytest.approx(0.999)
    with pytest.raises(SpecError, match=r"p50, p90, p95, p99: predictions have no p99\.9"):
        of_predictions(fine)
    assert of_predictions("p95_sojourn_time=2s").field == "sojourn_time"
    assert of_sweep("p95_sojourn_time=2s").quantity == "sojourn_time"
    with pytest.raises(SpecError, match="admission predicts no sojourn_time"):
        delay_target("p95_sojourn_time=2s")


def test_a_fine_quantile_of_a_sweep_is_that_of_its_records() -> None:
    records = [
        Record(request_id=str(i), outcome="completed", queueing_delay=i / 1000) for i in range(2000)
    ]
    assert of_sweep("p99.9_queueing_delay=2s").observed(records) == pytest.approx(1.997)
