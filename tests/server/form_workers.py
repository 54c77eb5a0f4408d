"""Stand-ins for the process that compiles forms: a form says itself what happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from kendall.server.engines.vllm.forms import READY, RefusedForm


def work(channel: Connection, configuration: Any, cpus: Iterable[int]) -> None:
    """`slow` takes for ever, `crash` ends the process, `bad` is refused; `pid`, with more behind
    it, answers who compiled it, `takes S` takes S seconds.
    """
    del cpus
    channel.send(READY)
    while True:
        try:
            form = channel.recv().structured.value
        except EOFError:
            return
        match form:
            case "slow":
                time.sleep(600)
            case "crash":
                os.abort()
            case "bad":
                channel.send(RefusedForm("got a bad form", "guided_regex"))
            case text if text.startswith("pid"):
                channel.send(os.getpid())
            case text if text.startswith("takes "):
                time.sleep(float(text.split()[1]))
                channel.send(text)
            case _:
                channel.send(f"{configuration} {form}")


def never_ready(channel: Connection, configuration: Any, cpus: Iterable[int]) -> None:
    """Ends before it can compile."""
    del configuration, cpus
    channel.close()
