"""The real engine killed by marked prompts, with a sequence that it forgets, stopped in a
calibration: in its gateway's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from kendall.queueing.measurement.record import Record
from kendall.server.engines.base import EngineRequest, TokenStream
from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import VllmEngine, prepare
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.eventually import eventually
from tests.server.asgi import FOR_THE_RUN, Call, call, completion
from tests.server.counts import tell
from tests.server.harness import Collector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    # raised inside vLLM and what it imports; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),  # of engines that were killed
]
MARK = 666
# tokens of a call that is not over before it kills, even where a busy machine kills late
LONG = 400
LIMIT = 840  # seconds; a restart takes 2 to 5 on a quiet machine, and A2 needs thirty


class Poisoned(VllmEngine):
    """Its process is killed soon after a prompt that begins with the mark went in, with or
    without tokens made before.
    """

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        if any(list(engine_request.prompt_token_ids[:1]) == [MARK] for engine_request in requests):
            asyncio.get_running_loop().call_later(0.02, self._kill, self.process_id)
        return super().dispatch(server_id, requests, padded=padded, joining=joining)

    @staticmethod
    def _kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def real(**settings: Any) -> AsyncIterator[tuple[FastAPI, Gateway, Poisoned, list[Record]]]:
    """A gateway of eight at once on the real engine, started, and the records it writes."""
    defaults = {
        "policy": "continuous:max_batch_size=8",
        "prediction_interval": 0,
        "allow_forced_lengths": True,
        "security": FOR_THE_RUN,
    }
    engine = Poisoned(str(make_tiny()))
    gateway = Gateway(
        Settings(model="tiny", served_model_name="tiny", **(defaults | settings)), engine
    )
    ready = asyncio.Event()
    app = create_app(gateway, on_ready=lambda _: ready.set())
    collector = Collector()
    async with asyncio.timeout(LIMIT), app.router.lifespan_context(app):
        await ready.wait()
        gateway.batcher.observers.add(collector)
        yield app, gateway, engine, collector.records


def ask(app: FastAPI, prompt: list[int], tokens: int = 40, **fields: Any) -> Call:
    body = completion(
        prompt=prompt,
        kendall_forced_output_tokens=tokens,
        max_tokens=1000,
        ignore_eos=False,
        temperature=0,
    )
    return Call(app, "POST", "/v1/completions", body | fields)


def run(main: Any) -> None:
    prepare(str(make_tiny()))
    asyncio.run(main)


def test_ten_poison_calls_cost_a_hundred_innocents_nothing_on_the_real_engine() -> None:
    """Acceptance A2, with a SIGKILL of the engine's process in the place of the fault."""

    async def main() -> None:
        async with real() as (app, gateway, _, records):
            began = gateway.now()
            innocents, poison = [], []
            for number in range(110):
                if number % 11 == 5:
                    poison.append(ask(app, [MARK, 300 + number], LONG))
                else:
                    innocents.append(ask(app, [301, 302, 300 + number]))
            await asyncio.gather(*(made.task for made in (*innocents, *poison)))
            seconds = round(gateway.now() - began, 1)
            outcomes = Counter(record.outcome for record in records)
            tell(
                "poison on vLLM",
                seconds=seconds,
                restarts=gateway.supervisor.restarts,
                outcomes=outcomes,
            )
            assert Counter(made.status for made in innocents)[200] >= 95
            assert Counter(made.status for made in poison) == {500: 10}
            assert outcomes["completed"] >= 95
            assert sum(outcomes.values()) == 110
            while not gateway.supervisor.serving:  # after the last conviction
                assert gateway.lifecycle.lost is None
                await asyncio.sleep(0.1)
            assert (await ask(app, [301]).task, gateway.lifecycle.lost) == (None, None)

    run(main())


def test_a_sequence_that_is_not_heard_of_any_more_goes_on_in_the_real_engine() -> None:
    async def main() -> None:
        async with real(supervision=SupervisionSettings(stuck_timeout=2.0)) as (
            app,
            gateway,
            _,
            records,
        ):

            async def others() -> None:
                while True:
                    assert (
                        await call(
                            app, "POST", "/v1/completions", completion(prompt=[310], max_tokens=500)
                        )
                    ).status == 200

            lost = ask(app, [301, 302], 600, return_token_ids=True)
            while not any(  # noqa: ASYNC110
                sequence.output_token_ids for sequence in gateway.batcher.unanswered_sequences()
            ):
                await asyncio.sleep(0.001)
            (sequence,) = gateway.batcher.unanswered_sequences()
            busy = asyncio.create_task(others())
            assert sequence.stream is not None
            sequence.stream.listener = None
            made = len(sequence.output_token_ids)
            assert made < 600
            await lost.task
            assert lost.status == 200, lost.body
            assert lost.json()["usage"]["completion_tokens"] == 600
            assert (sequence.continued, gateway.supervisor.restarts) == (True, 0)
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            assert "failed" not in {record.outcome for record in records}

    run(main())


def test_an_engine_stopped_in_a_calibration_is_replaced_and_the_queue_goes_on() -> None:
    async def main() -> None:
        async with real() as (app, gateway, engine, _):
            calibrating = Call(
                app, "POST", "/admin/calibrate", {"max_batch_size": 4, "max_output_tokens": 16}
            )
            await eventually(lambda: gateway.latency.calibrating)
            waiting = ask(app, [301, 302], 5)
            os.kill(engine.process_id, signal.SIGSTOP)
            await asyncio.gather(calibrating.task, waiting.task)
            assert (calibrating.status, calibrating.json()["error"]["code"]) == (
                503,
                "engine_unavailable",
            )
            assert (waiting.status, gateway.supervisor.restarts, gateway.latency.calibrating) == (
                200,
                1,
                False,
            )

    run(main())
