"""A query for the steady state of a queue: what `kendall predict`, `kendall simulate` and the
Python API make of their arguments. Requests come at a rate of Poisson arrivals, by another arrival
process, or from a recorded trace with its own lengths.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from kendall.policies.arguments import positive, short_repr
from kendall.policies.core import Policy
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.arrivals.notation import asked_process
from kendall.queueing.arrivals.text import Process
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.arrivals.traces import load_trace
from kendall.queueing.description.arguments import Limits
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction.counts import counts
from kendall.queueing.prediction.steady_state import predict_durations, predict_model
from kendall.queueing.predictors.predictor_text import NO_PREDICTION, without_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction
from kendall.queueing.simulation.experiment import NUM_REQUESTS, simulate_model
from kendall.queueing.simulation.recorded import recorded_model, simulate_recorded

_SOURCES = "set arrival_rate (requests per second), set arrivals, or set trace"


@dataclass(frozen=True, slots=True, eq=False)
class PredictionQuery:
    """A queue, and the requests that come to it: at `arrival_rate`, or those of `trace`."""

    model: Queue
    arrival_rate: float  # requests per second; of a trace, its mean
    trace: Timetable | None = None
    notes: tuple[str, ...] = ()  # on the trace, for the reader of the answer

    @classmethod
    def read(
        cls,
        policy: Policy | str,
        latency: LatencyModel | str | None,
        *,
        arrival_rate: float | None = None,
        output_tokens: TokenDistribution | str | None = None,
        trace: Path | str | None = None,
        **limits: Unpack[Limits],
    ) -> PredictionQuery:
        """Make a query from arguments of the command line or of the Python API.

        Raises SpecError: not exactly one of arrival rate, arrivals and trace; lengths missing, or
        given twice.
        """
        arrivals = limits.get("arrivals")
        given = {"arrival_rate": arrival_rate, "arrivals": arrivals, "trace": trace}
        sources = [f"{name}={_short(value)}" for name, value in given.items() if value is not None]
        if len(sources) != 1:
            raise SpecError(
                f"got {' and '.join(sources) or 'no arrivals'}; expected one of three: {_SOURCES}"
            )
        if latency is None:
            raise SpecError("got no latency; expected a latency law, its text, or a profile's name")
        if trace is not None:
            return _recorded(policy, latency, Path(trace), output_tokens, limits)
        if output_tokens is None:
            raise SpecError(
                "got no lengths; expected their distribution: set output_tokens, for example "
                "lognormal:mu=5,sigma=0.7"
            )
        rate = _rate(arrival_rate, arrivals)
        return cls(Queue.read(policy, output_tokens, latency, **limits), rate)

    @property
    def warning(self) -> str | None:
        """A warning where the policy's order goes by predicted lengths, and neither a predictor nor
        the trace has any.
        """
        traced = self.trace is not None and self.trace.predicted_output_tokens is not None
        if traced or self.model.requests.predictor != NO_PREDICTION:
            return None
        return without_predictor([self.model.policy])

    @property
    def model_text(self) -> str:
        """The queue in Kendall's notation, and its parts in words."""
        return self.model.model_text(self.arrival_rate)

    def predict(self, method: str = "auto", wanted: Collection[str] = ()) -> Prediction:
        """The answer by a method; under "auto", quantiles of the `wanted` durations are simulated
        where no formula gives them. Raises SpecError where `method` has no answer,
        UnstableQueueError, NotConvergedError.
        """
        if self.trace is None:
            found = (
                predict_durations(self.model, self.arrival_rate, wanted)
                if method == "auto"
                else predict_model(self.model, self.arrival_rate, method)
            )
            return replace(found, counts=counts(self.model, self.arrival_rate, found))
        if method not in ("auto", "simulation"):
            raise SpecError(f"got method {method!r} for a trace; expected auto or simulation")
        return simulate_recorded(self.model, self.trace, notes=self.notes)

    def simulate(
        self, num_requests: int | None = None, *, seed: int = 0, replications: int = 1
    ) -> Prediction:
        """The answer by a simulation of `num_requests` in each replication; a trace is replayed
        whole, and takes no number. Raises SpecError, UnstableQueueError.
        """
        if self.trace is not None:
            if num_requests is not None:
                raise SpecError(
                    f"got num_requests={num_requests} with a trace; expected none: all of the "
                    "trace is replayed"
                )
            return simulate_recorded(
                self.model, self.trace, seed=seed, replications=replications, notes=self.notes
            )
        self.model.stable_load(self.arrival_rate)
        count = NUM_REQUESTS if num_requests is None else num_requests
        return simulate_model(
            self.model, self.arrival_rate, num_requests=count, seed=seed, replications=replications
        )


def _short(value: object) -> str:
    return str(value) if isinstance(value, str | Path) else short_repr(value)


def _rate(arrival_rate: float | None, arrivals: Process | str | None) -> float:
    if arrival_rate is not None:
        return positive("arrival_rate", arrival_rate, "requests per second")
    process = asked_process(arrivals)
    assert process is not None
    return process.mean_rate


def _recorded(
    policy: Policy | str,
    latency: LatencyModel | str,
    path: Path,
    output_tokens: TokenDistribution | str | None,
    limits: Limits,
) -> PredictionQuery:
    if output_tokens is not None:
        raise SpecError(
            f"got output_tokens={_short(output_tokens)} and trace={path}; expected one of them: "
            "the trace has its own lengths"
        )
    found = load_trace(path)
    table, rate = found.timetable, found.timetable.rate
    seconds = short_number(float(table.intended_at[-1] - table.intended_at[0]))
    left_out = (
        f"; {counted(found.skipped, 'row')} without lengths left out" if found.skipped else ""
    )
    if found.out_of_order:
        left_out += f"; {counted(found.out_of_order, 'row')} out of order, sorted by their instants"
    note = f"trace {path} ({found.kind}): {counted(len(table), 'request')} in {seconds} s{left_out}"
    return PredictionQuery(recorded_model(table, policy, latency, **limits), rate, table, (note,))
