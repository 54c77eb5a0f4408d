"""Lengths given their prediction: predictions in classes, and the law of the lengths in each.

    P(N = n | Y in class k) = P(N = n) P(Y in class k | N = n) / P(Y in class k)

N, Y the true and predicted length, tokens. The classes hold about equal shares of P(Y <= y),
E[N; Y <= y] and E[N^2; Y <= y] (`sizes.shares`); one that nothing falls in is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.predictors.laws import Predictor
from kendall.queueing.predictors.sizes import Atoms, SizeGrid, shares

CLASSES = 32
_FINE = 400  # predictions at which the shares are tabled
_COARSE = 100  # half of the lengths with which they are
_NOTHING = 1e-9  # the probability of a class that is left out


def classes_of(
    predictor: Predictor, lengths: TokenDistribution, most: float
) -> tuple[tuple[float, ...], Vector]:
    """The largest prediction of each class but the last, tokens, and the joint law of classes and
    lengths [classes, lengths]; `most`: the largest prediction.
    """
    counts = lengths.counts
    few = Atoms(counts[1:], lengths.pmf[1:]).cells(SizeGrid(_COARSE))
    counts = np.maximum(counts, 1.0)  # none has 0
    y = np.unique(np.round(np.geomspace(1, max(most, 2.0), _FINE)))
    moments = np.stack([few.weights * few.sizes**k for k in range(3)])
    below = predictor.at_most(y[:, None] + 0.5, few.sizes)
    share = shares((below @ moments.T).T, 0.0)
    at = np.searchsorted(share, np.arange(1, CLASSES) / CLASSES)
    edges = np.unique(y[at[at < len(y) - 1]] + 0.5)
    joint = joint_of_classes(predictor, edges, counts, lengths.pmf)
    kept = joint.sum(axis=1) > _NOTHING
    ends = np.append(edges, np.inf)[kept]
    return tuple(ends[:-1].tolist()), joint[kept]


def joint_of_classes(
    predictor: Predictor, edges: Sequence[float] | Vector, sizes: Vector, weights: Vector
) -> Vector:
    """[classes, sizes], the weights shared out; the edges in the unit of the sizes."""
    below = predictor.at_most(np.asarray(edges, float)[:, None], sizes) * weights
    return np.diff(below, axis=0, prepend=0.0, append=weights[None, :])
