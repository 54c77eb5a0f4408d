"""The predicting process is the gateway's own: it goes when the gateway does, however that ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from policies.text import counted
from queueing.advice.forecast import Knobs
from queueing.estimation.feed import Feed
from server.law.idle_probes import _niced
from server.live import predicting
from server.live.predictor import Predictor
from server.live.question import Question
from server.pools import end_at_once
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve

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
        await predictor.close()
        assert first is not None
        assert not runs(first)
        assert len(children) == 1

    asyncio.run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_closed_in_order_it_leaves_no_process_and_no_thread(busy: bool) -> None:
    """A thread that still closes its pipe when the interpreter exits makes Python write a traceback; what is computed is not waited for."""

    async def main() -> None:
        before = set(threading.enumerate())
        predictor = Predictor()
        assert await predictor.ask("ask_what_ifs") == []
        assert predictor._pool is not None
        (child,) = multiprocessing.active_children()
        if busy:
            predictor._pool.submit(time.sleep, 300)
        assert managers() - before
        async with asyncio.timeout(60):
            await predictor.close()
        assert not managers() - before
        assert child.pid is not None
        assert not runs(child.pid)
        await predictor.close()  # again: nothing is left to do

    asyncio.run(main())


def test_a_refit_of_idle_probes_that_is_cancelled_leaves_no_thread() -> None:
    async def main() -> None:
        before = managers()
        pool = _niced()
        pool.submit(time.sleep, 300)
        async with asyncio.timeout(60):
            await end_at_once(pool)
        assert managers() == before

    asyncio.run(main())


def managers() -> set[threading.Thread]:
    """The threads of process pools that run."""
    return {thread for thread in threading.enumerate() if type(thread).__name__ == "_ExecutorManagerThread"}


def runs(pid: int) -> bool:
    """Whether it is there and no corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ended", [1, 3])
def test_after_few_requests_the_reason_counts_them(ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "capped:max_batch_size=8"
    snapshot = seen(serve(poisson(1.0, ended + 1, 1), Engine(most=8), 1), policy)
    assert len(snapshot.mine.rows) == ended, "the last has arrived, but not ended"
    monkeypatch.setattr(predicting, "_seen", lambda _: snapshot)
    knobs = Knobs(policy=policy)
    feed = Feed()
    feed.begin_epoch(0, 0.0)
    question = Question(news=feed.take(), at=10.0, window=300.0, shape=LAW, knobs=knobs, max_num_seqs=8, longest=64)
    answer = predicting.look(question)
    assert answer["reason"] == (
        f"{counted(ended, 'request')} of this epoch {'has' if ended == 1 else 'have'} ended; {predicting.ENOUGH} are needed"
    )
    assert answer["prediction"] is None
