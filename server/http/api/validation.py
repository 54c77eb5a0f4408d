"""A body as one of the API's models: errors that name the field, in the client's words."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive

from kendall.server.http.api.unserved import (
    HINTS,
    MOST_EXTRA,
    UNSERVED,
    check_unserved,
    nearest,
    unknown_field,
    unknown_to_all,
)
from kendall.server.http.bodies import parsed, read_body
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import MAX_ECHO, brief, excerpt, place_of
from kendall.server.security.settings import MAX_BODY_BYTES
from kendall.server.settings import Settings

log = logging.getLogger("kendall")
MOST_ERRORS = 1024  # of one body that are looked at: each is an object
NOT_KNOWN = "which neither OpenAI nor vLLM has"  # a field
_Model = TypeVar("_Model", bound=BaseModel)


def validate(body: bytes, model: type[_Model]) -> _Model:
    """The body as `model`. Raises ApiError 400 (never 422), naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:
            raise ApiError(
                400,
                "invalid_request",
                f"got a body with {error.error_count()} invalid values; expected none",
            ) from None
        errors = error.errors(include_url=False, include_context=False)
        first = _first(errors)
        if (misspelt := _misspelt(first, body, model)) is not None:
            raise misspelt from None
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise unknown_field(str(first["loc"][0]), model.model_fields) from None
        if first["type"] == "value_error" and not first["loc"]:
            # fields that do not go together: the message names the one to change first
            words = first["msg"].removeprefix("Value error, ")
            raise ApiError(
                400, "invalid_request", words, param=field_in(words, model.model_fields)
            ) from None
        if not first["loc"] and first["type"] in ("model_type", "json_invalid"):
            got = excerpt(body[: 2 * MAX_ECHO].decode(errors="replace"))
            invalid = first["type"] == "json_invalid"
            raise ApiError(
                400,
                "invalid_json" if invalid else "invalid_request",
                f"got {got}; expected "
                + (f"JSON ({first['msg']})" if invalid else "a JSON object"),
            ) from None
        where = (
            brief(place_of(first["loc"], from_json(body), missing=first["type"] == "missing"))
            if first["loc"]
            else ""
        )
        got = (
            f"; got {excerpt(first['input'])}"
            if where and first["type"] not in ("missing", "value_error")
            else ""
        )
        said = first["msg"].removeprefix("Value error, ")
        raise ApiError(
            400,
            "invalid_request",
            f"{where + ': ' if where else ''}{said}{got}",
            param=where or None,
        ) from None


def _first(errors: Sequence[Any]) -> Any:
    """The one that is told."""
    for each in errors:
        if each["type"] == "too_long":  # of a union: not that it is no text
            return each
    for each in errors:  # a field that is missing may be there under this name
        if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
            return each
    return errors[0]


def _misspelt(first: Any, body: bytes, model: type[BaseModel]) -> ApiError | None:
    """Of a field that is missing: the one that is there under nearly its name, if there is one."""
    if first["type"] != "missing" or len(first["loc"]) != 1:
        return None
    missing = first["loc"][0]
    sent = set(from_json(body)).difference(model.model_fields, UNSERVED, HINTS)
    if len(sent) > MOST_EXTRA:
        return None
    known = [*model.model_fields, *UNSERVED]
    for name in sorted(sent):
        if nearest(name, known) == missing:
            return unknown_to_all(name, known, NOT_KNOWN)
    return None


def field_in(message: str, fields: Container[str]) -> str | None:
    """The first of the fields that a message names."""
    return next((word for word in re.findall(r"\w[\w-]*", message) if word in fields), None)


async def parse(
    receive: Receive,
    model: type[_Model],
    most: int = MAX_BODY_BYTES,
    context: int | None = None,
) -> _Model:
    """The body as `model`. Raises ApiError 400 (never 422) or 413, naming the field. `context`: of
    the model, tokens, where it is known.
    """
    body = await read_body(receive, most)
    return await parsed(body, lambda text: validate(text, model), context)


def check_extra(
    settings: Settings,
    call: BaseModel,
    harmless: Mapping[str, Any] = MappingProxyType({}),
    served: Collection[str] = (),
    *,
    why: str = NOT_KNOWN,
) -> None:
    """Check the fields that the call's model does not have. Raises ApiError; unknown names are
    ignored if the settings say so.
    """
    if not call.model_extra:
        return
    extra = {name: value for name, value in call.model_extra.items() if name not in served}
    refuse_unknown(settings, check_unserved(extra, harmless), type(call).model_fields, why)


def refuse_unknown(
    settings: Settings, unknown: Sequence[str], known: Iterable[str], why: str
) -> None:
    """Raises ApiError 400 for the first one, unless the settings say that they are ignored."""
    if not unknown:
        return
    if settings.unknown_fields == "refuse":
        raise unknown_to_all(unknown[0], known, why)
    log.debug("ignored unknown fields: %s", ", ".join(brief(name) for name in unknown))
