"""What an optimisation found, in a sentence, and what the columns of its table mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

from policies.text import counted, short_number
from queueing.measurement.slo import PREDICTED
from queueing.optimization.quantity import WORDS
from queueing.optimization.search import TIE, Optimum, Point, near_scores, near_sojourns

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
    "longest tenth: mean sojourn time of the requests with the longest outputs",
    (
        "largest sigma: of predictions that are off by e^(sigma Z), the largest spread at which "
        "the mean delay is still below that of fcfs; any: at a spread of 4 too; none: not even "
        "exact ones"
    ),
)


def is_duration(name: str) -> bool:
    """Whether it names a mean or a quantile of a duration, as points of a search do."""
    return _NAME.fullmatch(name) is not None


def order_lines(found: Optimum) -> list[str]:
    """What the best order for each predictor gains, and at what price."""
    lines = []
    for predictor in dict.fromkeys(point["predictor"] for point in found.curve):
        own = [point for point in found.curve if point["predictor"] in (None, predictor)]
        stable = [point for point in own if point["score"] is not None]
        if predictor is not None and stable:
            best = min(stable, key=lambda point: float(point["score"]))
            told = "without" if predictor == "none" else f"with {predictor}"
            lines.append(f"{told} predictions: {_order_line(best)}")
    return lines


def _order_line(best: Point) -> str:
    ratio, longest = best["delay_ratio"], best["longest_ratio"]
    if ratio is None or ratio >= 1:
        return f"{best['order']}, no order has a shorter mean delay than fcfs"
    needs = {
        "always": "; it gains with predictions of any spread",
        "up to largest_sigma": f"; it gains up to sigma {best['largest_sigma']}",
    }
    return (
        f"{best['order']} cuts the mean delay by {1 - ratio:.0%}, and the longest tenth of the "
        f"requests take {longest:.2f} times as long{needs.get(best['beats_fcfs'], '')}"
    ).replace("%", " %")


def result_line(found: Optimum) -> str:
    """Which choice is best, and why."""
    return f"best: {_choice(found)}, {_named(found, _reason(found))}"


def legend(found: Optimum) -> str:
    """The mark and the score."""
    parts = [
        "> marks the best choice",
        *(_about_orders(found) if found.target == "order" else _about_score(found)),
        *_about_durations(found),
        *_about_losses(found),
    ]
    return "; ".join(parts)


def _about_orders(found: Optimum) -> tuple[str, ...]:
    if all(point["stable"] for point in found.curve):
        return _ABOUT_ORDERS
    return (*_ABOUT_ORDERS, "- in a whole row: unstable, interruptions cost more than is free")


def judged_by_slo(found: Optimum) -> bool:
    """Whether the table shows which choices keep the SLO, in place of the score that orders
    them.
    """
    return found.objective == "slo" and found.target in SLO_GOALS


def _about_score(found: Optimum) -> list[str]:
    if found.best.get("score") is None or judged_by_slo(found):
        return []
    text = f"score: {_named(found, SCORES[found.objective])} (less is better)"
    if all(point["score"] is not None for point in found.curve):
        return [text]
    if all(point["score"] is not None for point in found.curve if point["stable"]):
        return [text, "- as a score: unstable"]
    return [text, "- as a score: unstable, or outside the constraint"]


def _about_durations(found: Optimum) -> list[str]:
    """The dash of a stable choice."""
    stable = [point for point in found.curve if point.get("stable")]
    names = {name: None for point in stable for name in point if is_duration(name)}
    given = [name for name in names if any(point.get(name) is not None for point in stable)]
    missing = any(point.get(name) is None for point in stable for name in given)
    return ["- as a duration of a stable choice: not given by its method"] if missing else []


def _about_losses(found: Optimum) -> list[str]:
    """With patience the durations are means over different requests."""
    if not any(point.get("loss_fraction") for point in found.curve):
        return []
    scored = (
        found.compared is not None
        and found.best.get("score") is not None
        and not judged_by_slo(found)
    )
    where = "the queueing delay and in the score" if scored else "the queueing delay"
    return [
        (
            f"a lost request counts as its patience in {where}; sojourn time and first token: of "
            "the requests that are served"
        )
    ]


def _named(found: Optimum, text: str) -> str:
    return text.replace(DURATION, WORDS[found.compared or "queueing_delay"])


def _by_target(found: Optimum, texts: dict[str, str]) -> str | None:
    return texts.get(found.target) if found.objective == "slo" else None


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
            told = "" if predictor is None else f" with {predictor} predictions"
            return f"{found.best['order']}{told}"
        case "arrival-rate":
            return f"{short_number(found.best['arrival_rate'], 5)} requests per second"
        case _:
            return str(found.best["policy"])


def _reason(found: Optimum) -> str:
    goal = _by_target(found, SLO_GOALS) or GOALS[found.objective]
    if found.target not in ("batch-size", "policy") or found.objective == "throughput":
        equal = [point for point in found.curve if point.get("score") == found.best.get("score")]
        return goal if len(equal) == 1 else f"{_first(found)} {len(equal)} with {goal}"
    near = near_scores([point for point in found.curve if point["score"] is not None])
    if len(near) == 1:
        return goal
    return (
        f"{_tie(found, near_sojourns(near))} {len(near)} choices with {goal}, within {TIE:.1%}"
    ).replace("%", " %")


def _tie(found: Optimum, nearest: Sequence[Point]) -> str:
    return "the one with the shortest sojourn time of" if len(nearest) == 1 else _first(found)


def _first(found: Optimum) -> str:
    return "the first of" if found.target in ("policy", "order") else "the smallest of"
