"""Places that callers share: who gets the next one, and what one that leaves gives back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kendall.server.runtime.turns import Turns


class Callers:
    """Takes places, and notes who got one."""

    def __init__(self, places: int) -> None:
        self.turns, self.served = Turns(places), list[str]()

    async def come(self, *callers: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._take(caller)) for caller in callers]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    async def _take(self, caller: str) -> None:
        await self.turns.take(caller)
        self.served.append(caller)

    async def leave(self, *callers: str) -> None:
        for caller in callers:
            self.turns.give(caller)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.mark.parametrize(("places", "held"), [(1, 1), (2, 1), (3, 2)])
def test_one_caller_leaves_a_place_to_others_where_there_are_two(places: int, held: int) -> None:
    async def main() -> None:
        callers = Callers(places)
        await callers.come(*"aaaa")
        assert callers.served == ["a"] * held
        assert (callers.turns.waiting, callers.turns.waiting_of("a")) == (4 - held,) * 2
        await callers.come("b")
        assert callers.served == ["a"] * held + ["b"] * (places > 1)
        await callers.leave("a")
        assert callers.served.count("a") == held + 1

    asyncio.run(main())


def test_callers_take_turns_and_who_has_fewest_goes_first() -> None:
    async def main() -> None:
        callers = Callers(3)
        await callers.come(*"aab")
        await callers.come(*"bacbc")
        assert callers.served == ["a", "a", "b"]
        assert [callers.turns.waiting_of(caller) for caller in "abcd"] == [1, 2, 2, 0]
        await callers.leave("a")
        assert callers.served[3:] == ["c"], "who has none before who has one"
        await callers.leave("a")
        assert callers.served[4:] == ["a"], "a has none now"
        await callers.leave("b")
        assert callers.served[5:] == ["b"], "nor has b"
        await callers.leave("a")
        assert callers.served[6:] == ["c"], "c and b have one each: c was served longer ago"
        await callers.leave("c", "c", "b")
        assert callers.turns.waiting == 0

    asyncio.run(main())


def test_one_that_leaves_the_queue_is_passed_over() -> None:
    async def main() -> None:
        callers = Callers(1)
        await callers.come("a")
        gone, stays = await callers.come("b", "b")
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        assert (callers.turns.waiting, callers.turns.waiting_of("b")) == (1, 1)
        await callers.leave("a")
        assert callers.served == ["a", "b"]
        assert stays.done()
        (last,) = await callers.come("c")
        last.cancel()
        with suppress(asyncio.CancelledError):
            await last
        assert (callers.turns.waiting, callers.turns.waiting_of("c")) == (0, 0)

    asyncio.run(main())


def test_one_that_leaves_as_it_gets_its_place_gives_it_to_the_next() -> None:
    async def main() -> None:
        callers = Callers(1)
        await callers.come("a")
        gone, _ = await callers.come("b", "c")
        callers.turns.give("a")
        gone.cancel()  # its place is given, and it has not run since
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert callers.served == ["a", "c"]

    asyncio.run(main())


def test_one_that_was_cancelled_before_it_ran_takes_no_place() -> None:
    async def main() -> None:
        callers = Callers(1)
        await callers.come("a")
        gone, _ = await callers.come("b", "c")
        gone.cancel()
        callers.turns.give("a")  # before it has left the queue
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert callers.served == ["a", "c"]

    asyncio.run(main())
