"""A recorded trace replayed under a policy: its own instants and lengths, all of them, once.

Nothing is left out as warm-up and nothing is drawn but what the law draws (residuals, stalls), the
predictions of `predictor` and the flows of `flows`. The answer is about this trace: one path has no
standard error; several replications differ by what is drawn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from kendall.policies.arguments import whole_number
from kendall.policies.core import Policy
from kendall.policies.fixed import Fixed
from kendall.policies.ordered import counts, order_of
from kendall.policies.text import SpecError, counted
from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.description.arguments import Limits
from kendall.queueing.distributions.laws import LONGEST
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.queue import ONE_FLOW, Queue
from kendall.queueing.result import Prediction
from kendall.queueing.simulation.experiment import (
    by_flow,
    check_draws,
    delays_of_flows,
    run_given,
    summary,
)
from kendall.queueing.simulation.simulated_means import MORE

if TYPE_CHECKING:
    from kendall.queueing.simulation.fast import Trace

# limits that say what the trace says itself, or that its requests do not have
_OWN = ("prompt_tokens", "sequences", "arrivals")


def recorded_model(
    trace: Timetable, policy: Policy | str, latency: LatencyModel | str, **limits: Unpack[Limits]
) -> Queue:
    """The queue that serves the trace. Raises SpecError: a limit that the trace has itself, or
    that replays have not.
    """
    own = [name for name in _OWN if limits.get(name) is not None]
    if limits.get("arrival_scv", 1) != 1:
        own.append("arrival_scv")
    if own:
        raise SpecError(
            f"got {own[0]}={_in_short(limits, own[0])} with a trace; expected none: the "
            "trace has its own arrivals and lengths"
        )
    limit = limits.get("max_output_tokens")
    outputs = trace.output_tokens if limit is None else np.minimum(trace.output_tokens, limit)
    lengths = _seen("output", outputs, "set max_output_tokens")
    prompts = _seen("prompt", trace.prompt_tokens, "leave it out")
    with_prompts: Limits = {**limits, "prompt_tokens": prompts}
    model = Queue.read(policy, lengths, latency, **with_prompts)
    return model.but(process=Recorded(trace.intended_at))


def simulate_recorded(
    model: Queue,
    trace: Timetable,
    *,
    seed: int = 0,
    replications: int = 1,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """The trace under the policy of `recorded_model`."""
    whole_number("replications", replications)
    whole_number("seed", seed, least=0)
    if replications > 1 and not _draws(model):
        raise SpecError(
            f"got replications={replications} with a trace of which nothing is drawn; expected 1: "
            "each would be the same path"
        )
    check_draws(model, len(trace), replications)
    streams = np.random.SeedSequence(seed).spawn(replications)
    runs = [run_given(model, given_of(model, trace, stream), stream) for stream in streams]
    answer = summary(runs, model, _load(model, trace), (*notes, *_not_full(model, trace)))
    flows = by_flow(model, runs, streams)
    said = [text.replace(MORE, "the trace is short") for text in answer.assumptions]
    if _reads_predictions(model, trace):
        theirs = f"lengths: the trace's{_unpredicted(trace)}"
        said = [text.replace(f"lengths: {NO_PREDICTION}", theirs) for text in said]
    if model.requests.flows is None and trace.flow is not None and counts(model.policy):
        names, places = np.unique(trace.flow, return_inverse=True)
        flows = delays_of_flows(model, runs, names.tolist(), [places] * len(runs))
        said = [
            f"flows: the {len(names)} of the trace" if text == ONE_FLOW else text for text in said
        ]
    return dataclasses.replace(answer, flows=flows, assumptions=tuple(said))


def _seen(what: str, counts: npt.NDArray[np.int64], remedy: str) -> TokenDistribution:
    if (most := int(counts.max())) > LONGEST:
        raise SpecError(
            f"got a request of {most:,} {what} tokens in the trace; expected at most {LONGEST:,}: "
            f"{remedy}"
        )
    return TokenDistribution.from_counts(np.maximum(counts, 1))


def _draws(model: Queue) -> bool:
    return (
        model.draws_in_advance
        or model.requests.predictor != NO_PREDICTION
        or model.requests.flows is not None
        or model.requests.tool_calls is not None
    )


def _not_full(model: Queue, trace: Timetable) -> tuple[str, ...]:
    """A gateway would wait for more requests."""
    policy = model.policy
    if not isinstance(policy, Fixed) or policy.max_wait < math.inf:
        return ()
    left = len(trace) % (model.bound or policy.batch_size)
    if not left:
        return ()
    last = counted(left, "request")
    return (f"the trace ends with a batch that is not full: its last {last} served all the same",)


def _in_short(limits: Limits, name: str) -> Any:
    given: Any = limits.get(name)
    return given if isinstance(given, str | float) else type(given).__name__


def _load(model: Queue, trace: Timetable) -> float:
    """0 for a single request; infinite where all come at once."""
    return 0.0 if math.isnan(trace.rate) else trace.rate / model.largest_stable_rate


def given_of(model: Queue, trace: Timetable, stream: np.random.SeedSequence) -> Trace:
    """The requests of the trace as a run is given them, under the token limit of the queue."""
    from kendall.queueing.simulation import fast  # noqa: PLC0415 - numba is loaded only where something is simulated

    outputs = np.minimum(trace.output_tokens, model.requests.token_limit)
    flows = np.empty(0, np.str_) if trace.flow is None else trace.flow
    return fast.Trace(
        trace.intended_at,
        outputs,
        trace.prompt_tokens,
        predicted=_predicted(model, trace, outputs, stream),
        flows=flows
        if model.requests.flows is None
        else model.requests.flows.names_of_run(stream, len(trace)),
    )


def _predicted(
    model: Queue, trace: Timetable, outputs: np.ndarray[Any, Any], stream: np.random.SeedSequence
) -> Vector:
    """Drawn by the predictor, else those of the trace; empty where there are none or the order
    reads none.
    """
    from kendall.queueing.simulation import fast  # noqa: PLC0415 - numba is loaded only where something is simulated

    own = trace.predicted_output_tokens
    if own is None or not _reads_predictions(model, trace):
        return fast.draw_predictions(model, outputs, stream)
    limit = model.requests.token_limit
    return np.where(own > 0, np.minimum(own, limit), limit).astype(float)


def _unpredicted(trace: Timetable) -> str:
    assert trace.predicted_output_tokens is not None
    missing = int((trace.predicted_output_tokens == 0).sum())
    if not missing:
        return ""
    return f"; {counted(missing, 'request')} without one: the longest"


def _reads_predictions(model: Queue, trace: Timetable) -> bool:
    """Whether the order goes by those of the trace."""
    there = trace.predicted_output_tokens is not None and model.requests.predictor == NO_PREDICTION
    return there and order_of(model.policy).predicts
