"""The gateway's own requests to a server (a calibration): a greedy completion of exactly so many
tokens. Over token ids with `ignore_eos`; in words, with `max_tokens` alone, where the server takes
neither (`transformers serve`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from kendall.server.engines.base import EngineRequest
from kendall.server.engines.proxied import ProxiedCall

log = logging.getLogger("kendall.engine")
COMPLETIONS = "/v1/completions"
WORD = " the"  # one token in nearly every vocabulary
FEW_WORDS = 16  # fewer teach nothing: the marks around a prompt count too
SEVERAL = 1.5  # tokens per word, beyond which a word is taken to have several


@dataclass(frozen=True, slots=True)
class OwnCall:
    """`wanted`: tokens of the answer. `words`: of the prompt; None: it is token ids."""

    passed: ProxiedCall
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
    """How they are written for the servers of one engine: in words from the first one on that a
    server answered in words alone.
    """

    def __init__(self) -> None:
        self._in_words = False
        self._fewest: tuple[int, int] | None = None  # words, and the tokens that a server counted
        self._most: tuple[int, int] | None = None

    def call(self, model: str, engine_request: EngineRequest, *, in_words: bool = False) -> OwnCall:
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
        if in_words or self._in_words:
            words = self._words(len(engine_request.prompt_token_ids))
            body["prompt"] = WORD.strip() + WORD * (words - 1)
            del body["ignore_eos"]
        headers = (("content-type", "application/json"),)
        passed = ProxiedCall(COMPLETIONS, msgspec.json.encode(body), headers)
        return OwnCall(passed, wanted, words)

    def answered(self, call: OwnCall, prompt_tokens: int | None, refusal: str | None) -> None:
        """A call was; `refusal`: of its other form. Learns how many tokens words are."""
        if call.words is None:
            return
        if not self._in_words:
            log.warning(
                "a server refused a completion over token ids with ignore_eos (%s): calibration "
                "sends words, and max_tokens alone",
                refusal,
            )
        self._in_words = True
        if prompt_tokens and call.words >= FEW_WORDS:
            counted = call.words, prompt_tokens
            self._fewest = min(self._fewest or counted, counted)
            self._most = max(self._most or counted, counted)

    def _words(self, tokens: int) -> int:
        """That have so many tokens: by a line through the shortest and the longest prompt. Of one
        length it is not known whether a word has several tokens or marks surround the prompt.
        """
        if self._fewest is None or self._most is None:
            return tokens
        (few, least), (many, most) = self._fewest, self._most
        if many >= few + FEW_WORDS and most > least:
            slope = (most - least) / (many - few)
        else:
            slope = least / few if least > SEVERAL * few else 1.0
        return max(1, round(few + (tokens - least) / slope))


def wanted_tokens(engine_request: EngineRequest) -> int:
    """Output tokens of the gateway's own request: the forced number, else its limit."""
    forced = engine_request.forced_output_tokens
    return engine_request.sampling.max_tokens if forced is None else forced
