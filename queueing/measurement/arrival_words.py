"""What a failed test of arrivals means, in words: the known diseases of load generators by their
signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kendall.policies.text import short_number
from kendall.queueing.measurement.arrival_tests import EQUAL, NEAR, FloatArray, pairs_within

# of a period: how near to one phase counts as pinned to it; by chance a share of 0.02 is
CLOSE = 0.01
# equal pairs to a gap, beyond chance: two senders of one seed make 0.5, k of them (k - 1) / 2
REPEATED = 0.25
# seconds: Linux wakes a sleeper that much late (its timer slack), so a sleep adds at least as much
# to a gap
SLEEP = 5e-5
GAP_LAWS = ("gap law", "gap spacings", "gap law at the asked rate")
SOME, MUCH = (
    0.05,
    0.15,
    # shares of arrivals at one phase that are said, and where repeated gaps or bursts may be the
    # cause
)


def in_words(name: str, statistic: float, gaps: FloatArray) -> str:
    """One line about a statistic, whether it is alarming or not."""
    kind = name.partition(",")[0]
    if kind.startswith("phase"):
        return f"arrivals lean {statistic:.3f} towards one phase (0: none, 1: all at it)"
    return {
        "constant rate": (
            f"the share of arrivals is at most {statistic:.3f} away from the share of time"
        ),
        "gap law": (
            f"the gaps' law is at most {statistic:.3f} away from the exponential law of "
            "their own mean"
        ),
        "gap law at the asked rate": (
            f"the gaps' law is at most {statistic:.3f} away from the "
            "exponential law of the asked rate"
        ),
        "gap spacings": (
            f"the ordered gaps' differences are at most {statistic:.3f} away from exponential ones"
        ),
        "repeated gaps": f"{statistic:.3g} times as many equal gaps as chance gives",
        "correlation": (
            f"ranks of successive gaps correlate by {statistic:+.3f} (standard error "
            f"{1 / gaps.size**0.5:.3f})"
        ),
        "dispersion": f"variance of counts is {statistic:.2f} times their mean (Poisson: 1)",
        "longest gap": (
            f"the longest gap is {statistic:.1f} mean gaps (expected about "
            f"{np.log(gaps.size) + 0.58:.1f})"
        ),
        "rate": f"delivered over asked rate is {statistic:.3f}",
        "span too exact": (
            f"the run is as long as n / rate more closely than chance (statistic {statistic:.1f})"
        ),
    }[kind]


def disease(
    ordered: FloatArray,
    gaps: FloatArray,
    failed: Mapping[str, float],
    asked_rate: float | None,
    step: float,
) -> tuple[str, ...]:
    """What is wrong, the most telling first; nothing where no test failed.

    `failed`: statistic by name of the test; `step`: resolution of the instants, seconds.
    """
    if not failed:
        return ()
    found = [
        *_of_equal_gaps(ordered, gaps, failed, step),
        *_of_pauses(gaps, failed, asked_rate),
        *_of_counts(ordered, failed),
    ]
    if "rate" in failed and asked_rate is not None:
        rates = f"{short_number(1 / gaps.mean())} of {short_number(asked_rate)}"
        found.append(f"delivered {rates} per second asked")
    if "span too exact" in failed:
        found.append("the run ends at n / rate more exactly than chance does: a rescaled schedule")
    lags = [value for name, value in failed.items() if name.startswith("correlation")]
    if lags:
        found.append(f"gaps are correlated (rank correlation {max(lags, key=abs):+.2f})")
    laws = [name for name in GAP_LAWS if name in failed]
    if laws:
        found.append(f"gaps are not exponential: {in_words(laws[0], failed[laws[0]], gaps)}")
    return tuple(found) or tuple(
        in_words(name, statistic, gaps) for name, statistic in failed.items()
    )


def _of_equal_gaps(
    ordered: FloatArray, gaps: FloatArray, failed: Mapping[str, float], step: float
) -> Iterator[str]:
    """Gaps of one length: groups, constant arrivals, one seed in several senders; instants at
    one phase make them too.
    """
    if (
        simultaneous := float(np.mean(gaps == 0))
    ) > 0.01 + step / gaps.mean():  # by chance half of the last
        yield (
            f"{simultaneous:.0%} come at the very instant of the one before: calls of several "
            "sequences, or sent in groups"
        )
    if gaps.std() < 0.2 * gaps.mean():
        yield (
            f"gaps are nearly constant (standard deviation {gaps.std() / gaps.mean():.2g} of "
            "their mean)"
        )
        return
    share, words = pinned_phase(ordered, failed)
    # the others are of requests sent at once, as after a stall, and say nothing of a seed
    long = gaps > 0.1 * gaps.mean()
    repeated = "repeated gaps" in failed and gaps_repeat(gaps[long], step)
    bursts = any(value > 1.5 for name, value in failed.items() if name.startswith("dispersion"))
    if share > (MUCH if repeated or bursts else SOME):
        yield words
    elif repeated:
        yield (
            f"the same gaps occur again: {distinct_gaps(gaps, step)} distinct of {gaps.size}, "
            "as of senders that share one seed"
        )
    elif any(name.startswith("correlation") for name in failed):
        alike = float(np.mean((np.abs(np.diff(gaps)) < 0.1 * gaps.mean()) & long[1:] & long[:-1]))
        if alike > 0.3:  # by chance 9 %
            yield (
                f"{alike:.0%} of gaps are like the one before them, as of senders that share "
                "one seed"
            )


def gaps_repeat(gaps: FloatArray, step: float) -> bool:
    """Whether so many gaps are equal, beyond those that are so because many are nearly alike,
    that one draw made them all.
    """
    equal, alike = pairs_within(gaps, EQUAL * step), pairs_within(gaps, NEAR * step)
    return equal - (alike - equal) * EQUAL / (NEAR - EQUAL) > REPEATED * gaps.size


def distinct_gaps(gaps: FloatArray, step: float) -> int:
    """The number of gaps that the clock tells apart."""
    return 1 + int(np.sum(np.diff(np.sort(gaps)) > step))


def pinned_phase(ordered: FloatArray, failed: Mapping[str, float]) -> tuple[float, str]:
    """Largest share of arrivals around one phase of a period whose test failed, and what it
    means; 0 where none did.
    """
    for period, what in ((1.0, "whole seconds"), (0.1, "tenths of a second")):
        if f"phase in {period:g} s" in failed:
            face = np.sort((ordered / period) % 1.0)
            around = np.concatenate([face, face + 1.0])
            share = float(
                (np.searchsorted(around, face + 2 * CLOSE) - np.arange(face.size)).max() / face.size
            )
            return (
                share,
                (
                    f"{share:.0%} of arrivals are within {CLOSE * period * 1e3:g} ms of one phase: "
                    f"pinned to {what}"
                ),
            )
    return 0.0, ""


def _of_pauses(
    gaps: FloatArray, failed: Mapping[str, float], asked_rate: float | None
) -> Iterator[str]:
    """What sleeps do: one after the other they lengthen every gap; a sender that stood still
    either makes up or does not.
    """
    mean = float(gaps.mean())
    if gaps.min() > max(SLEEP, 50 * mean / gaps.size) and gaps.std() > 0.2 * mean:
        yield (
            f"no gap is shorter than {gaps.min() * 1e3:.3g} ms: something adds to every gap, as "
            "successive sleeps do"
        )
    if "longest gap" not in failed:
        return
    expected = float(np.median(gaps)) / np.log(2) if asked_rate is None else 1 / asked_rate
    rest = gaps[
        gaps < expected * (np.log(gaps.size) + 4)
    ]  # one in 50 Poisson streams has a longer one
    if not rest.any():
        # most come at the instant of the one before: there is no usual gap that a pause would stand
        # out from
        return
    noise = 4 / rest.size**0.5
    if abs(rest.std() / rest.mean() - 1) > noise:
        return  # uneven all along, not by a few pauses
    words = (
        f"pauses of up to {short_number(gaps.max(), 3)} s ({gaps.max() / expected:.0f} mean gaps)"
    )
    if "rate" in failed and asked_rate is not None and abs(expected / rest.mean() - 1) < noise:
        rates = f"delivered {short_number(1 / mean)} of {short_number(asked_rate)} per second asked"
        yield f"{words}, {rates}: the sender fell behind and never caught up"
    else:
        yield f"{words}: the sender or the network stalled"


def _of_counts(ordered: FloatArray, failed: Mapping[str, float]) -> Iterator[str]:
    values = [(value, name) for name, value in failed.items() if name.startswith("dispersion")]
    if values:
        value, name = max(values, key=lambda pair: abs(np.log(max(pair[0], 1e-9))))
        counted = f"variance over mean of counts is {value:.2f} ({name.partition(', ')[2]})"
        yield (
            f"arrivals come in bursts: {counted}"
            if value > 1
            else f"arrivals are too regular: {counted}"
        )
    elif "constant rate" in failed:
        half = float(np.mean(ordered <= (ordered[0] + ordered[-1]) / 2))
        yield f"the rate is not constant: {half:.0%} of arrivals lie in the first half of the time"
