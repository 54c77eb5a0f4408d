"""SIGHUP: keys, the certificate, limits of overload, patience and the log level are read again.
What cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kendall.options import flag_of
from kendall.policies.text import counted
from kendall.server.runtime.pools import in_a_thread
from kendall.server.security.exposure import no_password, warn_of
from kendall.server.security.guard import Guard
from kendall.server.security.settings import TlsSettings

if TYPE_CHECKING:
    from kendall.server.gateway import Gateway
    from kendall.server.settings import Settings

log = logging.getLogger("kendall")
Read = Callable[[], "Settings"]
LONGEST = 10.0  # seconds that reading may take
_T = TypeVar("_T")


class Reloader:
    """Of one gateway and its application. `tls` gives the context of the listening socket, once
    there is one.
    """

    def __init__(
        self, gateway: Gateway, app: Any, read: Read, tls: Callable[[], ssl.SSLContext | None]
    ) -> None:
        self._gateway, self._app, self._read, self._tls = gateway, app, read, tls
        self._task: asyncio.Task[None] | None = None
        self._asked = False

    def ask(self) -> None:
        """Reload soon; once more where a signal comes during a reload, which may have read
        already what has changed since.
        """
        self._asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="reload")

    async def _run(self) -> None:
        while self._asked:
            self._asked = False
            await self.reload()

    async def reload(self) -> None:
        """Everything that can be in force now, or nothing where the configuration is wrong."""
        try:
            self._take(await in_a_thread(self._prepare, LONGEST))
        except TimeoutError:
            log.error(  # noqa: TRY400
                "SIGHUP: nothing was reloaded: reading the configuration took over %g s", LONGEST
            )
        except Exception as error:  # noqa: BLE001 - an operator's mistake must not end what serves
            log.error("SIGHUP: nothing was reloaded: %s", _first_line(error))  # noqa: TRY400

    def _prepare(self) -> Settings:
        """Read the settings, load the certificate into the context in force, look at the key
        files: each may wait for a disk.
        """
        after = self._read()
        context, files = self._tls(), after.security.tls
        if context is not None and files.certfile is not None:
            context.load_cert_chain(files.certfile, files.keyfile, password=no_password)
        now = in_force(self._gateway.settings, after)
        warn_of(now.host, now.security)
        return after

    def _take(self, after: Settings) -> None:
        gateway, before = self._gateway, self._gateway.settings
        if gateway.lifecycle.started:
            after = after.under(gateway.batcher.capabilities.model_names)
        after = dataclasses.replace(after, port=after.port or before.port)  # 0: any
        now = in_force(before, after)
        gateway.reload(now)
        self._app.guard = Guard(now.security)
        security = now.security
        certificate = "" if self._tls() is None else ", the certificate"
        log.warning(
            "SIGHUP: reloaded %s and %s%s, the limits on queue and rates, log level %s",
            counted(len(security.api_keys), "API key"),
            counted(len(security.admin_keys), "admin key"),
            certificate,
            now.logs.level,
        )
        if left := differences(now, after):
            log.warning(
                "SIGHUP: changed in the configuration, and in force only after a restart: %s",
                ", ".join(left),
            )
        if now.logs.level != before.logs.level:
            logging.getLogger().setLevel(now.logs.level.upper())


def in_force(before: _T, after: _T) -> _T:
    """`before`, a part of the settings or all, with the fields marked `RELOADED` taken from
    `after`.
    """
    taken: dict[str, Any] = {}
    for field in dataclasses.fields(before):  # type: ignore[arg-type]
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, TlsSettings) and not (old.certfile and new.certfile):
            continue  # a socket that listens neither begins nor ends TLS
        if dataclasses.is_dataclass(old):
            taken[field.name] = in_force(old, new)
        elif field.metadata.get("reloaded"):
            taken[field.name] = new
    return dataclasses.replace(before, **taken)  # type: ignore[type-var]


def differences(before: Any, after: Any) -> list[str]:
    """The options in which two settings differ."""
    found = []
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(old):
            found += differences(old, new)
        elif old != new and field.name == "engine_args":
            changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
            found += [f"the engine argument {name}" for name in sorted(changed)]
        elif old != new and not field.metadata.get("derived"):
            found.append(flag_of(field))
    return found


@contextmanager
def hangups(ask: Callable[[], None]) -> Iterator[None]:
    """Within, SIGHUP calls `ask` on the running event loop."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(ask))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _first_line(error: Exception) -> str:
    format_message: Callable[[], str] | None = getattr(error, "format_message", None)  # of typer's
    said = str(error) if format_message is None else format_message()
    return (said or type(error).__name__).strip().splitlines()[0]
