"""By which methods a queue can be answered, and what each of them answers.

single                             exact          mg1; with patience mg1d; with several servers an
                                                  approximation, mgc
dynamic, capped, elastic           exact          batch_chain, batch_delay
fixed without max_wait             exact          mgb1
continuous                         approximation  continuous
batch policy on several servers    simulation
batch policy with patience         simulation
fixed with max_wait                simulation
single, independent gaps other     exact          gig1; on several servers, with patience and
than exponential ones                             under other policies simulation
prefill and decode on two servers  exact          tandem where Burke's or Friedman's theorem holds;
                                                  else an approximation, tandem
another order than fcfs            exact means    single; on several servers, in the slots of
                                                  continuous, and where requests are interrupted,
                                                  an approximation or simulation (ordered)
dynamic by bins of like length     exact means    two bins; more an approximation (bin_chain)
a policy from outside              simulation
servers with a queue each          as of one      by chance: Poisson arrivals at each; in turn:
                                                  gaps of SCV 1/c; to the fewest: simulation
memory that may bind               simulation
calls of several sequences         exact          batch_chain of whole calls for dynamic, capped,
                                                  elastic on one server where no batch splits one
                                   exact means    call_chain where some do, if the lengths in a call
                                                  are independent, and for single; else simulation

`bound`: a value that the mean delay does not exceed, where one is known. `paper`: the formula that
the documents print (queueing.models.printed).
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from kendall.queueing.prediction import solvers
from kendall.queueing.prediction.solver import Solver
from kendall.queueing.prediction.solvers.bounds import delay_bound, has_bound, is_renewal
from kendall.queueing.prediction.solvers.ordered import is_ordered
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction

RANK = ("exact", "approximation", "bound", "paper", "simulation")


def best_method(model: Queue) -> str:
    """exact, else approximation, else simulation."""
    return methods(model)[0]


def methods(model: Queue) -> tuple[str, ...]:
    """What this queue can be answered by, the best first."""
    if (one := model.one_of_several) is not None:
        return methods(one)
    known = {name for solver in _solvers(model) for name in solver.covers(model)}
    return tuple(sorted({*known, "simulation"}, key=RANK.index))


def answer(model: Queue, arrival_rate: float, method: str) -> Prediction:
    """By a method other than simulation. Raises UnstableQueueError, NotConvergedError."""
    solver = next(each for each in _solvers(model) if method in each.covers(model))
    values = solver.solve[method](model, arrival_rate)
    values.setdefault("served_queueing_delay", values["queueing_delay"])
    bounded = has_bound(model) and not is_ordered(model)
    upper = delay_bound(model, arrival_rate) if bounded else None
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=method,
        stable=True,
        load=model.load(arrival_rate),
        load_bound=model.load_bound,
        bounds={} if upper is None else {"queueing_delay_upper": upper},
        **{"utilisation": None, "assumptions": model.assumptions, **values},
    )


def _solvers(model: Queue) -> tuple[Solver, ...]:
    """Those of its order of service; none where only a simulation has what binds."""
    limited = model.memory_limited or model.prompt_limited
    simulated = model.engine.has_queues or limited or bool(model.engine.server_speeds)
    of_process = model.arrivals.process is not None and not is_renewal(model)
    if simulated or of_process:
        return ()
    ordered, policy = is_ordered(model), type(model.policy)
    return tuple(
        solver
        for solver in found_solvers()
        if solver.ordered == ordered and policy in solver.policies
    )


@cache
def found_solvers() -> tuple[Solver, ...]:
    """`SOLVERS` of each module of the folder."""
    modules = [each.name for each in pkgutil.iter_modules(solvers.__path__, f"{solvers.__name__}.")]
    return tuple(solver for name in modules for solver in import_module(name).SOLVERS)
