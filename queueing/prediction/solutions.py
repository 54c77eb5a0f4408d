"""The methods that answer a queue, and the prediction by each of them but simulation.

single                             exact          mg1; with patience mg1d; with several servers an
                                                  approximation, mgc
dynamic, capped, elastic           exact          batch_chain, batch_delay
fixed without max_wait             exact          mgb1
continuous                         approximation  continuous
batch policy on several servers    simulation
batch policy with patience         simulation
fixed with max_wait                simulation
single, --max-num-queued-reqs      exact means    mg1k; with patience, several servers, and
                                                  under other policies simulation
single, independent gaps that      exact          gig1; on several servers, with patience and
are not exponential                               under other policies simulation
prefill and decode on two servers  exact          tandem where Burke's or Friedman's theorem holds;
                                                  else an approximation, tandem
another order than fcfs            exact means    single; on several servers, in the slots of
                                                  continuous, and where requests are interrupted,
                                                  an approximation or simulation (ordered)
dynamic by bins of like length     exact means    two bins; more an approximation (bin_chain)
a policy from outside              simulation
c servers with a queue each        as one server  routed at random: Poisson arrivals at each; in
                                                  turn: gaps of SCV 1/c; to the server with the
                                                  fewest requests: simulation
memory or prompt tokens may bind,  simulation
servers of different speeds
calls of several sequences         exact          batch_chain of whole calls for dynamic, capped,
                                                  elastic on one server where no batch splits one
                                   exact means    call_chain where some do, if the lengths in a call
                                                  are independent, and for single; else simulation

Two more methods where they exist: `bound` is a value that the mean delay does not exceed, `paper`
the formula that the papers print (queueing.models.as_published).
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from kendall.queueing.prediction import solvers
from kendall.queueing.prediction.solver import Solver
from kendall.queueing.prediction.solvers.bounds import delay_bound, has_bound, is_renewal
from kendall.queueing.prediction.solvers.ordered import is_ordered
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction

BEST_FIRST = ("exact", "approximation", "bound", "paper", "simulation")


def best_method(model: Queue) -> str:
    """The method that `auto` means for this queue."""
    return methods(model)[0]


def methods(model: Queue) -> tuple[str, ...]:
    """The methods that answer this queue, the best first; the last one is simulation."""
    one_server = model.one_of_several
    if one_server is not None:
        return methods(one_server)
    known = {method for solver in _solvers(model) for method in solver.covers(model)}
    return tuple(sorted({*known, "simulation"}, key=BEST_FIRST.index))


def answer(model: Queue, arrival_rate: float, method: str) -> Prediction:
    """The prediction by one of `methods`, which may not be simulation. Raises UnstableQueueError,
    NotConvergedError.
    """
    solver = next(solver for solver in _solvers(model) if method in solver.covers(model))
    solved = _after_predictions(model, solver.solve[method](model, arrival_rate))
    defaults = {
        "served_queueing_delay": solved["queueing_delay"],
        "utilisation": None,
        "assumptions": model.assumptions,
    }
    bounds = {}
    if has_bound(model) and not is_ordered(model):
        bounds["queueing_delay_upper"] = delay_bound(model, arrival_rate)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=method,
        stable=True,
        load=model.load(arrival_rate),
        load_bound=model.load_bound,
        bounds=bounds,
        **model.counted(arrival_rate),
        **(defaults | solved),
    )


def _after_predictions(model: Queue, solved: dict[str, Any]) -> dict[str, Any]:
    """With the time that requests wait for predictions outside of the engine: all as long, but
    under skippredict, of which formulas have means only.
    """
    seconds = model.external_prediction
    if not seconds:
        return solved
    later = solved.keys() & {"queueing_delay", "sojourn_time", "time_to_first_token"}
    return solved | {name: solved[name].mapped(lambda _, value: value + seconds) for name in later}


def _solvers(model: Queue) -> tuple[Solver, ...]:
    """The solvers for the queue's policy and order of service; none for a queue that only a
    simulation models.
    """
    engine, arrivals = model.engine, model.arrivals
    if (
        model.memory_limited
        or model.prompt_limited
        or engine.has_queues
        or engine.server_speeds
        or (arrivals.process is not None and not is_renewal(model))
    ):
        return ()
    ordered, policy = is_ordered(model), type(model.policy)
    finite = engine.max_num_queued_reqs is not None
    return tuple(
        solver
        for solver in _all_solvers()
        if (solver.ordered, solver.finite) == (ordered, finite) and policy in solver.policies
    )


@cache
def _all_solvers() -> tuple[Solver, ...]:
    """The `SOLVERS` of every module in queueing/prediction/solvers."""
    modules = pkgutil.iter_modules(solvers.__path__, f"{solvers.__name__}.")
    return tuple(solver for module in modules for solver in import_module(module.name).SOLVERS)
