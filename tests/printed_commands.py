"""Run the shell lines that the documentation prints, as a reader would: in order, in an empty
folder, on a fresh account.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kendall.loadgen.gateway.gateway_process import free_port

ROOT = Path(__file__).resolve().parent.parent
PRINTED_URL = re.compile(r"(?P<host>localhost|127\.0\.0\.1):8080\b")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (?P<name>\w+\.py)\n")
SHELL = frozenset({"sh", "bash", "shell"})
# the emulated engine's law: a calibration takes seconds, and what a token costs shows in the
# longest answer on a busy machine too
QUICK = "k1=2e-05,k2=0.0002,k3=2e-06,k4=0.0004"
LIMIT = 300.0  # seconds a line may take

# Appended to a line, where the later of two options wins: a line is run with all its own arguments,
# and made short.
SHORTENED = {
    "load": ["--num-prompts", "16"],
    "load --request-rate": [
        "--num-prompts",
        "60",
    ],  # more than the live model needs before it predicts
    "load --duration": ["--duration", "3"],
    "sweep": ["--num-prompts", "6", "--tolerance", "1"],
    "calibrate": ["--repeats", "3", "--max-batch-size", "4", "--max-output-tokens", "64"],
    "simulate": ["--num-requests", "20000"],
}


@dataclass(frozen=True)
class Line:
    """One command of a fenced block."""

    page: str
    number: int  # in the page, from 1
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"


def shell_lines(page: Path) -> list[Line]:
    """The commands of every shell block of a page; a line that ends in a backslash takes the
    next one along. A Python block that begins with `# NAME.py` is written to that file.
    """
    text, found = page.read_text(), []
    for block in FENCE.finditer(text):
        if block["language"] == "python" and (file := MODULE.match(block["body"])):
            number = text[: block.start("body")].count("\n") + 1
            line = f"printf %s {shlex.quote(block['body'])} > {file['name']}"
            found.append(Line(page.name, number, line))
        if block["language"] not in SHELL:
            continue
        number = text[: block.start("body")].count("\n") + 1
        pending = ""
        for offset, raw in enumerate(block["body"].splitlines()):
            pending += raw.removesuffix("\\")
            if raw.endswith("\\"):
                continue
            if pending.strip() and not pending.lstrip().startswith("#"):
                name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
                found.append(Line(name, number + offset, pending.strip()))
            pending = ""
    return found


def pages() -> list[Path]:
    """Every page of the documentation that a person reads."""
    return sorted(
        page
        for page in [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("docker/*.md"),
            *ROOT.glob("requirements/*.md"),
        ]
    )


def words(text: str) -> list[str]:
    """The words of a line without its comment."""
    return shlex.split(text, comments=True)


@dataclass
class Reader:
    """Somebody who types line after line: a folder, an account without a cache, at most one
    gateway at a time.
    """

    folder: Path
    engine: str = "emulated"
    latency: str = QUICK
    _port: int = field(default_factory=lambda: free_port(0))
    _gateway: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> None:
        """Raises AssertionError with what the line printed, where it fails."""
        if _is_server(text):
            self._serve(text)
            return
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._here(_shortened(text))],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert result.returncode == 0, (
            f"exit status {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        )

    def _here(self, text: str) -> str:
        """With the port of this test in place of the printed one."""
        return PRINTED_URL.sub(lambda match: f"{match['host']}:{self._port}", text)

    def _environment(self) -> dict[str, str]:
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith("KENDALL_")
        }
        cache = self.folder / "home"
        cache.mkdir(exist_ok=True)
        places = [_strict_curl(cache / "bin"), Path(sys.executable).parent, os.environ["PATH"]]
        return ours | {
            "PATH": os.pathsep.join(str(place) for place in places),
            "PYTHONPATH": str(ROOT),
            "HOME": str(cache),
            "XDG_CACHE_HOME": str(cache / ".cache"),
            "MPLCONFIGDIR": str(cache / "matplotlib"),
            "KENDALL_PORT": str(self._port),
            "KENDALL_ENGINE": self.engine,
            **(
                {"KENDALL_SERVE_LATENCY": self.latency, "KENDALL_SWEEP_LATENCY": self.latency}
                if self.engine == "emulated"
                else {}
            ),
        }

    def _serve(self, text: str) -> None:
        self.stop()
        log = self.folder / "serve.log"
        with log.open("wb") as output:
            command = ["bash", "-c", f"exec {self._here(text)}"]
            self._gateway = subprocess.Popen(
                command, cwd=self.folder, env=self._environment(), stdout=output, stderr=output
            )
        scheme = "https" if "--ssl-certfile" in text else "http"
        deadline = time.perf_counter() + LIMIT
        while not _ready(f"{scheme}://127.0.0.1:{self._port}/ready"):
            status = self._gateway.poll()
            assert status is None, f"exit status {status}\n{log.read_text()[-3000:]}"
            assert time.perf_counter() < deadline, (
                f"not ready after {LIMIT:g} s\n{log.read_text()[-3000:]}"
            )
            time.sleep(0.1)

    def stop(self) -> None:
        """End the gateway, as Ctrl-C does. Raises AssertionError where it does not end well."""
        gateway, self._gateway = self._gateway, None
        if gateway is None:
            return
        gateway.send_signal(signal.SIGINT)
        try:
            gateway.wait(60)
        except subprocess.TimeoutExpired:
            gateway.kill()
            gateway.wait()
            raise AssertionError("the gateway did not end within 60 s of Ctrl-C") from None


@contextlib.contextmanager
def reader(folder: Path, **settings: str) -> Iterator[Reader]:
    """A reader, whose gateway ends with the test."""
    (folder / ".venv").symlink_to(sys.prefix)
    someone = Reader(folder, **settings)
    try:
        yield someone
    finally:
        someone.stop()


def _strict_curl(folder: Path) -> Path:
    """A folder with a `curl` that fails on 400 and above: curl itself ends with 0 there unless a
    flag asks for it.
    """
    real = shutil.which("curl")
    if real is not None and not folder.exists():
        folder.mkdir()
        (folder / "curl").write_text(f'#!/bin/sh\nexec {shlex.quote(real)} --fail-with-body "$@"\n')
        (folder / "curl").chmod(0o755)
    return folder


def _is_server(text: str) -> bool:
    return words(text)[:2] == ["kendall", "serve"] and not {"--show-config", "--help"} & set(
        words(text)
    )


def _shortened(text: str) -> str:
    parts = words(text)
    if not parts or parts[0] != "kendall" or len(parts) < 2 or "--help" in parts:
        return text
    names = [f"{parts[1]} {part}" for part in parts if part.startswith("--")]
    more = next((SHORTENED[name] for name in [*names, parts[1]] if name in SHORTENED), [])
    command, comment, rest = text.partition(" #")
    return f"{command.rstrip()} {shlex.join(more)}{comment}{rest}" if more else text


def _ready(url: str) -> bool:
    import ssl

    unchecked = ssl._create_unverified_context()  # a certificate that the page itself makes
    try:
        with urllib.request.urlopen(url, timeout=2, context=unchecked) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
