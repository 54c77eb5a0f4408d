"""`--cancel`: clients of a share of the requests hang up, and are counted apart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kendall.loadgen.measures.failures import HUNG_UP
from kendall.loadgen.report.files.saved_run import read_results
from kendall.loadgen.report.load_report import Report, parse_wishes, report_on
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.report.summary_text import load_lines
from kendall.loadgen.report.summary_values import flat
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import load_timetable, save_timetable
from tests.loadgen.fake_server import chunk, stream
from tests.loadgen.loading import loaded, planned


async def slowly(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    """Ten tokens in about 0.2 s."""
    return await stream(request, [*[chunk()] * 9, chunk(finish="length")], gap=0.02)


def report(result: Any) -> Report:
    return report_on(result, parse_wishes(ReportOptions()))


def test_a_client_hangs_up_after_its_time(tmp_path: Path) -> None:
    gone: list[float] = []

    async def watched(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            return await slowly(request, body)
        except (ConnectionError, asyncio.CancelledError):
            gone.append(asyncio.get_running_loop().time())
            raise

    result, _ = loaded(
        watched, tmp_path / "run.jsonl", cancel=0.5, cancel_after="70ms", request_rate=100.0
    )
    left = [record for record in result.records if record.outcome == "cancelled"]
    done = [record for record in result.records if record.outcome == "completed"]
    assert 4 <= len(left) <= 16
    assert len(left) + len(done) == 20
    for record in left:
        assert record.error == HUNG_UP
        assert record.released_at is not None
        assert record.sent_at is not None
        assert 0.07 <= record.released_at - record.sent_at < 0.15
        assert 1 <= (record.output_tokens or 0) <= 7
    assert len(gone) == len(left)
    # counted apart: neither failures nor errors, also when the file is read again
    for one in (result, read_results([tmp_path / "run.jsonl"])[0][1]):
        shown = report(one)
        assert shown.status == 0
        assert (shown.verdict.failures.failed, shown.verdict.failures.requests) == (0, len(done))
        assert shown.summary.hung_up == shown.summary.outcomes["cancelled"] == len(left)
        assert shown.summary.status_codes["200"].share == 1
        assert flat(shown.summary)["error_rate"] == 0
        assert f"{len(left)} cancelled by the client" in load_lines(shown.summary)[0]
        assert shown.summary.errors == {}


def test_a_client_hangs_up_after_its_number_of_tokens() -> None:
    result, _ = loaded(slowly, cancel=1.0, cancel_after="tokens:4", request_rate=100.0)
    assert {(r.outcome, r.output_tokens) for r in result.records} == {("cancelled", 4)}


def test_an_answer_that_ends_before_is_complete() -> None:
    result, _ = loaded(slowly, cancel=1.0, cancel_after="tokens:11", request_rate=100.0)
    assert {record.outcome for record in result.records} == {"completed"}


def test_a_closed_loop_goes_on_after_a_cancellation() -> None:
    result, _ = loaded(
        slowly, cancel=1.0, cancel_after="30ms", request_rate=None, max_concurrency=4
    )
    assert len(result.records) == 20
    assert {record.outcome for record in result.records} == {"cancelled"}


def test_a_client_may_hang_up_before_there_is_a_connection() -> None:
    """Nobody listens: no second end of a request that has ended."""

    async def main() -> Any:
        plan = planned(model=("m",), cancel=1.0, cancel_after="1us", natural_lengths=True)
        return await plan.run()

    result = asyncio.run(main())
    assert len(result.records) == 20
    assert {record.outcome for record in result.records} <= {"cancelled", "failed"}


def test_ends_are_drawn_apart_from_everything_else_and_saved(tmp_path: Path) -> None:
    plain, some, more = (
        planned(),
        planned(cancel=0.5, cancel_after="exponential:mean=1s"),
        planned(cancel=0.5, cancel_after="exponential:mean=1s", num_prompts=40),
    )
    assert np.array_equal(plain.timetable.intended_at, some.timetable.intended_at)
    assert some.timetable.hang_up_after is not None
    assert more.timetable.hang_up_after is not None
    assert np.array_equal(some.timetable.hang_up_after, more.timetable.hang_up_after[:20])
    assert 4 <= np.count_nonzero(some.timetable.hang_up_after) <= 16
    save_timetable(tmp_path / "t", some.timetable)
    again = planned(request_rate=None, timetable=tmp_path / "t").timetable
    assert np.array_equal(again.hang_up_after, some.timetable.hang_up_after)  # type: ignore[arg-type]
    assert load_timetable(tmp_path / "t")[1].hang_up_tokens is None
    as_trace = planned(request_rate=None, trace=tmp_path / "t").timetable
    assert np.array_equal(as_trace.intended_at, some.timetable.intended_at)


@pytest.mark.parametrize(
    ("share", "after", "message"),
    [
        (0.1, None, "got --cancel without --cancel-after; expected both"),
        (None, "2s", "got --cancel-after without --cancel; expected both"),
        (1.5, "2s", "got --cancel 1.5; expected a share between 0 and 1"),
        (0.1, "0s", "expected a duration"),
        (0.1, "exponental:mean=2s", "did you mean 'exponential'"),
        (0.1, "exponential:mean=x", "expected a duration"),
        (0.1, "uniform:low=2,high=1", "expected a duration"),
        (0.1, "tokens:gaussian:mean=3", "gaussian"),
    ],
)
def test_what_is_no_cancellation_is_one_line(
    share: float | None, after: str | None, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(cancel=share, cancel_after=after)
    assert message in str(caught.value)
