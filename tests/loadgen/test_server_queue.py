"""What a run tells of a server that is no gateway: its queueing delay by `/metrics`, lengths drawn
and received, dispatches inferred from the clients' records.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from kendall.loadgen.commands import compare_cli, load_cli, summary_cli
from kendall.loadgen.compare.client_side import client_side, inferred
from kendall.loadgen.measures.lengths import lengths_received
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Header, Record, read_run
from kendall.queueing.measurement.server_signals import TGI, ServerCounters
from kendall.queueing.measurement.server_signals import VLLM as VLLM_SERVER
from tests.loadgen.fake_server import DONE, chunk, serving_in_a_thread, stream, usage

VLLM = """# HELP vllm:request_queue_time_seconds Time in the queue
# TYPE vllm:request_queue_time_seconds histogram
vllm:num_requests_running{{engine="0",model_name="a"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="a"}} 1.0
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3"}} 7.0
vllm:request_queue_time_seconds_sum{{engine="0",model_name="a"}} {seconds}
vllm:request_queue_time_seconds_count{{engine="0",model_name="a"}} {requests}
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            VLLM.format(running=3.0, seconds=1.5, requests=10.0),
            ServerCounters(server=VLLM_SERVER, running=3, waiting=1, seconds=1.5, requests=10),
        ),
        (  # two engines of one server
            VLLM.format(running=3.0, seconds=1.5, requests=10.0)
            + VLLM.format(running=1.0, seconds=0.5, requests=1e1).replace('"0"', '"1"'),
            ServerCounters(server=VLLM_SERVER, running=4, waiting=2, seconds=2.0, requests=20),
        ),
        (
            "tgi_queue_size 2\ntgi_batch_current_size 4\n",
            ServerCounters(server=TGI, running=4, waiting=2),
        ),
        ("sglang:num_running_reqs 1\nsglang:num_queue_reqs nonsense\n", None),
        ("process_cpu_seconds_total 4\n", None),
        ("<html>vllm:num_requests_running</html>", None),
    ],
)
def test_the_counters_of_a_server(text: str, found: ServerCounters | None) -> None:
    counters = ServerCounters.read(text)
    if found is None and counters is not None:  # a gauge that cannot be read counts nothing
        assert (counters.waiting, counters.seconds) == (0, None)
    else:
        assert counters == found


async def _plain(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """No usage, no `ignore_eos`: answers end after five tokens."""
    tokens = min(5, body["max_tokens"])
    return await stream(request, [*[chunk()] * tokens, DONE])


async def _counting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    tokens = body["max_tokens"]
    return await stream(request, [*[chunk()] * tokens, usage(4, tokens), DONE])


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with serving_in_a_thread(_plain) as url:
        yield url


def load(url: str, *more: str) -> Result:
    flags = (
        "--request-rate",
        "400",
        "--num-prompts",
        "60",
        "--output-tokens",
        "uniform:low=2,high=9",
    )
    return CliRunner().invoke(load_cli.app, ["--base-url", url, *flags, *more])


def test_a_small_server_works_and_what_it_lacks_is_said(plain: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    result = load(plain, "--output", str(path))
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "shorter (does the server honour ignore_eos?)" in said
    assert "60 answers without it: their tokens are the events" in said
    assert f"queueing delay not known: {plain}/metrics answered 404" in said
    again = CliRunner().invoke(summary_cli.app, [str(path), "--json"])
    found = json.loads(again.stdout)
    assert found["server_queue"] == {
        "mean": None,
        "requests": None,
        "lacks": f"{plain}/metrics answered 404",
        "unanswered_before": None,
    }
    assert found["lengths"]["shorter"] > 0 == found["lengths"]["longer"]
    assert found["uncounted"] == 60


def test_an_slo_that_is_missed_ends_with_status_3(plain: str) -> None:
    assert load(plain, "--no-save", "--slo", "p50_sojourn_time<=30s").exit_code == 0
    missed = load(plain, "--no-save", "--slo", "p50_ttft<=1ns, p99_e2el<=30s")
    assert missed.exit_code == 3
    assert "expected <= 1e-06 ms" in missed.stdout
    unknown = load(plain, "--no-save", "--slo", "mean_queueing_delay<=1s")
    assert unknown.exit_code == 3, "it was not measured"


def test_another_model_is_refused_before_anything_is_sent(plain: str) -> None:
    refused = load(plain, "--model", "other", "--no-save")
    assert isinstance(refused.exception, SpecError)
    assert "got --model other; expected one that" in str(refused.exception)


def test_page_and_table_of_a_run(plain: str, tmp_path: Path) -> None:
    page, table = tmp_path / "run.html", tmp_path / "run.csv"
    result = load(plain, "--no-save", "--html", str(page), "--csv", str(table), "--json")
    assert result.exit_code == 0, result.output
    assert {"over-time", "histogram"} == {figure["name"] for figure in _figures(page.read_text())}
    heads, *rows = table.read_text().splitlines()
    assert heads == (
        "duration,mean_ms,half_width_ms,std_ms,p50_ms,p90_ms,p95_ms,p99_ms,max_ms,n,too_short"
    )
    assert any(row.startswith("ttft,") for row in rows)
    assert json.loads(result.stdout)["files"] == [str(page), str(table)]


def _figures(page: str) -> Any:
    begin = page.index('id="figures">') + len('id="figures">')
    return json.loads(page[begin : page.index("</script>", begin)])


def queue_of(slots: int, requests: int, seed: int) -> tuple[list[Record], np.ndarray]:
    """A queue with so many servers in the order of arrival, and the delay of each."""
    rng = np.random.default_rng(seed)
    sent = np.cumsum(rng.exponential(1.0, requests))
    held = rng.exponential(0.9 * slots, requests)
    free = [0.0] * slots
    records, delays = [], np.empty(requests)
    for place in range(requests):
        start = max(sent[place], heapq.heappop(free))
        end = start + held[place]
        heapq.heappush(free, end)
        delays[place] = start - sent[place]
        records.append(
            Record(
                request_id=f"load-1-{place}",
                outcome="completed",
                intended_at=sent[place],
                sent_at=sent[place],
                first_token_at=start + 0.1 * held[place],
                last_token_at=end,
                released_at=end,
                sojourn_time=end - sent[place],
                prompt_tokens=5,
                output_tokens=4,
                max_output_tokens=4,
            )
        )
    return records, delays


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_dispatches_are_those_of_a_queue_with_so_many_slots(slots: int) -> None:
    records, delays = queue_of(slots, 2_000, seed=slots)
    run = inferred(reversed(records), slots)
    assert run.early == 0
    assert delays.mean() > 0.5
    assert [r.queueing_delay for r in run.records] == pytest.approx(delays.tolist(), abs=1e-9)


def test_too_few_slots_show_in_first_tokens_that_came_too_early() -> None:
    records, _ = queue_of(8, 500, seed=1)
    assert inferred(records, 4).early > 100


def answer_of(sent: float, first: float, last: float, tokens: int, name: str = "") -> Record:
    return Record(
        request_id=name or f"{sent:g}",
        outcome="completed",
        sent_at=sent,
        first_token_at=first,
        last_token_at=last,
        output_tokens=tokens,
    )


def test_dispatches_by_hand() -> None:
    """Two slots: the third waits for the end of the first, the fourth has its first token before a
    slot is free and is put there, the fifth finds a free one.
    """
    records = [
        answer_of(0.0, 1.0, 4.0, 4),
        answer_of(1.0, 2.0, 9.0, 8),
        answer_of(2.0, 5.0, 6.0, 2),
        answer_of(3.0, 3.5, 4.5, 2),
        answer_of(20.0, 20.5, 21.0, 1),
        msgspec.structs.replace(answer_of(4.0, 5.0, 6.0, 2), outcome="failed"),
    ]
    run = inferred(records, 2)
    assert [record.dispatched_at for record in run.records] == [0.0, 1.0, 4.0, 3.5, 20.0]
    assert [record.queueing_delay for record in run.records] == [0.0, 0.0, 2.0, 0.5, 0.0]
    assert [record.service_time for record in run.records] == [4.0, 8.0, 2.0, 1.0, 1.0]
    assert [record.server_free_at for record in run.records] == [4.0, 9.0, 6.0, 4.5, 21.0]
    assert [record.batch_id for record in run.records] == [0, 1, 2, 3, 4]
    assert (run.early, run.slots) == (1, 2)
    first = run.records[0]
    assert (first.policy, first.epoch, first.server_id) == ("continuous:max_batch_size=2", 0, 0)
    assert (first.client_request_id, first.arrived_at, first.batch_size) == ("0", 0.0, 1)
    told = client_side(Header(writer="load"), run, [], model=None, rate=1.0)
    assert (told.inferred_delay, told.early, told.token_times) == (0.5, 1, ())
    # as early as the clocks of two reads allow: a thousandth of a second
    near = [answer_of(0.0, 1.0, 4.0, 4), answer_of(1.0, 3.9995, 5.0, 2)]
    found = inferred(near, 1)
    assert (found.early, found.records[1].dispatched_at) == (0, 3.9995)


def test_token_times_by_hand() -> None:
    """Of those that are kept; the gap is the ratio of the sums, one token has none."""
    records = [
        answer_of(0.0, 1.0, 4.0, 4, "a"),
        answer_of(10.0, 12.0, 13.0, 3, "b"),
        answer_of(20.0, 26.0, 26.0, 1, "c"),
        answer_of(30.0, 39.0, 99.0, 2, "left out"),
    ]
    told = {"server_queue": {"mean": 0.5, "requests": 4}}
    header = Header(writer="load", configuration=told)
    run = inferred(records, 2)
    found = client_side(header, run, ["a", "b", "c"], model=None, rate=1.0)
    first, gap = found.token_times
    assert [first.name, gap.name] == ["time_to_first_token", "inter_token_latency"]
    assert first.observed.mean == pytest.approx((1 + 2 + 6) / 3)
    assert gap.observed.mean == pytest.approx((3 + 1) / (3 + 2))
    assert (first.predicted, first.deviation, found.requests, found.slots) == (None, None, 4, 2)
    assert found.inferred_delay == 0.0
    assert found.server is not None
    assert (found.server.mean, found.server.requests) == (0.5, 4)
    # the spread is that of a ratio of sums
    rng = np.random.default_rng(1)
    spans, gaps = rng.exponential(1.0, 400), rng.integers(1, 9, 400)
    many = [
        answer_of(float(row), row + 0.5, row + 0.5 + spans[row], int(gaps[row]) + 1)
        for row in range(400)
    ]
    ids = [each.request_id for each in many]
    (_, ratio) = client_side(header, inferred(many, 9), ids, model=None, rate=1.0).token_times
    assert ratio.observed.mean == pytest.approx(spans.sum() / gaps.sum())
    error = np.std(spans - spans.sum() / gaps.sum() * gaps) / gaps.mean() / 20
    assert ratio.observed.half_width == pytest.approx(1.96 * error, rel=0.2)  # which knows memory
    one = client_side(Header(writer="load"), run, ["c"], model=None, rate=1.0)
    assert [each.name for each in one.token_times] == ["time_to_first_token"]
    assert one.server is None
    beside = dataclasses.replace(first, predicted=2.0)
    assert beside.deviation == pytest.approx(0.5)


def test_lengths_as_drawn() -> None:
    records, _ = queue_of(1, 10, seed=1)
    found = lengths_received(records)
    assert found is not None
    assert (found.shorter, found.longer, found.drawn, found.received) == (0, 0, 4, 4)
    assert lengths_received([]) is None


def test_a_clients_file_alone_needs_the_number_of_slots(plain: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert load(plain, "--output", str(path)).exit_code == 0
    assert len(read_run(path)[1]) == 60
    refused = CliRunner().invoke(compare_cli.app, [str(path)])
    assert "or --max-num-seqs of a server that is no gateway" in str(refused.exception)
    result = CliRunner().invoke(compare_cli.app, [str(path), "--max-num-seqs", "4", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["comparisons"]
    assert found["policy"] == "continuous:max_batch_size=4"
    assert found["client"]["slots"] == 4
    assert found["client"]["token_times"][0]["predicted"] is None
