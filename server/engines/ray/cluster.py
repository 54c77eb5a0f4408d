"""The connection of this process to Ray: a cluster's, or a Ray of its own on this machine.

A Ray of its own is made of processes that end with the thread that started them. So one thread
connects, waits until the last engine has gone, and disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.vllm.reader import first_line
from kendall.server.runtime.pools import in_daemon

CONNECT = 60.0  # seconds; a Ray of its own takes 3
LEAVE = 10.0  # seconds; then its processes end with this one
# else a warning of what a later version will do with actors that need no accelerator
NO_WARNING = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# a Ray of its own is for this machine: its servers then listen on loopback, on Linux too
NO_CLUSTER = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@dataclass(slots=True)
class _Connection:
    """The connection of all engines of this process."""

    users: set[int] = field(default_factory=set)  # that have an actor, or are to have one
    made: asyncio.Future[None] | None = None
    ended: asyncio.Future[None] | None = None
    over: threading.Event = field(default_factory=threading.Event)


_connection = _Connection()


async def join(user: object, address: str | None) -> None:
    """Connect, once for all users. Raises EngineStartError."""
    one = _connection
    one.users.add(id(user))
    if one.made is None or one.made.cancelled():
        loop = asyncio.get_running_loop()
        one.made, one.over = loop.create_future(), threading.Event()
        made, over = one.made, one.over

        def told(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(_tell, made, error)

        one.ended = in_daemon(partial(_connected, address, told, over), "ray")
    try:
        async with asyncio.timeout(CONNECT):
            await asyncio.shield(one.made)
    except TimeoutError:
        raise EngineStartError(
            f"got no connection to Ray within {CONNECT:g} s; {_there(address)}"
        ) from None
    except Exception as error:
        one.made = None
        raise EngineStartError(
            f"got no connection to Ray: {first_line(error)}; {_there(address)}"
        ) from error


async def leave(user: object) -> None:
    """The last user ends the connection, and a Ray of its own. Raises TimeoutError."""
    one = _connection
    one.users.discard(id(user))
    if one.users or one.ended is None:
        return
    ended, one.made, one.ended = one.ended, None, None
    one.over.set()
    async with asyncio.timeout(LEAVE):
        await asyncio.shield(ended)


def lacking(needs: dict[str, float]) -> str | None:
    """The first resource of which the whole cluster has too little for one actor."""
    import ray  # noqa: PLC0415 - an extra

    there = ray.cluster_resources()
    for name, number in needs.items():
        if number > there.get(name, 0.0):
            return f"{number:g} {name} where the cluster has {there.get(name, 0.0):g} in all"
    return None


def _there(address: str | None) -> str:
    if address is None:
        return "expected to start one on this machine: its log is under /tmp/ray"
    return (
        f"expected a cluster at --ray-address {address}: `ray status` there says whether it is up"
    )


def _tell(made: asyncio.Future[None], error: BaseException | None) -> None:
    if made.done():
        return
    if error is None:
        made.set_result(None)
    else:
        made.set_exception(error)
        made.exception()  # it is not logged where nobody waits for it any more


def _connected(
    address: str | None, told: Callable[[BaseException | None], object], over: threading.Event
) -> None:
    try:
        os.environ.setdefault(*NO_WARNING)
        options: dict[str, Any] = {}
        if address is None:
            os.environ.setdefault(*NO_CLUSTER)
            options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        import ray  # noqa: PLC0415 - an extra

        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="kendall",
            **options,
        )
    except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
        told(error)
        return
    told(None)
    over.wait()
    ray.shutdown()
