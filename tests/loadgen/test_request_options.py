"""`--header`, `--extra-body`, and `--model` given several times: what each request carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kendall.loadgen.report.load_report import parse_wishes, report_on
from kendall.loadgen.report.options import ReportOptions
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import load_timetable, save_timetable
from tests.loadgen.fake_server import answer
from tests.loadgen.loading import loaded, planned

LENGTHS = {"output_tokens": "uniform:low=1,high=4"}


def test_headers_go_with_every_request_and_their_values_into_no_file(tmp_path: Path) -> None:
    got: list[Mapping[str, str]] = []

    async def keep(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        got.append(request.headers)
        return await answer(request, body)

    run = tmp_path / "run.jsonl"
    result, _ = loaded(keep, run, header=("X-Tenant: blue", "authorization:Bearer k3y"), **LENGTHS)
    assert len(got) == len(result.records) == 20
    assert {(each["x-tenant"], each["authorization"]) for each in got} == {("blue", "Bearer k3y")}
    assert result.header.configuration["headers"] == ["x-tenant", "authorization"]
    assert "k3y" not in run.read_text()
    assert "blue" not in run.read_text()


def test_fields_of_extra_body_are_added_and_may_replace_sampling_parameters() -> None:
    result, server = loaded(extra_body='{"top_p": 0.5, "temperature": 1}', **LENGTHS)
    assert {(body["top_p"], body["temperature"]) for body in server.bodies} == {(0.5, 1)}
    assert result.header.configuration["extra_body"] == {"top_p": 0.5, "temperature": 1}
    plain, _ = loaded(**LENGTHS)
    assert "extra_body" not in plain.header.configuration


def test_each_request_asks_for_a_model_drawn_by_its_share(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": ("a=0.7", "b=0.3"), "num_prompts": 400, **LENGTHS}
    plan = planned(**options)
    assert plan.timetable.model is not None
    counts = Counter(plan.timetable.model.tolist())
    assert 250 < counts["a"] < 310
    assert counts["a"] + counts["b"] == 400
    one = planned(**options | {"model": ("a",)})
    assert np.array_equal(one.timetable.output_tokens, plan.timetable.output_tokens)
    save_timetable(tmp_path / "t", plan.timetable)
    assert load_timetable(tmp_path / "t")[1].model.tolist() == plan.timetable.model.tolist()  # type: ignore[union-attr]
    result, server = loaded(**options | {"request_rate": 2000.0})
    asked = {row: body["model"] for row, body in zip(server.rows, server.bodies, strict=True)}
    assert [asked[row] for row in range(400)] == plan.timetable.model.tolist()
    assert [record.model for record in result.records] == plan.timetable.model.tolist()
    report = report_on(result, parse_wishes(ReportOptions()))
    assert [(part.name, part.completed) for part in report.summary.parts] == sorted(counts.items())


def test_one_model_is_a_name_as_it_stands() -> None:
    result, server = loaded(model=("lora=0.5",), **LENGTHS)
    assert {body["model"] for body in server.bodies} == {"lora=0.5"}
    assert {record.model for record in result.records} == {None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"header": ("x-tenant",)}, "got --header without a colon; expected NAME:VALUE"),
        ({"header": ("x y:1",)}, "expected NAME:VALUE"),
        ({"header": ("x:a\nb",)}, "got --header x with a value of other characters"),
        ({"header": ("Content-Length:3",)}, "got --header Content-Length; expected a header that"),
        ({"header": ("a:1", "A:2")}, "got --header A twice"),
        (
            {"header": ("authorization:x",), "api_key": "k"},
            "got --header authorization with --api-key; expected one of them",
        ),
        ({"extra_body": "{"}, "got --extra-body '{'; expected a JSON object"),
        ({"extra_body": "[1]"}, "expected a JSON object"),
        ({"extra_body": '{"n": 2}'}, "got --extra-body with n; expected other fields"),
        ({"extra_body": '{"max_tokens": 2}'}, "--max-tokens sets it"),
        ({"model": ("a", "b=1")}, "got --model a among several; expected NAME=SHARE"),
        ({"model": ("a=1", "a=2")}, "got --model a twice"),
        ({"model": ("a=1", "b=0")}, "got --model b=0; expected a share > 0"),
        ({"model": ("a=1", "b=x")}, "--model b=x"),
        ({"cancel": 0.5, "cancel_after": "tokens:0"}, "got --cancel-after tokens:0; expected at"),
    ],
)
def test_what_cannot_be_sent_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
