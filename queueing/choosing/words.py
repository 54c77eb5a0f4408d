"""The result of an optimisation in a sentence, and the meaning of its table's columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kendall.policies.text import counted, short_number
from kendall.queueing.choosing.search import TIE, Optimum, Point, near_scores, near_sojourns
from kendall.queueing.measurement.slo import PREDICTED
from kendall.queueing.result import QUANTITY_WORDS

_NAME = re.compile(rf"(?:p[\d.]+_)?({'|'.join(PREDICTED)})")
# queueing delay, sojourn time or time to first token: the one that compares the choices
DURATION = "{duration}"
SHORTEST_DELAY, HIGHEST_RATE = f"the shortest mean {DURATION}", "the highest stable rate"
GOALS = {  # what the least score is, by objective
    "delay": SHORTEST_DELAY,
    "throughput": HIGHEST_RATE,
    "v1": "the largest V1",
    "v2": "the largest V2",
    "clipped": f"{SHORTEST_DELAY} with no more clipped answers than allowed",
    "slo": f"{SHORTEST_DELAY} that keeps the SLO",
}
SLO_GOALS = {  # of --objective slo, where a target has its own
    "max-output-tokens": "the largest limit that keeps the SLO",
    "servers": "the fewest that keep the SLO",
    "arrival-rate": "the largest that keeps the SLO",
}
SCORES = {  # by objective
    "delay": f"the mean {DURATION} in seconds",
    "throughput": "minus the largest stable rate in requests per second",
    "v1": "-V1",
    "v2": "-V2",
    "clipped": f"the mean {DURATION} in seconds",
    "slo": f"the mean {DURATION} in seconds",
}


_ABOUT_ORDERS = (
    "of fcfs: ratio to the order of arrival",
    "p99: of simulated requests, the same under every order",
    "longest tenth: mean sojourn time of the requests with the longest outputs",
    (
        "largest sigma: of predictions that are off by e^(sigma Z), the largest spread at which "
        "the mean delay is still below that of fcfs; any: at a spread of 4 too; none: not even "
        "exact ones"
    ),
)


TAIL_KEPT = 1.05  # p99 over that of fcfs


def is_duration(name: str) -> bool:
    """Whether it names a mean or a quantile of a duration, as points of a search do."""
    return _NAME.fullmatch(name) is not None


def order_lines(found: Optimum) -> list[str]:
    """A line per predictor: what the best order with it gains, and at what price."""
    lines = []
    for predictor in dict.fromkeys(point["predictor"] for point in found.curve):
        own = [point for point in found.curve if point["predictor"] in (None, predictor)]
        stable = [point for point in own if point["score"] is not None]
        if predictor is None or not stable:
            continue
        best = min(stable, key=lambda point: float(point["score"]))
        ratio, longest = best["delay_ratio"], best["longest_ratio"]
        needs = {
            "always": "; it gains with predictions of any spread",
            "up to largest_sigma": f"; it gains up to sigma {best['largest_sigma']}",
        }.get(best["beats_fcfs"], "")
        gains = (
            ", no order has a shorter mean delay than fcfs"
            if ratio is None or ratio >= 1
            else f" cuts the mean delay by {percent_of(1 - ratio)}, and the longest tenth of the "
            f"requests take {longest:.2f} times as long{needs}{_safe_for_the_tail(stable)}"
        )
        with_predictor = "without" if predictor == "none" else f"with {predictor}"
        lines.append(f"{with_predictor} predictions: {best['order']}{gains}")
    return lines


def _safe_for_the_tail(stable: Sequence[Point]) -> str:
    """Of the orders whose p99 is hardly above that of fcfs, the one with the shortest mean."""
    kept = [point for point in stable if (point["p99_delay_ratio"] or 0.0) <= TAIL_KEPT]
    best = min(kept, key=lambda point: float(point["score"]), default=None)
    if best is None or best["delay_ratio"] is None or best["delay_ratio"] >= 1:
        return f"; none gains with a p99 within {percent_of(TAIL_KEPT - 1)} of fcfs"
    within, gain = percent_of(TAIL_KEPT - 1), percent_of(1 - best["delay_ratio"])
    return f"; with a p99 within {within} of fcfs, {best['order']} cuts it by {gain}"


def percent_of(share: float, places: int = 0) -> str:
    """A share as a percentage, such as `12 %`."""
    return f"{share:.{places}%}".replace("%", " %")


def result_line(found: Optimum) -> str:
    """Which choice is best, and why."""
    goal = GOALS[found.objective]
    if found.objective == "slo":
        goal = SLO_GOALS.get(found.target, goal)
    first = "the first of" if found.target in ("policy", "order") else "the smallest of"
    if found.target not in ("batch-size", "policy") or found.objective == "throughput":
        equal = [point for point in found.curve if point.get("score") == found.best.get("score")]
        reason = goal if len(equal) == 1 else f"{first} {len(equal)} with {goal}"
    else:
        near = near_scores([point for point in found.curve if point["score"] is not None])
        if len(near_sojourns(near)) == 1:
            first = "the one with the shortest sojourn time of"
        tied = f"{first} {len(near)} choices with {goal}, within {percent_of(TIE, 1)}"
        reason = goal if len(near) == 1 else tied
    return f"best: {_choice(found)}, {_named(found, reason)}"


def legend(found: Optimum) -> str:
    """The mark, the score, and the dash of a stable choice."""
    parts = ["> marks the best choice"]
    stable = [point for point in found.curve if point.get("stable")]
    if found.target == "order":
        parts += _ABOUT_ORDERS
        if len(stable) < len(found.curve):
            parts.append(
                "- in a whole row: unstable, its interruptions or predictions cost more than is "
                "free"
            )
    scored = found.best.get("score") is not None and not judged_by_slo(found)
    if scored and found.target != "order":
        parts.append(f"score: {_named(found, SCORES[found.objective])} (less is better)")
        if any(point["score"] is None for point in stable):
            parts.append("- as a score: unstable, or outside the constraint")
        elif len(stable) < len(found.curve):
            parts.append("- as a score: unstable")
    given = {
        name
        for point in stable
        for name, value in point.items()
        if is_duration(name) and value is not None
    }
    if any(point.get(name) is None for point in stable for name in given):
        parts.append("- as a duration of a stable choice: not given by its method")
    if any(point.get("loss_fraction") for point in found.curve):
        # with patience the durations are means over different requests
        in_score = " and in the score" if scored and found.compared is not None else ""
        parts.append(
            f"a lost request counts as its patience in the queueing delay{in_score}; sojourn time "
            "and first token: of the requests that are served"
        )
    return "; ".join(parts)


def judged_by_slo(found: Optimum) -> bool:
    """Whether the table shows which choices keep the SLO, in place of the score that orders
    them.
    """
    return found.objective == "slo" and found.target in SLO_GOALS


def _named(found: Optimum, text: str) -> str:
    return text.replace(DURATION, QUANTITY_WORDS[found.compared or "queueing_delay"])


def _choice(found: Optimum) -> str:
    match found.target:
        case "max-output-tokens":
            return f"a limit of {counted(found.best['max_output_tokens'], 'output token')}"
        case "batch-size":
            return f"batch size {found.best['batch_size']}"
        case "servers":
            return counted(found.best["servers"], "server")
        case "order":
            predictor = found.best["predictor"]
            by = "" if predictor is None else f" with {predictor} predictions"
            return f"{found.best['order']}{by}"
        case "arrival-rate":
            return f"{short_number(found.best['arrival_rate'], 5)} requests per second"
        case _:
            return str(found.best["policy"])
