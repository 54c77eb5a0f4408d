"""What a server says of itself: its models, its bounds, whether it tokenises.

/v1/models                        names; max_model_len (vLLM, SGLang)
/metrics                          vllm:cache_config_info: KV memory; max_num_seqs where it says so
/server_info, /get_server_info    max_running_requests (SGLang), max_num_seqs (vLLM in
                                  development mode)
/props                            total_slots, n_ctx (llama.cpp)
/tokenize                         whether there is one that counts (vLLM, SGLang)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.http.prompts import TOKENIZE, counted_tokens
from kendall.server.engines.http.upstream import LOST, MODELS, Upstream

EXPECTED = "expected a server with OpenAI's API"
STARTING = (502, 503, 504)  # of a server that loads its model, or of a proxy before it
_KEYS = (401, 403)
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SEQUENCES = ("max_num_seqs", "max_running_requests", "total_slots")
_CONTEXT = ("max_model_len", "n_ctx")
AT_ONCE = 256 << 10  # bytes that are parsed on the event loop
MOST = 1 << 40  # a larger bound is none
_Read = TypeVar("_Read")


class StartingError(Exception):
    """It is there and does not serve yet; the message says what it answers."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Facts of one server; None where it says nothing."""

    names: tuple[str, ...]
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_tokens: int | None = None
    tokenizes: bool = False


async def described(upstream: Upstream) -> Description:
    """Raises EngineStartError where it is no such server, StartingError where it will be one, LOST
    where nothing answers.
    """
    models = await _models(upstream)
    names = _names(models)
    said = [models[0], *[facts async for facts in _facts(upstream)]]
    question = json.dumps({"model": names[0], "prompt": "a"}).encode()
    try:
        tokenizes = counted_tokens(*await upstream.ask(TOKENIZE, question, 5.0)) is not None
    except LOST:
        tokenizes = False
    return Description(
        names=names,
        max_model_len=_first(said, _CONTEXT),
        max_num_seqs=_first(said, _SEQUENCES),
        kv_cache_tokens=_first(said, ("kv_cache_tokens",)),
        tokenizes=tokenizes,
    )


async def _models(upstream: Upstream) -> list[dict[str, Any]]:
    if (fault := await upstream.fault()) is not None and "answers" in fault:
        raise StartingError(fault)
    status, body = await upstream.get(MODELS)
    if status in STARTING:
        raise StartingError(f"it answers {status} to {MODELS}")
    if status in _KEYS:
        raise EngineStartError(
            f"got {status} from {upstream.url}{MODELS}; expected a key that it accepts: "
            "--engine-api-key"
        )
    models = await _said(body, _listed)
    if status != 200 or not models:
        what = f"{status}" if status != 200 else "no model"
        raise EngineStartError(
            f"got {what} from {upstream.url}{MODELS}; {EXPECTED}: --engine-url is its URL without "
            "/v1"
        )
    return models


async def named(upstream: Upstream) -> tuple[str, ...]:
    """Names of its models as it lists them now; none where it does not. Raises LOST."""
    status, body = await upstream.get(MODELS)
    return _names(await _said(body, _listed)) if status == 200 else ()


def _listed(value: Any) -> list[dict[str, Any]]:
    """The models of an answer."""
    data = value.get("data") if isinstance(value, dict) else None
    return [
        model
        for model in (data if isinstance(data, list) else ())
        if isinstance(model, dict) and isinstance(model.get("id"), str)
    ]


def _names(models: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(str(model["id"]) for model in models)


async def _said(body: bytes, read: Callable[[Any], _Read]) -> _Read:
    """Apply `read` to its JSON, which may be of any kind and size."""
    if len(body) <= AT_ONCE:
        return read(_loaded(body))
    return await asyncio.to_thread(lambda: read(_loaded(body)))


def _loaded(body: bytes) -> Any:
    """None where it cannot be read, however it is wrong."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


async def _facts(upstream: Upstream) -> AsyncIterator[dict[str, Any]]:
    """What its other routes say, in one dictionary a route; none of them has to be there."""
    for path in ("/metrics", "/server_info", "/get_server_info", "/props"):
        try:
            status, body = await upstream.get(path)
        except LOST:
            continue
        if status == 200 and path == "/metrics":
            info = _INFO.search(body.decode(errors="replace"))
            labels = {} if info is None else dict(_LABEL.findall(info[1]))
            blocks, size = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
            yield labels | ({"kv_cache_tokens": blocks * size} if blocks and size else {})
        elif status == 200:
            yield await _said(body, _numbers)


def _numbers(value: Any) -> dict[str, Any]:
    """The numbers of an object, those of the objects in it too; of one name the outermost first."""
    facts: dict[str, Any] = {}
    objects = [value]
    for each in objects:  # it grows
        if isinstance(each, dict):
            for key, part in each.items():
                if type(part) is int:
                    facts.setdefault(key, part)
            objects += each.values()
    return facts


def _first(said: list[dict[str, Any]], names: tuple[str, ...]) -> int | None:
    """The first of these that is a number above 0."""
    values = (_whole(facts.get(name)) for facts in said for name in names)
    return next((value for value in values if value), None)


def _whole(value: Any) -> int | None:
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found <= MOST else None


def refusal(reason: str, url: str) -> EngineStartError:
    """Nothing answers at this URL."""
    return EngineStartError(
        f"got no answer from {url} ({reason}); {EXPECTED} there: start it, or correct --engine-url"
    )
