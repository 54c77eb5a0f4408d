"""`kendall check-policy` says of each contract whether it was checked; every command says when a
package's policy is not the one that is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from kendall.queueing.commands import check_policy_cli
from kendall.queueing.commands.check_policy_cli import QUICK
from kendall.queueing.commands.cli import app as predict_app
from kendall.queueing.simulation.policy_check import CONTRACT_NAMES, RUN
from tests.policies.outside import SHORTEST, installed, module, nothing_known

REST = SHORTEST[SHORTEST.index("        ordered =") :]
EVERY = [QUICK, *CONTRACT_NAMES, RUN]


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with nothing_known() as patch:
        patch.syspath_prepend(tmp_path)
        yield patch


def run(*arguments: str, app: typer.Typer = check_policy_cli.app) -> Result:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "200"})


def contracts(result: Result) -> dict[str, Any]:
    return {each["contract"]: each for each in json.loads(result.stdout)["contracts"]}


def test_a_policy_that_keeps_its_contracts(tmp_path: Path) -> None:
    path = module(tmp_path, SHORTEST)
    result = run("shortest", "--policy-module", path, "--states", "200")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:-1] == [f"ok       {name}" for name in EVERY]
    assert result.stdout.splitlines()[-1] == (
        "shortest keeps its contracts (200 states, one simulated run)"
    )


def test_what_a_policy_that_raises_was_not_asked_is_not_said_to_hold(tmp_path: Path) -> None:
    path = module(tmp_path, SHORTEST.replace(REST, "        raise KeyError('oops')\n"))
    result = run("shortest", "--policy-module", path, "--states", "200")
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "][:-1] == [
        "ok",
        "-",
        "FAILED",
        *["-"] * 8,
        "FAILED",  # nothing waits for ever: it raises in a later state too
        *["-"] * 2,
    ]
    assert lines[-1] == (
        "shortest breaks 2 of 14 contracts; 11 not checked, or not in every state (200 states, no "
        "simulated run)"
    )


def test_of_a_policy_that_sleeps_nothing_else_is_said(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(check_policy_cli, "LONGEST_DECISION", 0.05)
    sleeps = "        import time\n        time.sleep(0.2)\n"
    path = module(tmp_path, SHORTEST.replace(REST, sleeps + REST))
    arguments = ("shortest", "--policy-module", path, "--states", "200")
    result = run(*arguments)
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1] == (
        "shortest breaks 1 of 14 contracts; 13 not checked, or not in every state"
    )
    said = contracts(run(*arguments, "--json"))
    assert list(said) == EVERY
    assert said[QUICK]["fault"] == "a decision took over 0.05 s; expected far less"
    notes = {each["note"] for each in said.values() if each["fault"] is None}
    assert notes == {"not checked, as the policy is too slow"}


def test_a_package_with_the_name_of_a_built_in_policy_is_told_where_that_is_named(
    tmp_path: Path,
) -> None:
    text = SHORTEST.replace('"shortest"', '"dynamic"')
    module(tmp_path, text, "named_dynamic_of_a_command.py")
    installed(tmp_path, {"short-of-test": {"dynamic": "named_dynamic_of_a_command:Shortest"}})
    says = (
        "kendall: warning: got policy 'dynamic' of the package short-of-test, which is not used: "
        "dynamic is the built-in policy; expected another name in the package\n"
    )
    queue = ["--arrival-rate", "1", "--output-tokens", "deterministic:value=4"]
    queue += ["--latency", "k1=0.001,k2=0.02,k3=0.0002,k4=0.01"]

    def predicted(policy: str) -> Result:
        return run("predict", "--policy", policy, *queue, app=predict_app)

    for result in (run("dynamic", "--states", "20"), predicted("dynamic:order=fcfs")):
        assert (result.exit_code, result.stderr) == (0, says)
    assert predicted("single").stderr == ""


def test_a_policy_that_cannot_be_used_is_listed_with_its_fault(tmp_path: Path) -> None:
    module(tmp_path, "raise RuntimeError('no')", "broken_of_a_list.py")
    installed(tmp_path, {"short-of-test": {"shortest": "broken_of_a_list:Shortest"}})
    path = module(tmp_path, SHORTEST.replace('"shortest"', '"mine"'))
    fault = (
        "got policy 'shortest' of package short-of-test, broken_of_a_list:Shortest, which cannot "
        "be imported (RuntimeError: no); expected "
    )
    rows = json.loads(run("--policy-module", path, "--json").stdout)["policies"]
    listed = {row["name"]: row for row in rows}
    broken = listed["shortest"]
    assert broken.pop("fault").startswith(fault)
    assert broken == {
        "name": "shortest",
        "source": "short-of-test",
        "parameters": [],
        "orders": [],
    }
    mine = listed["mine"]
    assert (mine["source"], mine["orders"], mine["fault"]) == (path, [], None)
    assert [each["name"] for each in mine["parameters"]] == ["max_batch_size"]
    built_in = listed["capped"]
    assert (built_in["source"], built_in["fault"]) == ("built in", None)
    assert "fcfs" in [order["name"] for order in built_in["orders"]]
    lines = run("--policy-module", path).stdout.splitlines()
    assert any(line.startswith(fault) for line in lines)
    assert any(line.startswith("mine") and line.endswith(f"({path})") for line in lines)
