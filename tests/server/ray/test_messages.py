"""What passes between the gateway and an actor, without Ray."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import Request, SpecError
from kendall.queueing.latency.law import parse_law
from kendall.server.engines.base import EngineRequest, Sampling, Structured, Token, TokenLogprob
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.ray.actor import EngineActor
from kendall.server.engines.ray.engine import Handed, as_it_travels
from kendall.server.engines.ray.messages import (
    CancelOrder,
    DispatchOrder,
    End,
    Inbox,
    SequenceFailure,
    StepEnd,
    Tokens,
)
from kendall.server.engines.ray.options import needs_of
from tests.server.asgi import LAW
from tests.virtual_time import run_virtual


def request(number: int, tokens: int, **fields: Any) -> EngineRequest:
    asked = Request(id=f"r{number}", arrived_at=0.0, prompt_tokens=3, max_output_tokens=tokens)
    return EngineRequest(asked, (5, 6, 7), Sampling(max_tokens=tokens), tokens, **fields)


@given(st.permutations(range(8)))
def test_orders_are_taken_by_their_numbers(numbers: list[int]) -> None:
    inbox = Inbox()
    taken = [order for number in numbers for order in inbox.put(number, CancelOrder([str(number)]))]
    assert taken == [CancelOrder([str(number)]) for number in range(8)]


def test_an_actor_serves_and_lets_go_whatever_the_order_of_its_calls() -> None:
    async def main() -> None:
        actor = EngineActor(lambda: EmulatedEngine(parse_law(LAW)))
        capabilities = await actor.start()
        assert capabilities.engine == "emulated"
        there = actor.messages()
        await actor.take(1, CancelOrder(["r0"]))  # before what it cancels
        await actor.take(
            0, DispatchOrder([request(0, 9), request(1, 4)], padded=False, joining=True)
        )
        heard = [message async for message in until(there, tokens=4)]
        assert {message.request_id for message in heard if isinstance(message, Tokens)} == {"r1"}
        assert [m.tokens[0].ends for m in heard if isinstance(m, Tokens)][-1]
        assert any(isinstance(message, StepEnd) and message.admitted == 1 for message in heard)
        await actor.stop()

    run_virtual(main())


async def until(there: AsyncIterator[list[Any]], tokens: int) -> AsyncIterator[Any]:
    async for batch in there:
        for message in batch:
            tokens -= isinstance(message, Tokens)
            yield message
        if tokens <= 0:
            return


def test_a_dispatch_that_fails_fails_its_requests_alone() -> None:
    class Failing(EmulatedEngine):
        def dispatch(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no room")

    async def main() -> None:
        actor = EngineActor(lambda: Failing(parse_law(LAW)))
        await actor.start()
        there = actor.messages()
        await actor.take(0, DispatchOrder([request(0, 9)], padded=False, joining=False))
        (failure,) = await anext(there)
        assert isinstance(failure, SequenceFailure)
        assert (failure.request_id, failure.code) == ("r0", "engine_error")
        assert failure.message.endswith("no room")
        await actor.stop()

    run_virtual(main())


class Trace:
    def handed_on(self, request_id: str) -> dict[str, str]:
        return {"traceparent": f"00-{request_id}-01"}


def test_what_travels_comes_back_as_it_was() -> None:
    full = request(
        1,
        4,
        output_token_ids=(1, 2),
        cache_salt="s",
        trace=Trace(),
        rendered={"prompt_token_ids": [1]},
    )
    sampling = Sampling(max_tokens=3, structured=Structured("regex", "a+", prepared={"a": 1}))
    sent = as_it_travels(full)
    assert sent.trace == Handed({"traceparent": "00-r1-01"})
    assert sent.trace.handed_on("other") == {"traceparent": "00-r1-01"}
    assert as_it_travels(request(1, 4)).trace is None
    token = Token(3, "x", True, {3: TokenLogprob("x", -0.5, 1)})
    for one in (
        DispatchOrder([sent], True, False),
        sampling,
        Tokens("r1", [token]),
        End("r1", "stop"),
    ):
        assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("given", "needs", "rest"),
    [
        ({}, {}, {}),
        ({"num-cpus": "2", "dtype": "float32"}, {"CPU": 2.0}, {"dtype": "float32"}),
        ({"num_gpus": 0.5, "tensor_parallel_size": 2}, {"GPU": 0.5}, {"tensor_parallel_size": 2}),
        ({"resources": '{"a100": 1, "disk": 0}'}, {"a100": 1.0}, {}),
    ],
)
def test_what_an_actor_takes(
    given: dict[str, Any], needs: dict[str, float], rest: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr("kendall.server.engines.ray.options.vllm_is_for_cpus", lambda: True)
    assert needs_of(given) == (needs, rest)


def test_on_gpus_an_actor_takes_as_many_as_its_engine_computes_on(monkeypatch: Any) -> None:
    monkeypatch.setattr("kendall.server.engines.ray.options.vllm_is_for_cpus", lambda: False)
    assert needs_of({})[0] == {"GPU": 1.0}
    parallel = {"tensor_parallel_size": "4", "pipeline_parallel_size": 2}
    assert needs_of(parallel) == ({"GPU": 8.0}, parallel)
    assert needs_of({"num_gpus": 0})[0] == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_gpus": "many"}, "got --engine-arg num_gpus=many; expected a number >= 0"),
        ({"num_cpus": -1}, "got --engine-arg num_cpus=-1; expected a number >= 0"),
        ({"resources": "a100"}, r'resources=a100; .* for example {"a100": 1}'),
        ({"resources": "{}"}, "resources={};"),
        ({"resources": '{"a100": "x"}'}, "resources a100=x; expected a number"),
    ],
)
def test_what_is_no_number_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        needs_of(given)


def test_a_gateway_names_what_is_missing(monkeypatch: Any) -> None:
    from kendall.server.operations import serving
    from kendall.server.settings import Settings

    there = serving.importlib.util.find_spec
    monkeypatch.setattr(
        serving.importlib.util, "find_spec", lambda name: None if name == "ray" else there(name)
    )
    settings = Settings(model="tiny", served_model_name="tiny", engine="ray")
    if there("vllm") is not None:
        with pytest.raises(
            SpecError, match=r"Ray is not installed here; .*kendall\[ray\]: run `make setup-ray`"
        ):
            serving.choose_engine(settings)
    for other in ("emulated", "http"):
        elsewhere = Settings(
            model="tiny", served_model_name="tiny", engine=other, ray_address="auto"
        )
        with pytest.raises(SpecError, match=f"got --ray-address with --engine {other}"):
            serving.choose_engine(elsewhere)
