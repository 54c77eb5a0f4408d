"""The best choice of each target at a window's estimates, by the optimisers of
queueing.choosing on the estimated model.

Predictions hold the gateway's own turnaround and the stalls, as those that are reported do
(`WindowModel.measured`). Of several policies the sojourn time decides
(queueing.choosing.quantity).

batch-size           any objective; v1, v2 and clipped weigh token limits, so at a given limit they
                     mean delay
policy               likewise, among those in force and the usual ones
order                likewise, the policy in force in the orders of `optimize --target order` that
                     are quickly predicted; on request only
max-output-tokens    v1, v2; slo: the longest limit that keeps it, if that cuts no more than
                     `max_clipped_fraction`; delay and throughput alone would cut every answer at
                     one token, so they mean the shortest limit that cuts no more
servers              the fewest that keep the SLO; without an SLO more is always faster: one more
                     is shown

An SLO is kept by the value that is reported (`OperatingPoint.reported`): the choice is checked by
it, and near the SLO the search goes on with it, so that no advice breaks the SLO by its own
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kendall.policies import format_policy, parse_policy, policy_batch_size
from kendall.policies.immediate import Single
from kendall.policies.ordered import Ordered
from kendall.policies.text import first_come_form, with_order
from kendall.queueing.choosing.candidates import (
    LARGEST_SIZE,
    canonical,
    sized_policy,
    usual_policies,
    with_size,
)
from kendall.queueing.choosing.choices import best_batch_size, best_policy
from kendall.queueing.choosing.confirmed import confirmed_choice
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.orders import OrderSearch
from kendall.queueing.choosing.phrases import small_share
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.choosing.search import Optimum, Point, Predict, largest_kept, point_of
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.errors import NoStableChoiceError
from kendall.queueing.estimation.checked import plain
from kendall.queueing.prediction.solutions import best_method
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import is_compiled

LARGEST_SERVERS = 16
NEVER = 1e-6  # limits that cut fewer requests than this are not searched
SHOWN = 40  # points of a curve

Curve = tuple[Point, ...]


@dataclass(frozen=True)
class SearchResult:
    """The best setting with the curve it was chosen from; `setting` is None where there is no
    choice, and `why` says the reason. `left_out`: what could not be compared, with the reason.
    """

    setting: Setting | None
    curve: Curve = ()
    why: str = ""
    left_out: str = ""


def search(
    operating_point: OperatingPoint, current: Setting, objective: Objective, target: str
) -> SearchResult:
    """The best choice of a target. Raises SpecError where objective and limits do not fit (v2
    without patience).
    """
    limits_tokens = target == "max-output-tokens"
    refusal = operating_point.refusal(1 if limits_tokens else current.max_output_tokens)
    if refusal is not None:
        return SearchResult(None, why=refusal)
    if target != "policy" and _is_slow(operating_point.model(current)):
        return SearchResult(
            None,
            why=f"every choice under {current.policy} is simulated step by step, which takes too "
            f"long here; `kendall optimize --target {target}` has the time",
        )
    try:
        return SEARCHES[target](AdviceSearch(operating_point, current, objective))
    except NoStableChoiceError as error:
        lengths = operating_point.lengths
        beyond = lengths.refusal(None) if limits_tokens and lengths else None
        return SearchResult(None, why="; ".join(each for each in (str(error), beyond) if each))


def _is_slow(model: Queue) -> bool:
    """Whether no formula and no compiled simulation has it."""
    return best_method(model) == "simulation" and not is_compiled(plain(model))


def measure_of(
    operating_point: OperatingPoint,
    settings: tuple[Setting, Setting],
    objective: Objective,
    target: str,
) -> Criterion:
    """The criterion by which two settings are compared. Token limits and servers are chosen by the
    SLO itself; a policy that stays is compared as all choices of its target are.
    """
    if target in ("max-output-tokens", "servers") and objective.slo is not None:
        return Criterion(objective, objective.slo.field)
    current, best = settings
    texts = [each.policy for each in settings]
    if target in ("policy", "order") and current == best:
        texts = [
            current.policy,
            *usual_policies(current, operating_point.limits.engine.max_num_seqs),
        ]
    at_a_limit = target in ("policy", "batch-size", "order")
    goal = objective.at_a_limit if at_a_limit else objective
    return Criterion(goal, compared_by(map(parse_policy, texts), objective.slo))


@dataclass(frozen=True)
class AdviceSearch:
    """A search at an operating point, from the setting in force."""

    point: OperatingPoint
    current: Setting
    objective: Objective

    @property
    def model(self) -> Queue:
        """The queue of the setting in force."""
        return self.point.model(self.current)

    @property
    def ranking(self) -> Predict:
        """The quick predictions by which dozens of settings are ranked."""
        return self.point.ranking(self.objective.slos)

    def batch_size(self) -> SearchResult:
        """The best batch size of the policy in force."""
        policy, current = parse_policy(self.current.policy), self.current
        base, most = sized_policy(policy), self.point.limits.engine.max_num_seqs
        if base is None:
            alone = "takes one request at a time and " if policy_batch_size(policy) == 1 else ""
            why = f"{current.policy} {alone}has no batch size: see the target policy"
            return SearchResult(None, why=why)
        found = best_batch_size(
            self.point.model(dataclasses.replace(current, policy=format_policy(base))),
            self.point.rate,
            self.objective.at_a_limit,
            LARGEST_SIZE if most is None else min(most, LARGEST_SIZE),
            self.ranking,
        )

        def setting(point: Point) -> Setting:
            if point["batch_size"] == (policy_batch_size(policy) or most):
                return current
            sized = with_size(base, int(point["batch_size"]))
            return dataclasses.replace(current, policy=format_policy(sized))

        return self.verified(found, setting)

    def policy(self) -> SearchResult:
        """The best of the policy in force and the usual ones."""
        usual = usual_policies(self.current, self.point.limits.engine.max_num_seqs)
        in_force = canonical(self.current).policy
        cut = [
            text
            for text in usual
            if text != in_force
            and self.point.cut_by_memory(dataclasses.replace(self.current, policy=text))
        ]
        found = best_policy(
            self.model,
            [text for text in usual if text not in cut],
            self.point.rate,
            self.objective.at_a_limit,
            self.ranking,
        )
        choice = self.verified(
            found, lambda point: dataclasses.replace(self.current, policy=str(point["policy"]))
        )
        if not cut:
            return choice
        left_out = f"not compared, as KV memory may cut their batches: {', '.join(cut)}"
        return dataclasses.replace(choice, left_out=left_out)

    def order(self) -> SearchResult:
        """The best order of service of the policy in force."""
        in_force, notes = parse_policy(self.current.policy), []
        if not isinstance(in_force, Ordered):
            why = f"{self.current.policy} has no orders: see the target policy"
            return SearchResult(None, why=why)
        first_come, predictor = first_come_form(in_force), self.model.requests.predictor
        predicted, one_by_one = predictor != NO_PREDICTION, isinstance(in_force, Single)
        if not predicted:
            notes.append(
                "orders by predicted lengths are not compared: too few requests had a prediction "
                "(kendall serve --length-predictor makes them)"
            )
        orders = OrderSearch(self.model.but(policy=first_come), self.point.rate)
        names = orders.usual(
            lambda order: (
                (predicted or not order.predicts) and (one_by_one or not order.preemptive)
            )  # of slots only those that interrupt nobody
        )
        others = [format_policy(with_order(first_come, each)) for each in names]
        texts = list(dict.fromkeys([self.current.policy, format_policy(first_come), *others]))
        goal = self.objective.at_a_limit
        found = best_policy(self.model, texts, self.point.rate, goal, self.ranking)
        choice = self.verified(found, lambda point: self._under(str(point["policy"])))
        if choice.setting not in (None, self.current):
            both = (parse_policy(choice.setting.policy), in_force)
            own, usual = (orders.tail(policy, predictor)[1] for policy in both)
            if usual:
                notes.insert(
                    0, f"p99 of the queueing delay, simulated: {own / usual:.2f} times that"
                )
        return dataclasses.replace(choice, left_out="; ".join(notes))

    def _under(self, policy: str) -> Setting:
        return dataclasses.replace(self.current, policy=policy)

    def verified(self, found: Optimum, setting_of: Callable[[Point], Setting]) -> SearchResult:
        """The best choice that keeps the SLO by its reported value; the setting in force counts by
        its own. Raises NoStableChoiceError.
        """
        compared = found.compared
        if self.objective.slo is not None and compared is not None:
            kept = self.point.keeps_slo(self.current, self.objective)
            curve = []
            for point in found.curve:
                score = point["score"]
                if setting_of(point) == self.current:
                    # without a steady state it has no value
                    score = None if not kept else point[compared] if score is None else score
                curve.append(point if score == point["score"] else point | {"score": score})

            def reported(point: Point) -> Point:
                keeps = self.point.keeps_slo(setting_of(point), self.objective)
                return point if keeps else point | {"score": None}

            found = confirmed_choice(
                found.target,
                self.objective,
                curve,
                reported,
                found.note,
                by_sojourn=True,
                learns=False,
            )
        return SearchResult(setting_of(found.best), thinned(found))

    def token_limit(self) -> SearchResult:
        """The best token limit; under an SLO the longest that keeps it."""
        lengths, objective = self.point.lengths, self.objective
        assert lengths is not None
        goal = objective
        if objective.name in ("delay", "throughput"):
            goal = Objective(name="clipped", max_clipped_fraction=objective.max_clipped_fraction)
        model = self.point.model(dataclasses.replace(self.current, max_output_tokens=None))
        largest = int(min(lengths.reach, lengths.whole.quantile(1 - NEVER)))
        found = best_token_limit(model, self.point.rate, goal, largest, self.ranking)
        best = int(found.best["max_output_tokens"])
        if objective.name != "slo":
            return SearchResult(self.limited(best, largest), thinned(found))
        limit = largest_kept(
            lambda limit: self.point.keeps_slo(self.limited(limit, largest), objective),
            best,
            1,
            largest,
        )
        if limit is None:
            why = f"no token limit keeps the SLO {objective.constraint}"
            return SearchResult(
                None, why=f"{why}; add servers, lower the arrival rate, or relax the SLO"
            )
        setting, cut = self.limited(limit, largest), lengths.clipped_fraction(limit)
        most = objective.max_clipped_fraction
        if cut is not None and cut > most and setting != self.current:
            why = (
                f"the longest limit that keeps the SLO {objective.constraint}, {limit}, cuts "
                f"{small_share(cut)} of the answers, more than max_clipped_fraction={most:g}"
            )
            return SearchResult(None, why=f"{why}; allow more, add servers, or relax the SLO")
        return SearchResult(setting, self.curve_to(limit, setting, found))

    def limited(self, limit: int, largest: int) -> Setting:
        """The setting in force with that limit; without one, where there is none and this one would
        cut nothing.
        """
        if self.current.max_output_tokens is None and limit >= largest:
            return self.current
        return dataclasses.replace(self.current, max_output_tokens=limit)

    def curve_to(self, limit: int, setting: Setting, found: Optimum) -> Curve:
        """The curve of a search with the longest limit that keeps an SLO as it is reported; longer
        ones are no choice.
        """
        lengths = self.point.lengths
        assert lengths is not None
        choice = {
            "max_output_tokens": limit,
            "clipped_fraction": lengths.clipped_fraction(limit),
            "utility": float(lengths.whole.utilities[limit]),
        }
        model = self.point.model(setting)
        point, _ = point_of(
            choice, model, self.point.rate, lambda *_: self.point.predicted(setting)
        )
        best = point | {"score": -float(limit)}
        shorter = [point for point in found.curve if point["max_output_tokens"] < limit]
        longer = [
            point | {"score": None} for point in found.curve if point["max_output_tokens"] > limit
        ]
        return thinned(dataclasses.replace(found, best=best, curve=[*shorter, best, *longer]))

    def servers(self) -> SearchResult:
        """The fewest servers that keep the SLO; without one, one more."""
        if self.objective.name == "slo":
            found = fewest_servers(
                self.model, self.point.rate, self.objective, LARGEST_SERVERS, self.ranking
            )
            return self.fewest(found)
        model, more = self.model, self.current.servers + 1
        curve = [
            point_of(
                {"servers": count},
                model.but(servers=count),
                self.point.rate,
                self.ranking,
            )[0]
            for count in (more - 1, more)
        ]
        why = "one more server would not be enough for a steady state"
        best = dataclasses.replace(self.current, servers=more) if curve[-1]["stable"] else None
        return SearchResult(best, tuple(curve), why)

    def fewest(self, found: Optimum) -> SearchResult:
        """The fewest servers that keep the SLO by the reported values."""

        def keeps(spare: int) -> bool:
            setting = dataclasses.replace(self.current, servers=LARGEST_SERVERS - spare)
            return self.point.keeps_slo(setting, self.objective)

        start = LARGEST_SERVERS - int(found.best["servers"])
        spare = largest_kept(keeps, start, 0, LARGEST_SERVERS - 1)
        if spare is None:
            why = f"{LARGEST_SERVERS} servers do not keep the SLO {self.objective.constraint}"
            return SearchResult(None, why=f"{why}; lower the arrival rate, or relax the SLO")
        servers = LARGEST_SERVERS - spare
        curve = [
            point | {"score": None} if point["servers"] < servers else point
            for point in found.curve
        ]
        return SearchResult(dataclasses.replace(self.current, servers=servers), tuple(curve))


SEARCHES: Mapping[str, Callable[[AdviceSearch], SearchResult]] = {
    "batch-size": AdviceSearch.batch_size,
    "max-output-tokens": AdviceSearch.token_limit,
    "policy": AdviceSearch.policy,
    "servers": AdviceSearch.servers,
    "order": AdviceSearch.order,
}
TARGETS: Sequence[str] = tuple(SEARCHES)
UNASKED = tuple(target for target in TARGETS if target != "order")  # advised where none is asked


def thinned(found: Optimum) -> Curve:
    """At most about `SHOWN` points, the best among them."""
    every = max(1, len(found.curve) // SHOWN)
    return tuple(
        point
        for place, point in enumerate(found.curve)
        if place % every == 0 or point is found.best
    )
