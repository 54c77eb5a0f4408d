"""Which named law made these output lengths: maximum likelihood on the rounded law, with clipped
lengths as "at least".

    log L = sum_{ended} log P(n_i) + sum_{clipped} log P(N >= c_j)
    AIC = 2 p - 2 log L,    BIC = p log n - 2 log L

P is the law of whole counts that the text stands for, not its density: lengths of a few tokens, and
laws narrower than a token, are fitted as they are. Method: Nelder-Mead over scaled coordinates
(queueing/distributions/families.py), which needs no derivative of a likelihood with corners
(uniform, Pareto). Goodness of fit: D = max |F(n) - F_n(n)| between the fitted law and the
product-limit estimate; its p-value by parametric bootstrap with a new fit to every replicate, as
the tables for known parameters are far too kind. Conditions: independent lengths, limits
independent of them. A family that cannot have made the sample is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from kendall.policies.text import SpecError, suggest
from kendall.queueing.distributions.censoring import Counts, Sample, redraw, sample
from kendall.queueing.distributions.families import SEARCHES, Coordinates
from kendall.queueing.distributions.laws import LAWS, Law
from kendall.queueing.distributions.text import KEYS, DistributionText
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import NotConvergedError

FAMILIES = ("deterministic", *SEARCHES)
BOOTSTRAP = 99  # replicates: p-values in steps of 0.01
FEWEST = 10  # requests that ended by themselves
# in std: a normal law truncated there is an exponential one, and its likelihood has no maximum
FURTHEST_MEAN = -4.5
IMPOSSIBLE = 1e300  # minus log likelihood, finite for the simplex's arithmetic


@dataclass(frozen=True, slots=True)
class FittedDistribution:
    """A law of one family; `text` names it. `p_value` is None where no bootstrap was asked for."""

    family: str
    text: str
    parameters: dict[str, float]
    log_likelihood: float
    aic: float
    bic: float
    ks: float  # largest distance of the distribution functions
    p_value: float | None

    def law(self, max_output_tokens: int | None = None) -> TokenDistribution:
        """The law itself, clipped. Raises SpecError: its tail needs a limit."""
        return parse_distribution(self.text, max_output_tokens)


def fit_distribution(
    counts: npt.ArrayLike,
    censored: npt.ArrayLike | None = None,
    families: Sequence[str] = FAMILIES,
    rng: np.random.Generator | None = None,
    bootstrap: int = BOOTSTRAP,
) -> list[FittedDistribution]:
    """The families fitted to output token counts, smallest AIC first; p-values if `rng` is given
    (10 ms a fit, times `bootstrap`).

    `censored[i]` marks a request that a limit ended: its length is at least counts[i]. Raises
    SpecError: too few counts, an unknown family; NotConvergedError.
    """
    data = sample(counts, censored)
    if data.ended.sum() < FEWEST:
        raise SpecError(
            f"got {data.ended.sum()} counts that ended by themselves; expected at least {FEWEST}"
        )
    for family in families:
        if family not in FAMILIES:
            raise SpecError(
                f"got family {family!r}; expected some of "
                f"{', '.join(FAMILIES)}{suggest(family, FAMILIES)}"
            )
    found = [fit for family in families if (fit := _fit(family, data, rng, bootstrap)) is not None]
    return sorted(found, key=lambda fit: fit.aic)


def _fit(
    family: str, data: Sample, rng: np.random.Generator | None, bootstrap: int
) -> FittedDistribution | None:
    if not _has_maximum(family, data):
        return None
    spec = _estimate(family, data, precise=True)
    if family == "normal" and spec.numbers[0] < FURTHEST_MEAN * spec.numbers[1]:
        return None
    law = LAWS[family](str(spec), *spec.numbers)
    likelihood = _log_likelihood(law, data)
    if likelihood <= -IMPOSSIBLE:
        return None
    free, distance = len(spec.numbers), _distance(law, data)
    return FittedDistribution(
        family=family,
        text=str(spec),
        parameters=dict(zip(KEYS[family], spec.numbers, strict=True)),
        log_likelihood=likelihood,
        aic=2 * free - 2 * likelihood,
        bic=free * float(np.log(data.size)) - 2 * likelihood,
        ks=distance,
        p_value=None if rng is None else _p_value(spec, data, rng, bootstrap),
    )


def _has_maximum(family: str, data: Sample) -> bool:
    """A constant cannot make several values; on one, the likelihood of a law with a width grows
    as the width shrinks.
    """
    longer_than_ended = bool(data.clipped[data.values > data.values[data.ended > 0][0]].any())
    if np.count_nonzero(data.ended) > 1:
        return family != "deterministic"
    if longer_than_ended:
        return family in ("exponential", "geometric")
    return family == "deterministic"


def _estimate(family: str, data: Sample, *, precise: bool) -> DistributionText:
    if family == "deterministic":
        return DistributionText(family, (float(data.values[data.ended > 0][0]),))
    parameters = SEARCHES[family](data)
    dimensions = len(KEYS[family])
    start = np.vstack([np.zeros(dimensions), 0.3 * np.eye(dimensions)])
    tolerance = 1e-7 if precise else 1e-3

    def loss(coordinates: Coordinates) -> float:
        try:
            law = LAWS[family](family, *parameters(coordinates))
        except (SpecError, OverflowError):
            return IMPOSSIBLE
        return -_log_likelihood(law, data)

    found = minimize(
        loss,
        np.zeros(dimensions),
        method="Nelder-Mead",
        options={
            "initial_simplex": start,
            "xatol": 100 * tolerance,
            "fatol": tolerance,
            "maxiter": 2000,
            "maxfev": 4000,
        },
    )
    if not found.success:
        raise NotConvergedError(
            f"the fit of a {family} law",
            float(found.fun),
            "name another family, or give more counts",
        )
    return DistributionText(family, tuple(float(value) for value in parameters(found.x)))


def _log_likelihood(law: Law, data: Sample) -> float:
    ended, clipped = data.ended > 0, data.clipped > 0
    made = law.probabilities(data.values[ended].astype(float))
    reached = law.at_least(data.values[clipped].astype(float))
    if np.any(made <= 0) or np.any(reached <= 0):
        return -IMPOSSIBLE
    return float(data.ended[ended] @ np.log(made) + data.clipped[clipped] @ np.log(reached))


def _distance(law: Law, data: Sample) -> float:
    """max |P(N > n) - estimate| over the counts n at which the estimate is known: both ends of
    each of its steps.
    """
    estimate = data.survival()
    known = data.values <= data.values[data.ended > 0][-1]
    at = np.abs(law.at_least(data.values[known] + 1.0) - estimate[known])
    before = np.abs(law.at_least(data.values.astype(float)) - np.append(1.0, estimate[:-1]))
    return float(max(at.max(), before.max()))


def _p_value(
    spec: DistributionText, data: Sample, rng: np.random.Generator, bootstrap: int
) -> float:
    """Share of replicates, this sample among them, at least as far from the law fitted to each."""
    law = LAWS[spec.name](str(spec), *spec.numbers)
    distance = _distance(law, data)
    further, drawn = 1, 1
    for _ in range(bootstrap):
        replicate = redraw(_draw(law, data.size, rng), data, rng)
        if np.count_nonzero(replicate.ended) < 2:
            continue  # a handful of distinct counts, all clipped or all equal: nothing to fit
        again = _estimate(spec.name, replicate, precise=False)
        drawn += 1
        further += _distance(LAWS[spec.name](str(again), *again.numbers), replicate) >= distance
    return further / drawn


def _draw(law: Law, size: int, rng: np.random.Generator) -> Counts:
    """Counts by inversion, bisecting the survival: a heavy tail needs no table."""
    level = rng.random(size)
    low, high = np.ones(size, dtype=np.int64), np.full(size, 2**40, dtype=np.int64)
    while np.any(low < high):
        middle = (low + high) // 2
        longer = law.at_least(middle + 1.0) > level  # P(N > middle) > u: the count lies above
        low, high = np.where(longer, middle + 1, low), np.where(longer, high, middle)
    return low
