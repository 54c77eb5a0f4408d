"""The look at a server before a run: whether it answers, which model it serves, how it lets an
answer's length be set.

One cheap `GET /v1/models`, and `/ready` where the server is Kendall. No question goes through a
proxy, as no request of the run does: HTTP_PROXY and its like are not read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kendall.loadgen.sending.client.stream import read_error
from kendall.loadgen.sending.client.target import FORCED_FIELD, LoadError, Target
from kendall.policies.text import SpecError
from kendall.remote import (
    NO_TLS,
    NOT_TRUSTED,
    REFUSED,
    key_refusal,
    server_root,
    unanswered,
)

ANSWER_LIMIT = 10.0  # seconds that one answer may take
MIN_LIMIT = 0.01  # seconds: a client's timeout must be above 0
RETRY = 0.5  # seconds between two looks at a server that is not ready
WAIT_FOR_IT = "--ready-check-timeout SECONDS waits for it"


@dataclass(frozen=True, slots=True)
class LoadEndpoint:
    """A server as its list of models describes it."""

    models: tuple[str, ...] = ()
    kendall: bool = False
    # request fields that set an answer's length; None: it does not say
    length_fields: frozenset[str] | None = None

    @classmethod
    def read(cls, content: bytes) -> LoadEndpoint:
        """From a list of models; an unknown endpoint where it is none."""
        try:
            entries: list[dict[str, Any]] = msgspec.json.decode(content)["data"]
            models = tuple(str(entry["id"]) for entry in entries)
            first = entries[0]
            fields = first.get("output_length_fields")
            return cls(
                models,
                first.get("owned_by") == "kendall",
                None if fields is None else frozenset(map(str, fields)),
            )
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            return UNKNOWN


UNKNOWN = LoadEndpoint()


class _NotReadyError(Exception):
    """It may be soon; the message is one line."""


async def look_at(target: Target, timeout: float | None = None) -> LoadEndpoint:
    """Wait at most `timeout` seconds for a server that is ready; None looks once. Raises
    LoadError, SpecError.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (timeout or 0.0)
    url = server_root(target.base_url)
    limit = ANSWER_LIMIT
    verify = target.trust.verification(url)
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    headers |= dict(target.headers)
    waiting = False
    async with httpx.AsyncClient(
        base_url=url, headers=headers, verify=verify, trust_env=False, timeout=ANSWER_LIMIT
    ) as client:
        while True:
            try:
                if timeout:
                    limit = min(ANSWER_LIMIT, max(deadline - loop.time(), MIN_LIMIT))
                return await _look(client, url, target.model, limit)
            except _NotReadyError as error:
                if loop.time() + RETRY > deadline:
                    remedy = "is the server up, is --base-url right? " + WAIT_FOR_IT
                    if timeout is not None:
                        remedy = (
                            f"expected it to be ready within the {timeout:g} s of "
                            "--ready-check-timeout"
                            if timeout
                            else "without a ready server its model is unknown: give --model"
                        )
                    raise LoadError(f"{error}; {remedy}") from None
                if not waiting:
                    sys.stderr.write(f"kendall: {error}; waiting at most {timeout:g} s for it\n")
                waiting = True
            await asyncio.sleep(RETRY)


async def _look(client: httpx.AsyncClient, url: str, model: str, limit: float) -> LoadEndpoint:
    where = f"{url}/v1/models"
    response = await _get(client, "/v1/models", url, limit)
    if response.status_code in REFUSED:
        raise SpecError(
            key_refusal(where, response.status_code, read_error(response.content)[1], "--api-key")
        )
    if response.is_redirect:
        raise LoadError(
            f"{where} redirects to {response.headers['location']}; expected the server itself: "
            "give that address as --base-url"
        )
    endpoint, answered = UNKNOWN, f"answered {response.status_code}"
    if response.status_code == httpx.codes.OK:
        endpoint = LoadEndpoint.read(response.content)
        kind = response.headers.get("content-type", "").partition(";")[0]
        answered = (
            "lists no model"
            if kind == "application/json"
            else f"{answered} with {kind or 'no content type'}, not with a list of models"
        )
    if not (endpoint.models or model):
        raise LoadError(
            f"{where} {answered}; expected a list of models: correct --base-url, or name the model "
            "with --model"
        )
    if endpoint.kendall and not (await _get(client, "/ready", url, limit)).is_success:
        raise _NotReadyError(
            f"the gateway at {url} is not ready: its engine is starting or lost, or it is "
            "shutting down"
        )
    if model and endpoint.models and model not in endpoint.models:
        raise SpecError(
            f"got --model {model}; expected one that {url} serves: {', '.join(endpoint.models)}"
            + ("" if endpoint.kendall else " (--ready-check-timeout 0 sends without this check)")
        )
    return endpoint


async def _get(client: httpx.AsyncClient, path: str, url: str, limit: float) -> httpx.Response:
    """Any answer but a failure of the server, which may be over soon."""
    try:
        response = await client.get(path, timeout=limit)
    except httpx.InvalidURL as error:
        raise SpecError(f"got --base-url {url}: {error}; expected http://HOST:PORT") from None
    except httpx.TimeoutException:
        raise _NotReadyError(f"no answer from {url}{path} within {limit:.2g} s") from None
    except httpx.HTTPError as error:
        why = unanswered(error, url)
        told = f"no answer from {url}{path}: {why}"
        if why.startswith((NOT_TRUSTED, NO_TLS)):  # later, too
            raise LoadError(told) from None
        raise _NotReadyError(told) from None
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR and path != "/ready":
        raise _NotReadyError(
            f"{url}{path} answered {response.status_code}: {read_error(response.content)[1]}"
        )
    return response


def with_lengths(target: Target, endpoint: LoadEndpoint) -> tuple[Target, str | None]:
    """The target with drawn lengths enforced in a way that the server accepts, and a note where
    policies can see them. Raises LoadError where it accepts none.

    natural       only max_tokens: the model ends the answer
    forced        Kendall's sealed field, which no policy can see; one max_tokens for all requests
    ignore_eos    vLLM's field, with each request's own length as max_tokens
    """
    fields = endpoint.length_fields
    if fields is not None and FORCED_FIELD in fields:
        return target, None
    if fields is not None and "ignore_eos" not in fields:
        raise LoadError(
            f"{target.base_url} lets no request set the length of its answer; expected "
            "--natural-lengths, which sends only max_tokens"
        )
    why = (
        "this gateway runs without --allow-forced-lengths"
        if endpoint.kendall
        else "this server does not say that it is a Kendall gateway"
    )
    return dataclasses.replace(
        target, ignore_eos=True
    ), f"{why}; each request carries ignore_eos and its drawn length as max_tokens"
