"""Conversations of several turns: the next one is sent a think time after the last answer has
ended, with everything that was said before.

The instants of the timetable are those of first turns, which leave as requests of the open loop do.
A later turn is intended at the end of the last answer and its think time after it. A turn that is
not answered in full ends its conversation: there is nothing to go on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kendall.loadgen.datasets import Message, Prompt
from kendall.loadgen.sending.client.client import LoadExchange
from kendall.loadgen.sending.client.target import prompt_text
from kendall.loadgen.sending.pacing import Alarms, pace, pacing_clock
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.measurement.record import Record

if TYPE_CHECKING:
    from kendall.loadgen.sending.in_flight import InFlightRequests


def conversations(timetable: Timetable) -> list[range]:
    """The rows of each conversation; of each request, where there are none."""
    size = len(timetable)
    starts = range(size) if timetable.turn is None else np.flatnonzero(timetable.turn == 1).tolist()
    return [range(start, end) for start, end in zip(starts, [*starts[1:], size], strict=True)]


class Conversation:
    """What was said so far in one conversation."""

    def __init__(self, in_flight: InFlightRequests) -> None:
        self._in_flight = in_flight
        self._messages: list[Message] = []

    def exchange(self, index: int, instant: float) -> LoadExchange:
        """The request of the next row; a request without turns is as its row says."""
        job = self._in_flight.job
        if job.timetable.turn is None:
            return self._in_flight.exchange(index, instant)
        self._messages += _messages(job.prompts[index])
        prompt: Prompt = list(self._messages)
        if not job.target.chat:
            prompt = "\n".join(str(message["content"]) for message in self._messages)
        return self._in_flight.exchange(index, instant, prompt)

    def answered(self, exchange: LoadExchange) -> None:
        """The answer to the last turn is part of what comes next, where there are turns."""
        if self._messages:
            self._messages.append({"role": "assistant", "content": exchange.text})

    async def go_on(
        self,
        turns: range,
        alarms: Alarms,
        exchange: LoadExchange,
        recorded: asyncio.Future[Record],
    ) -> None:
        """Send the turns after the first, which is under way; returns when the last one has been
        sent, or one has failed or had no answer within the drain limit.
        """
        loop, job = asyncio.get_running_loop(), self._in_flight.job
        thinking = job.timetable.think_time
        for index in turns[1:]:
            ended_at = None
            with suppress(TimeoutError):
                async with asyncio.timeout(job.options.drain_limit):
                    record = await recorded
                if record.outcome == "completed":
                    ended_at = record.released_at
            if ended_at is None:
                self._in_flight.counters.asked -= turns.stop - index
                return
            self.answered(exchange)
            ready_at = ended_at + (0.0 if thinking is None else float(thinking[index]))
            exchange = self.exchange(index, ready_at)
            if ready_at > loop.time():
                await alarms.until(ready_at)
            recorded = self._in_flight.begin(exchange)


def _messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, list):
        return prompt
    text = prompt if isinstance(prompt, str) else prompt_text(prompt)
    return [{"role": "user", "content": text}]


async def talk(in_flight: InFlightRequests, start_at: float) -> None:
    """Begin every conversation at its own instant; returns when no turn is left to send."""
    rows = conversations(in_flight.job.timetable)
    firsts = in_flight.job.timetable.intended_at[[each.start for each in rows]]
    talking: set[asyncio.Task[object]] = set()
    with pacing_clock() as clock, closing(Alarms(clock)) as alarms:

        def prepare(place: int, instant: float) -> Callable[[], None]:
            conversation = Conversation(in_flight)
            first = conversation.exchange(rows[place].start, instant)
            return partial(begin, rows[place], conversation, first)

        def begin(turns: range, conversation: Conversation, first: LoadExchange) -> None:
            recorded = in_flight.begin(first)
            talking.add(in_flight.spawn(conversation.go_on(turns, alarms, first, recorded)))

        await pace(start_at + firsts, prepare)
        await asyncio.wait(talking)
