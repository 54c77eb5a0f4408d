"""The gateway as the page shows it: plain values by topic, read from its objects, changing nothing,
at a bounded cost.

A topic is sent when it differs from what was sent before, so what moves every second is apart from
what does not. Durations are seconds, instants Unix time. The numbers are those of `/metrics`, read
from the same places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from kendall.queueing.estimation.interval import UNKNOWN
from kendall.queueing.json_form import json_object, to_json
from kendall.server.engines.base import describe_engine
from kendall.server.live.servers_seen import servers_seen
from kendall.server.page.history import short
from kendall.server.page.host import PageHost
from kendall.server.page.minute import MINUTE_COLUMNS, NOTHING
from kendall.server.supervision.lifecycle import EngineState

if TYPE_CHECKING:
    from kendall.queueing.choosing.forecast import WhatIf
    from kendall.queueing.estimation.summaries import ObservedDelay
    from kendall.server.live import LiveModel
    from kendall.server.live.answers import AssessmentSummary
    from kendall.server.queue.sequence import SequenceState

MEMBERS = 48  # of a server's batch that are drawn
SERVERS = 8
DECISIONS = 12  # of the autopilot that are shown
_ENDS = ("", "_low", "_high", "_p95", "_p99")
COLUMNS = (
    *(
        "at",
        "queue_length",
        "in_service",
        "arrival_rate",
        "sequence_rate",
        "utilisation",
        "predicted_utilisation",
        "load",
        "predicted_queue_length",
    ),
    *(
        f"{side}_{what}{end}"
        for what in ("delay", "sojourn")
        for side in ("observed", "predicted")
        for end in _ENDS
    ),
    *MINUTE_COLUMNS,
)
_LOOK = (
    *(
        "policy",
        "epoch",
        "method",
        "stable",
        "load",
        "load_interval",
        "utilisation",
        "queueing_delay",
        "sojourn_time",
        "interval",
    ),
    *(
        "compared",
        "observed_queueing_delay",
        "comparison",
        "window",
        "n",
        "arrival_rate",
        "speed",
        "cv",
        "doubts",
    ),
)
Topics = dict[str, Any]


def topics(gateway: PageHost, at: float, minute: Sequence[float | None] = NOTHING) -> Topics:
    """Everything, at this instant of Unix time; little of it before the engine serves."""
    if not gateway.lifecycle.started:
        return {
            "gateway": _life(gateway),
            "now": {"row": [short(at), *[None] * (len(COLUMNS) - 1)], "servers": []},
        }
    live, now = gateway.live_model(), gateway.now()
    autopilot, predictor = live.pilot.shown(), gateway.length_predictor

    def unix(instant: float | None) -> int | None:
        return None if instant is None else round(at - (now - instant))

    pace = live.rate_factor  # once: it changes with every instant
    prediction = live.prediction
    return {
        "gateway": _life(gateway) | _about(gateway),
        "now": {"row": row(gateway, at, minute, pace), "servers": servers(gateway)},
        "look": {
            "prediction": None if prediction is None else _look(prediction),
            "reason": None if prediction else live.why_nothing(),
            "at": None if prediction is None else unix(prediction.at),
            "outdated": live.outdated,
            "stopped": live.stopped,
            "rate_seconds": live.rate_seconds,
        },
        "what_if": [_row(each) for each in _what_ifs(gateway, live)],
        "what_if_in_force": to_json(_in_force(gateway, live, pace)),
        "what_if_state": {
            "at": unix(live.what_if_at),
            "left": live.what_if_left,
            "outdated": live.what_if_outdated,
        },
        "load_balancer": to_json(live.load_balancer),
        "servers": _servers(gateway),
        "checks": to_json(live.checks),
        "length_predictor": None if predictor is None else to_json(predictor.quality()),
        "autopilot": to_json(replace(autopilot, decisions=autopilot.decisions[-DECISIONS:])),
    }


def _life(gateway: PageHost) -> Topics:
    """What the gateway is doing, and why where that needs words."""
    life, settings = gateway.lifecycle, gateway.settings
    calibrating = life.state is EngineState.SERVING and gateway.latency.calibrating
    return {
        "state": "calibrating" if calibrating else life.state.value,
        "reason": life.reason,
        "model": settings.served_model_name,
        "looks": settings.prediction_interval > 0,
    }


def _about(gateway: PageHost) -> Topics:
    """What serves, and what is in force."""
    settings, capabilities = gateway.settings, gateway.batcher.capabilities
    return describe_engine(capabilities, settings.served_model_name) | {
        "in_force": gateway.limits.state(),
        "policies": gateway.limits.policies,
        "law": gateway.latency.law is not None,
        "prediction_window": settings.prediction_window,
        "keyed": bool(settings.security.api_keys),
        "resizable": _resizable(gateway),
        "serving": gateway.batcher.servers,
        "what_if_interval": settings.what_if_interval,
        "restarts": gateway.supervisor.restarts,
        "versions": dict(capabilities.versions),
    }


def _what_ifs(gateway: PageHost, live: LiveModel) -> Sequence[WhatIf]:
    """What is from before a change of the rate has its load at the present one, which needs no new
    assessment, and no delay where there is no steady state any more.
    """
    known = live.what_if or []
    if not live.what_if_outdated:
        return known
    return [_at_rate(gateway, each, live.what_if_rate_factor) for each in known]


def _at_rate(gateway: PageHost, each: WhatIf, factor: float) -> WhatIf:
    if not math.isfinite(each.forecast.load):
        return each
    forecast = replace(each.forecast, load=each.forecast.load * factor)
    if forecast.load >= 1 and gateway.limits.patience is None:
        forecast = replace(forecast, stable=False, pending=False, notes=())
    elif forecast.stable is False:
        forecast = replace(forecast, stable=None, pending=True)
    return replace(each, forecast=forecast)


def _in_force(gateway: PageHost, live: LiveModel, pace: float) -> WhatIf | None:
    """The forecast of the setting in force, with the numbers of the last assessment: those that
    stand elsewhere on the page.
    """
    in_force, prediction = live.what_if_in_force, live.prediction
    if in_force is None or prediction is None:
        return in_force
    predicted, long_run = prediction.predicted, prediction.forecast
    judged = prediction.comparison.assumptions["stable_queue"]
    sound = judged.holds is not False and predicted.load < 1
    forecast = replace(
        in_force.forecast,
        stable=predicted.stable,
        load=predicted.load,
        queueing_delay=predicted.queueing_delay,
        sojourn_time=predicted.sojourn_time,
        time_to_first_token=predicted.time_to_first_token,
        notes=in_force.forecast.notes if predicted.stable or sound else (judged.says,),
        interval=long_run.queueing_delay_interval,
        sojourn_interval=long_run.sojourn_time_interval,
    )
    found = replace(in_force, forecast=forecast, at=long_run.at)
    return found if pace == 1 else _at_rate(gateway, found, pace)


def _servers(gateway: PageHost) -> list[Topics]:
    """Each of several, or of those behind; without addresses, which are the operator's."""
    live, known = gateway.live_model(), servers_seen(gateway).servers
    if gateway.proxying is None and len(known) < 2:
        return []
    return [
        {
            "id": server.id,
            "state": server.state,
            "in_service": server.in_service,
            "speed": server.speed,
            "utilisation": round(live.activity.utilisation_of(server.id), 2),
        }
        for server in known
    ]


def _resizable(gateway: PageHost) -> str | None:
    """By what `PUT /admin/servers` changes them, where it does."""
    if gateway.proxying is not None:
        return "urls"
    return None if gateway.servers is None else "replicas"


def row(
    gateway: PageHost,
    at: float,
    minute: Sequence[float | None] = NOTHING,
    pace: float | None = None,
) -> list[float | None]:
    """The numbers of this instant, in the order of COLUMNS; `minute` are those of
    MINUTE_COLUMNS, `pace` the rate factor of this instant.
    """
    live, batcher = gateway.live_model(), gateway.batcher
    pace = live.rate_factor if pace is None else pace
    assessment = live.prediction
    delay, sojourn = None if assessment is None else assessment.observed_queueing_delay, None
    if assessment is not None and assessment.compared == "sojourn_time":
        sojourn = assessment.comparison.observed
    delays = [*_observed(delay), *_predicted(assessment, "queueing_delay")]
    numbers = [
        *(
            at,
            batcher.queue_length,
            batcher.in_service,
            *_rates(live, pace),
            live.activity.utilisation(),
        ),
        *(
            None if assessment is None or live.outdated else assessment.predicted.utilisation,
            _load(live, pace),
            None if assessment is None or live.outdated else assessment.predicted.queue_length.mean,
            *delays,
            *_observed(sojourn),
            *_predicted(assessment, "sojourn_time"),
            *minute,
        ),
    ]
    return [
        None if number is None or not math.isfinite(number) else short(number) for number in numbers
    ]


def _rates(live: LiveModel, pace: float) -> tuple[float, float]:
    """Calls and sequences per second: the rate that load and delays are predicted at, or that of
    the time since, where it has changed. Without a prediction, and where no requests come any more,
    those of the last minute.
    """
    calls, sequences = live.activity.arrival_rate(), live.activity.sequence_rate()
    prediction = live.prediction
    if prediction is None or live.stopped:
        return calls, sequences
    rate = prediction.arrival_rate * pace
    return rate, rate * (sequences / calls if calls else 1.0)


def _load(live: LiveModel, pace: float) -> float | None:
    """At the rate that is shown."""
    prediction = live.prediction
    return None if prediction is None else prediction.predicted.load * pace


def _observed(delay: ObservedDelay | None) -> tuple[float | None, ...]:
    """Mean, its interval, p95 and p99."""
    if delay is None:
        return (None,) * len(_ENDS)
    mean, high = delay.mean, (delay.quantiles.get(name, UNKNOWN) for name in ("p95", "p99"))
    return mean.value, mean.low, mean.high, *(each.value for each in high)


def _predicted(
    assessment: AssessmentSummary | None, what: Literal["queueing_delay", "sojourn_time"]
) -> tuple[float | None, ...]:
    """The interval is that of the quantity that is compared."""
    if assessment is None:
        return (None,) * len(_ENDS)
    predicted = assessment.predicted
    found = predicted.queueing_delay if what == "queueing_delay" else predicted.sojourn_time
    if assessment.compared != what or found.mean is None:
        return found.mean, None, None, found.p95, found.p99
    return found.mean, assessment.interval.low, assessment.interval.high, found.p95, found.p99


def servers(gateway: PageHost) -> list[dict[str, Any]]:
    """What each server has in service: tokens so far, the limit, and whether the own end has
    come (a padded batch goes on).
    """
    found = gateway.batcher.in_service_sequences()
    return [
        {"size": len(sequences), "members": [_member(sequence) for sequence in sequences[:MEMBERS]]}
        for sequences in found[:SERVERS]
    ]


def _member(sequence: SequenceState) -> list[int]:
    detector = sequence.stop_detector
    return [detector.output_tokens, detector.limit, int(detector.finish_reason is not None)]


@lru_cache(maxsize=2)  # a minute has sixty ticks, and a dozen assessments
def _look(assessment: AssessmentSummary) -> Topics:
    members = assessment.as_dict()
    shown = {name: members.get(name) for name in _LOOK} | {"next": assessment.forecast.next}
    return json_object(shown)


@lru_cache(maxsize=128)
def _row(what_if: WhatIf) -> Topics:
    return json_object(what_if)
