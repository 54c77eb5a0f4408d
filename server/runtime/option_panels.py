"""The panels in which the help of `kendall serve` shows its options, in this order."""

from __future__ import annotations

from enum import StrEnum


class Panel(StrEnum):
    """A heading of the help."""

    LISTENING = "Listening"
    QUEUE = "Queue and policy"
    ENGINE = "Engine"
    BEHIND = "Servers behind the gateway (--engine http)"
    TOOLS = "Tools and reasoning"
    FAILURES = "Engine starts, failures and shutdown"
    MODEL = "Latency law and prediction"
    AUTOPILOT = "Autopilot"
    OVERLOAD = "Overload"
    STREAMS = "Streams and responses"
    SECURITY = "Security"
    LOGS = "Records and logs"
    CONFIGURATION = "Configuration"
