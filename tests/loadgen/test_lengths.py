"""How long answers are: natural where no law is given, else as drawn, in the way that the server
accepts.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import kendall.loadgen.sending.plan
from kendall.loadgen.commands.load_cli import app
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.endpoint import UNKNOWN, LoadEndpoint, with_lengths
from kendall.loadgen.sending.client.target import FORCED_FIELD, LoadError, Target
from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import plan_load
from kendall.loadgen.sending.run import LoadResult
from kendall.loadgen.sweep.gateway import GivenGateway
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.rig import Rig
from kendall.loadgen.sweep.status import Status
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable
from kendall.queueing.measurement.record import read_run
from tests.loadgen.fake_server import serving
from tests.serving import started

LAW = "k1=0.1e-3,k2=0.5e-3,k3=10e-6,k4=0.2e-3"
LENGTHS = "uniform:low=2,high=9"
TARGET = Target(base_url="http://x", model="m")


def sent(**options: Any) -> tuple[list[dict[str, Any]], LoadResult]:
    """The bodies that a server other than Kendall got, and what was recorded."""

    async def main() -> tuple[list[dict[str, Any]], LoadResult]:
        async with serving() as server:
            given = {"request_rate": 500.0, "num_prompts": 20} if "timetable" not in options else {}
            plan, _ = await plan_load(
                LoadOptions(base_url=server.url, **given | options)
            ).for_server()
            return server.bodies, await plan.run()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoint", "lengths", "note"),
    [
        (LoadEndpoint(("m",), True, frozenset({FORCED_FIELD, "ignore_eos"})), "forced", None),
        (
            LoadEndpoint(("m",), True, frozenset({"ignore_eos"})),
            "ignore_eos",
            "without --allow-forced-lengths",
        ),
        (
            LoadEndpoint(("m",), False, None),
            "ignore_eos",
            "does not say that it is a Kendall gateway",
        ),
        (UNKNOWN, "ignore_eos", "does not say that it is a Kendall gateway"),
    ],
)
def test_what_the_server_accepts_decides(
    endpoint: LoadEndpoint, lengths: str, note: str | None
) -> None:
    target, told = with_lengths(TARGET, endpoint)
    assert target.lengths == lengths
    assert told is None if note is None else note in str(told)


def test_a_server_that_accepts_nothing_is_one_line() -> None:
    with pytest.raises(LoadError, match="expected --natural-lengths"):
        with_lengths(TARGET, LoadEndpoint(("m",), True, frozenset()))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("options", "limit"), [({}, 128), ({"max_tokens": 7}, 7), ({"natural_lengths": True}, 128)]
)
def test_without_a_law_only_max_tokens_is_sent(options: dict[str, Any], limit: int) -> None:
    bodies, result = sent(**options)
    assert {body["max_tokens"] for body in bodies} == {limit}
    assert not any({"ignore_eos", FORCED_FIELD} & set(body) for body in bodies)
    configuration = result.header.configuration
    assert (
        configuration["lengths"],
        configuration["max_tokens"],
        configuration.get("output_tokens"),
    ) == ("natural", limit, None)


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}])
def test_a_law_at_a_server_other_than_kendall_is_kept_by_each_requests_own_limit(
    more: dict[str, Any],
) -> None:
    bodies, result = sent(output_tokens=LENGTHS, **more)
    drawn = plan_load(
        LoadOptions(base_url="http://x", request_rate=500.0, num_prompts=20, output_tokens=LENGTHS)
    ).timetable.output_tokens
    assert sorted(body["max_tokens"] for body in bodies) == sorted(drawn.tolist())
    assert len(set(drawn.tolist())) > 4
    assert all(body["ignore_eos"] is True and FORCED_FIELD not in body for body in bodies)
    assert [record.output_tokens for record in result.records] == drawn.tolist()
    assert (result.header.configuration["lengths"], result.header.configuration["max_tokens"]) == (
        "ignore_eos",
        None,
    )
    assert ("lengths_note" in result.header.configuration) is not more.get(
        "ignore_eos", False
    )  # what was asked for needs no note


def test_a_limit_cuts_recorded_lengths_too(tmp_path: Path) -> None:
    plan = plan_load(
        LoadOptions(base_url="http://x", request_rate=500.0, num_prompts=20, output_tokens=LENGTHS)
    )
    save_timetable(tmp_path / "t", plan.timetable, {"seed": 0, **plan.header})
    bodies, _ = sent(timetable=tmp_path / "t", max_tokens=4)
    assert sorted(body["max_tokens"] for body in bodies) == sorted(
        min(n, 4) for n in plan.timetable.output_tokens.tolist()
    )
    assert {body["ignore_eos"] for body in bodies} == {True}


def test_a_saved_timetable_is_sent_with_natural_lengths_where_it_was_drawn_so(
    tmp_path: Path,
) -> None:
    for natural, options in ((True, {}), (False, {"output_tokens": LENGTHS})):
        plan = plan_load(
            LoadOptions(base_url="http://x", request_rate=500.0, num_prompts=5, **options)
        )  # type: ignore[arg-type]
        save_timetable(tmp_path / "t", plan.timetable, {"seed": 0, **plan.header})
        assert {"ignore_eos" in body for body in sent(timetable=tmp_path / "t")[0]} == {not natural}


def test_a_dataset_that_knows_its_answers_lengths_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 5}\n')
    bodies, _ = sent(dataset_name="jsonl", dataset_path=path)
    assert {(body["max_tokens"], body.get("ignore_eos")) for body in bodies} == {(5, True)}
    path.write_text('{"prompt": "hello"}\n')
    bodies, _ = sent(dataset_name="jsonl", dataset_path=path)
    assert {(body["max_tokens"], body.get("ignore_eos")) for body in bodies} == {(128, None)}


def test_a_prediction_needs_lengths_that_it_predicts() -> None:
    with pytest.raises(SpecError, match="expected --output-tokens"):
        plan_load(LoadOptions(base_url="http://x", request_rate=5.0, predictor="exact"))


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of two emulated gateways: as `serve` starts it, and with --allow-forced-lengths."""
    folder = tmp_path_factory.mktemp("gateways")
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        LAW,
        "--policy",
        "dynamic",
        "--prediction-interval",
        "0",
    ]
    plain = GatewayProcess(
        [*arguments, "--record-file", str(folder / "plain.jsonl")],
        free_port(0),
        folder / "plain.log",
    )
    forced = [*arguments, "--allow-forced-lengths", "--record-file", str(folder / "forced.jsonl")]
    lenient = GatewayProcess(forced, free_port(0), folder / "forced.log")
    with started(plain), started(lenient):
        yield plain.url, lenient.url


def test_the_command_of_the_empty_page_works(
    gateways: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed by the page without traffic, also for a gateway that was started without
    --allow-forced-lengths.
    """
    monkeypatch.chdir(tmp_path)
    for url in gateways:
        command = [
            "--base-url",
            url,
            "--request-rate",
            "500",
            "--num-prompts",
            "50",
            "--json",
        ]  # the same, in a shorter time
        result = CliRunner().invoke(app, command)
        assert json.loads(result.stdout)["outcomes"] == {"completed": 50}, result.output
        assert (
            read_run(Path(json.loads(result.stdout)["files"][0]))[0].configuration["lengths"]
            == "natural"
        )
        assert result.stderr == "" or "sent" in result.stderr


def test_a_law_is_met_by_kendall_with_and_without_the_sealed_field(
    gateways: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = {}
    for url, lengths in zip(gateways, ("ignore_eos", "forced"), strict=True):
        flags = (
            "--request-rate",
            "500",
            "--num-prompts",
            "30",
            "--output-tokens",
            LENGTHS,
            "--output",
            "run.jsonl",
        )
        result = CliRunner().invoke(app, ["--base-url", url, *flags])
        header, records = read_run(tmp_path / "run.jsonl")
        assert header.configuration["lengths"] == lengths, result.output
        assert (
            "runs without --allow-forced-lengths; each request carries ignore_eos" in result.stderr
        ) == (lengths == "ignore_eos")
        assert {record.outcome for record in records} == {"completed"}
        limits[lengths] = [record.max_output_tokens for record in records]
        drawn = plan_load(
            LoadOptions(base_url=url, request_rate=500.0, num_prompts=30, output_tokens=LENGTHS)
        ).timetable.output_tokens
        assert [record.output_tokens for record in records] == drawn.tolist()
    assert set(limits["forced"]) == {9}
    assert len(set(limits["ignore_eos"])) > 4


def test_a_model_that_the_gateway_does_not_serve_is_one_line(gateways: tuple[str, str]) -> None:
    result = CliRunner().invoke(
        app, ["--base-url", gateways[0], "--request-rate", "5", "--model", "nosuch"]
    )
    assert isinstance(result.exception, SpecError)  # status 2
    assert f"expected one that {gateways[0]} serves: tiny" in str(result.exception)


def test_a_sweep_of_a_given_gateway_asks_it_too(gateways: tuple[str, str]) -> None:
    async def target_at(url: str) -> tuple[str, str, str]:
        said = io.StringIO()
        plan = SweepPlan(base_url=url, loads=(0.5,))
        async with Status(said) as status:
            rig = Rig(plan, cast(Any, None), status, GivenGateway(url))
            await rig.start()
        await rig.gateway.stop()
        return rig.target.lengths, rig.target.model, said.getvalue()

    lengths, model, said = asyncio.run(target_at(gateways[0]))
    assert (lengths, model) == ("ignore_eos", "tiny")
    assert "--allow-forced-lengths" in said
    assert asyncio.run(target_at(gateways[1]))[0] == "forced"


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"ready_check_timeout": 0.0, "model": "m"}, False),
        ({"ready_check_timeout": 1.0, "model": "m"}, True),
        ({"model": "m"}, True),
        # only the server knows its model, and how the length of an answer is set
        ({"ready_check_timeout": 0.0}, True),
        ({"ready_check_timeout": 0.0, "model": "m", "output_tokens": LENGTHS}, True),
    ],
)
def test_a_server_of_which_everything_is_known_is_not_asked_where_the_check_is_off(
    options: dict[str, Any], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    async def look_at(_: Target, timeout: float | None) -> LoadEndpoint:
        asked.append(timeout)
        return LoadEndpoint(models=("served", "other"), length_fields=frozenset({FORCED_FIELD}))

    monkeypatch.setattr(kendall.loadgen.sending.plan, "look_at", look_at)
    plan = plan_load(LoadOptions(base_url="http://x", request_rate=5.0, num_prompts=2, **options))
    found, note = asyncio.run(plan.for_server())
    assert asked == ([options.get("ready_check_timeout")] if looks else [])
    assert (found.target.model, note) == (options.get("model", "served"), None)
