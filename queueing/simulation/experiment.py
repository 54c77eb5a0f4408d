"""Arrivals (Poisson, or with gamma gaps) and lengths drawn first, as data, then the
policy replayed on them.

Means come with standard errors. The queue starts empty; the first tenth of the requests is dropped,
more where the queue remembers longer (queueing.simulation.spin_up). The standard error comes from
the replications, with one replication from 20 batch means of consecutive requests. Every stream has
its own generator, spawned from the seed: arrivals, output tokens, prompt tokens, one residual
stream per server. So one seed means the same arrivals and lengths under every policy. The compiled
replay (queueing.simulation.fast) is the default; `generic=True` of `simulate_run` drives the policy
object itself: same path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kendall.policies.arguments import whole_number
from kendall.policies.core import UNBOUNDED, Request
from kendall.policies.immediate import Single
from kendall.policies.ordered import counts, in_arrival_order, order_of
from kendall.policies.text import SpecError, counted
from kendall.queueing.arrivals.notation import Ending, has_end, span
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.engine_bounds import or_unbounded
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.slots.token_gaps import GapCounter, Gaps, found
from kendall.queueing.latency.stalls import SPARE_GAPS
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Levels, Mean, Prediction, Quantiles, Station
from kendall.queueing.simulation.counts import counts_of
from kendall.queueing.simulation.drift_control import has_drifts, means_by_drifts
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from kendall.queueing.simulation.scenarios.routed import (
    FewerOfTwo,
    FewestRequests,
    Router,
    simulate_routed,
)
from kendall.queueing.simulation.simulated_means import (
    BATCH_MEANS,
    MORE,
    RISING,
    TOO_SHORT,
    Controlled,
    Kind,
    Mask,
    Sampled,
    brevity,
    companion_of,
    kind_of_runs,
    mean_of_runs,
    summary_of_runs,
    tail_notes,
    weighted_quantiles,
    without_unsettled,
)
from kendall.queueing.simulation.spin_up import SpinUp, spin_up, unsettled

if TYPE_CHECKING:
    from kendall.queueing.simulation.fast import SimulatedRun, Trace

NUM_REQUESTS = 100_000
PILOT = 6000  # requests, after which a queue that grows is mostly seen
MOST_REQUESTS = 10_000_000  # of all replications together, some 100 bytes each: 1 GB
SEEDS = 8  # of a steady state under bursts: one path does not know how much it was spared
MOST_SPANS = 10_000  # of arrivals that end, a simulation of its own each
SURE = 3.0  # standard deviations of the work of so many requests, about
RISEN = 1.5  # the last quarter of a run over the second
GROWTH = 4.0  # standard deviations of so many Poisson arrivals
MOST_DRAWS = 60_000_000  # residuals, and as many gaps between stalls: 480 MB each


def simulate_model(
    model: Queue,
    arrival_rate: float,
    *,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    replications: int = 1,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Simulated means with standard errors, over `replications` runs of `num_requests` each."""
    _check(model, num_requests, replications, seed)
    if model.one_of_several is not None:
        one, own_rate = model.seen_by_a_request(arrival_rate)
        given = {"num_requests": num_requests, "seed": seed, "replications": replications}
        return of_several(model, simulate_model(one, own_rate, **given, notes=notes))
    load, model = model.load(arrival_rate), model.at_mean_rate(arrival_rate)
    if has_end(model.arrivals.process):
        replications = number_of_spans(model, num_requests * replications)
    begin = begin_of(model, arrival_rate, num_requests, replications)
    streams = np.random.SeedSequence(seed).spawn(replications)
    interrupts = order_of(model.policy).preemptive or model.on_demand
    if (interrupts or model.loads_unknown) and num_requests > PILOT:  # a growing queue is slow work
        pilot = np.random.SeedSequence((seed, PILOT))
        check_kept_up(model, [simulate_run(model, arrival_rate, PILOT, pilot)])
    runs = [steady_run(model, arrival_rate, begin, stream) for stream in streams]
    check_kept_up(model, runs)
    flows = by_flow(model, runs, streams, begin.warm_up)
    answer = summary(runs, model, load, (*notes, *begin.notes), remembers=bool(begin.notes))
    return without_unsettled(dataclasses.replace(answer, flows=flows), model)


def simulate_steady_state(
    model: Queue, arrival_rate: float, num_requests: int, delay: Quantiles | None = None
) -> Prediction:
    """`simulate_model`, its noise less: with a control variate where there is one, of bursts over
    several seeds. No sample's own means. `delay`: the law of the queueing delay, where that is
    known, and of the other durations only what follows the delay is left to chance.
    """
    if model.one_of_several is not None:
        one, own_rate = model.seen_by_a_request(arrival_rate)
        return of_several(model, simulate_steady_state(one, own_rate, num_requests, delay))
    companion = companion_of(model, arrival_rate) if delay is None else None
    if companion is None and delay is None and not has_drifts(model):
        seeds = SEEDS if kind_of_runs(model) == "bursty" else 1
        each = max(num_requests // seeds, 2 * BATCH_MEANS)
        return simulate_model(model, arrival_rate, num_requests=each, replications=seeds)
    _check(model, num_requests, 1, 0)
    begin, (stream,) = (
        begin_of(model, arrival_rate, num_requests),
        np.random.SeedSequence(0).spawn(1),
    )
    whole = _begun_run(model, arrival_rate, begin, stream)
    run = whole.after(begin.warm_up)
    check_kept_up(model, [run])
    control, means = None, None
    if delay is not None:
        control = Controlled(run.queueing_delay, delay, model.levels)
    elif companion is not None:
        beside = companion.delays(whole.arrived_at, whole.output_tokens)[begin.warm_up :]
        control = Controlled(beside, companion.exact, model.levels)
    elif (means := means_by_drifts(run, model, arrival_rate)) is not None:
        control = Controlled(run.queueing_delay, means[0], model.levels, by_mean=True)
    load, remembers = model.load(arrival_rate), bool(begin.notes)
    answer = summary([run], model, load, begin.notes, control, remembers=remembers)
    if means is not None:
        answer = dataclasses.replace(answer, batch_size=means[1])
    return dataclasses.replace(answer, flows=by_flow(model, [run], [stream], begin.warm_up))


def begin_of(model: Queue, arrival_rate: float, num_requests: int, replications: int = 1) -> SpinUp:
    """How each run begins, of which nine tenths of `num_requests` count."""
    from kendall.queueing.simulation import fast

    most = MOST_REQUESTS // replications
    if model.draws_in_advance:
        most = min(most, MOST_DRAWS // model.engine.all_servers - SPARE_GAPS)
    if not fast.is_compiled(model):
        most = num_requests
    return spin_up(model, arrival_rate, num_requests, most=most)


def steady_run(
    model: Queue, arrival_rate: float, begin: SpinUp, stream: np.random.SeedSequence
) -> SimulatedRun:
    """One replication as arrays, without its warm-up."""
    return _begun_run(model, arrival_rate, begin, stream).after(begin.warm_up)


def _begun_run(
    model: Queue, arrival_rate: float, begin: SpinUp, stream: np.random.SeedSequence
) -> SimulatedRun:
    return simulate_run(
        model,
        arrival_rate,
        begin.requests,
        stream,
        since=begin.warm_up,
        waiting=begin.waiting,
    )


def _check(model: Queue, num_requests: int, replications: int, seed: int) -> None:
    whole_number("num_requests", num_requests, least=2 * BATCH_MEANS)
    whole_number("replications", replications)
    whole_number("seed", seed, least=0)
    check_draws(model, num_requests, replications)


def of_several(model: Queue, one: Prediction) -> Prediction:
    """Of all servers, from the answer of `one_of_several`; how many requests there are at all of
    them, but for the mean, does not follow from how many there are at one.
    """
    calls = (one.request_rate or 0.0) / model.requests.call_size * model.engine.servers
    return dataclasses.replace(
        one,
        **(model.counted(calls) if calls else {}),
        counts={},
        model=model.name,
        assumptions=(*model.arrivals_assumed, *one.assumptions[1:]),
    )


def number_of_spans(model: Queue, num_requests: int) -> int:
    """How often arrivals that end are drawn from their first second to their last, so that about
    so many requests come, and a standard error can be told. Raises SpecError: too many in one.
    """
    process = model.arrivals.process
    assert isinstance(process, Ending)
    expected = process.mean_rate * span(process)
    spans = min(max(math.ceil(num_requests / expected), BATCH_MEANS), MOST_SPANS)
    check_draws(model, math.ceil(expected), spans)
    return spans


def summary(
    runs: Sequence[SimulatedRun],
    model: Queue,
    load: float,
    notes: tuple[str, ...],
    control: Controlled | None = None,
    *,
    remembers: bool = False,
) -> Prediction:
    """Means with standard errors, and quantiles, of all runs together; with `control` those of
    durations are corrected. `remembers`: successive batch means hang together.
    """
    kind = kind_of_runs(model)
    if kind == "steady" and remembers:
        kind = "bursty"
    served = [run.sojourn_time[~run.lost] for run in runs]
    short = brevity(model, [run.arrived_at for run in runs], served)
    # 0 for a trace of one request, infinite for one at one instant
    rate = load * model.largest_stable_rate
    stations = _stations(runs, model, rate, kind)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method="simulation",
        stable=True,
        load=load,
        load_bound=model.load_bound,
        utilisation=_utilisation_of(runs, model, stations),
        stations=stations,
        batch_size=Mean(*mean_of_runs([sizes_per_dispatch(run) for run in runs], kind)),
        loss_fraction=mean_of_runs([run.lost.astype(float) for run in runs])[0],
        rejected_fraction=mean_of_runs([run.rejected.astype(float) for run in runs])[0] or 0.0,
        counts=counts_of(runs, model),
        **(model.counted(rate) if 0 < rate < math.inf else {}),
        **_durations(model, runs, control or Sampled(kind, model.levels)),
        assumptions=(
            *model.assumptions,
            *tail_notes(model),
            *notes,
            *_cautions(runs, together=has_end(model.arrivals.process)),
            *_growing(runs, kind),
            *(_rising(runs) if model.on_demand and kind != "spans" else ()),
            *([] if short is None else [short]),
        ),
    )


def _stations(
    runs: Sequence[SimulatedRun], model: Queue, rate: float, kind: Kind
) -> tuple[Station, ...]:
    """Those of prefill and decode, where these are two."""
    if not model.engine.disaggregated:
        return ()
    found = []
    for place, name in enumerate(("prefill", "decode")):
        own = [run.stations[place] for run in runs]
        services = [run.server_free_at - run.dispatched_at for run in own]
        service = Mean(*mean_of_runs(services, kind))
        delay = summary_of_runs([run.queueing_delay for run in own], kind, model.levels)
        found.append(Station(name, rate / model.station_rates[place], delay, service))
    return tuple(found)


def _durations(
    model: Queue, runs: Sequence[SimulatedRun], of: Sampled | Controlled
) -> dict[str, Any]:
    """`Quantiles` by the names of `Prediction`."""
    kept, admitted = [~run.lost for run in runs], [~run.rejected for run in runs]
    delays = [every[own] for every, own in zip(_delays(model, runs), admitted, strict=True)]
    delay = of(delays, admitted)
    of_served = delay
    if any(run.lost.any() for run in runs):
        of_served = of([run.queueing_delay[~run.lost] for run in runs], kept)
    return {
        "queueing_delay": delay,
        "sojourn_time": of([run.sojourn_time[~run.lost] for run in runs], kept),
        "served_queueing_delay": of_served,
        "service_time": of(
            [(run.server_free_at - run.dispatched_at)[~run.lost] for run in runs], kept
        ),
        "time_to_first_token": _to_first_token(runs, of, checked=not model.on_demand),
        "inter_token_latency": Quantiles()
        if model.policy.padded
        else _between_tokens(runs, of, model.levels),
    }


def _delays(model: Queue, runs: Sequence[SimulatedRun]) -> list[Vector]:
    """Of each request; of a lost one the patience, though a rejected one does not wait."""
    patience = math.inf if model.requests.patience is None else model.requests.patience
    return [np.where(run.lost, patience, run.queueing_delay) for run in runs]


def by_flow(
    model: Queue,
    runs: Sequence[SimulatedRun],
    streams: Sequence[np.random.SeedSequence],
    warm_up: int = 0,
) -> dict[str, Quantiles]:
    """The queueing delay of each flow, where the order counts their service; `streams`: the seeds
    of the runs, of whose requests the first `warm_up` are left out.
    """
    if model.requests.flows is None or not counts(model.policy):
        return {}
    drawn = [
        model.requests.flows.of_run(stream, warm_up + len(run.arrived_at))[warm_up:]
        for stream, run in zip(streams, runs, strict=True)
    ]
    return delays_of_flows(model, runs, model.requests.flows.names, drawn)


def delays_of_flows(
    model: Queue,
    runs: Sequence[SimulatedRun],
    names: Sequence[str],
    drawn: Sequence[npt.NDArray[np.int64]],
) -> dict[str, Quantiles]:
    """`drawn`: of each run, the place in `names` of each request's flow."""
    delays, kind = _delays(model, runs), kind_of_runs(model)
    return {
        name: summary_of_runs(
            [
                of[(whose == place) & ~run.rejected]
                for of, whose, run in zip(delays, drawn, runs, strict=True)
            ],
            kind,
            model.levels,
        )
        for place, name in enumerate(names)
    }


def _to_first_token(
    runs: Sequence[SimulatedRun], of: Sampled | Controlled, *, checked: bool
) -> Quantiles:
    """Of the served; where it is `checked`, unknown under a law with a negative k1 or k2 that puts
    a first token before its dispatch: it says nothing of it.
    """
    if checked and any((run.first_token_at < run.dispatched_at)[~run.lost].any() for run in runs):
        return Quantiles()
    kept = [~run.lost for run in runs]
    return of([(run.first_token_at - run.arrived_at)[~run.lost] for run in runs], kept)


def mean_gaps(run: SimulatedRun) -> tuple[Mask, Vector, Vector]:
    """Which answers have several tokens, which leave one by one; of these the mean time from one
    token to the next, and how many such gaps.
    """
    several = ~run.lost & (run.output_tokens > 1)
    gaps = run.output_tokens[several] - 1.0
    return several, (run.released_at - run.first_token_at)[several] / gaps, gaps


def quantiles_of_gaps(runs: Sequence[SimulatedRun], levels: Levels = LEVELS) -> dict[str, float]:
    """By their names, of all gaps between tokens; none where no answer has several tokens."""
    counted_gaps = [run.gaps or Gaps(*mean_gaps(run)[1:]) for run in runs]
    seconds, times = map(np.concatenate, zip(*counted_gaps, strict=True))
    if not len(seconds):
        return {}
    return dict(zip(levels, weighted_quantiles(seconds, times, levels).tolist(), strict=True))


def _between_tokens(
    runs: Sequence[SimulatedRun], of: Sampled | Controlled, levels: Levels
) -> Quantiles:
    """The mean: each answer's counts once for each of its gaps."""
    several, means, gaps = zip(*map(mean_gaps, runs), strict=True)
    found, mean = quantiles_of_gaps(runs, levels), of.mean(means, several, gaps)
    return Quantiles.of(levels, mean.mean, map(found.get, levels), mean.standard_error)


def _cautions(runs: Sequence[SimulatedRun], *, together: bool) -> Iterator[str]:
    """Where a replication, or all of arrivals that end, saw hardly any dispatch: its utilisation,
    and the delays of its few batches, say nothing of the steady state.
    """
    numbers = [len(np.unique(run.batch_id[~run.lost])) for run in runs]
    batches = sum(numbers) if together else min(numbers)
    if batches < BATCH_MEANS:
        seen = counted(batches, "batch", "batches")
        yield (
            f"TOO FEW BATCHES: only {seen} in a replication, expected at least {BATCH_MEANS}: "
            f"{MORE}"
        )


def _growing(runs: Sequence[SimulatedRun], kind: Kind) -> Iterator[str]:
    """Where the end of what is kept does not look like its beginning."""
    if kind in ("steady", "bursty") and (
        growth := unsettled([run.queueing_delay[~run.lost] for run in runs])
    ):
        yield (
            f"{TOO_SHORT}the mean delay of the second half of the run is {growth:.0%} above that "
            f"of the first: {MORE}"
        )


def _rising(runs: Sequence[SimulatedRun]) -> Iterator[str]:
    """Where interruptions may make more work than can be done: from quarter to quarter there are
    more requests in the system, at last many more, and so in every run.
    """
    quarters = np.array([_present_by_quarter(run) for run in runs])
    mean = quarters.mean(axis=0)
    grows = np.all(np.diff(mean) > 0) and mean[-1] > RISEN * mean[1]
    if not (grows and np.all(quarters[:, -1] > quarters[:, 1])):
        return
    yield (
        f"{RISING}, at the end of the run "
        f"{mean[-1] - mean[0]:.0f} more than at its beginning, perhaps without bound: {MORE}"
    )


def _present_by_quarter(run: SimulatedRun) -> list[float]:
    """Requests in the system as others arrive, in the mean."""
    number = np.arange(len(run.arrived_at))
    present = number - np.searchsorted(np.sort(run.released_at), run.arrived_at, side="right")
    return [float(part.mean()) for part in np.array_split(present, 4)]


def simulate_run(
    model: Queue,
    arrival_rate: float,
    num_requests: int,
    stream: np.random.SeedSequence,
    *,
    since: int = 0,
    waiting: int = 0,
    generic: bool = False,
) -> SimulatedRun:
    """One replication as arrays, warm-up included; gaps between tokens are those of the requests
    from `since` on, and the first `waiting` are there as it begins. The one function that draws a
    path of any queue: where each server has a queue and all are alike, of one of them at its share
    of the rate.
    """
    from kendall.queueing.simulation import fast

    model, arrival_rate = model.seen_by_a_request(arrival_rate)
    trace = fast.draw_trace(model, arrival_rate, num_requests, stream)
    return run_trace(model, fast.beginning_with(trace, waiting), since, generic=generic)


def run_trace(model: Queue, trace: Trace, since: int = 0, *, generic: bool = False) -> SimulatedRun:
    """These requests under the policy, by the compiled kernels where they cover the queue (and not
    `generic`); else the policy object itself is driven.
    """
    from kendall.queueing.simulation import fast
    from kendall.queueing.simulation.scenarios.two_models import run_apart, run_together

    if not len(trace.arrived_at):
        return fast.nothing_served()
    if model.engine.disaggregated:
        from kendall.queueing.simulation.scenarios.tandem import run_stations

        return run_stations(model, trace, since, partial(run_trace, generic=generic))
    if model.models_apart:
        replay = partial(run_trace, generic=generic)
        return run_apart(model, trace, since, replay)
    if model.shares_server:
        return run_together(model, trace)
    own_limits = len(trace.limits) and not in_arrival_order(model.policy)  # kernels have one
    if model.on_demand or (fast.is_compiled(model) and not generic and not own_limits):
        return fast.after_predictions(model, trace, fast.replay(model, trace, since))
    if model.predicts_on_server and order_of(model.policy).preemptive:
        raise SpecError(
            f"got prediction_cost={model.requests.prediction_cost} for a queue that the compiled "
            "simulation does not cover; expected an external cost, or a law without negative times"
        )
    router = FewerOfTwo(_by_call(trace)) if len(trace.choices) else None
    run = driven_run(model, jobs_of(model, trace), trace.residuals, since, router)
    return fast.after_predictions(model, trace, run)


def _by_call(trace: Trace) -> Sequence[Sequence[int]]:
    """The two servers of each call: those of its first request."""
    first = np.append(0, np.unique(trace.call_ends)[:-1]) if len(trace.call_ends) else slice(None)
    found: list[list[int]] = trace.choices[first].tolist()
    return found


def run_given(model: Queue, given: Trace, stream: np.random.SeedSequence) -> SimulatedRun:
    """The same, with the residuals and routes that `stream` draws; also where they are sent to
    servers in turn or at random.
    """
    from kendall.queueing.simulation import fast
    from kendall.queueing.simulation.scenarios.two_models import run_parts

    residuals = [np.random.default_rng(child) for child in stream.spawn(model.engine.servers)]
    count = len(given.arrived_at)
    drawn: dict[str, Any] = {
        "choices": fast.draw_choices(model, count, stream),
        "second": fast.draw_second(model, count, stream),
        "tool_calls": fast.draw_tool_calls(model, given.output_tokens, stream),
    }
    given = dataclasses.replace(given, residuals=residuals, **drawn)
    if (one := model.one_of_several) is None:
        return run_trace(model, given)
    servers, server = model.engine.servers, np.arange(count) % model.engine.servers
    if model.engine.routing == "random":
        server = np.random.default_rng(stream.spawn(1)[0]).integers(servers, size=count)
    parts = [(mine, one) for each in range(servers) if (mine := server == each).any()]
    return run_parts(parts, given, 0, run_trace)


def simulated_engine(model: Queue, gaps: GapCounter | None = None) -> SimulatedEngine:
    """The law and the bounds of each server of the queue, for a driver of the policy object."""
    bound = 2**31 if model.engine.bounds.max_num_seqs is None else model.engine.bounds.max_num_seqs
    tokens = or_unbounded(model.step_tokens)
    return SimulatedEngine(
        model.law,
        max_batch_size=bound,
        max_context_tokens=or_unbounded(model.engine.bounds.max_context_tokens),
        step_tokens=tokens if model.policy.joins_running else UNBOUNDED,
        max_prompt_tokens=UNBOUNDED if model.policy.joins_running else tokens,
        pad_prompts=model.pads_prompts,
        speeds=model.engine.server_speeds,
        max_num_queued_reqs=or_unbounded(model.engine.max_num_queued_reqs),
        gaps=gaps,
    )


def driven_run(
    model: Queue,
    jobs: Sequence[Job],
    residuals: Sequence[np.random.Generator],
    since: int = 0,
    router: Router | None = None,
) -> SimulatedRun:
    """The policy object itself, driven by these jobs; their order is kept."""
    gaps = None if model.policy.padded else GapCounter({job.request.id for job in jobs[since:]})
    engine = simulated_engine(model, gaps)
    if model.engine.has_queues:
        to = router or FewestRequests()
        records = simulate_routed(model.policy, jobs, engine, residuals, to)
    else:
        records = simulate_trace(model.policy, jobs, engine, residuals)
    return run_of(model, records, jobs, gaps)


def run_of(
    model: Queue, records: Sequence[Record], jobs: Sequence[Job], gaps: GapCounter | None = None
) -> SimulatedRun:
    """What a driver recorded of these jobs as arrays, in their order."""
    from kendall.queueing.simulation import fast, kernels

    place = {job.request.id: index for index, job in enumerate(jobs)}
    records = sorted(records, key=lambda record: place[record.request_id])
    instants = {name: _column(records, name) for name in fast.COLUMNS if name.endswith("_at")}
    if order_of(model.policy).preemptive:  # the delay is the time outside of service
        instants["dispatched_at"] = _column(records, "arrived_at") + _column(
            records, "queueing_delay"
        )
    whole = {name: _column(records, name, -1) for name in fast.COLUMNS if name not in instants}
    rejected = [record.outcome == "rejected" for record in records]
    whole["batch_id"][rejected] = kernels.REJECTED
    return fast.SimulatedRun(
        _column(records, "arrived_at"),
        _column(records, "output_tokens"),
        instants | whole,
        gaps=None if gaps is None else found(gaps.counts),
    )


def draw_jobs(
    model: Queue, arrival_rate: float, num_requests: int, stream: np.random.SeedSequence
) -> tuple[list[Job], list[np.random.Generator]]:
    """The jobs and the residual generators of one replication."""
    from kendall.queueing.simulation import fast

    trace = fast.draw_trace(model, arrival_rate, num_requests, stream)
    return jobs_of(model, trace), trace.residuals


def jobs_of(model: Queue, trace: Trace) -> list[Job]:
    """The requests as a policy object sees them, named by their place: sequences of a call by that
    of the call and their own in it.
    """
    count = len(trace.arrived_at)
    limits = trace.limits.tolist() or [model.requests.token_limit] * count
    predicted = trace.predicted.tolist() or [math.nan] * count
    flows = trace.flows.tolist() or [""] * count
    reserved = or_unbounded(model.engine.bounds.reserved_tokens)
    patience = math.inf if model.requests.patience is None else model.requests.patience
    rows = zip(
        _names(trace),
        trace.arrived_at.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        limits,
        predicted,
        flows,
        strict=True,
    )
    return [
        Job(
            Request(
                id=name,
                arrived_at=at,
                prompt_tokens=prompt,
                max_output_tokens=limit,
                deadline=at + patience,
                predicted_output_tokens=None if math.isnan(told) else told,
                flow=flow,
                reserved_tokens=reserved,
            ),
            output,
        )
        for name, at, prompt, output, limit, told, flow in rows
    ]


def _names(trace: Trace) -> list[str]:
    count = len(trace.arrived_at)
    if not len(trace.call_ends):
        return [str(index) for index in range(count)]
    ends, calls = np.unique(trace.call_ends, return_inverse=True)
    firsts = np.concatenate([[0], ends[:-1]])[calls]
    numbers = (np.arange(count) - firsts).tolist()
    return [f"{call}-{number}" for call, number in zip(calls.tolist(), numbers, strict=True)]


def check_draws(model: Queue, num_requests: int, replications: int) -> None:
    """Raises SpecError for more requests, or more residuals and gaps between stalls drawn in
    advance, than fit into about 1 GB.
    """
    if num_requests * replications > MOST_REQUESTS:
        raise SpecError(
            f"got {num_requests} requests in each of {counted(replications, 'replication')}; "
            f"expected at most {MOST_REQUESTS} in all, which take 1 GB: ask for fewer, and run "
            "again with other seeds"
        )
    law, spare, fewest = (
        model.engine.law,
        SPARE_GAPS if model.engine.law.stall_share else 0,
        2 * BATCH_MEANS,
    )
    most = MOST_DRAWS // model.engine.all_servers - spare
    if model.draws_in_advance and num_requests > most:
        drawn = f"stall_share={law.stall_share:g}" if law.stall_share else f"cv={law.cv:g}"
        expected = (
            f"{most} requests on so many servers"
            if most >= fewest
            else f"{MOST_DRAWS // (fewest + spare)} servers"
        )
        raise SpecError(
            f"got {num_requests} requests on servers={model.engine.all_servers} and {drawn}; "
            f"expected at most {expected}"
        )


def _column(records: Sequence[Record], name: str, missing: float = math.nan) -> Any:
    values = [getattr(record, name) for record in records]
    if name == "released_at":
        values = [
            value if record.outcome == "completed" else None
            for value, record in zip(values, records, strict=True)
        ]
    return np.array([missing if value is None else value for value in values])


def sizes_per_dispatch(run: SimulatedRun) -> Vector:
    """The size of each batch, in order of dispatch, which mostly is the order of arrival."""
    kept = ~run.lost
    ids = run.batch_id[kept]
    steps = np.diff(ids, prepend=-1)
    opens = steps > 0 if (steps >= 0).all() else np.unique(ids, return_index=True)[1]
    return np.asarray(run.batch_size[kept][opens], dtype=float)


def _utilisation(runs: Sequence[SimulatedRun], model: Queue) -> float | None:
    """None too where interrupted requests share an engine: their stints are not kept."""
    interrupted = order_of(model.policy).preemptive
    if model.on_demand or (interrupted and model.bound != 1):
        return None
    measure = _served if interrupted else _busy
    known = [busy for run in runs if (busy := measure(run, model.engine.servers)) is not None]
    return float(np.mean(known)) if known else None


def _utilisation_of(
    runs: Sequence[SimulatedRun], model: Queue, stations: Sequence[Station]
) -> float | None:
    """Of all servers; of those with single requests their load."""
    if not stations:
        return _utilisation(runs, model)
    prefill, decode = (station.load for station in stations)
    if model.engine.pooled:
        return prefill + decode
    used: float | None = decode
    if not isinstance(model.policy, Single):
        used = _utilisation([run.stations[-1] for run in runs], model.decode)
    if used is None:
        return None
    engine = model.engine
    return (engine.prefill_servers * prefill + engine.servers * used) / engine.all_servers


def check_kept_up(model: Queue, runs: Sequence[SimulatedRun]) -> None:
    """Raises UnstableQueueError where interruptions make more work than can be done, which the
    load of the requests alone does not tell. Its load is then arrivals over departures.
    """
    if model.engine.disaggregated:
        model, runs = model.decode, [run.stations[-1] for run in runs]
    whole = model.lossless and not has_end(model.arrivals.process)
    adds_work = order_of(model.policy).preemptive or model.loads_unknown
    slots, over = 1, 0.0  # memory may leave the others free, and those that call hold none
    if not whole:
        return
    if not model.on_demand:
        if not adds_work or model.bound is None:
            return
        slots = model.bound * model.engine.servers
        over = _work(runs, model.engine.servers) if model.bound == 1 else 0.0
    if over == 0:
        grown = [_excess(run, slots) for run in runs]
        over = float(np.mean(grown)) if all(grown) else 0.0
    if over:
        raise UnstableQueueError(over)


def _work(runs: Sequence[SimulatedRun], servers: int) -> float:
    """Seconds of service in each second of arrivals and server, of requests that are served one at
    a time, where that is more than 1 by more than chance; else 0.
    """
    work = sum(float((run.server_free_at - run.dispatched_at).sum()) for run in runs) / servers
    found = work / sum(float(np.ptp(run.arrived_at)) for run in runs)
    chance = SURE * math.sqrt(2 / sum(len(run.arrived_at) for run in runs))
    return found if found > 1 + chance else 0.0


def _excess(run: SimulatedRun, slots: int) -> float:
    """Arrivals over departures in the second half of the arrivals, where more are left over than
    chance leaves, and in the last quarter no slot is ever free; else 0.
    """
    half = len(run.arrived_at) // 2
    joined_at = np.sort(run.joined_at)
    left = np.searchsorted(np.sort(run.server_free_at), joined_at[half:], side="right")
    present = half + np.arange(len(left)) - left  # as each one arrives
    growth = int(present[-1] - present[0])
    if present[len(present) // 2 :].min() < slots or growth <= GROWTH * math.sqrt(len(left)):
        return 0.0
    return len(left) / max(1, len(left) - growth)


def _served(run: SimulatedRun, servers: int) -> float | None:
    """As `_busy`, from the seconds of service of requests that are served one at a time."""
    kept = ~run.lost
    if not kept.any():
        return None
    ends = run.server_free_at[kept]
    service = float((ends - run.dispatched_at[kept]).sum())
    return service / float(ends.max() - run.arrived_at[kept].min()) / servers


def _busy(run: SimulatedRun, servers: int) -> float | None:
    """Servers busy on average, from the first dispatch to the last departure: union of the service
    intervals of each.

    None where every request was lost: then the servers were busy with one that came before.
    """
    kept = ~run.lost
    if not kept.any():
        return None
    starts, ends, ids = run.dispatched_at[kept], run.server_free_at[kept], run.server_id[kept]
    busy = 0.0
    for server in range(servers):
        mine = np.flatnonzero(ids == server)
        mine = mine[np.argsort(starts[mine], kind="stable")]  # of an order other than of arrival
        begin, end = starts[mine], np.maximum.accumulate(ends[mine])
        busy += float(
            np.sum(np.maximum(0.0, end - np.maximum(begin, np.append(-math.inf, end[:-1]))))
        )
    return busy / float(ends.max() - starts.min()) / servers
