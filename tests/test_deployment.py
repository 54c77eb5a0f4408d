"""What is deployed names only what is there: files, metrics, versions."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana.asked import filled
from tests.server.asgi import call, running
from tests.support import require_program, require_vllm
from tests.virtual_time import run_virtual

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"


def exposed() -> set[str]:
    """Every series of a running gateway's `/metrics`."""

    async def main() -> bytes:
        async with running() as (app, _):
            return (await call(app, "GET", "/metrics")).body

    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", run_virtual(main()).decode(), flags=re.MULTILINE)
    parts = ("_bucket", "_sum", "_count")
    return {
        name + part for name, kind in kinds for part in (parts if kind == "histogram" else ("",))
    }


SERIES = exposed()

YAML_FILES = sorted(
    [
        *DOCKER.rglob("*.y*ml"),
        *(ROOT / "grafana").rglob("*.y*ml"),
        ROOT / ".pre-commit-config.yaml",
        ROOT / "tests/rules_test.yml",
    ]
)
DASHBOARDS = sorted((ROOT / "grafana/dashboards").glob("*.json"))
RULES = yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = read_yaml(DOCKER / "compose.yaml")["services"]
    return services


def values(tree: Any, key: str) -> Iterator[Any]:
    """Every value that stands under `key`, however deep."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, child in children:
        if name == key:
            yield child
        yield from values(child, key)


def series_of(expression: str) -> set[str]:
    """The series that a query names: no recorded rule (level:metric:operation), no label."""
    return {
        name
        for name in re.findall(r"[a-zA-Z_:][\w:]*", expression)
        if name.startswith(("kendall_", "process_"))
    }


def recorded_of(expression: str) -> set[str]:
    """The recorded rules that it names."""
    return {name for name in re.findall(r"[a-zA-Z_:][\w:]*", expression) if ":kendall_" in name}


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_is_read(path: Path) -> None:
    assert read_yaml(path)


@pytest.mark.parametrize("service", sorted(compose()))
def test_compose_mounts_and_builds_what_exists(service: str) -> None:
    settings = compose()[service]
    for mount in settings.get("volumes", []):
        source = mount.split(":")[0]
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
        else:
            assert source in read_yaml(DOCKER / "compose.yaml")["volumes"]
    if "build" in settings:
        context = DOCKER / settings["build"]["context"]
        assert (context / settings["build"]["dockerfile"]).is_file()
    elif settings["image"] != compose()["gateway"]["image"]:
        assert re.fullmatch(r"[\w/.-]+:v?\d+(\.\d+)+@sha256:[0-9a-f]{64}", settings["image"])


def test_prometheus_scrapes_the_gateway_of_compose() -> None:
    """Every five seconds, at its own name and port; Grafana asks Prometheus at its."""
    settings = read_yaml(DOCKER / "prometheus.yml")
    assert settings["global"]["scrape_interval"] == "5s"
    target = settings["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == ["gateway:8080"]
    assert compose()["gateway"]["command"][2:6] == ["--host", "0.0.0.0", "--port", "8080"]
    assert all((DOCKER / name).is_file() for name in settings["rule_files"])
    source = read_yaml(ROOT / "grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose()


def test_grafana_finds_its_dashboards() -> None:
    provider = read_yaml(ROOT / "grafana/provisioning/dashboards/kendall.yaml")["providers"][0]
    folder = provider["options"]["path"]
    assert f"../grafana/dashboards:{folder}:ro" in compose()["grafana"]["volumes"]
    home = compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder)
    assert Path(home).name in {path.name for path in DASHBOARDS}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_asks_only_for_metrics_that_exist(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    expressions = [*values(dashboard, "expr"), *values(dashboard, "definition")]
    asked = set().union(*map(series_of, expressions))
    assert len(asked) > 10
    assert asked <= SERIES
    recorded = {rule["record"] for rule in RULES[0]["rules"]}
    assert set().union(*map(recorded_of, expressions)) <= recorded


def test_a_dashboard_asks_only_for_metrics_that_vllm_has() -> None:
    """By vLLM's own source; the test with a real Prometheus sees them filled."""
    require_vllm()
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    named = set(re.findall(r'name="(vllm:\w+)"', source))
    asked = set(re.findall(r"vllm:\w+", "".join(path.read_text() for path in DASHBOARDS)))
    assert len(asked) > 8
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= named | {
        f"{name}_total" for name in named
    }


def test_the_rules_record_only_from_metrics_that_exist() -> None:
    rules = RULES[0]["rules"]
    recorded = {rule["record"] for rule in rules}
    for rule in rules:
        assert series_of(rule["expr"]) <= SERIES
        assert recorded_of(rule["expr"]) <= recorded


def test_every_alarm_asks_for_metrics_that_exist_and_has_its_line_in_the_runbook() -> None:
    alarms = RULES[1]["rules"]
    headings = {
        f"#{line[3:].lower()}"
        for line in (ROOT / "docs/how-to/alarms.md").read_text().splitlines()
        if line.startswith("## ")
    }
    for alarm in alarms:
        assert series_of(alarm["expr"]) <= SERIES, alarm["alert"]
        assert set(alarm["annotations"]) == {"summary", "description", "runbook_url"}
        assert 80 < len(alarm["annotations"]["description"]) < 400, (
            "what it means and what to do first"
        )
        page, anchor = alarm["annotations"]["runbook_url"].split("#")
        assert (ROOT / page).is_file()
        assert f"#{anchor}" in headings
    fired = read_yaml(ROOT / "tests/rules_test.yml")["tests"][1]["promql_expr_test"][0][
        "exp_samples"
    ]
    assert {alarm["alert"] for alarm in alarms} == {
        re.findall(r'alertname="(\w+)"', sample["labels"])[0] for sample in fired
    }


def test_promtool_accepts_the_rules_and_they_compute_what_they_say() -> None:
    promtool = require_program("promtool")
    for command in (
        ["check", "config", "docker/prometheus.yml"],
        ["check", "rules", "docker/rules.yml"],
        ["test", "rules", "tests/rules_test.yml"],
    ):
        result = subprocess.run(
            [promtool, *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_every_query_of_the_dashboards(tmp_path: Path) -> None:
    """As the expressions of recording rules, Grafana's variables filled in."""
    promtool = require_program("promtool")
    expressions = [
        expr for path in DASHBOARDS for expr in values(json.loads(path.read_text()), "expr")
    ]
    complete = [filled(expr, window="20s", shown="900s") for expr in expressions]
    assert not [expr for expr in complete if "$" in expr]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(complete)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    result = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def copied() -> set[str]:
    """What the Dockerfile copies from the source tree."""
    lines = re.findall(
        r"^COPY (?!--from)(.+)$", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    return {source for line in lines for source in line.split()[:-1]}


def test_the_dockerfile_copies_what_exists_and_what_the_context_holds() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignore, f"{source} is kept out of the build context"


def test_the_dockerfile_copies_all_that_a_wheel_is_made_of() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *(path.name for path in (ROOT / "kendall").iterdir() if path.is_symlink()),
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert needed | {"pyproject.toml", "requirements", "tools/setup_env.py"} == copied()


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text()
    return dict(re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("flavour", ["cpu.txt", "cuda.txt", "emulated.txt"])
def test_a_flavour_and_the_tools_of_development_pin_the_same_versions(flavour: str) -> None:
    """They are installed together, in one environment."""
    ours, tools = pins(flavour), pins("dev.txt")
    assert {name: ours[name] for name in ours.keys() & tools} == {
        name: tools[name] for name in ours.keys() & tools
    }


@pytest.mark.parametrize("lock", ["cpu.txt", "cuda.txt", "emulated.txt", "dev.txt"])
def test_every_package_has_hashes_but_the_build_of_torch_that_pypi_lacks(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    hashed = re.findall(r"^(\S+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(pins(lock)) > 50
    assert set(pins(lock)) - set(hashed) == ({"torch"} if lock == "cpu.txt" else set())


def test_no_file_names_a_package_index_or_a_folder_of_wheels() -> None:
    """Locks and set-up take them from the configuration of whoever installs."""
    named = re.compile(
        r"^\s*(--)?(extra-)?(index-url|find-links)\b|https?://\S*(simple|whl)\b", re.MULTILINE
    )
    files = [
        *(ROOT / "requirements").glob("*.[it][nx]*"),
        *(ROOT / "tools").glob("*.*"),
        DOCKER / "Dockerfile",
        ROOT / "Makefile",
    ]
    assert [file.name for file in files if named.search(file.read_text())] == []
