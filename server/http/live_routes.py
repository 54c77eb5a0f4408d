"""`/admin/prediction` and `/admin/advice`: what the live model of a gateway, or of watched servers,
says.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.datastructures import QueryParams

from kendall.policies import SpecError
from kendall.policies.text import suggest
from kendall.queueing.json_form import fields_of, json_object
from kendall.server.http.api.openapi import errors
from kendall.server.http.api.parameters import ADVICE_QUERY
from kendall.server.http.api.validation import field_in
from kendall.server.http.client_connection import watch_client
from kendall.server.live.answers import AdviceAnswer
from kendall.server.live.model import LiveModel
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import brief

PREDICTION_QUERY = ("what_if", "rate_factor")


class Modelled(Protocol):
    """Raises ApiError 503 before there is a live model."""

    def live_model(self) -> LiveModel: ...


async def _at_another_rate(live: LiveModel, request: Request, factor: str) -> dict[str, Any]:
    """What-ifs where so many times as many requests come."""
    asked = {"rate_factor": factor}
    try:
        found = await live.questions.ask(
            ("what_if", factor),
            lambda: live.what_ifs_at(asked),
            partial(watch_client, request.scope, request.receive),
        )
    except SpecError as error:
        raise ApiError(400, "invalid_parameter", str(error), param="rate_factor") from None
    in_force, *others = found or [None]
    answer = {
        "rate_factor": float(factor),
        "what_if": others,
        "what_if_in_force": in_force,
        "reason": live.why_nothing() if in_force is None else None,
    }
    return json_object(answer)


def add_live(app: FastAPI, gateway: Modelled) -> None:
    """Both routes."""

    @app.get("/admin/prediction", responses=errors(400, 401, 403, 500, 503, 504))
    async def prediction(
        request: Request, *, what_if: bool = False, rate_factor: str | None = None
    ) -> dict[str, Any]:
        live = gateway.live_model()
        for key in request.query_params:
            if key not in PREDICTION_QUERY:
                names = f"{' or '.join(PREDICTION_QUERY)}{suggest(key, PREDICTION_QUERY)}"
                message = f"got {brief(key)}; expected {names}"
                raise ApiError(400, "invalid_parameter", message, param=key)
        _each_once(request.query_params)
        if rate_factor is not None:
            return await _at_another_rate(live, request, rate_factor)
        if what_if:
            await live.questions.ask(
                "what_if",
                live.update_what_if,
                partial(watch_client, request.scope, request.receive),
            )
        reason = live.why_nothing() if live.prediction is None else None
        answer = {
            "prediction": live.prediction,
            "age": live.age,
            "outdated": live.outdated,
            "stopped": live.stopped,
            "what_if_outdated": live.what_if_outdated,
            "what_if": live.what_if,
            "what_if_in_force": live.what_if_in_force,
            "what_if_at": live.what_if_at,
            "load_balancer": live.load_balancer,
            "reason": reason,
        }
        return json_object(answer)

    @app.get(
        "/admin/advice",
        responses=errors(400, 401, 403, 500, 503, 504),
        openapi_extra={"parameters": ADVICE_QUERY},
    )
    async def advice(request: Request) -> dict[str, Any]:
        live, asked = gateway.live_model(), request.query_params
        watch = partial(watch_client, request.scope, request.receive)
        _each_once(asked)
        try:
            found: AdviceAnswer = await live.questions.ask(
                ("advice", *sorted(asked.multi_items())), lambda: live.advice(asked), watch
            )
        except SpecError as error:
            named = field_in(str(error), asked)
            raise ApiError(400, "invalid_objective", str(error), param=named) from None
        reason = None if found.advice else live.why_nothing()
        return json_object(fields_of(found) | {"reason": reason})


def _each_once(asked: QueryParams) -> None:
    """Raises ApiError where a parameter stands twice."""
    for key in asked:
        if len(values := asked.getlist(key)) > 1:
            got = " and ".join(f"{brief(key)}={brief(value)}" for value in values[:2])
            raise ApiError(400, "invalid_objective", f"got {got}; expected it once", param=key)
