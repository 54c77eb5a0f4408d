"""The gateway's own requests to a server (a calibration): a greedy completion of exactly so many
tokens. Over token ids with `ignore_eos`; in words, with `max_tokens` alone, where the server takes
neither (`transformers serve`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from server.engines.base import EngineRequest
from server.engines.passing import PassedCall

log = logging.getLogger("kendall.engine")
COMPLETIONS = "/v1/completions"
WORD = " the"  # one token in nearly every vocabulary
FEW_WORDS = 16  # fewer teach nothing: the marks around a prompt count too


@dataclass(frozen=True, slots=True)
class OwnCall:
    """`wanted`: tokens of the answer. `words`: of the prompt; None: it is token ids."""

    passed: PassedCall
    wanted: int
    words: int | None

    @property
    def remedy(self) -> str:
        """Of an answer with another number of tokens."""
        if self.words is None:
            return "the server must honour ignore_eos and max_tokens"
        return (
            "the server takes no ignore_eos, so the model must not end its answers before "
            "max_tokens: calibrate with a model without an end-of-sequence token"
        )


class OwnForm:
    """How they are written for the servers of one engine."""

    def __init__(self) -> None:
        self._in_words = False
        self._tokens_per_word = 1.0

    def use_words(self) -> None:
        """A server refused token ids with `ignore_eos`."""
        if not self._in_words:
            log.warning(
                "a server refused a completion over token ids with ignore_eos: calibration sends "
                "words, and max_tokens alone"
            )
        self._in_words = True

    def call(self, model: str, engine_request: EngineRequest) -> OwnCall:
        """A prompt has one word at least."""
        wanted = wanted_tokens(engine_request)
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(engine_request.prompt_token_ids),
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        words = None
        if self._in_words:
            words = max(1, round(len(engine_request.prompt_token_ids) / self._tokens_per_word))
            body["prompt"] = WORD.strip() + WORD * (words - 1)
            del body["ignore_eos"]
        headers = (("content-type", "application/json"),)
        passed = PassedCall(COMPLETIONS, msgspec.json.encode(body), headers)
        return OwnCall(passed, wanted, words)

    def learn(self, call: OwnCall, prompt_tokens: int | None) -> None:
        """What the server counted in a prompt of words."""
        if call.words is not None and call.words >= FEW_WORDS and prompt_tokens:
            self._tokens_per_word = prompt_tokens / call.words


def wanted_tokens(engine_request: EngineRequest) -> int:
    """Of the gateway's own request: as forced, else its limit."""
    forced = engine_request.forced_output_tokens
    return engine_request.sampling.max_tokens if forced is None else forced
