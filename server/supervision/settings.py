"""How much an operator lets go wrong before the gateway gives up; one default each."""

from __future__ import annotations

from dataclasses import dataclass

MOST_REPLICAS = 64


@dataclass(frozen=True, kw_only=True)
class SupervisionSettings:
    """Seconds and counts. More than `max_restarts` starts within `restart_window` and the
    gateway ends with a non-zero status.
    """

    start_timeout: float = 3600.0  # of the first start, which may fetch the model
    max_restarts: int = 8  # 0: the first loss of the engine ends the gateway
    restart_window: float = 600.0
    # of one start after it; `RestartBudget` says when it may take longer
    restart_timeout: float = 300.0
    # a request that saw more engines die is given up: it may be what kills them
    max_interruptions: int = 3
    suspect_after: int = 2  # engines that died under a request before it is tried alone
    max_parked: int = 1024  # text prompts that wait for a tokenizer while the engine restarts
    stuck_timeout: float = 60.0  # without a token though sequences are in service; 0: nobody looks
    slow_reader_timeout: float = 60.0  # a client that does not take what waits for it; 0: for ever
