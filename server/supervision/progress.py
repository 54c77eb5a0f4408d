"""Notices what stands still: sequences are in service, and for too long no token came, of none of
them or of one.

None: the engine is replaced. That more requests arrive is no progress. One while others move: the
engine has forgotten it, and it is continued once where that is exact, else it fails with 504.
Looked at once a second from outside, so that the hot path pays nothing for it. A stillness in which
the event loop itself stood still does not count: each look adds what a timely look would have seen,
at most. An engine process that is gone or silent is noticed by its own watch, sooner; this one
finds what answers pings and makes no tokens, and a policy or a driver that no longer decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

from kendall.policies import Request, Running
from kendall.policies.text import counted
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.continuing import detach
from kendall.server.queue.policy_failures import PolicyFailures
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.clock import clock_of

if TYPE_CHECKING:
    from kendall.queueing.latency.law import LatencyModel

log = logging.getLogger("kendall.supervision")
EVERY = 1.0  # seconds between looks
STALLED = "sequence_stalled"  # code of an error
FORM_TIMES = 4  # compile times that a form may take in the engine, which computes meanwhile
# lawful times to the next token, prompts included, that may pass if that is longer than the limit
TOKENS = 20
WHOLE = 5  # lawful times to the end of an answer
RECENT, FEW = 100, 20  # answers whose pace is known; that have to be
UNKNOWN = 10  # times the limit, where nothing is known


class Stillness:
    """Seconds that nothing moved although something should have."""

    def __init__(self, longest_step: float = 1.5 * EVERY) -> None:
        self._longest_step = longest_step
        self._seen: Hashable = None
        self._last: float | None = None
        self.seconds = 0.0

    def look(self, now: float, state: Hashable, *, busy: bool) -> float:
        """`state` is the same as long as nothing moves. Returns the seconds counted so far."""
        passed = 0.0 if self._last is None else min(now - self._last, self._longest_step)
        self.seconds = self.seconds + passed if busy and state == self._seen else 0.0
        self._seen, self._last = state, now
        return self.seconds


class SilenceLimits:
    """Seconds that a server behind may say nothing of a call (`server.engines.proxied.Silence`),
    at least `timeout`. Of a whole answer nothing is seen until its end.

        the next event of a stream   TOKENS lawful times to the next token
        the first event, with a law  the same, with the prompt
        a whole answer with a limit  WHOLE times as long as an answer of that many tokens takes: by
                                     the law, else by the slowest of the RECENT answers
        else                         UNKNOWN times `timeout`
    """

    def __init__(self, timeout: float, law: Callable[[], LatencyModel | None]) -> None:
        self.least, self._law = timeout, law
        self._paces: deque[float] = deque(maxlen=RECENT)  # seconds for each token

    def learn(self, seconds: float, tokens: int) -> None:
        """See Silence."""
        self._paces.append(seconds / max(1, tokens))

    def seconds(
        self, request: Request, beside: int, *, limited: bool, streams: bool, flows: bool
    ) -> float:
        """See Silence."""
        law = self._law()
        if flows:
            lawful = 0.0 if law is None else TOKENS * law.padded(beside, 1, 0)
        elif streams and law is not None:
            lawful = TOKENS * law.padded(beside, 1, beside * request.prompt_tokens)
        elif limited and law is not None:
            prompts, batch_size = beside * request.prompt_tokens, beside + request.sequences - 1
            lawful = WHOLE * law.padded(batch_size, request.max_output_tokens, prompts)
        elif limited and len(self._paces) >= FEW:
            lawful = WHOLE * max(self._paces) * request.max_output_tokens
        else:
            lawful = UNKNOWN * self.least
        return max(self.least, lawful)


class Watched(Protocol):
    """What a `StuckWatch` reads of a queue: see `Batcher`."""

    @property
    def policy_failures(self) -> PolicyFailures: ...
    @property
    def resting(self) -> bool: ...
    @property
    def queue_length(self) -> int: ...
    @property
    def in_service(self) -> int: ...
    @property
    def ask(self) -> Callable[[], None]: ...
    def running(self) -> Sequence[Sequence[Running]]: ...
    def in_service_sequences(self) -> Sequence[Sequence[SequenceState]]: ...


class StuckWatch:
    """Looks at one queue; `on_stuck(reason)` is called once for each time it got stuck,
    `on_still(sequence, seconds)` for one sequence.
    """

    def __init__(
        self,
        batcher: Watched,
        timeout: float,
        law: Callable[[], LatencyModel | None],
        on_stuck: Callable[[str], None],
        on_still: Callable[[SequenceState, float], None] | None = None,
        *,
        form_time: float = 0.0,
    ) -> None:
        self._batcher = batcher
        self._timeout = timeout
        self._law = law
        self._on_stuck = on_stuck
        self._form_time = form_time  # seconds that a form takes to compile, at most
        self._on_still = on_still
        self._stillness = Stillness()
        self._each: dict[str, Stillness] = {}  # of the sequences in the engine
        self._tokens: dict[str, int] = {}  # at the last look
        self._moves = 0

    async def run(self) -> None:
        """Look until cancelled."""
        now = clock_of(asyncio.get_running_loop())
        while True:
            await asyncio.sleep(EVERY)
            self.look(now())

    def look(self, now: float) -> None:
        """One look."""
        batcher = self._batcher
        if batcher.policy_failures.error is not None:
            batcher.ask()
        busy = not batcher.resting and (
            batcher.in_service > 0 or batcher.policy_failures.error is not None
        )
        still = self._stillness.look(now, self._progress(), busy=busy)
        limit = self.limit() + (FORM_TIMES * self._form_time if self._waits_for_a_form() else 0.0)
        if still > limit:
            self._stillness = Stillness()
            why = (
                batcher.policy_failures.error
                or f"{counted(batcher.in_service, 'sequence')} in service"
            )
            self._on_stuck(
                f"nothing moved for {still:.0f} s ({why}, {batcher.queue_length} waiting)"
            )
        elif self._on_still is not None:
            self._look_at_each(now, limit, self._on_still)

    def limit(self) -> float:
        """Seconds that nothing may move now: the set time, or so many lawful times to the next
        token of all that is in service.
        """
        law, running = self._law(), [each for server in self._batcher.running() for each in server]
        if law is None or not running:
            return self._timeout
        prompts = sum(
            each.request.prompt_tokens for each in running if not each.output_tokens_so_far
        )
        return max(self._timeout, TOKENS * law.padded(len(running), 1, prompts))

    def _waits_for_a_form(self) -> bool:
        sequences = (
            sequence for server in self._batcher.in_service_sequences() for sequence in server
        )
        return any(
            sequence.engine_request.sampling.structured is not None
            and sequence.at.first_token is None
            for sequence in sequences
        )

    def _progress(self) -> int:
        """A number that changes with every look before which a sequence made a token or left."""
        before = self._tokens
        self._tokens = {
            running.request.id: running.output_tokens_so_far
            for server in self._batcher.running()
            for running in server
        }
        if any(self._tokens.get(request_id) != tokens for request_id, tokens in before.items()):
            self._moves += 1
        return self._moves

    def _look_at_each(
        self, now: float, limit: float, on_still: Callable[[SequenceState, float], None]
    ) -> None:
        watched: dict[str, Stillness] = {}
        overdue: list[tuple[SequenceState, float]] = []
        for sequence in (
            sequence for server in self._batcher.in_service_sequences() for sequence in server
        ):
            if sequence.stream is None or sequence.stop_detector.finish_reason is not None:
                continue  # not in the engine, or only padding
            stillness = self._each.get(sequence.id) or Stillness()
            seconds = stillness.look(now, self._tokens.get(sequence.id), busy=True)
            if seconds > limit:
                overdue.append((sequence, seconds))
            else:
                watched[sequence.id] = stillness
        self._each = watched
        for sequence, seconds in overdue:
            on_still(sequence, seconds)


def on_still(batcher: Batcher, sequence: SequenceState, seconds: float) -> None:
    """Take it out of the engine, and hand it over again behind the tokens it has; a second time,
    or where that is not exact, it fails.
    """
    reason = "also after it was submitted again" if sequence.continued else detach(sequence)
    if reason is not None:
        log.error("request %s got no token for %.0f s and fails: %s", sequence.id, seconds, reason)
        batcher.fail(
            sequence,
            "failed",
            STALLED,
            f"the engine produced no token of this answer for {seconds:.0f} s: {reason}",
        )
        return
    log.warning(
        ("request %s got no token for %.0f s; it is submitted to the engine again"),
        sequence.id,
        seconds,
    )
    sequence.continued = True
    batcher.recovery.renew(sequence)
