"""Why a sequence failed.

engine_unavailable  the engine was lost, and another one may serve it
engine_error        this sequence alone failed, and would again
invalid_request     the engine refused what the client asks
internal_error      the gateway's fault
sequence_stalled    nothing came of it for too long
"""

from __future__ import annotations

from typing import Literal

FailureCode = Literal[
    "engine_unavailable", "engine_error", "invalid_request", "internal_error", "sequence_stalled"
]
