"""What runs in the predicting process: assessments, what-ifs, advice.

The process keeps the last assessment, so that what-ifs and advice need not be sent what it already
has, and the next one can build on its long run, which costs most.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kendall.policies import SpecError, parse_policy
from kendall.policies.ordered import order_of
from kendall.policies.orders.order import Aging, Order
from kendall.policies.text import counted
from kendall.queueing.choosing.advice.advise import TARGETS, UNASKED, advise, parse_objective
from kendall.queueing.choosing.advice.load_balancer import behind_load_balancer, routings_of
from kendall.queueing.choosing.advice.rates import rate_factor_of, rate_sentences, rates
from kendall.queueing.choosing.advice.searches import search
from kendall.queueing.choosing.advice.what_if import WhatIfs
from kendall.queueing.choosing.autopilot.assessed_window import assessed_window
from kendall.queueing.choosing.autopilot.controller import Autopilot, Mode
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.state import State
from kendall.queueing.choosing.candidates import canonical
from kendall.queueing.choosing.forecast import (
    Advice,
    Forecast,
    Gains,
    LoadBalancerCost,
    RateBounds,
    WhatIf,
)
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.gain.same_requests import SameRequests
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.control.service_ahead import service_ahead
from kendall.queueing.control.wait_ahead import BatchService, SlotService
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import PredictionError
from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.assumptions.compared_window import (
    ENGINE,
    Compared,
    observed_mean,
    observed_quantiles,
)
from kendall.queueing.estimation.checked import cut_at
from kendall.queueing.estimation.estimates import Estimates, SavedEstimates
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.lengths.predictions import classes_of_window
from kendall.queueing.estimation.outlook import (
    Outlook,
    RecentArrivals,
    band,
    forecast_error,
    outlook,
)
from kendall.queueing.estimation.routing import Routing, routing_of
from kendall.queueing.estimation.served_times import ObservedLaw, ServedTimes
from kendall.queueing.estimation.speed.observed_law import observed_law
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.summaries import (
    ComparisonSummary,
    EstimatesSummary,
    ObservedDelay,
)
from kendall.queueing.estimation.window.replica import WindowReplica
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.identifiability import beyond
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import Check
from kendall.queueing.predictors.learned import learn
from kendall.queueing.result import Prediction, Quantity
from kendall.server.live.answers import (
    Answer,
    AssessmentSummary,
    DatedCheck,
    DelayCharts,
    LongRunSummary,
    NextMinutes,
    Stretch,
    Unpredicted,
)
from kendall.server.live.assessment_request import ENOUGH, AssessmentRequest

WHAT_IF_SECONDS = 45.0  # of a processor, for all what-ifs: what is left then is left out
WHAT_IF_SLICE = 0.5  # of a processor, after which what there is of them is answered
AHEAD_KEPT, AHEAD_SOON, AHEAD_MOVED = 60.0, 15.0, 0.1  # seconds; of the load, relative
learn_lengths = learn  # asked by server.predictors
ADVICE_SECONDS = 45.0  # of a processor, after which no search for another target begins


@dataclass(slots=True)
class _Round:
    """The what-ifs that are being computed, for the window that ended `at`; None: for one of an
    earlier life.
    """

    what_ifs: WhatIfs
    at: float | None
    same: SameRequests | None  # None: none are known
    seconds: float = 0.0  # of a processor


@dataclass(slots=True)
class _Memory:
    """What the process keeps between questions."""

    replica: WindowReplica = field(default_factory=WindowReplica)
    question: AssessmentRequest | None = None
    estimates: Estimates | None = None  # of the last assessment with enough data, or restored
    estimated_at: float | None = None  # the end of their window; None: of an earlier life
    pilot: Autopilot = field(default_factory=Autopilot)  # off until it is told otherwise
    last: Assessment | None = None  # what the next may build on
    last_shape: LatencyModel | None = None
    last_seen: Snapshot | None = None
    what_ifs: _Round | None = None
    history: SpeedHistory = field(
        default_factory=SpeedHistory
    )  # of the engine under this law, whatever the epoch
    recent: RecentArrivals = field(default_factory=RecentArrivals)  # whatever the epoch
    ahead: Outlook | None = None  # of the epoch
    next: NextMinutes | None = None  # what it says of the setting in force
    ahead_load: float = 1.0  # of the long run when it was said


_memory = _Memory()


def learn_law(served: ServedTimes) -> ObservedLaw | None:
    """The law of watched servers, from the requests that they served."""
    return observed_law(served, np.random.default_rng(0))


def learn_routing(served: ServedTimes, slots: int) -> Routing | None:
    """How watched servers with so many slots each get their requests."""
    server = np.unique(served.server, return_inverse=True)[1]
    return routing_of(served.arrived, served.started, served.last, server, slots)


def restore(state: msgspec.Raw) -> EstimatesSummary:
    """Estimates of an earlier life of the gateway: what-ifs and advice rest on them until the
    window has its own.
    """
    _memory.estimates = Estimates.from_json(msgspec.json.decode(state))
    return dataclasses.replace(_memory.estimates.summary(), restored=True)


def start_pilot(mode: Mode, state: msgspec.Raw | None, shift: float) -> None:
    """Decide with every assessment from here on; `state` of an earlier life, on a clock that showed
    `shift` seconds less.
    """
    _memory.pilot = Autopilot(mode=mode)
    if state is not None:
        _memory.pilot.restore(State.from_json(msgspec.json.decode(state)), shift)


def steer_pilot(mode: Mode) -> None:
    """Another mode from here on, with what it remembers; while it is off, nothing is on trial."""
    state = _memory.pilot.state
    state.trial = None if mode == "off" else state.trial
    _memory.pilot = Autopilot(mode=mode, state=state)


def assess_window(question: AssessmentRequest) -> Answer:
    """The estimates, the prediction for the policy in force beside the observation, and the
    verdict; or the `reason` why not.
    """
    seen = _seen(question)
    _memory.question = question
    found, reason = None, None
    try:
        found = _assessed(question, seen)
    except SpecError as error:  # a limit beyond what the lengths are known for
        ended = len(seen.mine.rows)
        reason = str(error) if ended >= ENOUGH else _too_few(question, ended)
    decision, failure = _decided(question, seen, found) if question.decides else (None, None)
    answer = Answer(reason=reason) if found is None else _answer(question, seen, found)
    return dataclasses.replace(
        answer,
        pilot_failure=failure,
        can_say_what_if=_memory.estimates is not None,
        decision=decision,
        pilot=_saved(_memory.pilot.state) if question.saving else None,
    )


def _decided(
    question: AssessmentRequest, seen: Snapshot, found: Assessment | None
) -> tuple[Decision | None, str | None]:
    """The autopilot's decision, or how it failed: the assessment itself stands."""
    if question.bounds is not None:
        _memory.pilot.bounds = question.bounds
    try:
        shown = assessed_window(
            seen,
            question.shape,
            question.setting,
            _limits(question),
            None if found is None else found.estimates,
            assumptions=() if found is None else found.compared.assumptions,
            longest=question.longest,
        )
        return _memory.pilot.decide(shown), None
    except Exception:  # noqa: BLE001 - told by the gateway's log
        return None, traceback.format_exc()


def _assessed(question: AssessmentRequest, seen: Snapshot) -> Assessment:
    same = question.shape == _memory.last_shape
    _memory.recent.add(seen)
    if not same:
        _memory.history = SpeedHistory()
    found = assess(
        seen,
        question.shape,
        _limits(question),
        known=_memory.last.long_run if same and _memory.last is not None else None,
        waiting_before=question.waiting_before,
        history=_memory.history,
    )
    if (check := found.compared.check) is not None:
        check = check.after(_check_before(seen))
        compared = dataclasses.replace(found.compared, check=check)
        found = dataclasses.replace(found, compared=compared)
    if _memory.last_seen is None or _memory.last_seen.epoch != seen.epoch:
        _memory.ahead = _memory.next = None
    _memory.last, _memory.last_shape, _memory.last_seen = found, question.shape, seen
    return found


def _next(
    question: AssessmentRequest, seen: Snapshot, found: Assessment, *, joins: bool
) -> NextMinutes | None:
    """What was said of them stands for a while."""
    last = _memory.ahead
    if found.model is None:
        return _memory.next
    moved = abs(math.log(found.load.value / _memory.ahead_load)) > AHEAD_MOVED
    kept = AHEAD_SOON if moved else AHEAD_KEPT
    if last is not None and seen.now - last.at < min(kept, last.history / 2):
        return _memory.next  # of little traffic it soon knows more
    _memory.ahead_load = found.load.value
    model = cut_at(found.model, question.engine.batch_tokens)
    error = forecast_error(found.estimates, _memory.history)
    least = found.estimates.gateway_turnaround
    ahead = outlook(seen, model, _memory.recent, error, least=least)
    _memory.ahead, _memory.next = ahead, None
    means = None if ahead is None else ahead.means(model)
    if ahead is None or means is None:
        return None
    told = band(means[1 if joins else 0])
    _memory.next = NextMinutes(
        seconds=ahead.seconds,
        mean=told.value,
        low=told.low,
        high=told.high,
        history=ahead.history,
        at=ahead.at,
    )
    return _memory.next


def _check_before(seen: Snapshot) -> Check | None:
    """Of the last assessment, if that is of this epoch."""
    last, last_seen = _memory.last, _memory.last_seen
    same = last is not None and last_seen is not None and last_seen.epoch == seen.epoch
    return last.compared.check if last is not None and same else None


def _answer(question: AssessmentRequest, seen: Snapshot, found: Assessment) -> Answer:
    enough = found.estimates.count >= ENOUGH
    if enough:
        _memory.estimates, _memory.estimated_at = found.estimates, seen.now
    if not enough:
        reason = _too_few(question, found.estimates.count)
        return Answer(estimates=found.estimates.summary(), reason=reason)
    return Answer(
        estimates=found.estimates.summary(),
        prediction=described(question, seen, found),
        ahead=_ahead(found),
        ranking=_ranking(seen, found),
        state=_saved(found.estimates.saved()) if question.saving else None,
    )


def _ranking(seen: Snapshot, found: Assessment) -> Order | None:
    """Of the policy in force, where its order learns from the lengths; by what predictions became,
    where enough requests had one.
    """
    if found.model is None or not (order := order_of(found.model.policy)).learns:
        return None
    if isinstance(order, Aging) and order.predicts and order.learns != "service":
        longest = found.model.requests.output_tokens.longest
        classes = classes_of_window(seen, longest)
        return order if classes is None else found.model.ranked_by_class(order, *classes)
    return order


def _saved(value: SavedEstimates | State) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _too_few(question: AssessmentRequest, ended: int) -> str:
    of, when = " of this epoch", f"in the last {question.window:g} s"
    if question.anew:
        of, when = "", "since the predicting process was restarted"
    ends = "has ended" if ended == 1 else "have ended"
    return f"{counted(ended, 'request')}{of} {ends} {when}; {ENOUGH} are needed"


def _ahead(found: Assessment) -> BatchService | SlotService | None:
    """Service times for the wait estimates of requests at their arrival; also where the queue
    has no steady state.
    """
    if found.model is None:
        return None
    try:
        return service_ahead(found.model)
    except PredictionError:
        return None


def described(question: AssessmentRequest, seen: Snapshot, found: Assessment) -> AssessmentSummary:
    """An unstable queue has no delays."""
    law, compared = found.estimates.law(question.shape), _compared(found)
    joins = parse_policy(seen.policy).joins_running
    comparison, predicted = compared.summary(), _predicted(seen, found)
    observed = while_requests_came(seen)
    delays = observed.judged()
    mean = observed_mean(observed) if delays.size else None
    quantiles = observed_quantiles(delays) if joins else found.compared.observed_quantiles
    return AssessmentSummary(
        predicted=predicted,
        check=None if compared.check is None else DatedCheck(compared.check, seen.now),
        forecast=_forecast(question, seen, found, predicted, comparison),
        epoch=seen.epoch,
        at=seen.now,
        window=Stretch(seen.start, seen.now, seen.now - seen.start),
        n=int(delays.size),
        observed_mean=None if mean is None else mean.value,
        observed_queueing_delay=None
        if mean is None
        else ObservedDelay(mean=mean.of_duration(), quantiles=quantiles),
        arrival_rate=found.estimates.arrival_rate.value,
        rate_seconds=seen.now - _rate_since(found.estimates),
        speed=law.speed,
        server_speeds=found.server_speeds,
        cv=law.cv,
        law=law,
        compared="sojourn_time" if joins else "queueing_delay",
        interval=comparison.predicted,
        gateway_turnaround=found.estimates.gateway_turnaround,
        load_interval=found.load,
        doubts=_doubts(question, seen),
        estimates=found.estimates.summary(),
        comparison=comparison,
    )


def _forecast(
    question: AssessmentRequest,
    seen: Snapshot,
    found: Assessment,
    predicted: Prediction | Unpredicted,
    comparison: ComparisonSummary,
) -> LongRunSummary:
    """Its conditions are what it takes for granted of those who send, and of the queue: the check
    takes nothing of it.
    """
    run, known = found.long_run, found.estimates
    intervals: Mapping[Quantity, Estimate] = {}
    if run is not None:
        known = run.estimates
        intervals = {} if run.prediction is None or _grows(found) else run.intervals
    delay, sojourn = (intervals.get(name) for name in ("queueing_delay", "sojourn_time"))
    every = comparison.assumptions
    return LongRunSummary(
        predicted=predicted,
        interval=comparison.predicted,
        conditions={name: every[name] for name in every if name not in ENGINE},
        at=known.now,
        arrival_rate=known.arrival_rate.value,
        law=known.law(question.shape),
        queueing_delay_interval=delay and delay.of_duration(),
        sojourn_time_interval=sojourn and sojourn.of_duration(),
        next=_next(question, seen, found, joins=parse_policy(seen.policy).joins_running),
    )


def _predicted(seen: Snapshot, found: Assessment) -> Prediction | Unpredicted:
    """The prediction, or what is known of it where the queue has none."""
    told = None if found.long_run is None or _grows(found) else found.long_run.answered
    if told is not None:
        return dataclasses.replace(told, policy=seen.policy)  # as asked, however it is served
    stable = False if _grows(found) else None
    return Unpredicted(policy=seen.policy, stable=stable, load=found.load.value)


def _rate_since(estimates: Estimates) -> float:
    """The arrival rate is that of the time since then."""
    changed = estimates.rate_changed_at
    return estimates.start if changed is None else changed


def _grows(found: Assessment) -> bool:
    """Whether there is no steady state: one assumption decides it. A load beyond 1 may be an
    estimate that is off, and a queue can grow at one that seems to be below.
    """
    return any(
        each.name == "stable_queue" and each.holds is False for each in found.compared.assumptions
    )


def _compared(found: Assessment) -> Compared:
    """Without a steady state nothing is predicted."""
    if not _grows(found):
        return found.compared
    return dataclasses.replace(found.compared, predicted=UNKNOWN, error=math.nan)


def ask_what_ifs(anew: bool = True) -> list[WhatIf]:
    """What is known of the setting in force, then of every other policy, some limits and caps,
    after WHAT_IF_SLICE seconds of a processor; none before there are estimates. Those of which only
    the load is known are `pending`: the next question has more. `anew`: at the estimates of the
    last assessment.
    """
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return []
    began, round_ = time.process_time(), None if anew else _memory.what_ifs
    if round_ is None:
        point = _operating_point(question, estimates)
        same, what_ifs = _same_requests(question, point), WhatIfs(point, question.setting)
        round_ = _memory.what_ifs = _Round(what_ifs, _instant_of(point), same)
    most = min(WHAT_IF_SLICE, WHAT_IF_SECONDS - round_.seconds)
    round_.what_ifs.advance(lambda: time.process_time() - began >= most)
    round_.seconds += time.process_time() - began
    late = round_.seconds >= WHAT_IF_SECONDS
    found = [each for each in round_.what_ifs.forecasts() if not (late and each.pending)]
    return _rows(found, round_.at, round_.same)


def _same_requests(question: AssessmentRequest, point: OperatingPoint) -> SameRequests | None:
    """The window that the estimates are of, if that is still known."""
    seen = _memory.last_seen
    if seen is None or seen.now != _memory.estimated_at:
        return None
    return SameRequests(seen, point, canonical(question.setting), _memory.ahead)


def ask_what_ifs_at(parameters: Mapping[str, str]) -> list[WhatIf]:
    """The same, all at once and with the steady states alone, where so many times as many requests
    come (`rate_factor`). Raises SpecError; none before there are estimates.
    """
    rate_factor_of(parameters)
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return []
    began = time.process_time()
    what_ifs = WhatIfs(_asked_about(question, estimates, parameters), question.setting)
    what_ifs.advance(lambda: time.process_time() - began >= WHAT_IF_SECONDS)
    found = [each for each in what_ifs.forecasts() if not each.pending]
    return _rows(found, _memory.estimated_at, None)


def _rows(found: Sequence[Forecast], at: float | None, same: SameRequests | None) -> list[WhatIf]:
    """The setting in force first."""
    policies = [parse_policy(each.setting.policy) for each in found]
    compared = [compared_by((policies[0], own)) for own in policies]
    return [
        WhatIf(
            forecast=each.summary(),
            gains=Gains() if same is None else same.gains(each.setting, quantity),
            compared=quantity,
            at=at,
        )
        for each, quantity in zip(found, compared, strict=True)
    ]


def ask_drawn() -> DelayCharts | None:
    """Of the last assessment: its requests by the second, and a histogram of their delays beside
    that of the model of the same requests. Where the requests cannot be driven through the model
    there are no pairs, and the histogram is beside the forecast; none where there is no forecast
    either.
    """
    from kendall.queueing.estimation.histogram import beside, quantiles  # noqa: PLC0415 - where a page is looked at

    seen, found = _memory.last_seen, _memory.last
    if seen is None or found is None:
        return None
    sojourn = parse_policy(seen.policy).joins_running
    drawn = DelayCharts(
        compared="sojourn_time" if sojourn else "queueing_delay",
        epoch=seen.epoch,
        assessed_at=seen.now,
    )
    if (pairs := found.pairs) is not None:
        return dataclasses.replace(
            drawn,
            histogram=beside(pairs.observed, pairs.draws.ravel()),
            modelled=quantiles(pairs.draws),
            pairs=pairs.by_second(seen.now),
        )
    forecast = _forecast_delays(found, sojourn=sojourn)
    histogram = None if forecast is None else beside(seen.judged(sojourn=sojourn), forecast)
    return dataclasses.replace(drawn, histogram=histogram)


def _forecast_delays(found: Assessment, *, sojourn: bool) -> Vector | None:
    from kendall.queueing.estimation.histogram import drawn  # noqa: PLC0415 - where a page is looked at

    question = _memory.question
    if question is None or found.prediction is None or _grows(found):
        return None
    operating_point = _operating_point(question, found.estimates)
    if operating_point.refusal(question.setting.max_output_tokens) is not None:
        return None
    model = operating_point.model(question.setting, law=found.estimates.law(question.shape))
    return drawn(model, operating_point.rate, sojourn=sojourn)


def ask_advice(parameters: Mapping[str, str]) -> list[Advice]:
    """What would be best for an objective. Raises SpecError; empty before there are estimates."""
    objective = parse_objective(parameters)
    if (target := parameters.get("target")) not in (
        None,
        *TARGETS,
    ):  # also before there is anything to be advised
        raise SpecError(f"got target {target!r}; expected one of {', '.join(TARGETS)}")
    routings_of(parameters)
    rate_factor_of(parameters)
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return []
    operating_point = _asked_about(question, estimates, parameters)
    usual = [each for each in UNASKED if not (question.owns_queue and each == "policy")]
    targets = usual if target is None else (target,)
    until = time.process_time() + ADVICE_SECONDS
    found = advise(
        operating_point,
        question.setting,
        objective,
        targets,
        over=lambda: time.process_time() >= until,
    )
    at_this_rate = rate_factor_of(parameters) == 1
    same = _same_requests(question, operating_point) if at_this_rate else None
    at, after = _instant_of(operating_point), [_next_gain(same, each) for each in found]
    return [
        dataclasses.replace(each, next_gain_low=gain.low, next_gain_high=gain.high, at=at)
        for each, gain in zip(found, after, strict=True)
    ]


def _next_gain(same: SameRequests | None, advice: Advice) -> Estimate:
    """Of what is advised over the setting in force."""
    if (
        same is None
        or advice.best is None
        or advice.compared not in ("queueing_delay", "sojourn_time")
    ):
        return UNKNOWN
    return same.next_gain(advice.best.setting, advice.compared)


def ask_load_balancer(parameters: Mapping[str, str]) -> LoadBalancerCost | None:
    """The setting in force with a queue at each server, beside the one queue. None with one server,
    and before there are estimates.
    """
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return None
    operating_point = _asked_about(question, estimates, parameters)
    return behind_load_balancer(
        operating_point, canonical(question.setting), routings_of(parameters)
    )


def ask_rates(parameters: Mapping[str, str]) -> RateBounds | None:
    """The observed rate, the one that is asked about, and the largest that the setting in force
    can serve. Raises SpecError; None before there are estimates.
    """
    objective, factor = parse_objective(parameters), rate_factor_of(parameters)
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return None
    operating_point = _operating_point(question, estimates, parameters.get("family"))
    found = rates(operating_point, canonical(question.setting), objective)
    last = None if _memory.last is None else _memory.last.compared
    limited = () if last is None else last.assumptions
    admitted = next((each for each in limited if each.name == "all_admitted"), None)
    says = "" if admitted is None or admitted.holds is not False else admitted.says
    found = dataclasses.replace(found, factor=factor, refused=says.partition(":")[0] or None)
    return dataclasses.replace(found, says=rate_sentences(found))


def ask_servers(slo: str) -> int | None:
    """The fewest servers that keep every SLO of the text. None before there are estimates, where
    none of the numbers that are searched keeps them, and where predictions have no such quantile.
    """
    question, estimates = _memory.question, _memory.estimates
    if question is None or estimates is None:
        return None
    try:
        objective = parse_objective({"objective": "slo", "slo": slo})
        found = search(
            _operating_point(question, estimates), canonical(question.setting), objective, "servers"
        )
    except SpecError:
        return None
    return None if found.setting is None else found.setting.servers


def _asked_about(
    question: AssessmentRequest, estimates: Estimates, parameters: Mapping[str, str]
) -> OperatingPoint:
    """At the rate and the family of lengths that the query of an advice names."""
    at_rate = estimates.at_rate(rate_factor_of(parameters))
    return _operating_point(question, at_rate, parameters.get("family"))


def _operating_point(
    question: AssessmentRequest, estimates: Estimates, family: str | None = None
) -> OperatingPoint:
    """That of the long run, with what was found out there, while it stands for these estimates."""
    last = _memory.last
    run = last.long_run if last is not None and last.estimates is estimates else None
    about = question.shape, _limits(question)
    if run is not None and family is None and (run.point.shape, run.point.limits) == about:
        return run.point
    return OperatingPoint(
        estimates=estimates, shape=question.shape, limits=_limits(question), family=family
    )


def _instant_of(point: OperatingPoint) -> float | None:
    """The end of the window that it rests on; None of an earlier life of the gateway."""
    return None if _memory.estimated_at is None else point.estimates.now


def _seen(question: AssessmentRequest) -> Snapshot:
    """The window with what is new."""
    _memory.replica.seconds = question.window
    _memory.replica.add(question.delta)
    setting = question.setting
    return _memory.replica.snapshot(
        setting.policy,
        question.at,
        in_service=question.in_service,
        ended=question.ended,
        waiting=question.waiting,
        servers=setting.servers,
    )


def _limits(question: AssessmentRequest) -> QueueLimits:
    setting = question.setting
    return QueueLimits(
        max_output_tokens=setting.max_output_tokens,
        patience=question.patience,
        servers=setting.servers,
        pads=question.pads,
        engine=question.engine,
        owns_queue=question.owns_queue,
        routing=question.routing,
    )


def _doubts(question: AssessmentRequest, seen: Snapshot) -> tuple[str, ...]:
    """What was served beyond what the law was measured on."""
    if question.reach is None:
        return ()
    return beyond(
        seen.mine.column("batch_size"), seen.mine.column("output_tokens"), *question.reach
    )
