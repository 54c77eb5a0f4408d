"""The cells of a report: every run read from its files, beside theory, with what is known of its
sending.

A cell comes from a gateway's (or simulator's) run file. The load generator's file of the same
requests, where it is at hand, adds the timetable: the sender's part of the difference, and its
lateness. What was asked (rate, lengths, load) is read from the headers unless it is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kendall.loadgen.compare.by_order import ComparedSample, with_orders
from kendall.loadgen.compare.client_side import ClientSide, InferredRun, client_side, inferred
from kendall.loadgen.compare.compare import Comparison, compare_samples
from kendall.loadgen.compare.comparison import QUANTITIES, Quantity, Theory, Verdict
from kendall.loadgen.compare.epoch_sample import timetable_of
from kendall.loadgen.compare.residual import verdict
from kendall.loadgen.measures.missing import incomplete
from kendall.policies import served_as
from kendall.policies.text import SpecError, parse_policy
from kendall.queueing.arrivals.notation import Ending, read_arrivals
from kendall.queueing.distributions.token_distribution import (
    SHORTER,
    TokenDistribution,
    parse_distribution,
)
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.arrival_audit import Audit, audit_arrivals
from kendall.queueing.measurement.record import Header, Record, call_of, read_cut_run
from kendall.queueing.measurement.recursion import served
from kendall.queueing.measurement.statistics import Summary, summarise
from kendall.queueing.predictors.predictor_text import PredictorText, parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCell:
    """One policy at one load, measured."""

    name: str
    comparison: Comparison
    load: float | None  # as asked; else of the measured rate by the calibrated law
    max_output_tokens: int | None = None  # the gateway's limit
    lateness: Summary | None = None  # of the sender, seconds
    audit: Audit | None = None  # of the arrivals at the gateway
    model: Queue | None = None  # the queue that was asked for, under the calibrated law
    client: ClientSide | None = None  # where its dispatches are inferred from clients' records

    @property
    def shown(self) -> Comparison:
        """The comparison with the load that was asked, as tables and pictures show it."""
        return (
            self.comparison
            if self.load is None
            else dataclasses.replace(self.comparison, load=self.load)
        )

    @property
    def invalid(self) -> bool:
        """True where requests arrived outside the lateness budget: the run is not the one that was
        asked for.
        """
        return self.audit is not None and self.audit.valid is False

    @property
    def counts(self) -> bool:
        """True where its mean may be judged: the run is the one that was asked for."""
        return not (self.invalid or self.comparison.of_others)

    @property
    def verdict(self) -> Verdict:
        """The cause of the difference to the prediction a priori, in words."""
        return verdict(self.comparison)

    def values(self) -> dict[str, float | None]:
        """The numbers of the cell by the names that conditions use (loadgen.compare.assertions):
        seconds, shares, counts. None where the run or the theory does not say.
        """
        comparison, late = self.comparison, self.lateness
        a_priori = comparison.quantity.a_priori
        values: dict[str, float | None] = {
            "prediction_error": comparison.prediction_error,
            "a_priori_error": None if a_priori is None else a_priori.deviation,
            "half_width": comparison.quantity.observed.relative,
            "arrival_rate": comparison.arrival_rate,
            "load": self.load,
            "utilisation": comparison.utilisation,
            "batch_size": comparison.batch_size,
            "speed": comparison.speed.factor if comparison.speed else None,
            "requests": comparison.n,
            "mean_send_lateness": None if late is None else late.mean,
            "p99_send_lateness": None if late is None else late.p99,
        }
        for name in QUANTITIES:
            quantity: Quantity = getattr(comparison, name)
            values[f"mean_{name}"] = quantity.observed.mean
            values |= {f"{level}_{name}": quantity.quantiles.get(level) for level in LEVELS}
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingCell:
    """One that was planned and has no result."""

    name: str
    policy: str
    load: float | None
    state: str  # unstable | refused | missing
    reason: str


@dataclass(frozen=True, slots=True)
class TheoryInputs:
    """Inputs of the theory that replace what the headers say; None: the headers, else the run
    itself.
    """

    law: LatencyModel | None = None
    output_tokens: TokenDistribution | None = None
    rate: float | None = None
    max_num_seqs: int | None = None
    predictor: PredictorText | None = None


@dataclass(frozen=True, slots=True)
class RunFile:
    """One file, read."""

    path: Path
    header: Header
    records: list[Record]
    cut: bool = False  # the last line was incomplete and is left out
    inferred: InferredRun | None = None  # `records` are its, of a server that tells no dispatch

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Say how its run or the file itself was cut short, one sentence each."""
        return incomplete(self.header, self.records, cut=self.cut)

    @classmethod
    def read(cls, path: Path) -> RunFile:
        """Raises SpecError."""
        try:
            return cls(path, *read_cut_run(path))
        except OSError as error:
            raise SpecError(f"got {path}: {error.strerror}; expected a run file") from None
        except ValueError as error:
            raise SpecError(str(error)) from None

    def with_dispatches(self, slots: int) -> RunFile:
        """A load generator's file, with the dispatches of a server of so many slots."""
        run = inferred(self.records, slots)
        return dataclasses.replace(self, records=run.records, inferred=run)

    def senders_among(self, sent: Iterable[RunFile]) -> list[RunFile]:
        """The load generators' files of this file's requests."""
        return [other for other in sent if timetable_of(self.records, other.records)]

    def cells(
        self, senders: Sequence[RunFile], asked: TheoryInputs
    ) -> list[tuple[ReportCell, ComparedSample]]:
        """Compare each policy and epoch of the file; one cell for each. Raises SpecError."""
        sent = [record for sender in senders for record in sender.records]
        configured = self.header.configuration
        for sender in senders:  # the gateway does not know what its clients predict with
            for name in ("predictor", "arrivals"):
                if name in sender.header.configuration:
                    configured = {name: sender.header.configuration[name]} | configured
        theory = None if asked.law is None else theory_for(asked.law, configured, asked)
        # nothing can have arrived before the first epoch of a simulation, or of a sweep's cell,
        # whose header has what was asked
        began_idle = (
            self.header.writer == "simulator" or "request_rate" in self.header.configuration
        )
        try:
            compared = compare_samples(self.records, theory, sent, began_idle=began_idle)
        except ValueError as error:
            raise SpecError(f"{self.path}: {error}") from None
        several = len(compared) > 1
        cells = [
            ReportCell(
                name=f"{self.path.stem}, epoch {comparison.epoch}" if several else self.path.stem,
                comparison=comparison,
                load=configured.get("load", comparison.load),
                max_output_tokens=configured.get("max_output_tokens"),
                lateness=lateness_of(sent),
                audit=self.audit(comparison, sent),
                model=model_for(theory, self.records, comparison),
            )
            for comparison in (sample.comparison for sample in compared)
        ]
        kept = [[request.id for request in sample.sample.kept] for sample in compared]
        cells = [
            dataclasses.replace(cell, client=self.client_side(cell, ids))
            for cell, ids in zip(cells, kept, strict=True)
        ]
        return list(zip(cells, compared, strict=True))

    def client_side(self, cell: ReportCell, kept: Iterable[str]) -> ClientSide | None:
        """The token times of the `kept` requests, by id; None where the dispatches are the
        gateway's own.
        """
        comparison, model = cell.comparison, cell.model
        if self.inferred is None:
            return None
        if model is not None and comparison.speed is not None:
            model = model.but(law=comparison.speed.law(model.engine.law))
        rate = comparison.asked_rate or comparison.arrival_rate
        return client_side(self.header, self.inferred, kept, model=model, rate=rate)

    def audit(self, comparison: Comparison, sent: Iterable[Record] = ()) -> Audit | None:
        """The arrivals at the gateway beside the process that was asked, and beside the timetable
        where it is at hand. The sequences of a call of a gateway arrive together.
        """
        epoch = [
            r
            for r in self.records
            if r.arrived_at is not None and (r.epoch or 0) == comparison.epoch
        ]
        if self.header.writer == "gateway":
            calls: dict[str, Record] = {}
            for record in epoch:
                calls.setdefault(call_of(record.request_id) or record.request_id, record)
            epoch = list(calls.values())
        arrived = np.array(
            [r.arrived_at if r.received_at is None else r.received_at for r in epoch],
            dtype=np.float64,
        )
        if arrived.size < 3:
            return None
        planned = timetable_of(epoch, sent) or {}
        intended = (
            np.array([planned[r.request_id] for r in epoch]) if len(planned) == len(epoch) else None
        )
        process = str(self.header.configuration.get("arrivals", "poisson")).partition(":")[0]
        return audit_arrivals(
            arrived, asked_rate=comparison.asked_rate, intended=intended, process=process
        )


def cells_of_files(files: Sequence[RunFile], asked: TheoryInputs) -> list[ReportCell]:
    """A cell for every policy and epoch of every gateway's file; load generators' files stand
    beside those they share requests with.
    """
    sent = [file for file in files if file.header.writer == "load"]
    received = [file for file in files if file.header.writer != "load"]
    if not received and asked.max_num_seqs is None:
        raise SpecError(
            "got load generators' files only; expected the gateway's own as well (kendall serve "
            "--record-file), or --max-num-seqs of a server that is no gateway"
        )
    if not received and asked.max_num_seqs is not None:
        received = [file.with_dispatches(asked.max_num_seqs) for file in files]
    pairs = [pair for file in received for pair in file.cells(file.senders_among(sent), asked)]
    conditions = [(cell.comparison.asked_rate, cell.max_output_tokens) for cell, _ in pairs]
    comparisons = with_orders([compared for _, compared in pairs], conditions)
    return [
        dataclasses.replace(cell, comparison=comparison)
        for (cell, _), comparison in zip(pairs, comparisons, strict=True)
    ]


def theory_for(law: LatencyModel, configured: Mapping[str, Any], asked: TheoryInputs) -> Theory:
    """The theory of a run whose header says what was asked."""
    from kendall.loadgen.compare.theory import theory_of  # noqa: PLC0415 - compiled mathematics, which `--help` need not wait for

    rate, text = configured.get("request_rate"), configured.get("predictor")
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate <= 0:
        rate = None
    lengths, limit = configured.get("output_tokens"), configured.get("max_output_tokens")
    asked_lengths, process = asked.output_tokens, None
    if asked_lengths is None and isinstance(lengths, str):
        limit = None if limit is None else int(limit)
        asked_lengths = parse_distribution(lengths, limit, remedy=SHORTER)
    arrivals = configured.get("arrivals")
    # Poisson arrivals where the header names no process, one without a steady state, a closed loop
    # or recorded instants
    with suppress(SpecError):
        process = read_arrivals(arrivals) if isinstance(arrivals, str) else None
    theory = theory_of(
        law,
        asked_lengths,
        asked.rate or (None if rate is None else float(rate)),
        EngineBounds(
            max_num_seqs=asked.max_num_seqs or configured.get("max_num_seqs"),
            step_tokens=configured.get("step_tokens"),
            batch_tokens=configured.get("max_num_batched_tokens"),
        ),
        asked.predictor or (parse_predictor(text) if isinstance(text, str) else None),
        process=None if isinstance(process, Ending) else process,
    )
    return dataclasses.replace(theory, pads=configured.get("pads") is not False)


def model_for(
    theory: Theory | None, records: Iterable[Record], comparison: Comparison
) -> Queue | None:
    """The queue that the run was asked to be; None without a law."""
    if theory is None or theory.model is None:
        return None
    policy = served_as(parse_policy(comparison.policy), pads=theory.pads)
    return theory.model(policy, [r for r in served(records) if r.epoch == comparison.epoch])


def lateness_of(sent: Iterable[Record]) -> Summary | None:
    """sent - intended, seconds; None without a load generator's file."""
    late = [
        r.sent_at - r.intended_at
        for r in sent
        if r.sent_at is not None and r.intended_at is not None
    ]
    return summarise(np.array(late)) if late else None
