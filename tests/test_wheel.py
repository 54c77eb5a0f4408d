"""The wheel installs one name, and what lies beside a user's script has no part in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from kendall.loadgen.gateway.gateway_process import free_port
from tests.eventually import eventually_here

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("server", "policies", "queueing", "loadgen")
OFFLINE = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", str(ROOT)]
    subprocess.run([*command, "-w", str(folder)], check=True, timeout=300)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which the wheel is installed; its dependencies are those of this Python."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", *OFFLINE, "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    return os.environ | {"PYTHONPATH": str(site)}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with modules of the rooms' names, none of which can be imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    return tmp_path


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"kendall"}
    for name in NAMES:
        product = {str(path.relative_to(ROOT)) for path in (ROOT / name).rglob("*.py")}
        assert {f"kendall/{path}" for path in product} <= set(names)


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "kendall/py.typed" in names, "without it a user's mypy sees Any"
    assert "kendall/api.py" in names


def test_modules_of_the_same_names_beside_a_script_break_nothing(
    environment: dict[str, str], beside: Path
) -> None:
    script = beside / "script.py"
    script.write_text(
        "import kendall\nprint(kendall.__file__, kendall.parse_policy('single').order)\n"
    )
    ran = subprocess.run(
        [sys.executable, script.name],
        cwd=beside,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.stderr == ""
    assert ran.stdout == f"{environment['PYTHONPATH']}/kendall/__init__.py fcfs\n"


def test_kendall_predict_works_there(environment: dict[str, str], beside: Path) -> None:
    asked = "predict --policy single --arrival-rate 0.5 --output-tokens deterministic:value=100"
    ran = subprocess.run(
        [sys.executable, "-m", "kendall", *asked.split(), "--latency", "a=0.01,c=0", "--json"],
        cwd=beside,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.stderr == ""
    assert json.loads(ran.stdout)["queueing_delay"]["mean"] == pytest.approx(0.5)


def test_kendall_serve_works_there(environment: dict[str, str], beside: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port(0))}"
    asked = f"serve tiny --engine emulated --port {port}"
    with (
        (beside / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "kendall", *asked.split()],
            cwd=beside,
            env=environment,
            stdout=log,
            stderr=log,
        ) as gateway,
    ):
        try:
            eventually_here(lambda: is_ready(url), 120)
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        finally:
            gateway.terminate()
    assert gateway.returncode == 0, (beside / "log").read_text()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False
