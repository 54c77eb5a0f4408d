"""A call that is passed on whole, from its arrival to its one outcome: bytes of another server's
answer in place of tokens. It has one record, however many sequences it asks for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Protocol, cast

import msgspec

from kendall.policies import QueueState
from kendall.server.engines.base import EngineRequest, FailureCode
from kendall.server.engines.proxied import Answered, Cause, Refused
from kendall.server.queue.sequence import Batch, Consumer, Owner, SequenceState
from kendall.server.queue.stop_detector import StopDetector

MOST_RETURNS = 1  # a call that was returned is dispatched once more
AGAIN = "also when it was sent again"
OK = 200
NOT_THE_CALLS = (401, 403, 407, 408, 429)  # the gateway's key, or the server's load
IN_THE_ANSWER = "reported an error in its answer"
BEGUN = "an answer of another server cannot be continued"
# calls that a server returned and no other has answered, from which on it gets no new ones
UNDECIDED = 3
ELSEWHERE = 30.0  # seconds for which a returned call waits for another server, and its server too


class ProxiedConsumer(Consumer, Protocol):
    """Where the answer to a passed call goes."""

    def on_head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """The answer begins."""

    def on_bytes(self, data: bytes) -> Awaitable[None] | None:
        """More of it. Returns what to wait for before more is read, where there is enough."""

    def on_refused(self, answer: Refused) -> None:
        """What to write in place of the gateway's own error; `on_failed` follows."""


class CountedEnd(StopDetector):
    """Counts; the other server finds where the answer ends."""

    __slots__ = ()

    def count(self, tokens: int) -> None:
        """So many more."""
        self.output_tokens += tokens

    def finish(self, end: Answered, limit: int | None) -> None:
        """The answer is whole. What the server counted itself holds; else `limit` where it ended
        there, as a piece may hold several tokens.
        """
        self.finish_reason = end.finish_reason
        if end.output_tokens is not None:
            self.output_tokens = end.output_tokens
        elif limit is not None and end.finish_reason == "length":
            self.output_tokens = max(self.output_tokens, limit)


class ProxiedSequence(SequenceState):
    """Listens to the answer of another server."""

    __slots__ = ("begun",)

    def __init__(
        self,
        owner: Owner,
        engine_request: EngineRequest,
        stop_detector: StopDetector,
        consumer: Consumer,
    ) -> None:
        super().__init__(owner, engine_request, stop_detector, consumer)
        self.begun = False  # the answer began: it cannot be had elsewhere any more

    @property
    def _client(self) -> ProxiedConsumer:
        return cast("ProxiedConsumer", self.consumer)

    @property
    def _counted(self) -> CountedEnd:
        return cast("CountedEnd", self.stop_detector)

    @property
    def _sent_limit(self) -> int | None:
        """Of its one sequence, where the call has a limit."""
        request, call = self.engine_request.request, self.engine_request.call
        sent = call is not None and call.most_tokens is not None and request.sequences == 1
        return request.max_output_tokens if sent else None

    @property
    def _over(self) -> bool:
        return self.stop_detector.finish_reason is not None or self.outcome is not None

    def begin_service(self, batch: Batch, epoch: int) -> None:
        """It was dispatched: its body is sent with the token limit in force."""
        super().begin_service(batch, epoch)
        call = self.engine_request.call
        if call is not None and call.under is not None:
            body, most = call.under(self._owner.max_output_tokens)
            sent = msgspec.structs.replace(call, body=body, most_tokens=most)
            self.engine_request = msgspec.structs.replace(self.engine_request, call=sent)

    def on_head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """The answer begins."""
        self.begun = True
        if not self._over:
            self._client.on_head(headers, streamed=streamed)

    def on_bytes(self, data: bytes, tokens: int) -> Awaitable[None] | None:
        """On to the client as they are."""
        if self._over:
            return None
        if tokens:
            self._came()
            self._counted.count(tokens)
            if self.running is not None:
                self.running.output_tokens_so_far = self.stop_detector.output_tokens
        return self._client.on_bytes(data)

    def _came(self) -> None:
        """Tokens; between those of several answers, which follow each other, there are no gaps."""
        now, newest = self._owner.now(), self._newest_token
        if newest is None:
            self.at.first_token = now
        elif self.engine_request.request.sequences == 1:
            self.on_gap(now - newest)
        self._newest_token = now

    def on_answered(self, end: Answered) -> None:
        """Whole, with the other server's own counts where it gave some."""
        if self._over:
            return
        self._counted.finish(end, self._sent_limit)
        if end.prompt_tokens is not None:
            request = self.engine_request.request
            self.engine_request = msgspec.structs.replace(
                self.engine_request,
                request=request._replace(prompt_tokens=end.prompt_tokens),
            )
        self.cached_tokens = end.cached_tokens
        self.at.last_token = self._owner.now()
        self._owner.member_ended(self)

    def on_refused(self, answer: Refused) -> None:
        """The other server's error is the client's answer."""
        if self._over:
            return
        self._client.on_refused(answer)
        own_fault = 400 <= answer.status < 500 and answer.status not in NOT_THE_CALLS
        code = "invalid_request" if own_fault else "engine_error"
        said = f"answered {answer.status}" if answer.status != OK else answer.fault or IN_THE_ANSWER
        self._owner.fail(self, "failed", code, f"the server behind {said}")

    def on_returned(
        self,
        reason: str,
        answer: Refused | None = None,
        code: FailureCode = "engine_unavailable",
        *,
        cause: Cause = "failed",
    ) -> None:
        """Back to the head of the queue, once; then `answer`, where there is one, is the
        client's.
        """
        if self._over:
            return
        if self.interruptions < MOST_RETURNS:
            self.interruptions += 1
            self._note_server(cause)
            self._owner.put_back([self])
        elif answer is not None:
            self.on_refused(answer)
        else:
            self.interruptions += 1
            self.on_failure(f"{reason}, {AGAIN}", code)

    @property
    def returned_by(self) -> tuple[int, ...]:
        """The servers that had it and gave no answer."""
        call = self.engine_request.call
        return () if call is None else call.returned_by

    def _note_server(self, cause: Cause) -> None:
        if cause == "gone":
            return
        call = self.engine_request.call
        assert call is not None
        assert self.batch is not None
        own = (self.batch.server_id,)
        noted = msgspec.structs.replace(
            call,
            returned_by=call.returned_by + own,
            failed_by=call.failed_by + (own if cause == "failed" else ()),
        )
        self.engine_request = msgspec.structs.replace(self.engine_request, call=noted)


class ReturnedCalls:
    """Calls that a server returned and that have no answer yet: they go to another server, and
    that one gets little until they have: it may be what fails.
    """

    def __init__(self) -> None:
        self._calls: dict[str, tuple[ProxiedSequence, float]] = {}

    def add(self, sequences: Sequence[SequenceState], now: float) -> None:
        """They go back into the queue."""
        for each in sequences:
            if isinstance(each, ProxiedSequence) and each.returned_by:
                self._calls[each.id] = each, now + ELSEWHERE

    def views(
        self, state: QueueState, in_use: Callable[[], Collection[int]], now: float
    ) -> Iterator[tuple[QueueState, float]]:
        """`state` as the policy is to see it, one view after the other, until one has something to
        start; and when to ask again at the latest. `in_use`: the servers that take work.

        First the whole queue and the servers that may serve all of it. Then each other server with
        what it may serve: not what it returned, and nothing new from UNDECIDED such calls on.
        """
        if self._calls:
            self._calls = {
                name: entry
                for name, entry in self._calls.items()
                if entry[0].outcome is None and entry[0].stop_detector.finish_reason is None
            }
        if not self._calls or len(up := in_use()) < 2:
            yield state, math.inf
            return
        undecided = [each for each, until in self._calls.values() if now < until]
        waiting = {each.id: each for each, _ in self._calls.values() if each.batch is None}
        kept = {
            server_id: {
                name
                for name, each in waiting.items()
                if server_id in each.returned_by and self._avoids(each, up, now)
            }
            for server_id in up
        }
        doubtful = {
            server_id
            for server_id in up
            if sum(server_id in each.returned_by for each in undecided) >= UNDECIDED
        }
        again = min((at for _, at in self._calls.values() if at > now), default=math.inf)
        apart = {server_id for server_id in up if kept[server_id]} | doubtful
        others = [server for server in state.servers if server.id not in apart]
        yield dataclasses.replace(state, servers=others), again
        for server in state.servers:
            if server.id in apart:
                may = [
                    each
                    for each in state.waiting
                    if each.request.id not in kept[server.id]
                    and (server.id not in doubtful or each.request.id in waiting)
                ]
                yield dataclasses.replace(state, servers=[server], waiting=may), again

    def _avoids(self, sequence: ProxiedSequence, up: Collection[int], now: float) -> bool:
        """Whether it waits for another server: there is one, and it has not waited for long."""
        return not set(up) <= set(sequence.returned_by) and now < self._calls[sequence.id][1]


def sequence_of(
    owner: Owner,
    engine_request: EngineRequest,
    eos: Collection[int],
    consumer: Consumer,
) -> SequenceState:
    """A request that has arrived: tokens are expected for it, or another server's bytes."""
    if engine_request.call is None:
        ends = eos if engine_request.ends_by_itself else ()
        detector = StopDetector(engine_request.sampling, ends)
        return SequenceState(owner, engine_request, detector, consumer)
    counted = CountedEnd(engine_request.sampling, ())
    return ProxiedSequence(owner, engine_request, counted, consumer)
