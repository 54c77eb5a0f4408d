"""Where a load goes, with which keys, and what one request of it looks like: the bytes of its
body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kendall.loadgen.datasets import Prompt
from kendall.options import option, within
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import IntArray
from kendall.queueing.errors import CommandError
from kendall.remote import SYSTEM, Trust, check_key, server_root

GATEWAY = "Gateway"  # panel of the help of `kendall sweep`
FORCED_FIELD = "kendall_forced_output_tokens"  # read by the engine alone
# headers that make up the request itself
OWN_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
        "transfer-encoding",
        "x-request-id",
    }
)
# fields of the body that carry what is measured, each with the reason
OWN_FIELDS = {
    "stream": "every answer is streamed",
    "stream_options": "every answer is streamed",
    "prompt": "--prompt-tokens or --dataset-path sets it",
    "messages": "--dataset-path with --chat sets it",
    "model": "--model sets it",
    "max_tokens": "--max-tokens sets it",
    "max_completion_tokens": "--max-tokens sets it",
    "ignore_eos": "--ignore-eos sets it",
    "n": "each request has one answer",
    "predicted_output_tokens": "--predictor sets it",
    FORCED_FIELD: "--output-tokens sets it",
}
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


class LoadError(CommandError):
    """The run cannot begin; the message is one line."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a gateway that is measured: sent, never written to a file, never shown; and the
    certificates it may show. An admin key is for switching and asking, where the gateway has one.

    Raises SpecError for a key that cannot be sent.
    """

    api_key: str | None = option(
        GATEWAY,
        "With --base-url: key sent as a bearer token; never written to a file.",
        secret=True,
    )
    admin_key: str | None = option(
        GATEWAY, "With --base-url: key for a gateway with --admin-key.", secret=True
    )
    trust: Trust = within(GATEWAY, Trust)

    def __post_init__(self) -> None:
        check_key(self.api_key, "--api-key")
        check_key(self.admin_key, "--admin-key")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a call to /admin: an admin key opens everything."""
        key = self.admin_key or self.api_key
        return {"authorization": f"Bearer {key}"} if key else {}


NO_KEYS = Keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the load goes and in what form."""

    base_url: str
    model: str
    # the same for all; None: the largest drawn length, or each its own where nothing is sealed
    max_tokens: int | None = None
    chat: bool = False
    ignore_eos: bool = False  # for servers without the sealed field: max_tokens is the drawn length
    # answers end where the model ends them, at max_tokens at the latest
    natural_lengths: bool = False
    api_key: str | None = None
    trust: Trust = SYSTEM
    n: int = 1  # sequences that each request asks for
    models: tuple[str, ...] = ()  # of a mix; each request then names its own
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # names in lower case
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # added to every body

    @property
    def url(self) -> str:
        return server_root(self.base_url) + (
            "/v1/chat/completions" if self.chat else "/v1/completions"
        )

    @property
    def lengths(self) -> str:
        """How an answer's length is set."""
        return "natural" if self.natural_lengths else "ignore_eos" if self.ignore_eos else "forced"

    def limit(self, output_tokens: int, largest: int) -> int:
        """`max_tokens` of a request of this drawn length; `largest` is the run's."""
        if self.ignore_eos:
            return min(output_tokens, self.max_tokens or output_tokens)
        if self.natural_lengths:
            return self.max_tokens or output_tokens
        return self.max_tokens or largest

    def body(
        self,
        prompt: Prompt,
        output_tokens: int,
        limit: int,
        seed: int,
        predicted: float | None = None,
        *,
        model: str | None = None,
    ) -> bytes:
        """JSON of one request; where lengths are forced, only the sealed field tells two of them
        apart.

        Raises SpecError where the endpoint cannot take such a prompt.
        """
        body: dict[str, Any] = {
            "model": model or self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": seed,
            "max_tokens": limit,
        }
        if isinstance(prompt, list):
            if not self.chat:
                raise SpecError("got a dataset of conversations; expected --chat, which sends them")
            body["messages"] = prompt
        elif self.chat:
            text = prompt if isinstance(prompt, str) else prompt_text(prompt)
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = prompt if isinstance(prompt, str) else prompt.tolist()
        if self.n > 1:
            body["n"] = self.n
        if self.ignore_eos:
            body["ignore_eos"] = True
        elif not self.natural_lengths:
            body[FORCED_FIELD] = output_tokens
        if predicted is not None:
            body["predicted_output_tokens"] = predicted
        body |= self.extra_body
        return msgspec.json.encode(body)


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """A JSON object without the fields that the load sets itself. Raises SpecError."""
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise SpecError(
            f"got --extra-body {text!r:.80}; expected a JSON object, for example "
            f"'{{\"top_p\": 0.9}}' ({error})"
        ) from None
    for name in fields:
        if name in OWN_FIELDS:
            raise SpecError(
                f"got --extra-body with {name}; expected other fields: {OWN_FIELDS[name]}"
            )
    return fields


def prompt_text(prompt: IntArray) -> str:
    """Text of about as many tokens for a chat: single letters, one to a token in most
    vocabularies.
    """
    return " ".join(LETTERS[prompt % len(LETTERS)].tolist())
