"""The whole gateway on the real vLLM engine: one `kendall serve tiny`, spoken to as its users
do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.measurement.record import Record, read_run
from tests.eventually import eventually, eventually_here
from tests.grafana.asked import FILES, faults, filled, queries_of
from tests.prometheus_server import Prometheus
from tests.server.asgi import through
from tests.server.counts import outcomes
from tests.server.processes import arrived
from tests.server.statuses import ROWS, Row
from tests.serving import started

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
]  # seconds: a busy machine needs minutes to bring an engine up
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=3,max_wait=0.05",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
)
FOLDER = "real-gateway"
MANY = 64  # sequences of a call: of 1,900 tokens each, one after the other
# seconds between two answers of /health: thirty times what it takes on a quiet machine
LONGEST_GAP = 2.0


class Served:
    """A running gateway and a way to run coroutines against it."""

    def __init__(self, gateway: GatewayProcess, runner: asyncio.Runner, folder: Path) -> None:
        self.gateway, self.runner, self.folder = gateway, runner, folder

    def run(self, work: Callable[[GatewayProcess], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            return await work(self.gateway)

        return self.runner.run(main())

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.gateway.url + "/v1", api_key="none", max_retries=0, timeout=60
        )

    async def outcomes(self) -> Counter[str]:
        """Of all requests so far."""
        async with httpx.AsyncClient(base_url=self.gateway.url, timeout=60) as client:
            return outcomes((await client.get("/metrics")).text)

    async def records(self) -> list[Record]:
        """All, once the file has those that the gateway has counted."""
        counted = (await self.outcomes()).total()
        return list(
            await eventually(
                lambda: (
                    len(found := read_run(self.folder / "records.jsonl")[1]) >= counted and found
                )
            )
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(FOLDER)
    arguments = [
        "tiny",
        "--allow-forced-lengths",
        "--prediction-interval",
        "0",
        "--record-file",
        str(folder / "records.jsonl"),
        "--policy",
        "single",
    ]
    gateway = GatewayProcess(arguments, free_port(0), folder / "gateway.log")
    with started(gateway) as runner:
        yield Served(gateway, runner, folder)


def test_the_official_client_completes_streams_and_chats(served: Served) -> None:
    with served.openai() as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(
            model=model,
            prompt="A robot may not injure a human being",
            n=2,
            logprobs=3,
            max_tokens=6,
            seed=1,
        )
        assert [choice.index for choice in whole.choices] == [0, 1]
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        parts = list(
            client.completions.create(
                model=model,
                prompt="A robot",
                max_tokens=9,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        assert parts[-1].choices[0].finish_reason == "length"
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where was it played?"},
        ]
        chat = client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=7, extra_body={"ignore_eos": True}
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 7
        assert chat.choices[0].message.content
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == chat.usage.prompt_tokens


def test_greedy_answers_do_not_depend_on_the_policy_or_on_streaming(served: Served) -> None:
    """Padded service cuts each answer where it would have ended alone."""
    texts = set()
    with served.openai() as client:
        for policy in POLICIES:
            served.run(
                lambda gateway, policy=policy: gateway.ask(
                    "PUT", "/admin/policy", {"policy": policy}
                )
            )
            arguments: Any = {
                "model": "tiny",
                "prompt": "the queue",
                "temperature": 0,
                "max_tokens": 12,
                "extra_body": {"ignore_eos": True},
            }
            texts.add(client.completions.create(**arguments).choices[0].text)
            texts.add(
                "".join(
                    part.choices[0].text
                    for part in client.completions.create(**arguments, stream=True)
                )
            )
    assert len(texts) == 1


def test_vllms_own_metrics_stand_beside_the_gateways_without_a_clash(served: Served) -> None:
    """Each family once, and both count the same tokens and requests."""

    def scrape() -> dict[str, float]:
        text = httpx.get(f"{served.gateway.url}/metrics").text
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        samples: dict[str, float] = {}
        for family in families:
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    served.run(lambda gateway: gateway.ask("PUT", "/admin/policy", {"policy": "single"}))
    before = scrape()
    with served.openai() as client:
        for _ in range(3):
            client.completions.create(
                model="tiny", prompt="the queue", max_tokens=5, extra_body={"ignore_eos": True}
            )

    def counted() -> dict[str, float] | None:
        """Once vLLM has: it does so a moment after the answer."""
        after = scrape()
        over = (
            not after["vllm:num_requests_running"]
            and after["vllm:request_success_total"] >= before["vllm:request_success_total"] + 3
        )
        return (
            {name: after[name] - before[name] for name in after.keys() & before.keys()}
            if over
            else None
        )

    grown = eventually_here(counted)
    assert grown["vllm:generation_tokens_total"] == grown["kendall_output_tokens_sum"] == 15
    assert grown["vllm:request_success_total"] == grown["kendall_queueing_delay_seconds_count"] == 3
    assert scrape()["kendall_in_service"] == 0


@pytest.mark.slow
def test_prometheus_gets_finite_data_for_every_query_of_the_dashboards_about_vllm(
    served: Served, tmp_path: Path
) -> None:
    """In the right unit, from the gateway's own port; tests/test_prometheus.py asks all the
    others.
    """
    seconds, scrapes = 6.0, 2.0

    async def main(gateway: GatewayProcess) -> tuple[float, float]:
        """The longest sojourn, and since when every window has had requests."""
        await gateway.ask("PUT", "/admin/policy", {"policy": "continuous:max_batch_size=4"})
        prompts, lengths = (
            parse_distribution("deterministic:value=16"),
            parse_distribution("uniform:low=4,high=24"),
        )
        timetable = draw(8.0, round(8.0 * seconds), 8, prompts, lengths)
        before = (await served.outcomes()).total()
        load = asyncio.create_task(
            run_load(Target(base_url=gateway.url, model="tiny", max_tokens=24), timetable, seed=8)
        )

        async def under_way() -> bool:
            return (await served.outcomes()).total() > before

        await eventually(under_way)
        await asyncio.sleep(scrapes)
        start = datetime.now(tz=UTC).timestamp()
        result = await load
        await asyncio.sleep(scrapes)
        return max(
            record.sojourn_time for record in result.records if record.sojourn_time is not None
        ), start

    queries = [asked for path in FILES for asked in queries_of(path) if asked.vllm]
    assert len(queries) > 8
    with Prometheus(tmp_path, served.gateway.url.removeprefix("http://")) as prometheus:
        longest, start = served.run(main)
        end = datetime.now(tz=UTC).timestamp()
        answers = [
            (asked, prometheus.over(filled(asked.expr, window="5s", shown="10s"), start, end))
            for asked in queries
        ]
    assert [fault for asked, answer in answers for fault in faults(asked, answer, longest)] == []


def test_errors_are_openais(served: Served) -> None:
    with served.openai() as client:
        with pytest.raises(openai.NotFoundError, match="serves 'tiny'"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="tiny", prompt="x", max_tokens=100_000)


@pytest.mark.left_out
def test_policies_switched_under_load_lose_and_mix_nothing(served: Served) -> None:
    switch_under_load(served, seconds=8.0)


@pytest.mark.slow
def test_policies_switched_every_second_for_a_minute(served: Served) -> None:
    """Acceptance A4: load 0.7 of single's capacity."""
    switch_under_load(served, seconds=60.0)


def switch_under_load(served: Served, seconds: float) -> None:
    lengths = parse_distribution("uniform:low=1,high=24")
    prompts = parse_distribution("deterministic:value=16")

    async def main(gateway: GatewayProcess) -> Any:
        await gateway.ask("PUT", "/admin/policy", {"policy": "single"})
        target = Target(base_url=gateway.url, model="tiny", max_tokens=32)
        pilot = await run_load(target, draw(2.0, 12, 5, prompts, lengths), seed=5)
        before = await served.records()
        alone = [r for r in before if r.policy == "single" and r.prompt_tokens == 16]
        service = float(np.mean([record.service_time for record in alone[-len(pilot.records) :]]))
        rate = 0.7 / service
        part = max(4, round(rate))  # calls: about a second of them under each policy
        sent = [draw(rate, part, 6 + number, prompts, lengths) for number in range(int(seconds))]
        answered, loads = (await served.outcomes()).total(), []
        for policy, timetable in zip(itertools.cycle(POLICIES), sent, strict=False):
            await gateway.ask("PUT", "/admin/policy", {"policy": policy})
            loads.append(asyncio.create_task(run_load(target, timetable, seed=6 + len(loads))))
            # some of those that were sent under this policy; the others go on
            due = answered + part * len(loads) - part // 2

            async def so_many(due: int = due) -> bool:
                await asyncio.sleep(0.05)
                return (await served.outcomes()).total() >= due

            await eventually(so_many, 120.0)
        results = [await load for load in loads]
        await eventually(lambda: idle(gateway))
        state = await gateway.ask("GET", "/admin/state")
        return sent, results, state, (await served.records())[len(before) :]

    sent, results, state, records = served.run(main)
    for timetable, result in zip(sent, results, strict=True):
        assert [r.output_tokens for r in result.records] == timetable.output_tokens.tolist()
        assert {(r.outcome, r.finish_reason) for r in result.records} == {("completed", "stop")}
    assert len(records) == sum(map(len, sent)), "one record each"
    assert {record.outcome for record in records} == {"completed"}
    assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)
    assert len({record.policy for record in records}) >= min(len(POLICIES), int(seconds / 2))
    assert_no_server_mixes_policies(records)


async def idle(gateway: GatewayProcess) -> bool:
    """Nobody is in the system any more."""
    state = await gateway.ask("GET", "/admin/state")
    return (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)


def assert_no_server_mixes_policies(records: list[Record]) -> None:
    """Intervals of service under different epochs of one server do not overlap."""
    last_end: dict[str | None, float] = {}
    for record in sorted(records, key=lambda r: r.dispatched_at or 0.0):
        assert record.dispatched_at is not None
        assert record.server_free_at is not None
        for policy, end in last_end.items():
            assert policy == record.policy or record.dispatched_at >= end, (policy, record)
        last_end[record.policy] = max(last_end.get(record.policy, 0.0), record.server_free_at)


@pytest.mark.parametrize(("stream", "sequences"), [(False, MANY), (True, 1)])
def test_a_client_that_leaves_frees_the_engine(
    served: Served, stream: bool, sequences: int
) -> None:
    """A call in service and one that waits behind it, of `MANY` sequences one after the other:
    minutes of work.

    A stream that has begun has been dispatched whole, so it is one sequence, of some seconds. Where
    those were over before its client left, on a machine that stood still, it is asked for again.
    """

    async def main(gateway: GatewayProcess) -> None:
        await gateway.ask("PUT", "/admin/policy", {"policy": "single"})
        for _ in range(5):
            if (await both_leave(served, stream=stream, sequences=sequences))["cancelled"] > MANY:
                return
        raise AssertionError("the first call was never cancelled")

    served.run(main)


async def both_leave(served: Served, *, stream: bool, sequences: int) -> Counter[str]:
    """What became of the sequences of two calls whose clients left once both had arrived."""
    before = await served.outcomes()
    arrivals = (await served.gateway.ask("GET", "/admin/state"))["arrivals"]["count"]
    arguments: Any = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 1900,
        "extra_body": {"ignore_eos": True},
    }
    async with openai.AsyncOpenAI(
        base_url=served.gateway.url + "/v1", api_key="none", max_retries=0
    ) as client:
        first = asyncio.create_task(
            client.completions.create(**arguments, n=sequences, stream=stream)
        )
        await arrived(served.gateway, arrivals + 1, [first])
        second = asyncio.create_task(client.completions.create(**arguments, n=MANY))
        await arrived(served.gateway, arrivals + 2, [first, second])
        if stream:
            await (await first).close()  # it has begun
        for call in (first, second):
            call.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
    await eventually(lambda: idle(served.gateway))
    return await served.outcomes() - before


def calibrated(served: Served) -> tuple[dict[str, Any], dict[str, Any]]:
    """In full, and its speed alone."""

    async def main(gateway: GatewayProcess) -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"max_output_tokens": 16, "max_batch_size": 8, "repeats": 3}
        profile = await gateway.ask("POST", "/admin/calibrate", body)
        return profile, await gateway.ask(
            "POST", "/admin/calibrate", body | {"speed_only": True, "seconds": 1}
        )

    found: tuple[dict[str, Any], dict[str, Any]] = served.run(main)
    return found


def test_calibration_over_http_gives_a_law(served: Served) -> None:
    """How well it fits is the machine's: `test_calibration_over_http_gives_a_law_that_fits`."""
    full, speed = calibrated(served)
    coefficients = [full["law"][name] for name in ("k1", "k2", "k3", "k4")]
    assert min(coefficients) >= 0
    assert sum(coefficients) > 0
    assert np.isfinite([full["r2"], *coefficients]).all()
    assert full["r2"] <= 1
    assert [speed["law"][name] for name in ("k1", "k2", "k3", "k4")] == coefficients
    assert speed["law"]["speed"] > 0


@pytest.mark.slow
def test_calibration_over_http_gives_a_law_that_fits(served: Served) -> None:
    full, speed = calibrated(served)
    law = full["law"]
    assert law["k4"] > 0
    assert law["k3"] >= 0
    assert full["r2"] > 0.5, (
        "times that do not follow their cells give about 0; a busy machine lowers a good fit"
    )
    assert 0.5 < speed["law"]["speed"] < 2.0


BAD_STARTS = [
    (["serve", "tiny", "--policy", "fixd"], "did you mean 'fixed'"),
    (["serve", "tiny", "--policy", "fixed"], "batch_size"),
    (["serve", "/nowhere/model"], "not a directory here"),
    (["serve", "tiny", "--engine-arg", "nonsense"], "KEY=VALUE"),
    (["serve", "tiny", "--engine", "other"], "auto, vllm, emulated, http or ray"),
    (
        [
            "predict",
            "--policy",
            "single",
            "--arrival-rate",
            "1",
            "--output-tokens",
            "unifrm:low=1,high=3",
            "--latency",
            "a=0.01,c=0.01",
        ],
        "uniform",
    ),
    (["frobnicate"], "got command 'frobnicate'"),
]


@pytest.mark.thinned(7)
@pytest.mark.parametrize(("arguments", "says"), BAD_STARTS)
def test_bad_arguments_are_one_line_and_status_2(arguments: list[str], says: str) -> None:
    free = ["--port", str(free_port(0))] if arguments[0] == "serve" else []
    done = subprocess.run(
        [sys.executable, "-m", "kendall", *arguments, *free],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_a_port_in_use_and_a_model_without_a_tokenizer_are_one_clear_line(
    served: Served, tmp_path: Path
) -> None:
    port = served.gateway.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "kendall", "serve", "tiny", "--port", port],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "expected a free address" in done.stderr.strip().splitlines()[-1]
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "kendall", "serve", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"KENDALL_LOG_LEVEL": "error"},
    )
    assert done.returncode == 2, done.stderr
    assert "tokenizer" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "boolean"}},
            }
        },
        lambda text: isinstance(json.loads(text), bool),
    ),
]


@pytest.mark.parametrize("policy", ["continuous:max_batch_size=4", "capped:max_batch_size=4"])
def test_answers_keep_to_a_form_padded_and_unpadded(served: Served, policy: str) -> None:
    """A padded member whose grammar has ended decodes on behind its end, and loses none of its
    form by it.
    """

    async def ask(gateway: GatewayProcess) -> list[Any]:
        await gateway.ask("PUT", "/admin/policy", {"policy": policy})
        bodies = [
            {"model": "tiny", "prompt": "x", "max_tokens": 30, "seed": 3} | fields
            for fields, _ in FORMS
        ]
        longer = {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": 60,
            "ignore_eos": True,
        }  # the batch goes on for this one
        return await asyncio.gather(
            *(gateway.ask("POST", "/v1/completions", body) for body in (*bodies, longer))
        )

    *formed, free = served.run(ask)
    for answer, (fields, holds) in zip(formed, FORMS, strict=True):
        assert holds(answer["choices"][0]["text"]), (fields, answer)
        assert answer["choices"][0]["finish_reason"] == "stop"
    assert free["usage"]["completion_tokens"] == 60


def test_tokens_are_allowed_and_words_forbidden(served: Served) -> None:
    async def ask(gateway: GatewayProcess) -> list[Any]:
        await gateway.ask("PUT", "/admin/policy", {"policy": "continuous"})
        body = {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": 20,
            "seed": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        letters = (await gateway.ask("POST", "/tokenize", {"prompt": "abc"}))["tokens"]
        bare = await gateway.ask(
            "POST",
            "/tokenize",
            {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True},
        )
        assert (bare["count"], "".join(bare["token_strs"])) == (len(bare["tokens"]), "abc")
        few = await gateway.ask(
            "POST", "/v1/completions", body | {"allowed_token_ids": [300, 301, 302]}
        )
        fewer = await gateway.ask(
            "POST", "/v1/completions", body | {"allowed_token_ids": letters, "bad_words": ["abc"]}
        )
        return [few["choices"][0]["token_ids"], letters, fewer["choices"][0]["text"]]

    ids, letters, text = served.run(ask)
    assert len(ids) == 20
    assert set(ids) <= {300, 301, 302}
    assert letters
    assert "abc" not in text


@pytest.mark.slow
def test_what_one_client_sizes_holds_up_nobody_else(served: Served) -> None:
    """16 MB of one forbidden word, of messages and of values in an unknown field, and 131,072
    sequences in 5 KB.

    The gateway answered /health after 33 s when it tokenised the word on its event loop, after 5 s
    when it built the sequences.
    """
    head, message = (
        b'{"model": "tiny", "prompt": "x", ',
        b'{"role": "user", "content": "hello there"}',
    )
    asked = {
        "bad_words": head + b'"bad_words": ["' + b"x" * 15_600_000 + b'"]}',
        "messages": b'{"model": "tiny", "messages": [' + b",".join([message] * 300_000) + b"]}",
        "values": head + b'"metadata": [' + b",".join([b"[]"] * 4_000_000) + b"]}",
        "sequences": json.dumps({"model": "tiny", "prompt": ["a"] * 1024, "n": 128}).encode(),
    }

    async def ask(gateway: GatewayProcess) -> tuple[dict[str, tuple[int, str]], list[float]]:
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            paths = {
                name: "/v1/chat/completions" if name == "messages" else "/v1/completions"
                for name in asked
            }
            calls = {
                name: asyncio.create_task(client.post(paths[name], content=body))
                for name, body in asked.items()
            }
            looks = [loop.time()]
            while not all(call.done() for call in calls.values()):
                assert (await client.get("/health")).status_code == 200
                looks.append(loop.time())
            answers = {name: call.result() for name, call in calls.items()}
            return {
                name: (answer.status_code, answer.json()["error"]["code"])
                for name, answer in answers.items()
            }, looks

    answers, looks = served.run(ask)
    assert answers == {
        "bad_words": (400, "invalid_request"),
        "messages": (413, "too_many_values"),
        "values": (413, "too_many_values"),
        "sequences": (400, "too_many_sequences"),
    }
    gaps = np.diff(looks)
    assert len(gaps) > 5
    assert gaps.max() < LONGEST_GAP


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.anywhere],
    ids=lambda row: f"{row.status}-{row.says.replace(' ', '-')}",
)
def test_statuses_are_as_the_table_says(served: Served, row: Row) -> None:
    async def ask(gateway: GatewayProcess) -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            asked = await row.ask(through(client), cast("Any", None))
            error = asked.json()["error"]
            assert (asked.status, error["code"], error["type"], error["param"]) == (
                row.status,
                row.code,
                row.type,
                row.param,
            )
            assert asked.headers["x-request-id"]
            assert "retry-after" not in asked.headers

    served.run(ask)


BAD_FORMS = [
    ({"structured_outputs": {"regex": "["}}, 400),
    ({"structured_outputs": {"grammar": " "}}, 400),
    ({"guided_json": "no json"}, 400),
    ({"guided_json": {"$ref": "#"}}, 400),
    ({"guided_grammar": "root ::= nowhere"}, 400),
    ({"guided_grammar": "root ::= ("}, 400),
    ({"guided_json": {"enum": [f"word {index}" for index in range(200_000)]}}, 400),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "nonsense"}},
            }
        },
        400,
    ),
    ({"allowed_token_ids": [5000]}, 400),
    ({"stop_token_ids": [5000]}, 400),
    ({"logit_bias": {"5000": 1}}, 400),
]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("fields", "status"), BAD_FORMS, ids=lambda given: f"{given!s:.60}")
def test_what_the_engine_cannot_do_is_said_before_the_request_queues(
    served: Served, fields: dict[str, Any], status: int
) -> None:
    with served.openai() as client:
        before = served.run(lambda gateway: gateway.ask("GET", "/admin/state"))["arrivals"]
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(model="tiny", prompt="x", max_tokens=3, extra_body=fields)
        assert error.value.status_code == status
        assert served.run(lambda gateway: gateway.ask("GET", "/admin/state"))["arrivals"] == before
