"""A server with OpenAI's API that is no gateway, as a sweep measures it: under its own policy,
continuous batching on `--max-num-seqs` slots, in the order of arrival.

It answers the questions that a sweep asks of a gateway, as far as its API and its `/metrics` go: no
policy is switched, nothing is recorded there (loadgen.compare.client_side infers the dispatches).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kendall.loadgen.gateway.gateway_process import (
    HEALTH_LIMIT,
    GatewayClient,
    GatewayError,
    GatewayLostError,
)
from kendall.loadgen.sending.client.endpoint import look_at
from kendall.loadgen.sending.client.target import NO_KEYS, Keys, Target
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.policies.text import SpecError
from kendall.server_metrics import read_counters

COME_BACK_LIMIT = 60.0  # seconds for a server that somebody else must start again
ASSUMED_CONTEXT = 131_072  # tokens, of a server that does not say


class _ServedModel(msgspec.Struct):
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel] = []


async def is_plain(url: str, keys: Keys = NO_KEYS) -> bool:
    """Whether the server there lists models and is no gateway. Raises LoadError, SpecError."""
    target = Target(base_url=url, model="", api_key=keys.api_key, trust=keys.trust)
    return not (await look_at(target)).kendall


def with_own_policy(given: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields for a server that is no gateway. Raises SpecError."""
    url = given["base_url"]
    for name in ("policies", "orders"):
        if given.get(name):
            raise SpecError(
                f"got --{name} with --base-url {url}, which is no gateway; expected none: the "
                "server has its own policy"
            )
    for name, example in (
        ("max_num_seqs", "the number of sequences it serves at once, vLLM's --max-num-seqs"),
        ("latency", f"a law: `kendall calibrate {url} --output law.json` measures it"),
    ):
        if given.get(name) is None:
            raise SpecError(
                f"got --base-url {url}, which is no gateway, without --{name.replace('_', '-')}; "
                f"expected {example}"
            )
    policy = f"continuous:max_batch_size={given['max_num_seqs']}"
    return given | {"plain_server": True, "policies": (policy,), "bracket": 0.0}


class PlainServerClient(GatewayClient):
    """Questions that a sweep asks of a gateway, answered from the server's API and `/metrics`."""

    def __init__(self, url: str, keys: Keys, slots: int, policy: str) -> None:
        super().__init__(url, keys)
        self._keys_given, self._slots, self._policy = keys, slots, policy

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The present state, or the policy in force, which does not change."""
        del body
        match method, path:
            case "PUT", "/admin/policy":
                return {"epoch": 0}
            case "GET", "/admin/state":
                return await self._state()
            case _:
                raise GatewayError(f"{method} {path}: {self.url} is no gateway")

    async def _state(self) -> dict[str, Any]:
        counters = await read_counters(self.url, self._keys_given.api_key, self._keys_given.trust)
        running, waiting = 0, 0  # where it does not tell
        if not isinstance(counters, str):
            running, waiting = int(counters.running), int(counters.waiting)
        return {
            "unanswered": running + waiting,
            "in_service": running,
            "queue_length": waiting,
            "policy": self._policy,
            "effective_max_batch_size": self._slots,
            "engine": {
                "max_num_seqs": self._slots,
                "max_model_len": await self._context(),
            },
        }

    async def _models(self) -> httpx.Response | None:
        key = self._keys_given.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with contextlib.suppress(httpx.HTTPError):
            return await self._client.get("/v1/models", headers=headers, timeout=HEALTH_LIMIT)
        return None

    async def _context(self) -> int:
        answer = await self._models()
        if answer is None:
            raise GatewayLostError(f"no answer from {self.url}/v1/models")
        try:
            models = msgspec.json.decode(answer.content, type=_ServedModels).data
        except msgspec.MsgspecError:
            models = []
        return (models[0].max_model_len if models else None) or ASSUMED_CONTEXT

    async def is_ready(self) -> bool:
        """Whether it lists its models."""
        answer = await self._models()
        return answer is not None and answer.status_code == httpx.codes.OK

    async def is_healthy(self) -> bool:
        """As `is_ready`: not every server has a /health."""
        return await self.is_ready()


class PlainServer:
    """A `SweptGateway` that runs already and is none."""

    def __init__(self, plan: SweepPlan, keys: Keys = NO_KEYS) -> None:
        assert plan.base_url is not None
        (policy,) = plan.policies
        self.client: GatewayClient = PlainServerClient(
            plan.base_url, keys, plan.max_num_seqs, policy
        )
        self.record_file = Path()  # it writes none
        self._served = False

    async def start(self) -> None:
        """See `SweptGateway`; waits a while for one that is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + COME_BACK_LIMIT
        while not await self.client.is_ready():
            if loop.time() > deadline or not self._served:
                raise GatewayLostError(f"no server lists its models at {self.client.url}")
            await asyncio.sleep(1)
        self._served = True

    async def stop(self) -> None:
        await self.client.__aexit__()

    async def why_lost(self) -> str | None:
        return None if await self.client.is_healthy() else f"no server answers at {self.client.url}"
