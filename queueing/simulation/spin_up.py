"""How a simulation of a steady state begins: how many requests are left out, and how many wait as
it does.

A queue forgets its beginning over so many requests, at load rho, with I the index of dispersion of
the arrivals (1: Poisson), C^2 that of a service of b requests at once:

    bounded      2 rho^2 (I + rho b C^2) / (1 - rho)^2     reflected Brownian motion: M/M/1 4 rho^2
                                                           (1 + rho) / 2 / (1 - rho)^2
    b unbounded  B / (1 - slope)       B = lam H(B), what waits in the mean (fluid); slope = lam H'
    K at most    2 K^2 / (pi^2 (I + rho b C^2)), or K rho / (rho - 1) above load 1    where less
    all          and what all servers hold together, and a cycle of the states of the arrivals

The first tenth is left out, or where that is more `MEMORIES` of these: behind them what an empty
beginning takes from the mean delay of a bounded queue is 1 % where its standard error is 25 %. What
is left out beyond the tenth is simulated besides, `MOST_MORE` times the length asked for at most,
so that a run whose tenth suffices is the one that it was. Batches without a bound grow from an
empty queue over 1 / (1 - slope) batches of B requests each, and vary little: where `GROWING`
memories are more than the tenth, B requests wait as the run begins. `unsettled` compares the end of
what is kept with its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.policies.immediate import Continuous, Dynamic, Elastic, Single
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.notation import cycle, has_end
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import PredictionError
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.simulated_means import MORE, TOO_SHORT

WARM_UP = 0.1  # share of the requests that is left out
MEMORIES, GROWING = 1.5, 4.0  # times the requests over which the queue forgets
MOST_MORE = 2.0  # times the length that was asked for
_LARGEST = 2**40  # requests that may wait
# standard errors, and the share, by which the second half may be above the first
_FAR, _GROWN = 4.0, 0.02
_PARTS = 20


@dataclass(frozen=True, slots=True)
class SpinUp:
    """A run of `requests`, of which the first `warm_up` are left out and the first `waiting` are
    there as it begins.
    """

    requests: int
    warm_up: int
    waiting: int = 0
    notes: tuple[str, ...] = ()


def spin_up(model: Queue, arrival_rate: float, num_requests: int, *, most: int) -> SpinUp:
    """Of a run that keeps nine tenths of `num_requests`, and has `most` requests at most; where
    these are no more than asked for, up to a half is left out.
    """
    tenth = int(WARM_UP * num_requests)
    if has_end(model.arrivals.process):
        return SpinUp(num_requests, 0)
    forgotten = memory(model, arrival_rate)
    needed, waiting = MEMORIES * forgotten, 0
    if _grows(model) and GROWING * forgotten > tenth:
        waiting = _fluid(model, arrival_rate)
    if (needed <= tenth and not waiting) or math.isinf(forgotten):  # no run behind a tail settles
        return SpinUp(num_requests, tenth)
    if most <= num_requests:
        warm_up = int(min(max(needed, tenth), num_requests / 2))
        return SpinUp(num_requests, warm_up, notes=_notes(warm_up, forgotten, 0))
    longest = min(most, (1 + MOST_MORE) * num_requests)
    more = int(min(max(needed - tenth, 0), longest - num_requests))
    warm_up, begun = tenth + more, min(waiting, tenth + more)
    return SpinUp(num_requests + more, warm_up, begun, _notes(warm_up, forgotten, begun))


def _notes(warm_up: int, forgotten: float, waiting: int) -> tuple[str, ...]:
    if warm_up >= forgotten / 2:
        begun = f", which begins with {waiting:,} of them waiting" if waiting else ""
        return (
            f"the first {warm_up:,} requests of a run are left out{begun}: its queue remembers "
            "long",
        )
    return (
        f"{TOO_SHORT}the queue remembers {forgotten:,.0f} requests, of which {warm_up:,} are left "
        f"out before the means: {MORE}",
    )


def memory(model: Queue, arrival_rate: float) -> float:
    """Requests after which the state hardly depends on the beginning (e^-1); infinite where
    services have no second moment.
    """
    if model.engine.disaggregated and not isinstance(model.policy, Single):
        return memory(model.prefill, arrival_rate) + memory(model.decode, arrival_rate)
    if model.models_apart:
        return max(
            memory(queue, share * arrival_rate) / share for share, queue in model.models if share
        )
    load = model.load(arrival_rate)
    try:
        held, of_queue = _in_service(model, arrival_rate), _of_queue(model, arrival_rate, load)
    except PredictionError:
        return 0.0  # no law of the services to tell it from
    process = model.arrivals.process
    states = 0.0 if process is None or has_end(process) else cycle(process)
    if model.requests.patience is not None:
        of_queue = min(of_queue, arrival_rate * model.requests.call_size * model.requests.patience)
    if model.engine.max_num_queued_reqs is not None:
        of_queue = min(of_queue, _of_room(model, load, model.engine.max_num_queued_reqs))
    return of_queue + held + states * arrival_rate


def unsettled(series: Sequence[Vector]) -> float:
    """By what share the second half of a run's values is above the first, where that is more than
    chance; of several runs on average. Else 0.
    """
    series = [run for run in series if len(run) >= _PARTS]
    if not series:
        return 0.0
    halves = np.array([[part.mean() for part in np.array_split(run, _PARTS)] for run in series])
    first, second = halves[:, : _PARTS // 2].mean(axis=1), halves[:, _PARTS // 2 :].mean(axis=1)
    error = math.sqrt(float(halves.var(axis=1, ddof=1).mean()) * 4 / _PARTS / len(series))
    growth, mean = float((second - first).mean()), float(first.mean())
    return growth / mean if mean > 0 and growth > max(_FAR * error, _GROWN * mean) else 0.0


def _grows(model: Queue) -> bool:
    """Whether batches are as large as what waits."""
    batches = isinstance(model.policy, Dynamic | Elastic) and model.bound is None
    alone = not model.engine.disaggregated and model.engine.second_model is None
    return batches and alone and model.requests.sequences is None and model.lossless


def _of_queue(model: Queue, arrival_rate: float, load: float) -> float:
    if not load < 1:
        return math.inf
    if _is_open(model):
        waiting = _fluid(model, arrival_rate)
        return waiting / (1 - _slope(model, arrival_rate, waiting))
    size = 1 if model.policy.joins_running else (model.bound or 1)
    scv = _service_scv(model, size)
    if (
        size == 1 and model.requests.sequences is not None
    ):  # a call of equal lengths is one long service
        calls = model.requests.sequences
        scv *= 1 + model.requests.intraclass_correlation * (calls.moment(2) / calls.mean - 1)
    return 2 * load**2 * (_dispersion(model) + load * size * scv) / (1 - load) ** 2


def _of_room(model: Queue, load: float, most: int) -> float:
    """Until all between an empty system and a full one is mixed, or, above load 1, it is full."""
    size = 1 if model.policy.joins_running else (model.bound or 1)
    variance = _dispersion(model) + load * size * _service_scv(model, size)
    mixed = 2 * most**2 / (math.pi**2 * variance) if variance else math.inf
    return min(mixed, most * load / (load - 1)) if load > 1 else mixed


def _is_open(model: Queue) -> bool:
    return model.bound is None and not model.policy.joins_running


def _service_scv(model: Queue, size: int) -> float:
    if isinstance(model.policy, Continuous):
        lengths = model.requests.output_tokens
        return lengths.variance / lengths.mean**2 if model.requests.tail_index > 2 else math.inf
    if model.shares_server:
        return model.changeover.scv
    time = model.batch_time
    return max(time.second_moment(size) / time.mean(size) ** 2 - 1, 0.0)


def _dispersion(model: Queue) -> float:
    """Of the number that arrives over long times."""
    process = model.arrivals.process
    scv = process.dispersion if isinstance(process, Mmpp) else model.arrivals.scv
    if model.requests.sequences is None:
        return scv
    size, second = model.requests.sequences.mean, model.requests.sequences.moment(2)
    return (second - size**2) / size + scv * size


def _in_service(model: Queue, arrival_rate: float) -> float:
    """Requests that all servers together hold at most."""
    if model.policy.joins_running:
        each = model.bound or arrival_rate / model.engine.servers * model.slot_time.mean(
            1, refilled=False
        )
    else:
        each = model.bound or 1
    return model.engine.servers * each


def _fluid(model: Queue, arrival_rate: float) -> int:
    """The largest number of requests that so many arrive while as many are served; 1 at least."""
    time, rate = model.batch_time, arrival_rate / model.engine.servers
    low, high = 1, 2
    while high < _LARGEST and rate * time.mean(high) > high:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if rate * time.mean(middle) > middle:
            low = middle
        else:
            high = middle
    return low


def _slope(model: Queue, arrival_rate: float, waiting: int) -> float:
    """Of what arrives during a batch, in its size, at most that of the largest ones."""
    time, rate = model.batch_time, arrival_rate / model.engine.servers
    step = max(1, waiting // 8)
    rise = time.mean(waiting + step) - time.mean(waiting)
    return min(max(rate * rise / step, 0.0), 0.999999)
