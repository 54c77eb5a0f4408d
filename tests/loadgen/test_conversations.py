"""`--turns`: the next turn of a conversation is sent a think time after the last answer ended, with
everything that was said.
"""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kendall.loadgen.report.audit import sent_stream
from kendall.loadgen.report.load_report import parse_wishes, report_on
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.report.summary_text import load_lines
from kendall.loadgen.sending.conversations import conversations
from kendall.loadgen.sending.job import row_of
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable, split
from kendall.queueing.measurement.record import Record, read_run
from tests.loadgen.fake_server import DONE, chat_chunk, chunk, stream, usage
from tests.loadgen.fake_server import row_of as asked_row
from tests.loadgen.loading import loaded, planned

SHAREGPT = Path(__file__).parent / "samples" / "sharegpt.json"


async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Three tokens that name the request."""
    texts = ["answer", " ", str(asked_row(request))]
    made = chat_chunk if "messages" in body else chunk
    key = "content" if "messages" in body else None
    parts = [made({key: text} if key else text) for text in texts[:2]]  # type: ignore[arg-type]
    parts += [made({key: texts[2]} if key else texts[2], "stop"), usage(9, 3), DONE]  # type: ignore[arg-type]
    return await stream(request, parts, gap=0.002)


def by_conversation(records: list[Record]) -> list[list[Record]]:
    rows = sorted(records, key=row_of)
    numbers = np.cumsum([record.turn == 1 for record in rows]).tolist()
    pairs = zip(numbers, rows, strict=True)
    return [[row for _, row in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]


@pytest.mark.parametrize("chat", [True, False])
def test_each_turn_carries_what_was_said_and_waits_for_its_answer(chat: bool) -> None:
    result, server = loaded(
        echo, chat=chat, turns="deterministic:value=3", think_time=0.05, num_prompts=6
    )
    assert len(result.records) == 18
    sent = dict(zip(server.rows, server.bodies, strict=True))
    for turns in by_conversation(result.records):
        assert [record.turn for record in turns] == [1, 2, 3]
        said = ""
        for last, record in zip([None, *turns], turns, strict=False):
            body = sent[row_of(record)]
            if last is not None:
                assert record.intended_at is not None
                assert last.released_at is not None
                assert record.intended_at > last.released_at
                said += f"\nanswer {row_of(last)}\n"
            prompt = body.get("prompt") or "\n".join(m["content"] for m in body["messages"])
            assert prompt.startswith(said)
            assert len(prompt) > len(said)
            said = prompt
        if chat:
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_think_times_are_those_of_the_timetable() -> None:
    result, _ = loaded(echo, turns="deterministic:value=2", think_time=0.05, num_prompts=30)
    plan = planned(turns="deterministic:value=2", think_time=0.05, num_prompts=30)
    assert plan.timetable.think_time is not None
    thought = [
        (second.intended_at or 0.0) - (first.released_at or 0.0)
        for first, second in by_conversation(result.records)
    ]
    assert np.allclose(thought, plan.timetable.think_time[1::2])
    assert np.mean(thought) == pytest.approx(0.05, rel=0.6)


def test_first_turns_are_the_arrivals_that_were_asked_for(tmp_path: Path) -> None:
    result, _ = loaded(echo, tmp_path / "run.jsonl", turns="geometric:mean=3", num_prompts=50)
    plain = planned(num_prompts=50)
    firsts = [record for record in result.records if record.turn == 1]
    instants = sorted(record.intended_at or 0.0 for record in firsts)
    assert np.allclose(
        np.array(instants) - instants[0],
        plain.timetable.intended_at - plain.timetable.intended_at[0],
    )
    stream_sent = sent_stream("run", result.header, result.records)
    assert stream_sent.instants.size == 50
    summary = report_on(result, parse_wishes(ReportOptions())).summary
    assert summary.conversations == 50
    assert summary.parts[0].requests <= 50
    assert any("conversations" in line for line in load_lines(summary))
    assert summary.asked_rate == 500
    header, records = read_run(tmp_path / "run.jsonl")
    assert [record.intended_at for record in records] == sorted(
        record.intended_at or 0.0 for record in records
    )
    assert header.configuration["turns"] == "geometric:mean=3"


def test_a_conversation_ends_with_a_turn_that_fails() -> None:
    async def once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"]) > 1:
            return web.Response(status=500)  # type: ignore[return-value]
        return await echo(request, body)

    result, _ = loaded(once, chat=True, turns="deterministic:value=4", num_prompts=5)
    assert sorted((r.turn, r.outcome) for r in result.records) == [
        *[(1, "completed")] * 5,
        *[(2, "failed")] * 5,
    ]
    assert result.missing == ()


def test_a_turn_without_an_answer_ends_its_conversation_within_the_drain_limit() -> None:
    async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    result, _ = loaded(never, turns="deterministic:value=2", num_prompts=2, drain_limit=0.2)
    assert [(r.turn, r.outcome) for r in result.records] == [(1, "cancelled")] * 2


def test_users_of_a_closed_loop_have_one_conversation_after_another() -> None:
    result, _ = loaded(
        echo, request_rate=None, max_concurrency=2, turns="deterministic:value=3", num_prompts=6
    )
    assert len(result.records) == 18
    for turns in by_conversation(result.records):
        assert [record.turn for record in turns] == [1, 2, 3]
    ends = sorted((r.sent_at or 0.0, r.released_at or 0.0) for r in result.records)
    for _, third in zip(ends, ends[2:], strict=False):
        assert sum(begin < third[0] < end for begin, end in ends) <= 1


def test_all_turns_of_a_dataset_with_its_questions(tmp_path: Path) -> None:
    dataset = tmp_path / "talk.jsonl"
    talks = [
        [("user", "hello"), ("assistant", "hi"), ("user", "more"), ("assistant", "no")],
        [("system", "be brief"), ("user", "what"), ("assistant", "this")],
    ]
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
        for talk in talks
    ]
    dataset.write_text("\n".join(lines) + "\n")
    result, server = loaded(echo, chat=True, dataset_path=dataset, turns="all", num_prompts=2)
    said = sorted([message["content"] for message in body["messages"]] for body in server.bodies)
    assert said[0] == ["be brief", "what"]
    assert said[1] == ["hello"]
    assert said[2][0::2] == ["hello", "more"]
    assert said[2][1].startswith("answer ")
    assert len(result.records) == 3


def test_sharegpt_conversations_and_a_saved_timetable(tmp_path: Path) -> None:
    plan = planned(dataset_path=SHAREGPT, turns="all", think_time=1.0, num_prompts=10)
    assert plan.timetable.turn is not None
    assert plan.timetable.turn.max() > 1
    save_timetable(tmp_path / "t", plan.timetable, {"seed": plan.seed, **plan.header})
    again = planned(
        request_rate=None, num_prompts=None, timetable=tmp_path / "t", dataset_path=SHAREGPT
    )
    assert list(again.prompts) == list(plan.prompts)
    assert np.array_equal(again.timetable.think_time, plan.timetable.think_time)  # type: ignore[arg-type]


def test_senders_share_whole_conversations() -> None:
    plan = planned(turns="geometric:mean=3", num_prompts=40, model=("a=1", "b=1"))
    table = plan.timetable
    parts = split(table, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(table)))
    for part in parts:
        rows = table.rows(part)
        assert rows.turn is not None
        assert rows.turn[0] == 1
        assert rows.model is not None
        for talk in conversations(rows):
            assert rows.turn[talk.start : talk.stop].tolist() == [*range(1, len(talk) + 1)]
            assert len(set(rows.model[talk.start : talk.stop].tolist())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": "all"}, "got --turns all without --dataset-path"),
        ({"turns": "three"}, "three"),
        (
            {"turns": "geometric:mean=3", "request_rate": None, "trace": "x"},
            "got --turns with --trace",
        ),
        ({"think_time": 1.0}, "got --think-time in an open loop"),
    ],
)
def test_what_is_no_conversation_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
