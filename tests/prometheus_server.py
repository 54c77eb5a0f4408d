"""A real Prometheus with the project's own configuration, scraping every second, and questions
to it.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from kendall.loadgen.gateway.gateway_process import free_port
from tests.support import require_program

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docker/prometheus.yml"
SCRAPE = "1s"  # in place of 5 s, of a test that lasts half a minute


class Prometheus:
    """Runs while entered; its data stays in `folder`."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._port = free_port(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(target)))

    def __enter__(self) -> Self:
        command = [
            require_program("prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            if self._is_ready():
                return self
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            assert self._process.returncode is None, (self._folder / "prometheus.log").read_text()
        raise TimeoutError("Prometheus did not become ready")

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._client.close()

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/-/ready").status_code == 200
        return False

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self._client.base_url)

    def over(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series of a range query, a value a second."""
        return self._ask("query_range", query=expr, start=start, end=end, step=SCRAPE)

    def at(self, expr: str, instant: float) -> list[dict[str, Any]]:
        """Series of an instant query, each with one value, in the form of `over`."""
        return [
            each | {"values": [each["value"]]}
            for each in self._ask("query", query=expr, time=instant)
        ]

    def scrapes_since(self, instant: float) -> int:
        """How often it has scraped the gateway since then, at most a minute ago; what it scraped
        can be asked for.
        """
        return sum(
            at > instant
            for series in self._ask("query", query="kendall_queue_length[1m]")
            for at, _ in series["values"]
        )

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get(path, **parameters)["result"]
        return result

    def _get(self, path: str, **parameters: Any) -> dict[str, Any]:
        response = self._client.get(f"/api/v1/{path}", params=parameters)
        if response.status_code != 200:
            raise ValueError(f"{parameters.get('query', path)}: {response.text}")
        data: dict[str, Any] = response.json()["data"]
        return data


def configuration(target: str) -> dict[str, Any]:
    """docker/prometheus.yml, but for the intervals and the place of the gateway."""
    settings: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    settings["global"] |= {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    settings["rule_files"] = [str(CONFIGURATION.parent / name) for name in settings["rule_files"]]
    static = [job for job in settings["scrape_configs"] if "static_configs" in job]
    for job in static:
        job["static_configs"] = [{"targets": [target]}]
    return settings | {"scrape_configs": static}
