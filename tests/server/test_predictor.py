"""The predicting process is the gateway's own: it goes when the gateway does, however that ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.live.predictor import Predictor

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


def test_an_answer_that_takes_too_long_ends_the_process_and_the_next_question_has_another() -> None:
    async def main() -> None:
        predictor = Predictor(longest=60)
        assert await predictor.ask("ask_what_ifs") == []
        (first,) = {child.pid for child in multiprocessing.active_children()}
        predictor.longest = 0.0
        with pytest.raises(TimeoutError):
            await predictor.ask("ask_what_ifs")
        predictor.longest = 60
        assert await predictor.ask("ask_what_ifs") == []
        children = {child.pid for child in multiprocessing.active_children()}
        predictor.close()
        assert first is not None
        assert not runs(first)
        assert len(children) == 1

    asyncio.run(main())


def runs(pid: int) -> bool:
    """Whether it is there and no corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
