"""A run beside theory by its clients' records alone: a server that is no gateway of ours tells no
dispatch.

The server is taken as one continuous engine of M slots (`--max-num-seqs`) that starts requests in
the order in which they came:

    start = max(sent, when fewer than M of those before are unanswered, start of the one before)

No law enters. A first token that came before its start shows that the assumption is wrong: the
start is put there, and the number of such requests is said. The mean of these delays stands beside
the one that the server's own `/metrics` told, where it did. Of the tokens the clients' instants
are used:

    time to first token      first token - sent
    inter-token latency      sum of (last token - first token) / sum of (output tokens - 1)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kendall.loadgen.sending.client.server_queue import ServerQueue
from kendall.queueing.errors import PredictionError
from kendall.queueing.measurement.record import Header, Record
from kendall.queueing.measurement.statistics import FloatArray, Interval, mean_interval
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction

EARLY = 0.001  # seconds by which a first token may seem too early: the clocks of two reads


@dataclass(frozen=True, slots=True)
class InferredRun:
    """Records with dispatches, and of how many the first token came before a slot was free."""

    records: list[Record]
    slots: int
    early: int


def inferred(records: Iterable[Record], slots: int) -> InferredRun:
    """The answered requests of a client's run, in the order in which they were sent."""
    answered = [
        (record.sent_at, end, record)
        for record in records
        if record.outcome == "completed"
        and record.sent_at is not None
        and (end := record.last_token_at or record.released_at) is not None
    ]
    found: list[Record] = []
    busy: list[float] = []  # when those in service will have ended
    before, early = -np.inf, 0
    for place, (sent, end, record) in enumerate(sorted(answered, key=lambda row: row[0])):
        start = max(sent, before)
        while busy and (len(busy) >= slots or busy[0] <= start):
            start = max(start, heapq.heappop(busy))
        first = record.first_token_at
        if first is not None and start > first:
            early += start > first + EARLY
            start = max(sent, first)
        before = start
        heapq.heappush(busy, max(end, start))
        found.append(
            msgspec.structs.replace(
                record,
                client_request_id=record.request_id,
                policy=f"continuous:max_batch_size={slots}",
                epoch=0,
                server_id=0,
                batch_id=place,
                batch_size=len(busy),
                arrived_at=sent,
                dispatched_at=start,
                server_free_at=end,
                queueing_delay=start - sent,
                service_time=end - start,
            )
        )
    return InferredRun(found, slots, early)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """A duration of tokens, observed by the clients, and its mean by theory at the run's speed;
    seconds. None: no theory, or it cannot say.
    """

    name: str
    observed: Interval
    predicted: float | None

    @property
    def deviation(self) -> float | None:
        """observed / predicted - 1."""
        return self.observed.mean / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSide:
    """Of a cell whose dispatches are inferred."""

    slots: int
    token_times: tuple[TokenTime, ...]
    inferred_delay: float  # mean queueing delay of all requests, seconds
    server: ServerQueue | None  # as the header of the run file has it
    early: int
    requests: int


def client_side(
    header: Header, run: InferredRun, kept: Iterable[str], *, model: Queue | None, rate: float
) -> ClientSide:
    """Token times of the `kept` requests, by id, beside the `model` at this arrival rate."""
    ids = set(kept)
    answers = [record for record in run.records if record.request_id in ids]
    prediction: Prediction | None = None
    if model is not None:
        try:
            prediction = predict_model(model, rate)
        except PredictionError:
            prediction = None
    observed = {
        "time_to_first_token": _first_tokens(answers),
        "inter_token_latency": _gaps(answers),
    }
    queue = header.configuration.get("server_queue")
    return ClientSide(
        slots=run.slots,
        token_times=tuple(
            TokenTime(
                name=name,
                observed=mean_interval(values),
                predicted=None if prediction is None else getattr(prediction, name).mean,
            )
            for name, values in observed.items()
            if values.size
        ),
        inferred_delay=float(np.mean([record.queueing_delay or 0.0 for record in run.records])),
        server=None if queue is None else msgspec.convert(queue, ServerQueue),
        early=run.early,
        requests=len(run.records),
    )


def _first_tokens(records: Sequence[Record]) -> FloatArray:
    return np.array(
        [
            record.first_token_at - record.sent_at
            for record in records
            if record.first_token_at is not None and record.sent_at is not None
        ],
        dtype=np.float64,
    )


def _gaps(records: Sequence[Record]) -> FloatArray:
    """A value for each answer, whose mean is the ratio of the sums and whose spread is that of the
    ratio.
    """
    rows = [
        (record.last_token_at - record.first_token_at, record.output_tokens - 1)
        for record in records
        if record.first_token_at is not None
        and record.last_token_at is not None
        and record.output_tokens is not None
        and record.output_tokens > 1
    ]
    if not rows:
        return np.empty(0)
    spans, gaps = np.array(rows, dtype=np.float64).T
    ratio = spans.sum() / gaps.sum()
    return np.asarray(ratio + (spans - ratio * gaps) / gaps.mean(), dtype=np.float64)
