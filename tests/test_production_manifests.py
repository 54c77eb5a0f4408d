"""What is deployed to serve users pads no batch, and is given the time that a start may take.

A padded batch decodes every member until its longest one ends: an engine that could take the next
request waits. `dynamic` is there to watch it happen, in a profile of compose of its own.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kendall.policies import parse_policy
from kendall.policies.core import Policy
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.test_containers import instructions
from tests.test_kubernetes import CHOICES, FOLDER, OVERLAYS, built, combined

DOCKER = FOLDER.parent
DEMO = "demo"  # the profile of compose


def compose() -> dict[str, dict[str, Any]]:
    """Its services, with the defaults of their variables."""
    text = (DOCKER / "compose.yaml").read_text()
    services: dict[str, dict[str, Any]] = yaml.safe_load(
        re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    )["services"]
    return services


def option(flag: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Its value on the command line, as one word or two, or in a variable."""
    words = [
        part
        for word in arguments
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    if flag in words:
        return words[words.index(flag) + 1]
    name = flag.removeprefix("--").replace("-", "_").upper()
    return environment.get(f"KENDALL_SERVE_{name}") or environment.get(f"KENDALL_{name}")


def policy_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Policy:
    """That a command `serve` begins with."""
    return parse_policy(option("--policy", arguments, environment) or Settings.policy)


Command = tuple[str, list[str], dict[str, str]]  # where, `serve ...`, its environment


def of_compose() -> Iterator[Command]:
    for name, service in compose().items():
        if service.get("command", [""])[0] == "serve" and DEMO not in service.get("profiles", []):
            yield f"compose {name}", service["command"], service.get("environment", {})


def of_images() -> Iterator[Command]:
    steps = instructions()
    for stage, name, rest in steps:
        if name == "CMD":
            entries = [text for at, kind, text in steps if (at, kind) == (stage, "ENV")]
            environment = dict(
                word.split("=", 1) for text in entries for word in shlex.split(text) if "=" in word
            )
            yield f"Dockerfile {stage}", json.loads(rest), environment


def of_pods(where: str, documents: Sequence[dict[str, Any]]) -> Iterator[Command]:
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", []):
            known = {each["name"]: each.get("value", "") for each in container.get("env", [])}
            yield where, container["args"], known


def padded(commands: Iterator[Command]) -> dict[str, bool]:
    return {where: policy_of(words, known).padded for where, words, known in commands}


def test_no_service_of_compose_and_no_image_pads() -> None:
    found = padded(itertools.chain(of_compose(), of_images()))
    assert found == {
        "compose gateway": False,
        "compose gateway-gpu": False,
        "Dockerfile runtime": False,
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_overlay_pads(overlay: str) -> None:
    assert padded(of_pods(overlay, built(FOLDER / overlay))) == {overlay: False}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_overlay_pads_with_all_components_that_it_lacks(overlay: str, tmp_path: Path) -> None:
    most = max((parts for name, parts in CHOICES if name == overlay), key=len)
    assert padded(of_pods(overlay, combined(overlay, most, tmp_path))) == {overlay: False}


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["serve", "tiny", "--policy=dynamic"], {}),
        (["serve", "tiny", "--policy", "capped:max_batch_size=8"], {}),
        (["serve", "tiny"], {"KENDALL_POLICY": "fixed:batch_size=4"}),
        (["serve", "tiny"], {"KENDALL_SERVE_POLICY": "dynamic"}),
    ],
)
def test_a_padded_policy_is_found_where_a_manifest_can_say_it(
    arguments: list[str], environment: dict[str, str]
) -> None:
    assert policy_of(arguments, environment).padded


def test_the_demo_profile_serves_dynamic_under_a_load_of_its_own() -> None:
    services = {
        name: each["command"]
        for name, each in compose().items()
        if DEMO in each.get("profiles", [])
    }
    assert {name: words[0] for name, words in services.items()} == {
        "gateway-demo": "serve",
        "load-demo": "load",
    }
    assert option("--policy", services["gateway-demo"], {}) == "dynamic"
    assert option("--base-url", services["load-demo"], {}) == "http://gateway-demo:8080"
    assert "gateway-demo" in (DOCKER / "prometheus.yml").read_text()


def start_timeout(arguments: Sequence[str]) -> float:
    return float(option("--start-timeout", arguments, {}) or SupervisionSettings.start_timeout)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_given_as_long_to_start_as_the_gateway_gives_its_engine(overlay: str) -> None:
    """/health is 200 while the engine starts: only a gateway that gives up is started again. A
    rollout is not called failed before that either.
    """
    (deployment,) = (each for each in built(FOLDER / overlay) if each["kind"] == "Deployment")
    (gateway,) = deployment["spec"]["template"]["spec"]["containers"]
    longest = start_timeout(gateway["args"])
    probe = gateway["startupProbe"]
    assert probe["httpGet"]["path"] == "/health"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= longest
    assert deployment["spec"]["progressDeadlineSeconds"] > longest


def test_a_gateway_of_compose_is_not_called_unhealthy_before_a_start_may_take() -> None:
    """A service that waits for a healthy gateway would give up with it."""
    for name in ("gateway", "gateway-gpu", "gateway-demo"):
        check = compose()[name]["healthcheck"]
        assert "/ready" in check["test"][-1]
        period = float(check["start_period"].removesuffix("s"))
        assert period >= start_timeout(compose()[name]["command"])


def test_an_image_is_not_called_unhealthy_while_its_engine_is_calibrated_or_restarts() -> None:
    (check,) = (rest for _, name, rest in instructions() if name == "HEALTHCHECK")
    assert "/health" in check
    assert "/ready" not in check
