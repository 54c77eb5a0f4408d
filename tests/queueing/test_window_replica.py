"""The predicting process's copy of the window is the window, however it is cut into messages;
the producer keeps nothing.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest

from kendall.queueing.estimation.window.producer import CallGroups, WindowProducer, row
from kendall.queueing.estimation.window.replica import WindowReplica
from kendall.queueing.estimation.window.snapshot import (
    CENSORED,
    COLUMN,
    ENDED,
    WIDTH,
    WITHOUT_LENGTH,
    Snapshot,
)
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.measurement.record import Record
from tests.queueing.estimation_windows import record

POLICY = "capped:max_batch_size=8"


@dataclass
class Everything:
    """The same in plain lists that never forget: what a window says by its definition."""

    seconds: float
    most: int
    epoch: int = 0
    epoch_at: float = -math.inf
    carried_from: float = -math.inf
    arrivals: list[float] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    rows: list[tuple[float, ...]] = field(default_factory=list)

    def begin_epoch(self, epoch: int, at: float, *, carry_lengths: bool) -> None:
        self.epoch, self.epoch_at = epoch, at
        self.arrivals, self.retries, self.lost = [], [], []
        if not carry_lengths:
            self.rows, self.carried_from = [], at

    def on_arrival(self, at: float, *, retry: bool) -> None:
        self.arrivals.append(at)
        self.retries += [at] if retry else []

    def on_record(self, each: Record) -> None:
        assert each.arrived_at is not None
        if each.dispatched_at is not None:
            self.rows.append(row(each, each.arrived_at, each.dispatched_at))
        elif each.epoch == self.epoch:
            self.lost.append(each.released_at or each.arrived_at)

    def check(self, seen: Snapshot, now: float) -> None:
        oldest = self.arrivals[-self.most] if len(self.arrivals) > self.most else -math.inf
        start = max(self.epoch_at, now - self.seconds, oldest)
        assert (seen.epoch, seen.epoch_at, seen.start, seen.now) == (
            self.epoch,
            self.epoch_at,
            start,
            now,
        )
        assert seen.arrivals.tolist() == [at for at in self.arrivals if at > start]
        assert seen.retries == sum(at > start for at in self.retries)
        assert seen.lost_at.tolist() == [at for at in self.lost if at > start]
        kept = [
            each
            for each in self.rows[-self.most :]
            if each[COLUMN["dispatched_at"]] >= now - self.seconds
            or each[COLUMN["server_free_at"]] > start
        ]
        np.testing.assert_array_equal(seen.rows, np.reshape(kept, (-1, len(COLUMN))))
        assert seen.carried_from == max(self.carried_from, now - self.seconds)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(8))
def test_however_the_feed_is_cut_the_mirror_is_the_window(seed: int) -> None:
    """Arrivals, retries, losses, two epochs without and one with forgotten lengths, gaps beyond
    the window, more rows than are kept.
    """
    rng = np.random.default_rng(seed)
    seconds, most = 30.0, 60
    producer, replica = WindowProducer(most=most), WindowReplica(seconds=seconds, most=most)
    window, truth = Window(seconds=seconds, most=most), Everything(seconds, most)
    now = 0.0
    checks = 0
    for number in range(1500):
        now += rng.exponential(0.1) if rng.random() < 0.995 else 40.0
        kind = rng.random()
        retry = bool(rng.random() < 0.1)
        each = (
            record(number, now, epoch=truth.epoch)
            if kind < 0.8
            else _lost(number, now, truth.epoch)
        )
        for side in (producer, window, truth):
            side.on_arrival(now, retry=retry)
            side.on_record(each)
            if number in (400, 900, 1300):
                side.begin_epoch(number, now, carry_lengths=number != 900)
        if rng.random() < 0.05:
            replica.add(pickle.loads(pickle.dumps(producer.take())))
            if rng.random() < 0.7:
                truth.check(replica.snapshot(POLICY, now), now)
                truth.check(window.snapshot(POLICY, now), now)
                checks += 1
    assert checks > 20


def _lost(number: int, at: float, epoch: int) -> Record:
    return record(number, at, epoch=epoch, outcome="abandoned", dispatched_at=None, released_at=at)


def test_what_was_taken_is_forgotten() -> None:
    producer = WindowProducer()
    producer.on_arrival(1.0, retry=True)
    producer.on_record(record(1, 1.0))
    producer.on_record(_lost(2, 1.0, 0))
    first, second = producer.take(), producer.take()
    assert [len(first.arrivals), len(first.retries), len(first.lost), len(first.rows)] == [
        1,
        1,
        1,
        WIDTH,
    ]
    assert [len(second.arrivals), len(second.retries), len(second.lost), len(second.rows)] == [
        0,
        0,
        0,
        0,
    ]


def test_a_feed_that_nobody_takes_is_bounded() -> None:
    producer = WindowProducer(most=50)
    for number in range(1000):
        producer.on_arrival(float(number), retry=True)
        producer.on_record(record(number, float(number)))
        producer.on_record(_lost(number, float(number), 0))
    delta = producer.take()
    assert (
        max(len(delta.arrivals), len(delta.retries), len(delta.lost), len(delta.rows) // WIDTH)
        <= 100
    )
    assert delta.arrivals[-1] == delta.retries[-1] == delta.lost[-1] == 999.0


def test_a_mirror_without_news_says_so() -> None:
    with pytest.raises(ValueError, match="expected at least one `add`"):
        WindowReplica().snapshot(POLICY, 1.0)


def test_a_message_is_small() -> None:
    """5 s at 500 requests/s: 128 bytes a row and 16 an arrival, no more than 1 % beyond."""
    producer = WindowProducer()
    for number in range(2500):
        producer.on_arrival(float(number))
        producer.on_record(record(number, float(number)))
    assert len(pickle.dumps(producer.take(), protocol=5)) < 1.01 * 2500 * 144


@pytest.mark.parametrize("cuts", [1, 3, 7])
def test_the_sequences_of_a_call_are_one_arrival(cuts: int) -> None:
    """However the stream is cut into messages; two calls at one instant are two arrivals."""
    producer, replica = WindowProducer(), WindowReplica()
    calls = [("a", 1.0, 3), ("b", 1.0, 1), ("c", 2.0, 8), ("d", 3.0, 1), ("e", 4.0, 2)]
    for number, (name, at, size) in enumerate(calls):
        for _ in range(size):
            producer.on_arrival(at, retry=name == "c", call=name)
        if number % cuts == 0:
            replica.add(producer.take())
    replica.add(producer.take())
    found = replica.snapshot(POLICY, 5.0)
    assert found.arrivals.tolist() == [at for _, at, _ in calls]
    assert found.call_sizes.tolist() == [size for *_, size in calls]
    assert found.retries == 1
    assert found.since(1.5).call_sizes.tolist() == [8, 1, 2]


def test_where_each_call_is_one_sequence_nothing_is_said_of_calls() -> None:
    window = Window()
    for number in range(5):
        window.on_arrival(float(number), call=str(number))
    found = window.snapshot(POLICY, 5.0)
    assert found.sequences is None
    assert found.call_sizes.tolist() == [1.0] * 5


def test_the_numbers_of_a_request_and_what_stands_for_those_that_are_missing() -> None:
    whole = record(
        3,
        1.0,
        dispatched_at=2.0,
        released_at=5.0,
        server_free_at=6.0,
        batch_size=4,
        server_id=2,
        epoch=7,
        predicted_output_tokens=12.5,
        preemptions=2,
        max_output_tokens=20,
        cached_tokens=3,
        first_token_at=3.5,
    )
    # of the prompt what was computed
    expected = (1.0, 2.0, 6.0, 5.0, 3, 4, 2, 5, 10, ENDED, 7, 12.5, 2, 20, 3, 3.5)
    assert row(whole, 1.0, 2.0) == expected
    bare = Record(request_id="x", outcome="completed")
    found = dict(zip(COLUMN, row(bare, 1.0, 2.0), strict=True))
    assert math.isnan(found["server_free_at"])
    assert math.isnan(found["released_at"])
    unknown = {"predicted_tokens", "max_output_tokens", "first_token_at"}
    assert all(math.isnan(found[name]) for name in unknown)
    assert {name: found[name] for name in list(COLUMN)[4:] if name not in unknown} == {
        "batch_id": -1.0,
        "batch_size": 1,
        "server_id": 0,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "ending": WITHOUT_LENGTH,
        "epoch": 0,
        "preemptions": 0,
        "cached_tokens": 0,
    }


@pytest.mark.parametrize(
    ("about", "ending", "released"),
    [
        ({}, ENDED, True),
        ({"clipped": True}, CENSORED, True),
        ({"outcome": "cancelled"}, CENSORED, False),
        ({"outcome": "failed"}, WITHOUT_LENGTH, False),
        ({"outcome": "rejected"}, WITHOUT_LENGTH, False),
        ({"output_tokens": 0}, WITHOUT_LENGTH, True),
        ({"output_tokens": 1}, ENDED, True),
    ],
)
def test_only_completed_answers_were_released_and_only_made_tokens_are_a_length(
    about: dict[str, object], ending: float, released: bool
) -> None:
    found = dict(
        zip(COLUMN, row(record(3, 1.0, server_free_at=None, **about), 1.0, 1.0), strict=True)
    )
    assert found["ending"] == ending
    assert (found["released_at"] == 2.0) == released
    assert found["server_free_at"] == 2.0, "the server was free when it ended"


def test_a_loss_without_an_end_is_at_its_arrival_and_one_of_another_epoch_is_not_counted() -> None:
    producer = WindowProducer(epoch=2)
    for number, (epoch, released) in enumerate(((2, 3.0), (None, None), (1, 9.0))):
        producer.on_record(
            record(number, 1.0 + number, epoch=epoch, dispatched_at=None, released_at=released)
        )
    producer.on_record(record(4, 1.0, epoch=2, arrived_at=None))
    delta = producer.take()
    assert (list(delta.lost), len(delta.rows)) == ([3.0, 2.0], 0)


def test_a_sequence_without_a_call_is_one_and_so_is_the_same_name_later() -> None:
    calls = CallGroups()
    asked = [
        (1.0, "a"),
        (1.0, "a"),
        (1.0, "b"),
        (1.0, None),
        (1.0, None),
        (2.0, "b"),
        (3.0, "b"),
        (3.0, "b"),
    ]
    assert [calls.begins(at, call) for at, call in asked] == [
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        False,
    ]


def test_a_sequence_of_a_call_that_was_cut_by_a_take_or_an_epoch_is_an_arrival() -> None:
    """What was taken is not there to be added to."""
    producer = WindowProducer()
    producer.on_arrival(1.0, call="a")
    first = producer.take()
    producer.on_arrival(1.0, call="a")
    second = producer.take()
    assert (list(first.sequences), list(second.sequences), list(second.arrivals)) == (
        [1.0],
        [1.0],
        [1.0],
    )


def test_the_shortest_delay_is_that_of_dispatched_requests() -> None:
    producer, replica = WindowProducer(), WindowReplica()
    replica.add(producer.take())
    assert replica.snapshot(POLICY, 1.0).shortest_delay == math.inf
    producer.on_record(record(1, 1.0, dispatched_at=1.75))
    producer.on_record(record(2, 2.0, dispatched_at=2.5))
    replica.add(producer.take())
    assert replica.snapshot(POLICY, 3.0).shortest_delay == 0.5


def test_what_was_refused_is_counted_by_its_limit_in_the_window_and_in_no_other_epoch() -> None:
    """However it is cut into messages; where the oldest are forgotten the window is shorter."""
    window = Window(seconds=10.0, most=4)
    window.begin_epoch(1, 100.0)
    for at in (101.0, 103.0):
        window.on_refused(at, "slo")
    window.on_arrival(104.0)
    assert window.snapshot(POLICY, 105.0).refused == {"slo": 2}
    window.on_refused(106.0, "rate_limit")
    assert window.snapshot(POLICY, 112.0).refused == {"slo": 1, "rate_limit": 1}
    assert window.snapshot(POLICY, 112.0).arrivals.size == 1, "none of them is an arrival"
    for at in np.arange(112.0, 115.0, 0.5):
        window.on_refused(float(at), "slo")
    seen = window.snapshot(POLICY, 115.0)
    assert (seen.start, seen.refused) == (113.0, {"slo": 3, "rate_limit": 0})
    window.begin_epoch(2, 115.0)
    assert window.snapshot(POLICY, 116.0).refused == {}


def test_who_was_in_service_as_the_window_began_is_in_it() -> None:
    """The server was busy then: whoever came first in the window waited for that."""
    window = Window(seconds=60.0, epoch=0, epoch_at=0.0)
    for number in range(10):  # one after the other, 20 s each
        window.on_arrival(10.0 * number)
        served = {"dispatched_at": 20.0 * number, "server_free_at": 20.0 * (number + 1)}
        released = {"released_at": 20.0 * (number + 1)}
        window.on_record(record(number, 10.0 * number, **served, **released))
    seen = window.snapshot("single", 130.0)  # since 70: the fourth is served until 80
    assert seen.column("dispatched_at").min() == 60.0
    assert seen.mine.column("arrived_at").min() == 70.0
