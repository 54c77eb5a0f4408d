"""The cost of a load balancer: the requests of a window at the same servers, with a queue at each
in place of the one queue.

random, round_robin   one server with its share of the arrivals (Queue.one_of_several): the
                      price of a what-if, together 0.3 s or less
least_requests        no formula: all servers are simulated side by side, 0.1 s for a standard error
                      of 1 to 4 % (load 0.7, 2 to 8 servers). No live look has it; an advice does
                      where it is asked for by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kendall.policies.text import SpecError, suggest
from kendall.queueing.choosing.answer import precise
from kendall.queueing.choosing.forecast import CentralQueue, LoadBalancerCost, RoutedQueues, Setting
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.description.parts import ROUTINGS
from kendall.queueing.errors import PredictionError
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantity
from kendall.queueing.simulation.experiment import simulate_model
from kendall.queueing.simulation.run_limits import affordable_requests

ASKED = ROUTINGS[1:4]
USUAL = ("random", "round_robin")  # as cheap as a what-if
SIMULATED = 100_000  # requests, where every server is simulated
_DURATIONS: tuple[Quantity, ...] = ("queueing_delay", "sojourn_time")


def routings_of(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The routings in the query of an advice: the one that it names, else the usual ones. Raises
    SpecError.
    """
    named = parameters.get("routing")
    if named is None:
        return USUAL
    if named not in ASKED:
        raise SpecError(
            f"got routing {named!r}; expected {', '.join(ASKED[:-1])} or {ASKED[-1]}"
            f"{suggest(named, ASKED)}"
        )
    return (named,)


def behind_load_balancer(
    window: WindowModel, setting: Setting, routings: Sequence[str] = USUAL
) -> LoadBalancerCost | None:
    """The setting with one queue and with a queue at each server. None with one server, and
    without a steady state.
    """
    if setting.servers == 1 or window.refusal(setting.max_output_tokens) is not None:
        return None
    try:
        one_queue = window.predicted(setting)
    except PredictionError:
        return None
    model = window.model(setting)
    return LoadBalancerCost(
        servers=setting.servers,
        policy=setting.policy,
        compared="sojourn_time" if model.policy.joins_running else "queueing_delay",
        central=CentralQueue(
            method=one_queue.method,
            queueing_delay=one_queue.queueing_delay,
            sojourn_time=one_queue.sojourn_time,
        ),
        routings=[_routed(window, model, routing, one_queue) for routing in routings],
    )


def _routed(window: WindowModel, model: Queue, routing: str, one_queue: Prediction) -> RoutedQueues:
    """A queue at each server, as the gateway would measure it, and how much more than in one queue;
    or `reason` says why it has no numbers. Behind a stall waits who has joined that server's queue;
    the fewest requests avoid it as one queue does.
    """
    try:
        routed = model.but(routing=routing)
        one = routed.one_of_several
        if one is None:
            prediction = window.measured(_simulated)(routed, window.rate)
        else:
            prediction = window.measured(precise)(one, window.rate / model.engine.servers)
    except (SpecError, PredictionError) as error:
        return RoutedQueues(routing=routing, reason=str(error))
    more: dict[str, float | None] = {}
    for name in _DURATIONS:
        here, central = (getattr(each, name).mean for each in (prediction, one_queue))
        more[name] = None if here is None or central is None else here - central
    return RoutedQueues(
        routing=routing,
        method=prediction.method,
        queueing_delay=prediction.queueing_delay,
        sojourn_time=prediction.sojourn_time,
        more=more,
    )


def _simulated(model: Queue, arrival_rate: float) -> Prediction:
    assert model.engine.has_queues
    model.stable_load(arrival_rate)
    count = affordable_requests(model, arrival_rate, SIMULATED)
    return simulate_model(model, arrival_rate, num_requests=count)
