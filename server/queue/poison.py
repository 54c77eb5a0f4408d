"""Finds the request that kills engines, so that its neighbours in service do not fail with it.

    a death                          every sequence in service is charged with it; the next engine
                                     gets all of them back
    the second one under a sequence  it is a suspect. The queue waits; the engine gets the suspects
                                     back one at a time, the fewest tokens first (most kill with
                                     their prompt). One that makes `TRIAL_TOKENS` more, or ends, is
                                     cleared, and keeps running while the next one is tried
    a death during a trial           the suspect on trial is the cause: it fails with 500 and is
                                     refused for a while
    the second one, alone            the same without a trial

The restart budget gets the deaths of a convicted request back, but only once an engine has made
tokens of something else. The gateway asks the next engine for a few itself (`KillTrial`) before
that one gets anything else, so that requests that kill engines one after the other do not end the
gateway. An engine that dies whatever it is given uses the budget up, and the gateway ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kendall.server.engines.base import EngineRequest
from kendall.server.queue.kill_trial import KillTrial
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.clock import clock_of
from kendall.server.runtime.errors import ApiError

log = logging.getLogger("kendall.supervision")
TRIAL_TOKENS = 16  # more than an engine has under way when it dies
LOOK = 0.05  # seconds between two looks at the suspect on trial
REFUSED_FOR = 600.0  # seconds
MOST_REFUSED = 1024  # prompts; the oldest are forgotten
CODE = "engine_killed"
# losses of one server are numbered from a multiple of this on: a sequence may have seen those of
# several
LOSSES = 10**9
FAILED = (
    "the engine died each time this request was in service, the last time with no other suspect; "
    "do not send it again"
)


class Trials:
    """Who goes back to an engine, and when, after a death.

    `restart` hands sequences to the engine, `over` ends the wait of the queue, `prove` begins a
    proof that the engine is sound.
    """

    def __init__(
        self,
        suspect_after: int,
        restart: Callable[[Sequence[SequenceState]], None],
        over: Callable[[], None],
        prove: Callable[[Callable[[bool], None]], KillTrial],
        *,
        first_death: int = 0,
    ) -> None:
        self._suspect_after = suspect_after
        self._restart, self._over, self._prove = restart, over, prove
        self._proof: KillTrial | None = None  # under way
        self._loop = asyncio.get_running_loop()
        self._now = clock_of(self._loop)
        self._suspects: deque[SequenceState] = deque()
        self._others: list[SequenceState] = []
        self._made: int  # tokens that the suspect had when its trial began
        self._timer: asyncio.TimerHandle | None = None
        self._deaths = first_death  # the number of the last one
        self._died_at = 0.0
        self.suspect: SequenceState | None = None  # on trial
        self.convicted = 0
        # deaths by a convicted request, not yet given back to the budget
        self.explained: set[int] = set()
        self._given_back: set[int] = set()
        self.on_sound: Callable[[int], None] | None = None  # gives that many deaths back

    @property
    def pauses_dispatch(self) -> bool:
        """Whether the queue waits for a trial or a proof."""
        return self.suspect is not None or self._proof is not None

    @property
    def proving(self) -> bool:
        """Whether the engine works on the gateway's own request."""
        return self._proof is not None

    def died(self, sequences: Sequence[SequenceState]) -> SequenceState | None:
        """An engine died with these in service; returns the one that is now certain to be the
        cause.
        """
        self._deaths += 1
        self._died_at = self._now()
        served = [
            sequence
            for sequence in sequences
            if sequence.stream is not None and sequence.stop_detector.finish_reason is None
        ]
        guilty = self._cause(served)
        self.stop()
        if guilty is None:
            for sequence in served:
                sequence.deaths = (*sequence.deaths, self._deaths)
        else:
            self.convicted += 1
            self.explained.update({*guilty.deaths, self._deaths} - self._given_back)
            losses = len(guilty.deaths) + 1
            log.error(
                "request %s killed the engine %d times; it fails, and its prompt is refused for a "
                "while",
                guilty.id,
                losses,
            )
        return guilty

    def resume(self, sequences: Sequence[SequenceState]) -> None:
        """Another engine serves: all of them at once, or suspects one at a time and then the
        others.
        """
        suspects = [sequence for sequence in sequences if self.suspected(sequence)]
        self._suspects = deque(
            sorted(suspects, key=lambda sequence: len(sequence.output_token_ids))
        )
        self._others = [sequence for sequence in sequences if not self.suspected(sequence)]
        if suspects:
            log.warning(
                "%d sequences in service each saw %d engines die: they are tried one at a time",
                len(suspects),
                self._suspect_after,
            )
        if self.explained:
            self._proof = self._prove(self._proved)
        else:
            self._next()

    def settled(self, sequence: SequenceState) -> None:
        """The engine is sound if it made this answer's last token after the last death."""
        if not self.explained:  # nearly always
            return
        if sequence.at.last_token is not None and sequence.at.last_token > self._died_at:
            self._sound()

    def suspected(self, sequence: SequenceState) -> bool:
        """Whether it may be what kills engines."""
        return len(sequence.deaths) >= self._suspect_after

    def _cause(self, served: Sequence[SequenceState]) -> SequenceState | None:
        if self.suspect is not None:
            return None if self._passed(self.suspect) else self.suspect
        alone = len(served) == 1 and len(served[0].deaths) + 1 >= self._suspect_after
        return served[0] if alone else None

    def _passed(self, sequence: SequenceState) -> bool:
        over = sequence.outcome is not None or sequence.stop_detector.finish_reason is not None
        return over or len(sequence.output_token_ids) >= self._made + TRIAL_TOKENS

    def _proved(self, sound: bool) -> None:
        self._proof = None
        if sound:
            self._sound()
        else:
            log.warning("the engine did not complete the gateway's own request")
        self._next()

    def _next(self) -> None:
        """The next suspect's trial; after the last one everything else."""
        self.suspect = None
        while self._suspects:
            sequence = self._suspects.popleft()
            if sequence.outcome is not None:  # its client has left
                continue
            self.suspect, self._made = sequence, len(sequence.output_token_ids)
            self._timer = self._loop.call_later(LOOK, self._look)
            self._restart([sequence])
            return
        others, self._others = self._others, []
        self._restart([sequence for sequence in others if sequence.outcome is None])
        self._over()

    def _look(self) -> None:
        suspect = self.suspect
        if suspect is None:
            return
        if not self._passed(suspect):
            self._timer = self._loop.call_later(LOOK, self._look)
            return
        if suspect.outcome in (None, "completed"):
            suspect.deaths = ()
            self._sound()
        self._next()

    def _sound(self) -> None:
        self._given_back |= self.explained
        deaths, self.explained = self.explained, set()
        if deaths:
            self._give_back(deaths)

    def _give_back(self, deaths: Collection[int]) -> None:
        if self.on_sound is not None:
            self.on_sound(len(deaths))

    def stop(self) -> None:
        """No trial goes on."""
        self.suspect = None
        if self._proof is not None:
            self._proof.stop()
            self._proof = None
        self._suspects.clear()
        self._others = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ServerTrials(Trials):
    """The trials on one of several servers, while the others go on."""

    on_forgiven: Callable[[int, int], None]

    def _give_back(self, deaths: Collection[int]) -> None:
        """Each to the server that died."""
        for server_id in {death // LOSSES - 1 for death in deaths}:
            losses = sum(death // LOSSES - 1 == server_id for death in deaths)
            self.on_forgiven(server_id, losses)


class RejectedPrompts:
    """Prompts that killed engines, by caller and hash; neither is kept in the clear."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[tuple[str, bytes], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, engine_request: EngineRequest) -> None:
        """From now on, for a while."""
        mark = _mark(engine_request)
        self._until.pop(mark, None)
        self._until[mark] = self._now() + REFUSED_FOR
        while len(self._until) > MOST_REFUSED:
            del self._until[next(iter(self._until))]

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Raises ApiError 400 where one of them is refused."""
        if not self._until:
            return
        prompts = {
            id(engine_request.prompt_token_ids): engine_request for engine_request in requests
        }  # the choices of a prompt share it
        for engine_request in prompts.values():
            left = self._until.get(_mark(engine_request), 0.0) - self._now()
            if left > 0:
                raise ApiError(
                    400,
                    CODE,
                    f"this prompt killed the engine; it is refused for {left:.0f} s more",
                    param="prompt",
                )


def _mark(engine_request: EngineRequest) -> tuple[str, bytes]:
    return engine_request.caller, hashlib.blake2b(
        array("q", engine_request.prompt_token_ids).tobytes(), digest_size=16
    ).digest()
