"""All observers hear every event; a fault of one harms no other, is counted each time, and is
logged once for each kind.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest

from kendall.server.queue.observers import Observers

EVENTS: dict[str, tuple[Any, ...]] = {
    "on_arrival": (object(),),
    "on_dispatch": (object(),),
    "on_preempt": (object(),),
    "on_idle": (3, 1.5),
    "on_settle": (object(),),
    "on_record": (object(),),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_fault_of_one_is_told_and_the_others_hear_the_event(
    event: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, sound = Mock(), Mock()
    getattr(faulty, event).side_effect = OSError("no room")
    observers = Observers([faulty, sound])
    with caplog.at_level(logging.ERROR, "kendall"):
        for _ in range(3):
            getattr(observers, event)(*EVENTS[event])
    assert [call.args for call in getattr(sound, event).call_args_list] == [EVENTS[event]] * 3
    assert observers.faults == 3
    assert [record.message for record in caplog.records] == [
        "Mock failed; it stays active, and further failures of it are not logged",
    ]


@pytest.mark.parametrize("event", EVENTS)
def test_one_that_is_added_hears_an_event_last_unless_it_is_to_hear_it_first(event: str) -> None:
    heard: list[str] = []

    def noting(name: str) -> Mock:
        observer = Mock()
        getattr(observer, event).side_effect = lambda *_: heard.append(name)
        return observer

    observers = Observers([noting("a"), noting("b")])
    observers.add(noting("last"))
    observers.add(noting("first"), first=True)
    getattr(observers, event)(*EVENTS[event])
    assert heard == ["first", "a", "b", "last"]
