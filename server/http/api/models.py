"""`/v1/models`: the one model under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI

from kendall.server.engines.base import describe_engine
from kendall.server.gateway import Gateway
from kendall.server.http.api.answers import ModelEntry, ModelList
from kendall.server.http.api.checked_call import check_model
from kendall.server.http.api.openapi import answers
from kendall.server.http.api.schema import FORCED_FIELD


def _entry(gateway: Gateway, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "kendall",
        "parent": None,
    }
    entry["root"] = gateway.settings.model  # a benchmark without --model reads id and root
    entry["output_length_fields"] = [
        *((FORCED_FIELD,) if gateway.settings.allow_forced_lengths else ()),
        "ignore_eos",
    ]
    if gateway.lifecycle.started:
        entry |= describe_engine(gateway.batcher.capabilities, gateway.settings.served_model_name)
    return entry


def add_models(app: FastAPI, gateway: Gateway) -> None:
    """The list, and one by its name (which may hold slashes); both also where KServe has them."""
    router = APIRouter()

    @router.get("/v1/models", responses=answers(ModelList, 401, 500))
    async def models() -> dict[str, Any]:
        settings = gateway.settings
        names = (settings.served_model_name, *settings.served_model_aliases)
        return {"object": "list", "data": [_entry(gateway, name) for name in names]}

    @router.get("/v1/models/{name:path}", responses=answers(ModelEntry, 401, 404, 500))
    async def model(name: str) -> dict[str, Any]:
        check_model(gateway.settings, name)
        return _entry(gateway, name)

    app.include_router(router)
    app.include_router(router, prefix="/openai", include_in_schema=False)
