"""How a sequence goes on when its engine was lost in the middle of it, so that the answer is one
that could have been.

    nothing made yet           from the start
    behind what was made       prompt + tokens so far become the new prompt. The next token's
                               distribution depends on the text so far only: exact for greedy
                               decoding; sampled without a seed, a draw of the same distribution
    from the start, compared   the same tokens are made again, dropped while they equal those the
                               client has, and what follows is new. For what reproduces but cannot
                               be resumed: a seed (its stream of chance begins at the first token),
                               and greedy decoding whose state lives in the output alone
    not at all                 sampled without a seed, with such a state

State in the output alone: presence and frequency penalties count output tokens, a grammar
(structured output) is parsed along the output; as part of a prompt the same tokens would not count.
The repetition penalty counts prompt and output alike and may go on. `FREE_OF_STATE` names what is
known to; any other parameter that was set is taken to have a state, one that is added later too.
Stop strings, limits and half characters are the gateway's own affair and are carried over the seam
(`StopDetector`, the engine's detokenizer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Literal

import msgspec

from kendall.server.engines.base import (
    EngineEnd,
    EngineRequest,
    FailureCode,
    Sampling,
    Token,
    TokenListener,
    TokenStream,
)
from kendall.server.queue.proxied import BEGUN, ProxiedSequence
from kendall.server.queue.sequence import SequenceState

Way = Literal["behind", "again", "none"]
FREE_OF_STATE = frozenset(
    {
        *(
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "logit_bias",
            "logprobs",
        ),
        *(
            "allowed_token_ids",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        ),
    }
)
OWN_RULE = "seed"
CANNOT = (
    "an answer sampled with {names} cannot be continued exactly; send it again, with a "
    "`seed` it could be"
)
DIFFERS = "the answer was interrupted, and the engine did not reproduce it; send it again"


def way_to_continue(sampling: Sampling, made: int) -> Way:
    """Which of the ways above, after `made` tokens."""
    if made == 0 or resumable(sampling):
        return "behind"
    return "again" if sampling.temperature == 0 or sampling.seed is not None else "none"


def resumable(sampling: Sampling) -> bool:
    """Whether the answer can be continued exactly behind what was made: it may be preempted."""
    if sampling.seed is not None and sampling.temperature != 0:
        return False
    states_of, plain = _states(type(sampling))
    return bool(states_of(sampling) == plain)


@cache
def _with_state(kind: type[Sampling]) -> tuple[str, ...]:
    return tuple(
        name for name in kind.__struct_fields__ if name not in FREE_OF_STATE and name != OWN_RULE
    )


@cache
def _states(kind: type[Sampling]) -> tuple[Callable[[Sampling], object], object]:
    """What reads these parameters, and what it reads where none is set. Once a dispatch."""
    states_of = attrgetter(*_with_state(kind))
    return states_of, states_of(kind(max_tokens=1))


def stateful(sampling: Sampling) -> list[str]:
    """Names of the parameters in use whose state lives in the output alone."""
    plain = type(sampling)(max_tokens=sampling.max_tokens)
    return [
        name
        for name in _with_state(type(sampling))
        if getattr(sampling, name) != getattr(plain, name)
    ]


class Replay:
    """Stands between a stream and its sequence until what the client has was made again, then
    steps aside.
    """

    def __init__(self, stream: TokenStream, sequence: SequenceState) -> None:
        self._stream = stream
        self._sequence = sequence
        self._known: Sequence[int] = tuple(sequence.output_token_ids)
        self._at = 0

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """Drop what is known; hand on the rest."""
        known = self._known[self._at : self._at + len(tokens)]
        if any(token.id != known_id for token, known_id in zip(tokens, known, strict=False)):
            self._sequence.on_failure(DIFFERS)
            return
        self._at += len(known)
        if self._sequence.running is not None:
            self._sequence.running.output_tokens_so_far = self._at
        if self._at == len(self._known):
            self._stream.listener = self._sequence
            if len(tokens) > len(known):
                self._sequence.on_tokens(tokens[len(known) :])

    def on_end(self, end: EngineEnd) -> None:
        """It ended before it came to where the client is."""
        del end
        self._sequence.on_failure(DIFFERS)

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """Nothing to compare any more."""
        self._sequence.on_failure(message, code)


def prepare(sequence: SequenceState) -> str | None:
    """Make the sequence's request what the next engine is to do; returns why it cannot continue,
    None where it can.
    """
    if isinstance(sequence, ProxiedSequence) and sequence.begun:
        return BEGUN
    made = sequence.output_token_ids
    match way_to_continue(sequence.engine_request.sampling, len(made)):
        case "behind":
            sequence.engine_request = msgspec.structs.replace(
                sequence.engine_request, output_token_ids=tuple(made)
            )
        case "again":
            sequence.engine_request = msgspec.structs.replace(
                sequence.engine_request, output_token_ids=()
            )
        case "none":
            return CANNOT.format(names=" and ".join(stateful(sequence.engine_request.sampling)))
    return None


def listener(
    stream: TokenStream, sequence: SequenceState, engine_request: EngineRequest
) -> TokenListener:
    """Who hears the stream of `engine_request`: the sequence, or a comparison in front of it."""
    return (
        Replay(stream, sequence)
        if sequence.output_token_ids and not engine_request.output_token_ids
        else sequence
    )


def listen(sequence: SequenceState, stream: TokenStream) -> None:
    """The sequence hears the engine that has its request now."""
    sequence.stream = stream
    assert sequence.batch is not None
    sequence.on_gap = sequence.batch.on_gap
    stream.listener = listener(stream, sequence, sequence.engine_request)


def detach(sequence: SequenceState) -> str | None:
    """The sequence hears no more of the engine that has it, and is ready to be handed over again.
    Returns why that would not be exact, or None.
    """
    stream, sequence.stream = sequence.stream, None
    if stream is not None:
        stream.listener = None
    if sequence.stop_detector.finish_reason is not None:  # it is whole and leaves with its batch
        return None
    return prepare(sequence)


def interrupted(sequence: SequenceState, most: int) -> str | None:
    """Its engine is gone. Returns why it cannot go on with the next one, or None: it saw more than
    `most` engines die, or would not be exact.
    """
    if len(sequence.deaths) > most and sequence.stop_detector.finish_reason is None:
        return (
            f"{len(sequence.deaths)} engines were lost while this request was in service: "
            "it may be the cause"
        )
    reason = detach(sequence)
    return None if reason is None else f"the engine was lost, and {reason}"
