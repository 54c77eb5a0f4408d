"""How good the predicted lengths are that came with the requests: a predictor's text, as `kendall
predict --predictor` takes it.

The error of a prediction Y of a length X is ln(Y/X). A spread below `SMALLEST` is none: `exact`;
else predictions are taken for lognormal with that spread, whatever their common bias, which changes
no order by length. Two values, of which one is four times the other, are a bit: half and twice its
threshold, with the two errors apart; one value for lengths that differ predicts nothing. Lengths
that were cut are left out: how wrong their predictions were is not known.

The lengths given their prediction (`classes_of_window`) need no text: ln N = a + b ln Y + e, by
least squares over what ended, and the law of e by the product-limit estimator, with cut lengths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.lengths.same_lengths import lengths_from
from kendall.queueing.estimation.window.snapshot import CENSORED, ENDED, WITHOUT_LENGTH, Snapshot
from kendall.queueing.predictors.classes import CLASSES

Mask = npt.NDArray[np.bool_]
FEWEST = 30  # predictions
NEARLY_ALL = 0.95  # share of the requests that must have one
SMALLEST = 0.01


def predictor_of(seen: Snapshot) -> str | None:
    """`none` where requests come without predictions; None where too few have ended."""
    told = seen.column("dispatched_at") >= seen.carried_from
    ended = told & (seen.column("ending") == ENDED)
    actual, predicted = (seen.column(name)[ended] for name in ("output_tokens", "predicted_tokens"))
    return predictor_of_lengths(actual, predicted)


def predictor_of_lengths(actual: Vector, predicted: Vector) -> str | None:
    """Of lengths made and predicted, tokens; not a number where none was predicted."""
    known = np.isfinite(predicted) & (predicted > 0)
    if actual.size < FEWEST:
        return None
    if float(known.mean()) < NEARLY_ALL:
        return "none"
    actual, predicted = actual[known], predicted[known]
    spread = float(np.log(predicted / actual).std())
    if spread < SMALLEST:
        return "exact"
    values = np.unique(predicted)
    if len(values) == 1:
        return "none"
    threshold = int(values[-1] // 2)
    if len(values) == 2 and values.tolist() == [max(threshold // 2, 1), 2 * threshold]:
        return f"onebit:threshold={threshold},{_errors(actual > threshold, predicted > threshold)}"
    return f"lognormal:sigma={spread:.3g}"


def classes_of_window(seen: Snapshot, longest: int) -> tuple[tuple[float, ...], Vector] | None:
    """The largest prediction of each class but the last, tokens, and the joint law of classes and
    lengths up to `longest` [classes, lengths], as `predictors.classes`; None where too few requests
    had a prediction, or all the same one.
    """
    from scipy.stats import CensoredData, ecdf  # noqa: PLC0415 - heavy, and only for one order

    kept = (seen.column("ending") < WITHOUT_LENGTH) & (
        seen.column("dispatched_at") >= lengths_from(seen)
    )
    actual, told = (seen.column(name)[kept] for name in ("output_tokens", "predicted_tokens"))
    cut = seen.column("ending")[kept] == CENSORED
    known = (told > 0) & (actual > 0)
    if known.sum() - cut[known].sum() < FEWEST or float(known.mean()) < NEARLY_ALL:
        return None
    told, z, cut = told[known], np.log(actual[known] + cut[known]), cut[known]
    x = np.log(told)
    if np.ptp(x[~cut]) == 0:
        return None
    slope = float(np.cov(x[~cut], z[~cut])[0, 1] / np.var(x[~cut], ddof=1))
    law = ecdf(CensoredData.right_censored(z - slope * x, cut)).sf
    chances = -np.diff(law.probabilities, prepend=1.0)
    chances[-1] += law.probabilities[-1]  # what outlives the last one that ended
    edges = np.unique(np.quantile(told, np.arange(1, CLASSES) / CLASSES, method="lower"))
    edges = edges[edges < told.max()]
    place = np.searchsorted(edges, told)
    centres = np.bincount(place, x) / np.bincount(place)
    lengths = np.clip(np.rint(np.exp(slope * centres[:, None] + law.quantiles)), 1, longest)
    rows = [np.bincount(each, chances, longest + 1) for each in lengths.astype(np.int64)]
    joint = np.array(rows) * (np.bincount(place) / len(x))[:, None]
    return tuple(edges.tolist()), joint


def _errors(long: Mask, told_long: Mask) -> str:
    """How often a bit is wrong about short lengths and about long ones, where both came."""
    short = ~long
    if not (long.any() and short.any()):
        return f"accuracy={float((long == told_long).mean()):.3g}"
    missed = float(told_long[short].mean()), float((~told_long)[long].mean())
    if not any(missed):
        return "accuracy=1"
    return f"miss_short={missed[0]:.3g},miss_long={missed[1]:.3g}"
