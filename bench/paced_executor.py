"""An executor of vLLM that makes a step take `KENDALL_BENCH_STEP` seconds: the tiny model as slow
as a large one, so that other work on the machine hardly changes its speed. Scheduler, queue and
model are vLLM's.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

VARIABLE = "KENDALL_BENCH_STEP"


class PacedExecutor(UniProcExecutor):  # type: ignore[misc]
    """Steps without a pause between them end on a grid: a late one is caught up by the next."""

    _ends_at = 0.0

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """The step, and the wait for its end."""
        step, began = float(os.environ[VARIABLE]), time.monotonic()  # noqa: TID251 - no event loop here
        output = super().execute_model(*args, **kwargs)
        self._ends_at = step + (self._ends_at if began < self._ends_at + step else began)
        time.sleep(max(0.0, self._ends_at - time.monotonic()))  # noqa: TID251
        return output
