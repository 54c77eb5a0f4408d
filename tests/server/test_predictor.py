"""The predicting process is the gateway's own: it goes when the gateway does, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ASKS = """
import asyncio, multiprocessing
from server.live.predictor import Predictor

async def main():
    predictor = Predictor()  # kept: a pool that nobody holds ends by itself
    await predictor.ask("ask_what_ifs")
    print(multiprocessing.active_children()[0].pid, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_predicting_process_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as gateway:
        assert gateway.stdout is not None
        predicting = int(gateway.stdout.readline())
        os.kill(gateway.pid, signal.SIGKILL)
    for _ in range(200):
        if not runs(predicting):
            return
        time.sleep(0.05)
    os.kill(predicting, signal.SIGKILL)
    raise AssertionError("it is left behind")


def runs(pid: int) -> bool:
    """Whether it is there and no corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
