"""The predicting process is the gateway's own: it goes when the gateway does, however that ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kendall.policies import SpecError, parse_policy
from kendall.policies.text import counted
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.estimation.estimates import estimate
from kendall.server.calibration.idle_probes import niced_executor
from kendall.server.live import prediction_client as predictor_module
from kendall.server.live import prediction_worker
from kendall.server.live.prediction_client import (
    SIZE_BYTES,
    Ask,
    PredictorClient,
    PredictorLostError,
    waited_for_processor,
)
from kendall.server.live.prediction_process import framed_failure
from kendall.server.runtime.pools import end_at_once
from tests.eventually import eventually, eventually_here
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve
from tests.queueing.speed_hours import SIGMA, TAU, cells
from tests.server.questions import question_at
from tests.virtual_time import run_virtual

ASKS = """
import asyncio
from kendall.server.live.prediction_client import PredictorClient

async def main():
    predictor = PredictorClient()
    await predictor.ask("ask_what_ifs")
    print(predictor.process_id, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_the_predicting_process_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as gateway:
        assert gateway.stdout is not None
        predicting = int(gateway.stdout.readline())
        os.kill(gateway.pid, signal.SIGKILL)
    try:
        eventually_here(lambda: not runs(predicting))
    except AssertionError:
        os.kill(predicting, signal.SIGKILL)
        raise AssertionError("it is left behind") from None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_gateways_group_does_not_end_the_predicting_process(
    number: signal.Signals,
) -> None:
    """`timeout` and service managers send SIGTERM to the whole group, or to each process."""

    async def main() -> None:
        predictor = PredictorClient()
        try:
            assert await predictor.ask("ask_what_ifs") == []
            process = of(predictor)
            assert os.getpgid(process) != os.getpgid(0)
            os.kill(process, number)
            assert await predictor.ask("ask_what_ifs") == []
            assert of(predictor) == process
        finally:
            await predictor.close()

    asyncio.run(main())


def test_the_fit_of_idle_probes_is_ended_by_the_gateway_alone() -> None:
    async def main() -> None:
        pool = niced_executor()
        try:
            loop = asyncio.get_running_loop()
            process = await loop.run_in_executor(pool, os.getpid)
            os.kill(process, signal.SIGTERM)
            assert await loop.run_in_executor(pool, os.getpid) == process
        finally:
            await end_at_once(pool)

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_is_told_in_each_of_its_lives_what_it_has_to_know_before_anything_else() -> None:
    told: list[tuple[int, object]] = []

    async def begin(ask: Ask, life: int) -> None:
        told.append((life, await ask("ask_what_ifs")))

    async def main() -> None:
        predictor = PredictorClient(begin=begin)
        await predictor.start()
        await predictor.start()
        assert await predictor.ask("ask_what_ifs") == []
        assert told == [(1, [])]
        os.kill(of(predictor), signal.SIGKILL)
        with pytest.raises(PredictorLostError):
            await predictor.ask("ask_what_ifs")
        assert await predictor.ask("ask_what_ifs") == []
        assert told == [(1, []), (2, [])]
        await predictor.close()

    asyncio.run(main())


@pytest.mark.slow
def test_an_answer_that_takes_too_long_ends_the_process_and_the_next_question_has_another() -> None:
    async def main() -> None:
        predictor = PredictorClient(longest=60)
        assert await predictor.ask("ask_what_ifs") == []
        first = predictor.process_id
        predictor.longest = 0.0
        with pytest.raises(PredictorLostError, match="did not answer within 0 s"):
            await predictor.ask("ask_what_ifs")
        predictor.longest = 60
        assert await predictor.ask("ask_what_ifs") == []
        second = predictor.process_id
        await predictor.close()
        assert None not in (first, second)
        assert first != second
        await eventually(lambda: not any(runs(pid) for pid in (first, second) if pid is not None))

    asyncio.run(main())


class Elsewhere:
    """A process that is not there."""

    pid = 1

    async def kill(self) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize(
    ("share", "takes", "ends"),
    [
        (0.0, 119.0, 119.0),
        (0.0, 121.0, None),
        (0.7, 380.0, 380.0),  # of which it computed 114
        (0.7, 420.0, None),
        (1.0, 1190.0, 1190.0),
        (1.0, 1210.0, None),
    ],
)
def test_seconds_in_which_the_process_waits_for_a_processor_do_not_count(
    share: float, takes: float, ends: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            predictor_module, "waited_for_processor", lambda _: 50 + share * loop.time()
        )
        predictor = PredictorClient()
        predictor._process = Elsewhere()  # type: ignore[assignment]
        began = loop.time()
        asking = predictor._within(lambda _: asyncio.sleep(takes, "answer"))
        if ends is None:
            with pytest.raises(PredictorLostError, match="did not answer within 120 s"):
                await asking
        else:
            assert await asking == "answer"
            assert loop.time() - began == pytest.approx(ends)

    run_virtual(main())


def test_of_a_process_that_is_started_for_a_question_every_wait_counts_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        waits = {None: 0.0, 1: 300.0}
        monkeypatch.setattr(predictor_module, "waited_for_processor", lambda pid: waits[pid])
        predictor = PredictorClient()

        async def new(_: object = None) -> Any:
            await asyncio.sleep(1)
            predictor._process = Elsewhere()  # type: ignore[assignment]
            return predictor._process

        monkeypatch.setattr(predictor, "_new", new)
        assert await predictor._within(lambda _: asyncio.sleep(400, "answer")) == "answer"
        with pytest.raises(PredictorLostError):
            await predictor._within(lambda _: asyncio.sleep(400, "answer"))

    run_virtual(main())


def test_what_a_process_waited_is_known_on_linux_and_0_elsewhere() -> None:
    assert waited_for_processor(os.getpid()) >= 0.0
    assert waited_for_processor(None) == 0.0
    assert waited_for_processor(2**22 + 1) == 0.0


class Busy:
    """An argument that takes for ever to arrive: its process computes and does not let go of the
    interpreter.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return sum, (range(10**15),)


MANY_BYTES = "x" * 50_000_000  # more than any socket holds


async def idle(_: PredictorClient) -> None:
    """Nothing is asked."""


async def stopped(predictor: PredictorClient) -> None:
    """And nothing is asked."""
    os.kill(of(predictor), signal.SIGSTOP)


async def stopped_before_a_large_question(predictor: PredictorClient) -> None:
    os.kill(of(predictor), signal.SIGSTOP)
    await begun(predictor, MANY_BYTES)


async def stopped_within_a_large_answer(predictor: PredictorClient) -> None:
    assert predictor._process is not None
    predictor._process._writer.transport.pause_reading()  # type: ignore[attr-defined]
    await begun(predictor, MANY_BYTES)
    while predictor._process._writer.transport.get_write_buffer_size():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # the answer begins to come
    os.kill(of(predictor), signal.SIGSTOP)
    predictor._process._writer.transport.resume_reading()  # type: ignore[attr-defined]


async def busy(predictor: PredictorClient) -> None:
    await begun(predictor, Busy())


def of(predictor: PredictorClient) -> int:
    assert predictor.process_id is not None
    return predictor.process_id


async def begun(predictor: PredictorClient, argument: object) -> None:
    """A question is asked, and its answer not awaited."""
    asking = asyncio.create_task(predictor.ask("counted", 1, argument))
    asking.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [idle, stopped, stopped_before_a_large_question, stopped_within_a_large_answer, busy]
)
def test_closed_it_leaves_no_process_and_no_thread_whatever_it_does(
    how: Callable[[PredictorClient], Awaitable[None]],
) -> None:
    """A process that is stopped or busy must not hold the gateway's exit up: a pool of
    `concurrent.futures` joins its threads at exit.
    """

    async def main() -> None:
        before = set(threading.enumerate())  # of which some may end meanwhile
        predictor = PredictorClient()
        assert await predictor.ask("ask_what_ifs") == []
        process = of(predictor)
        await how(predictor)
        async with asyncio.timeout(60):
            await predictor.close()
        await eventually(lambda: not runs(process))
        assert set(threading.enumerate()) <= before
        await predictor.close()  # again: nothing is left to do

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.slow
def test_a_process_that_dies_fails_its_question_and_the_next_one_has_another() -> None:
    async def main() -> None:
        predictor = PredictorClient()
        assert await predictor.ask("ask_what_ifs") == []
        os.kill(of(predictor), signal.SIGSTOP)
        asking = asyncio.create_task(predictor.ask("ask_what_ifs"))
        await asyncio.sleep(0)
        os.kill(of(predictor), signal.SIGKILL)
        with pytest.raises(PredictorLostError):
            await asking
        assert await predictor.ask("ask_what_ifs") == []
        await predictor.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_caller_who_leaves_does_not_leave_its_answer_to_the_next() -> None:
    async def main() -> None:
        predictor = PredictorClient()
        assert await predictor.ask("ask_what_ifs") == []
        process = predictor.process_id
        os.kill(of(predictor), signal.SIGSTOP)
        leaves = asyncio.create_task(predictor.ask("counted", 1, "first"))
        await asyncio.sleep(0.05)
        leaves.cancel()
        asking = asyncio.create_task(predictor.ask("counted", 1, "second"))
        await asyncio.sleep(0.05)
        os.kill(of(predictor), signal.SIGCONT)
        assert await asking == "1 second"
        assert predictor.process_id == process
        await predictor.close()

    asyncio.run(main())


@pytest.mark.slow
def test_what_it_raises_is_raised_here_with_its_traceback() -> None:
    async def main() -> None:
        predictor = PredictorClient()
        with pytest.raises(SpecError, match="nonsense") as raised:
            await predictor.ask("parse_policy", "nonsense")
        assert "Traceback" in raised.value.__notes__[0]
        assert await predictor.ask("counted", 2, "look") == "2 looks"
        await predictor.close()

    asyncio.run(main())


class TwoPartsError(Exception):
    """Not made again from the text that it hands on."""

    def __init__(self, place: str, cause: str) -> None:
        super().__init__(f"{place}: {cause}")


def test_an_error_that_cannot_be_made_again_from_its_arguments_is_sent_as_its_text() -> None:
    error = TwoPartsError("here", "a reason")
    with pytest.raises(TypeError, match="positional argument"):
        pickle.loads(pickle.dumps(error))
    number, succeeded, sent = pickle.loads(framed_failure(7, error)[SIZE_BYTES:])
    assert (number, succeeded, type(sent)) == (7, False, RuntimeError)
    assert "here: a reason" in str(sent)


def test_an_unstable_queue_is_sent_as_it_is() -> None:
    number, succeeded, sent = pickle.loads(framed_failure(7, UnstableQueueError(1.5))[SIZE_BYTES:])
    assert (number, succeeded, type(sent)) == (7, False, UnstableQueueError)
    assert sent.load == 1.5


def test_a_refit_of_idle_probes_that_is_cancelled_leaves_no_thread() -> None:
    async def main() -> None:
        before = managers()
        pool = niced_executor()
        pool.submit(time.sleep, 300)
        async with asyncio.timeout(60):
            await end_at_once(pool)
        await eventually(lambda: managers() <= before)

    asyncio.run(main())


def managers() -> set[threading.Thread]:
    """The threads of process pools that run."""
    return {
        thread
        for thread in threading.enumerate()
        if type(thread).__name__ == "_ExecutorManagerThread"
    }


def runs(pid: int) -> bool:
    """Whether it is there and no corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ended", [1, 3])
def test_after_few_requests_the_reason_counts_them(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "capped:max_batch_size=8"
    snapshot = seen(serve(poisson(1.0, ended + 1, 1), Engine(most=8), 1), policy)
    assert len(snapshot.mine.rows) == ended, "the last has arrived, but not ended"
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: snapshot)
    question = question_at(10.0, policy, slots=8, window=300.0)
    answer = prediction_worker.assess_window(question)
    number, ends = counted(ended, "request"), "has ended" if ended == 1 else "have ended"
    assert answer.reason == f"{number} of this epoch {ends} in the last 300 s; 50 are needed"
    anew = prediction_worker.assess_window(dataclasses.replace(question, anew=True))
    assert anew.reason == (
        f"{number} {ends} since the predicting process was restarted; 50 are needed"
    )
    assert answer.prediction is None


@pytest.mark.parametrize("ended", [49, 50])
def test_fifty_requests_of_an_epoch_are_predicted_from_and_fewer_are_not(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "capped:max_batch_size=8"
    snapshot = seen(serve(poisson(1.0, ended + 1, 1), Engine(most=8), 1), policy)
    assert len(snapshot.mine.rows) == ended, "the last has arrived, but not ended"
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: snapshot)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())
    question = question_at(60.0, policy, slots=8, window=300.0)
    answer = prediction_worker.assess_window(question)
    assert (answer.prediction is None) == (answer.reason is not None) == (ended < 50)
    assert (answer.ahead is None) == (ended < 50)


@pytest.mark.parametrize("most", [None, 32])
def test_the_autopilot_decides_within_the_bounds_of_the_question(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token limit outside of them is left at once."""
    policy = "capped:max_batch_size=8"
    snapshot = seen(serve(poisson(1.0, 200, 1), Engine(most=8), 1), policy)
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: snapshot)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())
    bounds = AutopilotBounds(policies=("capped",), largest_token_limit=most)
    question = question_at(300.0, policy, slots=8, window=300.0, bounds=bounds)
    prediction_worker.start_pilot("act", None, 0.0)
    answer = prediction_worker.assess_window(question)
    assert answer.pilot_failure is None
    limit = None if answer.decision is None else answer.decision.after.max_output_tokens
    assert limit == most


def test_the_wander_is_that_of_the_hour_and_not_of_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thirty epochs of a wandering engine have gone by; the window of the last one is too short
    and too steady to show it.
    """
    history, hour = cells(30, 60.0, SIGMA)
    assert hour.significant
    policy = "capped:max_batch_size=8"
    snapshot = seen(serve(poisson(10.0, 200, 1), Engine(most=8), 1), policy)
    assert not estimate(snapshot, parse_policy(policy), LAW).wander.significant
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: snapshot)
    monkeypatch.setattr(
        prediction_worker, "_memory", prediction_worker._Memory(history=history, last_shape=LAW)
    )
    question = question_at(20.0, policy, slots=8, window=300.0)
    summary = prediction_worker.assess_window(question).estimates
    assert summary is not None
    slow = summary.wander
    assert slow.significant
    assert slow.sigma.value == pytest.approx(SIGMA, rel=0.2)
    assert slow.tau == pytest.approx(TAU, rel=1.0)


@pytest.mark.parametrize("where", ["killed", "not connected"])
def test_a_killed_process_that_is_slow_to_end_is_reaped_all_the_same(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """On a busy machine a niced process takes seconds to end; nobody waits for it."""
    monkeypatch.setattr(predictor_module, "REAPED", 0.0)
    started: list[subprocess.Popen[bytes]] = []
    popen = predictor_module._popen

    def kept(connection: socket.socket) -> subprocess.Popen[bytes]:
        started.append(popen(connection))
        return started[-1]

    async def refused(**_: Any) -> Any:
        raise OSError("no more files")

    monkeypatch.setattr(predictor_module, "_popen", kept)

    async def test() -> None:
        predictor = PredictorClient()
        if where == "not connected":
            monkeypatch.setattr(asyncio, "open_connection", refused)
            with pytest.raises(OSError, match="no more files"):
                await predictor.start()
        else:
            await predictor.start()
        await predictor.close()
        await eventually(lambda: started[0].returncode is not None)  # somebody waits for it

    asyncio.run(test())
