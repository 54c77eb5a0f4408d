"""The live model: what arrived and was served in a sliding window, and what theory says to it.

The window holds one epoch only. Rate, lengths and speed are estimated from it, never a delay; the prediction is
computed in a niced process of its own, so that the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import multiprocessing
import os
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from policies import parse_policy
from queueing.latency import LatencyModel
from queueing.record import Record
from server.batch import Batch
from server.ticket import Ticket

if TYPE_CHECKING:
    from server.gateway import Gateway

log = logging.getLogger("kendall.live")
WINDOW = 60.0  # seconds
ENOUGH = 50  # dispatched requests before anything is predicted


@dataclass(frozen=True, slots=True)
class Question:
    """What the predicting process is asked."""

    policy: str
    arrival_rate: float
    output_tokens: tuple[int, ...]  # of the window's completed requests
    prompt_tokens: int  # mean, rounded
    law: LatencyModel
    max_num_seqs: int


class LiveModel:
    """An observer with a sliding window, and the loop that predicts from it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._epoch = 0
        self._since = gateway.now()
        self._arrivals: deque[float] = deque()
        self._delays: deque[tuple[float, float]] = deque()  # dispatched_at, queueing delay
        self._records: deque[Record] = deque()
        self._busy: deque[tuple[float, float]] = deque()  # closed busy intervals of any server
        self._busy_since: dict[int, float] = {}
        self._pool: ProcessPoolExecutor | None = None
        self.prediction: dict[str, Any] | None = None  # the last one, as `/admin/prediction` shows it
        metrics = gateway.metrics
        metrics.arrival_rate.set_function(self.arrival_rate)
        metrics.utilisation.set_function(self.utilisation)

    # the window

    def on_arrival(self, ticket: Ticket) -> None:
        """Counted from its arrival."""
        self._arrivals.append(ticket.work.request.arrived_at)

    def on_dispatch(self, batch: Batch) -> None:
        """Delays, and a busy server."""
        self._busy_since.setdefault(batch.server_id, batch.dispatched_at)
        for ticket in batch.tickets:
            self._delays.append((batch.dispatched_at, batch.dispatched_at - ticket.work.request.arrived_at))

    def on_idle(self, server_id: int, at: float) -> None:
        """A busy interval is over."""
        since = self._busy_since.pop(server_id, None)
        if since is not None:
            self._busy.append((since, at))

    def on_record(self, record: Record) -> None:
        """Lengths and service times."""
        if record.outcome == "completed":
            self._records.append(record)

    def arrival_rate(self) -> float:
        """Arrivals per second over the window."""
        start = self._forget()
        return len(self._arrivals) / max(1e-9, self._gateway.now() - start)

    def utilisation(self) -> float:
        """Fraction of the window in which a server was busy, averaged over servers."""
        start, now = self._forget(), self._gateway.now()
        closed = sum(end - max(begin, start) for begin, end in self._busy)
        open_now = sum(now - max(begin, start) for begin in self._busy_since.values())
        servers = self._gateway.batcher.capabilities.servers
        return (closed + open_now) / max(1e-9, now - start) / servers

    def _forget(self) -> float:
        """Drop what is older than the window or of an earlier epoch; returns the window's start."""
        epoch = self._gateway.batcher.epoch
        now = self._gateway.now()
        if epoch != self._epoch:
            self._epoch, self._since, self.prediction = epoch, now, None
            for queue in (self._arrivals, self._delays, self._records):
                queue.clear()
        start = max(self._since, now - WINDOW)
        _drop_before(self._arrivals, start, lambda arrived_at: arrived_at)
        _drop_before(self._delays, start, lambda pair: pair[0])
        _drop_before(self._busy, start, lambda interval: interval[1])
        _drop_before(self._records, start, lambda record: record.released_at or 0.0)
        while self._records and self._records[0].epoch != epoch:
            self._records.popleft()
        return start

    # the prediction

    async def run(self, interval: float) -> None:
        """Predict every `interval` seconds while a law is known."""
        while True:
            await asyncio.sleep(interval)
            if self._gateway.law is not None and not self._gateway.calibrating:
                try:
                    await self.update()
                except Exception:
                    log.exception("the live prediction failed; it is tried again")

    async def update(self) -> None:
        """One prediction from the window as it is, into the gauges and `/admin/prediction`."""
        self._forget()
        law = self._gateway.law
        if law is None or len(self._records) < ENOUGH:
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=os.nice, initargs=(10,))
        batcher = self._gateway.batcher
        records, epoch = list(self._records), batcher.epoch
        question = Question(
            policy=batcher.policy_text,
            arrival_rate=self.arrival_rate(),
            output_tokens=tuple(record.output_tokens or 1 for record in records),
            prompt_tokens=round(sum(record.prompt_tokens or 0 for record in records) / len(records)),
            law=law,
            max_num_seqs=batcher.capabilities.max_num_seqs,
        )
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, predict_window, question, records)
        if batcher.epoch == epoch:
            self._show(question, answer)

    def _show(self, question: Question, answer: dict[str, Any]) -> None:
        metrics, policy = self._gateway.metrics, self._gateway.metrics.label(question.policy)
        delays = sorted(delay for _, delay in self._delays)
        observed = math.fsum(delays) / len(delays) if delays else math.nan
        predicted = answer["queueing_delay"]
        for gauge in (metrics.predicted, metrics.observed, metrics.error):
            gauge.clear()
        for stat, value in predicted.items():
            metrics.predicted.labels(policy, answer["method"], stat).set(math.nan if value is None else value)
        metrics.observed.labels(policy, "mean").set(observed)
        for stat, level in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
            if delays:
                metrics.observed.labels(policy, stat).set(delays[min(len(delays) - 1, int(level * len(delays)))])
        if predicted["mean"]:
            metrics.error.labels(policy).set(observed / predicted["mean"] - 1)
        if answer["load"] is not None:
            metrics.load.set(answer["load"])
        self.prediction = answer | {"observed_mean": observed, "n": len(delays), "window": WINDOW, "arrival_rate": question.arrival_rate}

    def close(self) -> None:
        """Let the predicting process go."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def predict_window(question: Question, records: list[Record]) -> dict[str, Any]:
    """In the predicting process: the model's answer at the window's rate, lengths and speed."""
    from queueing.distributions import TokenDistribution  # noqa: PLC0415 - the gateway itself needs no numerics
    from queueing.prediction import predict  # noqa: PLC0415
    from queueing.recursion import served  # noqa: PLC0415
    from queueing.speed import measured_speed  # noqa: PLC0415

    policy = parse_policy(question.policy)
    speed = measured_speed(policy, served(records), question.law)
    law = question.law if speed is None else speed.law(question.law)
    prediction = predict(
        policy,
        question.arrival_rate,
        TokenDistribution.from_counts(list(question.output_tokens)),
        law,
        max_num_seqs=question.max_num_seqs,
        prompt_tokens=TokenDistribution.from_counts([question.prompt_tokens]),
    )
    return prediction.to_dict() | {"speed": law.speed, "cv": law.cv, "law": dataclasses.asdict(law)}


def _drop_before(queue: deque[Any], start: float, instant: Any) -> None:
    while queue and instant(queue[0]) < start:
        queue.popleft()
