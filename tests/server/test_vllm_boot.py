"""A start of vLLM that hangs, without vLLM: what it forked is killed, its thread is waited for
no longer than a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kendall.server.engines.vllm import boot as vllm_boot
from kendall.server.engines.vllm import engine as vllm_engine
from kendall.server.engines.vllm.boot import GIVEN_UP, Boot, Forks
from kendall.server.engines.vllm.engine import VllmEngine
from kendall.server.engines.vllm.process import descendants
from tests.server.processes import alive, gone


class Core:
    """As much of the real one as ends it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hangs = threading.Event()
        self.hangs.set()

    def stop_listening(self) -> None:
        self.calls.append("stop_listening")

    def shutdown(self) -> None:
        self.hangs.wait(30)
        self.calls.append("shutdown")

    def kill(self) -> None:
        self.calls.append("kill")


class Stopped:
    """A boot that waits for a process which is stopped, with another one below it, and never
    answers.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.forked = threading.Event()

    def __call__(self, forks: Forks) -> Any:
        self.child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
        while not descendants(self.child.pid):
            time.sleep(0.01)
        os.kill(self.child.pid, signal.SIGSTOP)
        forks._processes.append(self.child)
        self.forked.set()
        self.child.wait()
        raise RuntimeError("Engine core initialization failed.")

    async def processes(self) -> list[int]:
        while not self.forked.is_set():  # noqa: ASYNC110 - it is set in a thread
            await asyncio.sleep(0.01)
        assert self.child is not None
        return [self.child.pid, *descendants(self.child.pid)]


def played(scene: Callable[[], Any]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(90):
            return await scene()

    return asyncio.run(main())


def test_a_boot_that_is_given_up_kills_what_it_waits_for_and_all_below_it() -> None:
    async def scene() -> None:
        stopped = Stopped()
        boot = Boot(stopped)
        pids = await stopped.processes()
        assert len(pids) == 2
        assert await boot.give_up() is None
        assert await gone(pids) == []
        with pytest.raises(RuntimeError, match="initialization failed"):
            await boot.core()

    played(scene)


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False])
def test_a_thread_that_never_ends_is_left_alone_forks_no_more_and_ends_what_it_brings_up(
    forked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has forked nothing imports vLLM: that is no error, and not waited for."""
    began, goes_on, core = threading.Event(), threading.Event(), Core()
    tried: list[str] = []
    monkeypatch.setattr(vllm_boot, "ENGINE_ENDS", 0.2)

    def kill(*, idle: bool = False) -> None:
        tried.append(f"fork server killed{' if idle' * idle}")

    monkeypatch.setattr(vllm_boot, "kill_fork_server", kill)

    def make(forks: Forks) -> Any:
        if forked:
            forks.Process(target=print)
        began.set()
        goes_on.wait(30)
        try:
            forks.Process(target=print)
        except RuntimeError as error:
            tried.append(str(error))
        return core

    async def scene() -> None:
        boot = Boot(make)
        await asyncio.to_thread(began.wait, 30)
        assert await boot.give_up() is None
        assert vllm_boot.left_behind()
        goes_on.set()
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            await boot.core()

    played(scene)
    assert (set(tried), tried[-1], core.calls) == (
        {f"fork server killed{' if idle' * (not forked)}", GIVEN_UP},
        GIVEN_UP,
        ["shutdown"],
    )
    assert ("did not end" in caplog.text) is forked


def test_how_a_process_ended_is_known_to_all_who_wait_for_it() -> None:
    """vLLM's own threads wait as well: who came second read an end of file, and wrote 255 over
    the exit code.
    """
    forks = Forks()
    processes = [forks.Process(target=time.sleep, args=(600,)) for _ in range(8)]
    for process in processes:
        process.start()
    codes: list[int | None] = []

    def wait_for(process: Any) -> None:
        process.join(60)
        codes.append(process.exitcode)

    waiting = [
        threading.Thread(target=wait_for, args=(process,))
        for process in processes
        for _ in range(4)
    ]
    for thread in waiting:
        thread.start()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for thread in waiting:
        thread.join()
    assert codes == [-signal.SIGKILL] * len(waiting)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * len(processes)


def test_a_core_that_came_up_in_spite_of_it_is_handed_over() -> None:
    core = Core()

    async def scene() -> None:
        boot = Boot(lambda _: core)  # type: ignore[arg-type, return-value]
        await boot.core()
        assert await boot.give_up() is core  # type: ignore[comparison-overlap]

    played(scene)
    assert core.calls == []


@pytest.fixture
def engine() -> VllmEngine:
    return VllmEngine("any")


def test_a_cancelled_start_of_the_engine_leaves_nothing_and_ends_at_once(
    engine: VllmEngine,
) -> None:
    """It once awaited the boot, for as long as that took."""
    stopped = Stopped()
    engine._boot = lambda _, forks: stopped(forks)  # type: ignore[method-assign]

    async def scene() -> None:
        starting = asyncio.create_task(engine.start())
        pids = await stopped.processes()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await gone(pids) == []
        assert not vllm_boot.left_behind()
        await engine.stop()

    played(scene)


def test_stopping_the_engine_is_bounded_and_kills_it_where_vllm_does_not_end(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_engine, "STOP_TIMEOUT", 0.2)
    core = Core()
    core.hangs.clear()
    engine._core = core  # type: ignore[assignment]
    played(engine.stop)
    assert core.calls == ["stop_listening", "kill"]
    assert "vLLM did not exit" in caplog.text
    core.hangs.set()


LEFT = """
import atexit, threading
from kendall import cli
from kendall.server.engines.vllm import boot as vllm_boot

atexit.register(print, "tidied up")
threading.Thread(target=threading.Event().wait, name={name!r}, daemon=True).start()
cli.run_command = lambda *_: print("done") or 3
cli.main(["serve"])
"""


@pytest.mark.parametrize(
    ("name", "printed"), [(vllm_boot.BOOTS, "done\n"), ("another", "done\ntidied up\n")]
)
def test_the_command_ends_without_tidying_up_around_a_thread_that_is_left_in_vllm(
    name: str, printed: str
) -> None:
    """An interpreter that does may abort, with status -6 instead of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", LEFT.format(name=name)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, printed), ended.stderr


def test_a_tree_of_processes_is_killed_though_it_is_stopped() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as child:
        while not (below := descendants(child.pid)):
            time.sleep(0.01)
        for pid in (child.pid, *below):
            os.kill(pid, signal.SIGSTOP)
        vllm_boot.kill_tree(child.pid)
        with contextlib.suppress(ChildProcessError):
            child.wait(30)
    assert asyncio.run(gone([child.pid, *below])) == []
    assert not alive(below[0])


def test_a_terminals_ctrl_c_reaches_the_gateway_alone() -> None:
    """It once ended the engine, whose requests the gateway was to finish, or printed a traceback
    of the import of vLLM.
    """
    script = """
import contextlib, multiprocessing as mp, os, signal
from kendall.server.engines.vllm import process as vllm_process

def engine(pipe):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    pipe.send("lives")
    with contextlib.suppress(EOFError):
        pipe.recv()

if __name__ == "__main__":
    vllm_process._PRELOAD, vllm_process.on_cpu = [], lambda: False
    vllm_process.prepare()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    here, there = mp.get_context("forkserver").Pipe()
    process = mp.get_context("forkserver").Process(target=engine, args=(there,))
    process.start()
    there.close()
    print(here.recv())
    vllm_process.kill_fork_server(idle=True)
    assert process.is_alive()
    here.close()
    process.join(90)
"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "child.py"
        file.write_text(script)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        ended = subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
            env=environment,
        )
    assert ended.stdout == "lives\n", ended.stderr


def test_a_fork_server_of_before_gets_the_environment_of_the_engine(tmp_path: Path) -> None:
    """It would not know the file to which an engine writes why it cannot start."""
    seen = tmp_path / "seen"
    script = f"""
import multiprocessing as mp, os
from multiprocessing import forkserver
forkserver.ensure_running()
from kendall.server.engines.vllm import process as vllm_process
vllm_process._PRELOAD, vllm_process.on_cpu = [], lambda: False
vllm_process.prepare()
command = "echo $KENDALL_ENGINE_ERROR_FILE > {seen}"
process = mp.get_context("forkserver").Process(target=os.system, args=(command,))
process.start()
process.join(90)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
    assert seen.read_text().strip().endswith("engine-error")


def test_after_the_fork_server_is_killed_the_next_start_begins_another_one() -> None:
    forks = Forks()
    for _ in range(4):
        process = forks.Process(target=print)
        process.start()
        process.join(60)
        vllm_boot.kill_fork_server()


class Vanishing:
    """vLLM's client of a process that ends while vLLM looks for its children."""

    def __init__(self) -> None:
        self.closed = 0
        self.engine_core = self

    def shutdown(self, timeout: float) -> None:
        assert timeout == 0
        raise ProcessLookupError("no such process")

    def resources(self) -> None:
        self.closed += 1


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_process_that_ends_while_vllm_shuts_it_down_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from kendall.server.engines.vllm.core import Core as RealCore

    core, client = object.__new__(RealCore), Vanishing()
    core.llm, core.pid = client, 0
    process = core.process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    core.shutdown()
    assert client.closed == 1
    assert not hasattr(core, "llm")
    assert caplog.messages == ["vLLM's shutdown failed; its process is killed"]
