"""`kendall calibrate`: against a running gateway, or with an engine started for it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import typer
from rich.console import Console

from kendall.policies import SpecError
from kendall.queueing.commands.terminal import Column, Table, console, say, working
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.fit import Measured
from kendall.queueing.latency.identifiability import of_cells
from kendall.queueing.latency.profile import Profile, profile_path
from kendall.remote import (
    A_GATEWAY,
    REFUSED,
    SYSTEM,
    Trust,
    check_no_credentials,
    key_refusal,
    server_root,
    unanswered,
)
from kendall.server.calibration.calibration import CalibrationRequest, Calibrator
from kendall.server.engines.hugging_face import check_model
from kendall.server.gateway import Gateway
from kendall.server.operations.calibrate_server import (
    ForeignServer,
    key_refused,
    lists_foreign_models,
)
from kendall.server.operations.serving import serve
from kendall.server.settings import Settings

COLUMNS = (
    Column(heading="milliseconds", left=True),
    Column(heading="value"),
    Column(heading="95 % low"),
    Column(heading="high"),
)
MEASURING = "measuring the engine"
EXPECTED = f"{A_GATEWAY}, or of a server with OpenAI's API"
_ADDRESS = re.compile(
    r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d+(?:/.*)?"
)  # host and port without http://: neither a folder nor a name on the hub
OTHER_SCHEMES = (
    "ftp",
    "ws",
    "wss",
    "tcp",
    "unix",
    "file",
)  # of URLs that are neither a gateway's nor a model's


def calibrate(
    target: str,
    plan: dict[str, Any],
    output: Path | None,
    *,
    key: str | None = None,
    api_key: str | None = None,
    trust: Trust = SYSTEM,
    share: bool = False,
    json_output: bool,
) -> None:
    """Measure, save, and say what was found. `key`: for a gateway's /admin; `api_key`: for a server
    that is no gateway.
    """
    request = CalibrationRequest.model_validate(plan)
    check_no_credentials(target, "a URL")
    scheme, address, _ = target.partition("://")
    if (address and scheme in OTHER_SCHEMES) or (
        _ADDRESS.fullmatch(target) and not Path(target).exists()
    ):
        raise SpecError(f"got {target}; {A_GATEWAY}")
    if target.startswith(("http://", "https://")):
        server = ForeignServer(url=target, key=api_key, trust=trust, share=share)
        profile = _by_url(server, request, key)
    else:
        profile = _local(target, request)
    path, why_not = _place(profile, request, output)
    place: Path | str = "not saved" if path is not None else why_not
    try:
        if path is not None:
            profile.save(path)
            place = path
    finally:  # what was measured is shown in any case
        _tell(profile, request, place, json_output=json_output)


def _tell(
    profile: Profile, request: CalibrationRequest, place: Path | str, *, json_output: bool
) -> None:
    if not request.speed_only and profile.poor_fit is not None:
        sys.stderr.write(f"kendall: warning: {profile.poor_fit}\n")
    if profile.note is not None and not request.speed_only:
        sys.stderr.write(f"kendall: {profile.note}\n")
    if json_output:
        sys.stdout.write(profile.to_json() + "\n")
        return
    show(profile, place, console(), speed_only=request.speed_only)


def _place(
    profile: Profile, request: CalibrationRequest, output: Path | None
) -> tuple[Path | None, str]:
    """Where to save it; without --output or --name a profile in the cache is replaced only by a
    law measured on an engine.
    """
    if output is not None or request.name is not None:
        return output or profile_path(profile.name), ""
    if profile.engine == "emulated":
        return None, "not saved, because the engine is emulated; --output or --name saves it"
    if request.speed_only:
        return None, "not saved, because only the speed was measured; --output or --name saves it"
    return profile_path(profile.name), ""


def show(profile: Profile, place: Path | str, to: Console, *, speed_only: bool = False) -> None:
    """The law, its coefficients with their intervals, how well it fits; before it, the speed
    where only that was measured.
    """
    law = profile.law
    if speed_only:
        say(
            to,
            (
                f"speed     {law.speed:.3f}: batches take {law.speed:.3f} times as long as the "
                "law says (the law itself was not measured again)"
            ),
            hang=10,
        )
        law = law.at_speed(1.0)
    say(to, "law       " + law.rounded().replace(",", ", "), hang=10)
    if profile.intervals:
        to.print(Table(COLUMNS, [_coefficient(profile, name) for name in profile.intervals]))
    if profile.r2 is not None and profile.mape is not None:
        say(
            to,
            f"fit       R2 {profile.r2:.4f}, mean absolute error of the cells {profile.mape:.1%}",
            hang=10,
        )
    for doubt in () if speed_only else _doubts(profile):
        say(to, f"imprecise {doubt}", hang=10)
    say(to, f"profile   {place}", hang=10)


def _doubts(profile: Profile) -> tuple[str, ...]:
    """What the measurements could not tell apart."""
    if not profile.cells:
        return ()
    return of_cells(msgspec.convert(profile.cells, list[Measured]), profile.intervals).doubts


def _coefficient(profile: Profile, name: str) -> list[str]:
    return [
        name,
        *(
            f"{seconds * 1e3:.4f}"
            for seconds in (getattr(profile.law, name), *profile.intervals[name])
        ),
    ]


class _NoGatewayError(SpecError):
    """Something else answers there."""


def _by_url(server: ForeignServer, request: CalibrationRequest, key: str | None) -> Profile:
    """Through the gateway that runs there, or the API of another server."""
    answer = server.models()
    if lists_foreign_models(answer):
        with working(f"{MEASURING} through its API") as tell:
            return server.calibrated(request, tell)
    try:
        return _remote(server.url, request, key, server.trust)
    except _NoGatewayError:
        if (refused := key_refused(answer)) is not None:
            raise SpecError(refused) from None
        raise


def _remote(url: str, request: CalibrationRequest, key: str | None, trust: Trust) -> Profile:
    try:
        with working(f"{MEASURING} through its gateway"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            settings: dict[str, Any] = {
                "headers": headers,
                "timeout": 900,
                "verify": trust.verification(url),
                "trust_env": False,
            }
            response = httpx.post(
                server_root(url) + "/admin/calibrate", json=request.model_dump(), **settings
            )
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise SpecError(f"got {url}; {A_GATEWAY} ({error})") from None
    except httpx.HTTPError as error:
        raise CommandError(f"no answer from {url} ({unanswered(error, url)}); {EXPECTED}") from None
    try:
        answer = response.json()
    except ValueError:
        raise _NoGatewayError(f"got {url}, whose answer is not a gateway's; {EXPECTED}") from None
    if response.status_code != httpx.codes.OK:
        raise _refusal(url, response.status_code, answer)
    return Profile.from_dict(answer)


def _refusal(url: str, status: int, answer: Any) -> Exception:
    refused = CommandError if status >= httpx.codes.INTERNAL_SERVER_ERROR else SpecError
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or "message" not in error or status == httpx.codes.NOT_FOUND:
        other = _NoGatewayError if refused is SpecError else CommandError
        return other(f"got {url}, which answers {status} to /admin/calibrate; {EXPECTED}")
    if status in REFUSED:
        return refused(key_refusal(url, status, str(error["message"]), "--admin-key"))
    return refused(f"{url} answered {status}: {error['message']}")


class _Measurement:
    """One calibration of an engine that is started for it: what it found, or why it did not."""

    def __init__(self, request: CalibrationRequest, tell: Callable[[str], None]) -> None:
        self._request, self._tell = request, tell
        self._task: asyncio.Task[None] | None = None
        self.profile: Profile | None = None
        self.failure: BaseException | None = None

    def begin(self, gateway: Gateway) -> None:
        """The engine serves; the gateway is stopped when the measurement has ended."""
        self._task = asyncio.ensure_future(self._run(gateway))

    async def _run(self, gateway: Gateway) -> None:
        try:
            self._tell(MEASURING)
            calibrator = Calibrator(
                gateway,
                lambda done, total: self._tell(f"{MEASURING}: {done} of {total} measurements"),
            )
            self.profile = await calibrator.run(self._request)
        except Exception as error:  # noqa: BLE001 - handed to the caller of `_local`
            self.failure = error
        os.kill(os.getpid(), signal.SIGINT)


def _local(model: str, request: CalibrationRequest) -> Profile:
    """An engine of its own on a free port, stopped afterwards. Raises Exit where a signal ends
    it before the law is known.
    """
    signals: list[int] = []
    settings = Settings(
        model=model,
        served_model_name=model.rstrip("/").rsplit("/", 1)[-1],
        port=0,
        prediction_interval=0,
    )
    if importlib.util.find_spec("vllm") is not None or not model.strip():
        check_model(model, {})  # before anything is said of a start
    with working("the engine starts") as tell:
        measurement = _Measurement(request, tell)
        try:
            serve(settings, on_ready=measurement.begin, on_signal=signals.append)
        except KeyboardInterrupt:  # before the server took the signals
            signals.append(signal.SIGINT)
    if measurement.failure is not None:
        raise measurement.failure
    if measurement.profile is None:
        sys.stderr.write("kendall: interrupted before the law was known; nothing was saved\n")
        raise typer.Exit(128 + signals[0])
    return measurement.profile
