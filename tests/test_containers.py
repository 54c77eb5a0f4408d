"""Images and compose without a container engine: schemas, a linter, and the Dockerfile's own
commands run in a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support import assert_flags_exist, missing

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def check(document: Any, name: str) -> None:
    """By the schema that check-jsonschema ships. Raises jsonschema.ValidationError."""
    text = (
        resources.files("check_jsonschema")
        .joinpath("builtin_schemas", "vendor", f"{name}.json")
        .read_text()
    )
    schema = json.loads(text)
    jsonschema.validators.validator_for(schema)(schema).validate(document)


# compose

GATEWAYS = ("gateway", "gateway-gpu", "gateway-demo")


def test_compose_is_valid_by_the_compose_specification() -> None:
    compose = read(DOCKER / "compose.yaml")
    check(compose, "compose-spec")
    compose["services"]["gateway"]["port"] = compose["services"]["gateway"].pop("ports")
    with pytest.raises(jsonschema.ValidationError):
        check(compose, "compose-spec")


def test_the_scheduled_audit_is_a_workflow_that_asks_by_the_makefiles_command() -> None:
    """Its action is pinned by commit: a tag can be moved."""
    workflow = read(ROOT / ".github/workflows/audit.yml")
    check(workflow, "github-workflows")
    (job,) = workflow["jobs"].values()
    checkout, audit = job["steps"]
    assert re.fullmatch(r"actions/checkout@[0-9a-f]{40}", checkout["uses"])
    assert audit["run"] == "make audit"
    assert re.search(r"^audit:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_pull_request_runs_the_script_that_every_landing_runs() -> None:
    workflow = read(ROOT / ".github/workflows/check.yml")
    check(workflow, "github-workflows")
    assert "pull_request" in workflow["on"]
    (job,) = workflow["jobs"].values()
    *actions, script = job["steps"]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", each["uses"]) for each in actions)
    assert script["run"] == "bash .ci/run"
    assert {"make check", "make test"} <= set((ROOT / ".ci/run").read_text().splitlines())


def test_a_tag_releases_a_wheel_and_an_image_by_its_digest_after_the_checks() -> None:
    workflow = read(ROOT / ".github/workflows/release.yml")
    check(workflow, "github-workflows")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["check"] == {"uses": "./.github/workflows/check.yml"}
    assert "workflow_call" in read(ROOT / ".github/workflows/check.yml")["on"]
    assert jobs["release"]["needs"] == "check"
    actions = [each["uses"] for each in jobs["release"]["steps"] if "uses" in each]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", each) for each in actions)
    script = "\n".join(each.get("run", "") for each in jobs["release"]["steps"])
    assert re.search(r"--file (\S+) --target (\w+)", script).groups() == (  # type: ignore[union-attr]
        "docker/Dockerfile",
        "cuda",
    )
    assert {"--sbom=true", "--provenance=mode=max", "--metadata-file"} <= set(script.split())
    assert "${{" not in script, "what a tag is called is no part of a script"


def test_compose_says_only_flags_that_the_command_has() -> None:
    for name in (*GATEWAYS, "load", "load-demo"):
        command = read(DOCKER / "compose.yaml")["services"][name]["command"]
        assert_flags_exist(command[0], command[1:])


def test_compose_passes_the_hugging_face_token_and_names_the_capability_for_numa() -> None:
    services = read(DOCKER / "compose.yaml")["services"]
    for name in GATEWAYS:
        assert services[name]["environment"]["HF_TOKEN"] == "${HF_TOKEN:-}"
        assert "cap_add" not in services[name]  # a note only: one NUMA node needs no capability
    (note,) = re.findall(
        r"^ +# (cap_add: \[SYS_NICE\])  # (.*NUMA.*)$",
        (DOCKER / "compose.yaml").read_text(),
        re.MULTILINE,
    )
    written = (DOCKER / "compose.yaml").read_text().replace(f"# {note[0]}", note[0])
    for name in GATEWAYS:
        assert yaml.safe_load(written)["services"][name]["cap_add"] == ["SYS_NICE"]
    check(yaml.safe_load(written), "compose-spec")


def test_compose_leaves_no_right_that_nobody_needs() -> None:
    """A read-only root with places for all that is written, no forced lengths, and no login with
    a known password.
    """
    services = read(DOCKER / "compose.yaml")["services"]
    for name in GATEWAYS:
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "--allow-forced-lengths" not in service["command"]
        written = {mount.split(":")[0]: mount.split(":")[1] for mount in service["tmpfs"]}
        assert set(written) == {"/tmp", "/home/kendall", "/home/kendall/.cache"}
        assert all("exec" in options.split(",") for options in written.values()), (
            "compiled kernels are loaded from there"
        )
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    assert [name for name, service in services.items() if not service.get("read_only")] == [
        "grafana"
    ], "SECURITY.md and docker/README.md name it"
    grafana = services["grafana"]["environment"]
    assert (
        grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"]
        == grafana["GF_AUTH_DISABLE_LOGIN_FORM"]
        == "true"
    )
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"


@pytest.mark.parametrize("flavour", ["cpu", "emulated"])
def test_one_service_builds_a_tag(flavour: str) -> None:
    """Some image stores refuse a tag that is built twice at the same time."""
    text = (DOCKER / "compose.yaml").read_text().replace("${KENDALL_FLAVOUR:-cpu}", flavour)
    services = yaml.safe_load(text)["services"].values()
    built = [service["image"] for service in services if "build" in service]
    assert sorted(built) == sorted({f"kendall:{flavour}", "kendall:cuda"})
    assert {service["image"] for service in services if "kendall:" in service["image"]} == {*built}


def test_what_stops_a_container_waits_longer_than_the_drain() -> None:
    from kendall.server.settings import Settings

    grace = read(DOCKER / "compose.yaml")["services"]["gateway"]["stop_grace_period"]
    assert (
        int(grace.removesuffix("s"))
        > Settings(model="m", served_model_name="m").shutdown_timeout + 10
    )


# the image


DIGEST = r"[a-z0-9/.:-]+@sha256:[0-9a-f]{64}"


def test_the_image_that_ours_begin_from_is_named_by_its_digest() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    versions = dict(re.findall(r"^ARG (\w+)=(.+)$", text, re.MULTILINE))
    own = set(bases())
    others = {base for base in bases().values() if base not in own}
    assert others
    for base in others:
        assert re.fullmatch(DIGEST, re.sub(r"\$\{(\w+)\}", lambda m: versions[m[1]], base)), base


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which(
        "hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if hadolint is None:
        missing("hadolint", "it is in requirements/dev.txt")
    result = subprocess.run(
        [hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def instructions() -> list[tuple[str, str, str]]:
    """(stage, instruction, rest), continued lines joined, comments left out."""
    text = re.sub(r"(?m)^#.*\n", "", (DOCKER / "Dockerfile").read_text()).replace("\\\n", " ")
    stage, found = "", []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        found.append((stage, name, " ".join(rest.split())))
    return found


def bases() -> dict[str, str]:
    return {stage: rest.split(" AS ")[0] for stage, name, rest in instructions() if name == "FROM"}


@pytest.mark.parametrize("target", ["cpu", "cuda", "emulated"])
def test_a_target_runs_without_rights_has_a_check_and_its_own_flavour(target: str) -> None:
    lineage = [target]
    while (base := bases()[lineage[-1]]) in bases():
        lineage.append(base)
    mine = [(name, rest) for stage, name, rest in instructions() if stage in lineage]
    users = [rest for stage, name, rest in instructions() if stage == target and name == "USER"]
    assert users == ["10001"], "a number: Kubernetes' runAsNonRoot cannot know a name"
    assert any("useradd" in rest and "--uid 10001" in rest for name, rest in mine if name == "RUN")
    assert any(name == "HEALTHCHECK" for name, _ in mine)
    assert ("COPY", f"--from=built-{target} /opt/kendall /opt/kendall") in mine
    built = [
        rest for stage, name, rest in instructions() if stage == f"built-{target}" and name == "RUN"
    ]
    assert len(built) == 1
    assert f"--flavour {target} " in built[0]
    assert "sources" not in lineage, "the sources and the build's tools stay behind"


def test_the_last_stage_is_the_cpu_image() -> None:
    assert instructions()[-1][0] == "cpu"


@pytest.mark.slow
def test_the_dockerfiles_own_commands_make_an_environment_that_serves(tmp_path: Path) -> None:
    """The target `emulated`, step by step in a folder: what COPY brings, what RUN does, what CMD
    starts, what HEALTHCHECK asks.
    """
    source, made = tmp_path / "src", tmp_path / "opt/kendall"
    source.mkdir()
    for _, name, rest in (step for step in instructions() if step[0] == "sources"):
        if name == "COPY":
            *sources, where = rest.split()
            for what in sources:
                copy(ROOT / what, source / where / what if where == "./" else source / where)
    (run,) = [
        rest for stage, name, rest in instructions() if stage == "built-emulated" and name == "RUN"
    ]
    run = re.sub(r"--mount=\S+ ", "", run).replace("/opt/kendall", str(made))
    # python and uv, as the stage before has them
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KENDALL_", "VIRTUAL_ENV", "PYTHON"))
    }
    subprocess.run(
        ["sh", "-c", run], cwd=source, env=environment | {"PATH": path}, check=True, timeout=300
    )
    assert not list(made.glob("lib/python*/site-packages/pip")), (
        "nothing is installed into a container that runs"
    )
    source.rename(tmp_path / "gone")  # a copy was installed, no link
    starts_and_is_healthy(made / "bin", tmp_path)


def copy(what: Path, where: Path) -> None:
    if what.is_dir():
        shutil.copytree(what, where, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(what, where)


def starts_and_is_healthy(binaries: Path, home: Path) -> None:
    steps = {name: rest for stage, name, rest in instructions() if stage == "runtime"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [*json.loads(steps["ENTRYPOINT"]), *json.loads(steps["CMD"])]
    image = json.loads(steps["HEALTHCHECK"].split("CMD ")[1])
    test, *compose = read(DOCKER / "compose.yaml")["services"]["gateway"]["healthcheck"]["test"]
    assert test == "CMD"
    assert "8080" in command
    assert "8080/health" in image[-1]
    assert "8080/ready" in compose[-1]
    command = [port if part == "8080" else part for part in command]
    checks = [[part.replace("8080", port) for part in each] for each in (image, compose)]
    environment = {
        "PATH": f"{binaries}:/usr/bin:/bin",
        "HOME": str(home),
        "KENDALL_API_KEY": "a-key-of-this-test-alone",
    }
    gateway = subprocess.Popen(
        [str(binaries / command[0]), *command[1:]], cwd=home, env=environment
    )
    try:
        for check in checks:
            answers = []
            while len(answers) < 120 and 0 not in answers:
                assert gateway.poll() is None, "the gateway ended"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    gateway.wait(0.5)
                asked = subprocess.run(
                    [str(binaries / check[0]), *check[1:]],
                    env=environment,
                    capture_output=True,
                    check=False,
                )
                answers.append(asked.returncode)
            assert answers[-1] == 0
    finally:
        gateway.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            gateway.wait(20)
        gateway.kill()
    assert gateway.wait() == -15 or gateway.returncode == 0


# what goes with a release


def test_the_citation_is_valid() -> None:
    check(json.loads(json.dumps(read(ROOT / "CITATION.cff"), default=str)), "citation-file-format")
