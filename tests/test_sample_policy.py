"""A policy of one's own, as a package that is installed: checked, predicted, served on the real
engine, without a change of Kendall.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.measurement.record import read_run
from tests.eventually import eventually
from tests.serving import started

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "tests" / "sample_policy"
LAW = "k1=0.0002,k2=0.002,k3=2e-5,k4=0.002"
BUILT_IN = ("single", "dynamic", "fixed", "capped", "elastic", "continuous")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which the package is installed; nothing is fetched."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*command, str(SAMPLE)], check=True, capture_output=True, timeout=120)
    path = os.pathsep.join(filter(None, (str(site), str(ROOT), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield dict(os.environ)


def kendall(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kendall", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.left_out
def test_it_keeps_the_contracts(installed: dict[str, str]) -> None:
    checked = kendall(installed, "check-policy", "shortest:max_batch_size=3,max_wait=2s", "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)
    assert found["policy"] == "shortest:max_batch_size=3,max_wait=2"
    assert found["passed"]
    assert len(found["contracts"]) == 14
    assert all(each["note"] is None for each in found["contracts"])


def test_a_policy_that_sleeps_is_found_out_at_once(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """In far less time than the other checks would take with it."""
    sample = (SAMPLE / "kendall_sample_policy.py").read_text(encoding="utf-8")
    first = "        server = state"
    sleepy = sample.replace('"shortest"', '"sleepy"').replace(
        first, f"        __import__('time').sleep(2.0)\n{first}"
    )
    (module := tmp_path / "sleepy.py").write_text(sleepy, encoding="utf-8")
    checked = kendall(installed, "check-policy", "sleepy", "--policy-module", str(module), "--json")
    assert checked.returncode == 3, checked.stderr
    first, *others = json.loads(checked.stdout)["contracts"]
    assert first["fault"] == "a decision took over 1 s; expected far less"
    assert {each["note"] for each in others} == {"not checked, as the policy is too slow"}


def test_it_is_listed_with_its_package(installed: dict[str, str]) -> None:
    listed = json.loads(kendall(installed, "check-policy", "--json").stdout)["policies"]
    assert [each["name"] for each in listed] == [*BUILT_IN, "shortest"]
    assert listed[-1]["source"] == "kendall-sample-policy"
    assert [each["name"] for each in listed[-1]["parameters"]] == ["max_batch_size", "max_wait"]


@pytest.mark.slow
def test_it_is_predicted_by_simulation(installed: dict[str, str]) -> None:
    given = ["--arrival-rate", "20", "--output-tokens", "uniform:low=8,high=24", "--latency", LAW]
    found = kendall(installed, "predict", "--policy", "shortest", *given, "--json")
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["method"] == "simulation"
    assert answer["policy"] == "shortest"
    assert answer["queueing_delay"]["mean"] > 0
    refused = kendall(installed, "predict", "--policy", "shortest", *given, "--method", "exact")
    assert refused.returncode == 2
    assert "expected auto or simulation" in refused.stderr


@pytest.mark.slow
def test_it_is_swept_and_compared(installed: dict[str, str], tmp_path: Path) -> None:
    """Beside a built-in policy, on the same requests; the report has both."""
    folder, page = str(tmp_path / "sweep"), tmp_path / "report.html"
    options = ["--loads", "0.3", "--num-prompts", "60", "--engine", "emulated", "--latency", LAW]
    swept = kendall(
        installed, "sweep", "--policies", "shortest", "dynamic", *options, "--output", folder
    )
    assert swept.returncode == 0, swept.stderr
    compared = kendall(installed, "compare", "--sweep", folder, "--html", str(page), "--json")
    assert compared.returncode == 0, compared.stderr
    assert "shortest" in compared.stdout
    assert "shortest" in page.read_text(encoding="utf-8")


def test_it_is_among_the_candidates(installed: dict[str, str]) -> None:
    given = ["--arrival-rate", "30", "--output-tokens", "uniform:low=8,high=24", "--latency", LAW]
    candidates = ["--candidates", "shortest", "--candidates", "dynamic"]
    found = kendall(installed, "optimize", "--target", "policy", *candidates, *given, "--json")
    assert found.returncode == 0, found.stderr
    assert {each["policy"] for each in json.loads(found.stdout)["curve"]} == {"shortest", "dynamic"}


def test_without_the_package_its_name_is_unknown() -> None:
    found = kendall(dict(os.environ) | {"PYTHONPATH": str(ROOT)}, "check-policy", "shortest")
    assert found.returncode == 2
    assert "got policy 'shortest'; expected one of single, dynamic," in found.stderr


@pytest.mark.slow  # its live prediction is simulated: minutes on a busy machine
@pytest.mark.engine
@pytest.mark.timeout(900)  # seconds: a busy machine needs minutes to bring an engine up
def test_it_is_served_and_switched_to_on_the_real_engine(
    installed: dict[str, str], tmp_path: Path
) -> None:
    assert "site" in installed["PYTHONPATH"]
    gateway = GatewayProcess(
        [
            *("tiny", "--allow-forced-lengths", "--policy", "shortest", "--latency", LAW),
            *("--record-file", str(tmp_path / "records.jsonl"), "--prediction-interval", "0.5"),
        ],
        free_port(0),
        tmp_path / "gateway.log",
    )
    with started(gateway) as runner:
        first, second, predictions = runner.run(served_under_two(gateway))
    for result in (first, second):
        assert {(r.outcome, r.finish_reason) for r in result.records} == {("completed", "stop")}
        assert [r.output_tokens for r in result.records] == LENGTHS
    _, records = read_run(tmp_path / "records.jsonl")
    assert {record.outcome for record in records} == {"completed"}
    by_policy = {record.policy for record in records}
    assert by_policy == {"shortest", "continuous", "shortest:max_batch_size=2"}
    assert len(records) == 2 * len(LENGTHS) + 1
    assert len({record.request_id for record in records}) == len(records)
    for policy, prediction in zip(
        ("shortest", "shortest:max_batch_size=2"), predictions, strict=True
    ):
        assert prediction["policy"] == policy
        assert prediction["method"] == "simulation"
        assert prediction["queueing_delay"]["mean"] is not None
    assert max(r.batch_size or 0 for r in records if r.policy == by_policy_of(2)) <= 2


TIMES = draw(
    5.0,
    60,  # more than the live model needs before it predicts
    5,
    parse_distribution("deterministic:value=16"),
    parse_distribution("uniform:low=2,high=24"),
)
LENGTHS = TIMES.output_tokens.tolist()


def by_policy_of(size: int) -> str:
    return f"shortest:max_batch_size={size}"


async def served_under_two(gateway: GatewayProcess) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The same load under the policy of the start, and after a switch away and to another."""
    target = Target(base_url=gateway.url, model="tiny", max_tokens=24)
    first = await run_load(target, TIMES, seed=5)
    before = await predicted(gateway, "shortest")
    await gateway.ask("PUT", "/admin/policy", {"policy": "continuous"})
    await gateway.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 4})
    state = await gateway.ask("PUT", "/admin/policy", {"policy": by_policy_of(2)})
    assert state["effective_max_batch_size"] == 2
    second = await run_load(target, TIMES, seed=5)
    return first, second, [before, await predicted(gateway, by_policy_of(2))]


async def predicted(gateway: GatewayProcess, policy: str) -> dict[str, Any]:
    async def look() -> Any:
        found = (await gateway.ask("GET", "/admin/prediction"))["prediction"]
        return found is not None and found["policy"] == policy and found

    return dict(await eventually(look, 240.0))
