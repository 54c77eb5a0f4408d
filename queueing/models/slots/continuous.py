"""Continuous batching: c slots on an engine whose step slows down with the sequences in it. An
approximation.

Birth-death in the number of requests n, the closed system of queueing.latency.slots.slot_time in
each state: up lam, down X(min(n, c)), the refilled X above c. Gives the slots taken, P(Wq > 0) and
the delay Wq_M of exponential work. General lengths:

    Wq = Wq_M (1 + C^2)/2 * 2 w_D / (2 alpha w_D + 1 - alpha),   w_D = Wq(M/D/c) / Wq(M/M/c)
    alpha = ((1 + C^2) E[S] / g - c - 1) / (c - 1),   C^2, g: SlotTime.scv, SlotTime.smallest_of

(Boxma, Cohen and Huffels 1979, with w_D by Kimura 1986 after Cosmetatos): right in light and heavy
traffic, exact for c = 1. Above C^2 = 1, up to 256 slots, Wq / Wq_M is that of slot times of two
exponential phases with the same three moments (queueing.models.slots.two_phases).

    P(Wq > x) = P(Wq > 0) e^{-x P(Wq > 0) / Wq}
    time to first token = Wq + gap + admissions + first step
    inter-token latency = (sojourn - time to first token) / (E[N] - 1)

Conditions: Poisson arrivals, one server. `load` = lam / refilled X(c). The same engine as a fluid,
exact: queueing.models.slots.processor_sharing.

Where a step computes a bounded number of tokens (chunked prefill,
queueing.latency.slots.prompt_parts) and `doubt` is silent, in 87 of 156 cells (8 and 64 slots,
steps of 128, 512 and 2,048 tokens, prompts of means 100, 640 and 4,500, load .1 to .85, 6e4
requests a cell): sojourn -1 to 0 %, time to first token -2 to +4 %.

Measured against simulation of the same model (not an engine), model / simulation - 1 in %. Laws: k1
.3 ms, k3 25 us, k4 .92 ms with turnaround 0 and 1.55 ms; k1 .3 ms, k3 = k4 = .5 ms. Load .3, .6,
.85, .95; 6e5 requests a cell (2e6 at .95, 1e5 at .3 and c >= 16; standard error of the delay 1 to
10 %). Delay where it is above 2 % of the sojourn (below, it is up to 80 % off and does not matter),
then sojourn, worst cells of either sign:

    lengths               c = 2              4              8             16             32
    geometric 16     -2+2 -2+2      -3+4 -2+3      -4+5 -2+1      -2+8 -0+4      -5+3 -1+1
    uniform 1-32     -3+2 -3+1      -4+2 -1+1      -7+2 -1+1      -6+0 -1+1     -18+0 -1+2
    lognormal .7     -5+2 -4+1      -3+4 -1+3      -3+8 -1+5      -3+3 -1+1     -12+4 -1+1
    16 each          -8+2 -7+2      -5+6 -1+4     -12+1 -7+1     -24+4 -8+2     -29-4 -1+1
    uniform 1-4     -9+20 -3+17   -17+35 -4+25    -27+1 -8+7    -28+22 -6+9    -42+32 -3+11

Time to first token: the delay's error, else within 3 %; inter-token latency -1 to +3 %. Of 520
cells with up to 256 slots and lengths of SCV 0 to 7, bimodal ones too (docs/why/theory.md),
`doubt` names every one where a mean is off by more than 5 %, the delay where it is above 2 % of the
sojourn, beyond two standard errors; so it does in 19 cells of lognormal lengths of SCV 2.5 to 12
with 2 to 64 slots whose delay is up to 99 % of the sojourn (3e6 requests, standard error 0.1 to
4 %): the sojourn is within 5 % in all that are not in doubt. Quantiles where given: p50 to p95
within 10 %, p99 within 13 %; at load .95 17 %, noise included, and -28 % in one cell whose delay
has a standard error of 25 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.latency.slots.slot_time import SlotTime
from kendall.queueing.models.mgc import general_service
from kendall.queueing.models.slots.processor_sharing import log_weights
from kendall.queueing.models.slots.two_phases import delay_ratio, fitted
from kendall.queueing.result import LEVELS, Quantiles

__all__ = [
    "SlotQueue",
    "SlotTime",
    "doubt",
    "in_service",
    "next_step",
    "solve_continuous",
    "trusted",
]

_LARGEST = 20_000
_ALL_FOLLOWED = 256  # slots; of more, only as many as matter
_FEW_TOKENS, _ADMISSIONS, _ALIKE, _NEAR = 8.0, 0.35, 0.05, 0.88  # where the measured errors begin
# E[N^3] / E[N]^3 with an SCV near 1 or less, and above; E[N^4] over that of two phases; slots
_SPREAD_OUT, _THIRD, _HEAVY, _KINDS, _MANY = 1.2, 7.0, 60.0, 0.85, 16
_SHORT, _RARE, _SOME, _LARGE = 0.015, 0.06, 0.35, 0.6  # the delay's share of the sojourn
# shares: of steps in which prompts wait for each other while all slots are taken; of time in which
# the steps are full of prompts
_BOUND, _FULL = 0.25, 0.18
_SPREAD = 0.2  # SCV of the lengths from which on the delay of those who wait is near exponential


@dataclass(frozen=True)
class SlotQueue:
    """A continuous engine in steady state; `batch_size` counts the slots taken just after a
    dispatch. Seconds.
    """

    queueing_delay: float
    sojourn_time: float
    batch_size: float
    utilisation: float
    load: float
    waiting: float  # P(Wq > 0)
    delay: Quantiles  # its mean is queueing_delay
    time_to_first_token: float  # from the arrival
    inter_token_latency: float | None  # mean over tokens; None where every answer is one token


def solve_continuous(time: SlotTime, arrival_rate: float, slots: int | None) -> SlotQueue:
    """The approximation. Raises UnstableQueueError, NotConvergedError."""
    load = arrival_rate / _capacity(time, slots)
    if load >= 1:
        raise UnstableQueueError(load)
    found = occupancy(time, arrival_rate, slots, load)
    delay = 0.0
    if slots is not None and found.waiting > 0:
        delay = (
            found.waiting
            / (time.throughput(slots, refilled=True) - arrival_rate)
            * lengths_ratio(time, arrival_rate, slots, found)
        )
    sojourn, first = delay + found.taken(0) / arrival_rate, delay + found.first_token(time)
    later = time.output_tokens.mean - 1
    return SlotQueue(
        queueing_delay=delay,
        sojourn_time=sojourn,
        batch_size=found.taken(1),
        utilisation=1 - float(found.free[0]),
        load=load,
        waiting=found.waiting,
        delay=_quantiles(found.waiting, delay, time.output_tokens.scv),
        time_to_first_token=first,
        inter_token_latency=(sojourn - first) / later if later > 0 else None,
    )


def next_step(time: SlotTime, arrival_rate: float, slots: int | None) -> float:
    """Mean time from the dispatch to the step that the request enters; 0 where more comes than is
    served, and slots are refilled at the ends of steps, unless there is a turnaround.
    """
    load = arrival_rate / _capacity(time, slots)
    if load < 1:
        return occupancy(time, arrival_rate, slots, load).gap(time)
    if slots is None:
        return 0.0
    return time.gap(slots, time.parts(slots, refilled=True)[1], refilled=True)


def in_service(time: SlotTime, arrival_rate: float, slots: int | None) -> float:
    """Mean time from the first step that a request enters to its end; where more comes than is
    served, that of refilled slots. Infinite there without a bound on the slots.
    """
    load = arrival_rate / _capacity(time, slots)
    if load < 1:
        found = occupancy(time, arrival_rate, slots, load)
        return found.taken(0) / arrival_rate - found.gap(time)
    if slots is None:
        return math.inf
    mean, share = time.parts(slots, refilled=True)
    return mean - time.gap(slots, share, refilled=True)


def doubt(
    time: SlotTime, arrival_rate: float, slots: int | None, queue: SlotQueue | None = None
) -> str | None:
    """Why the approximation is not to be trusted here, if so (see the table of errors). A stable
    queue; `queue`, its solution, where it is known.
    """
    capacity, tokens = _capacity(time, slots), time.output_tokens
    most = math.inf if slots is None else slots
    admissions = time.admitted * arrival_rate
    if admissions > _ADMISSIONS and most > 4:
        return (
            f"admissions take {admissions:.0%} of the engine's time; the approximation holds "
            f"up to {_ADMISSIONS:.0%}"
        )
    if slots is not None and (reason := _doubtful_prompts(time, arrival_rate, slots)):
        return reason
    if tokens.mean < _FEW_TOKENS and most > tokens.mean:
        room = "slots" if slots is None else f"{slots} slots"
        return (
            f"answers of {tokens.mean:.3g} tokens in {room} end in bunches; the approximation "
            f"holds from {_FEW_TOKENS:.0f} tokens on"
        )
    if (
        time.law.turnaround > 0
        and (tokens.mean < _FEW_TOKENS or tokens.scv < _ALIKE)
        and arrival_rate > _NEAR * capacity
    ):
        return (
            "short answers, or answers of one length, keep step with the turnaround: the "
            "capacity is uncertain by 2 %"
        )
    if slots is None or slots == 1:
        return None
    return _doubtful_lengths(time, arrival_rate, slots, queue)


def _doubtful_prompts(time: SlotTime, arrival_rate: float, slots: int) -> str | None:
    """Where they wait for each other in the engine's steps, not only for slots."""
    full, waiting = time.prompt_shares(arrival_rate, slots)
    if waiting > _BOUND or full > _FULL:
        return (
            f"prompts fill the engine's steps for {full:.0%} of the time: the time to first token "
            "is off by 5 % and more, and so is a delay that is not short"
        )
    return None


def _doubtful_lengths(
    time: SlotTime, arrival_rate: float, slots: int, queue: SlotQueue | None
) -> str | None:
    """Where a delay that is not short is off by more than 5 % because of the lengths."""
    tokens = time.output_tokens
    second, third, fourth = (tokens.moment(k) / tokens.mean**k for k in (2, 3, 4))
    phases = fitted(second - 1, third) if tokens.scv > _SPREAD_OUT else None
    kinds = phases is not None and fourth < _KINDS * phases.fourth
    long = third > (_THIRD if phases is None else _HEAVY)
    alike = tokens.scv < _ALIKE and slots >= _MANY
    if not (kinds or long or alike):
        return None
    found = queue or solve_continuous(time, arrival_rate, slots)
    share = found.queueing_delay / found.sojourn_time
    if kinds and _SHORT < share < _LARGE:
        return "answers of two kinds, each of nearly one length: the delay is up to 20 % long"
    # of the delay; the longer the longest, the busier must the slots be for two phases to be near
    busy = _RARE if phases is None else max(_SOME, 1 - _HEAVY / third)
    if long and _SHORT < share < busy:
        wrong = "8 % long" if phases is None else "30 % short"
        return (
            f"a few long answers take much of the slots' time (E[N^3] is {third:.3g} times "
            f"E[N]^3): the delay is up to {wrong}"
        )
    if alike and _SHORT < share < _RARE:
        return "answers of one length in many slots: the delay of the few that wait is 7 % short"
    return None


def trusted(time: SlotTime, arrival_rate: float, slots: int | None) -> bool:
    """Whether `doubt` has nothing to say."""
    return doubt(time, arrival_rate, slots) is None


@dataclass(frozen=True)
class _Occupancy:
    """What an arrival sees: P(n slots taken) for n < c, and P(all taken); `stays[n]` = S and
    share of n + 1 taken slots.
    """

    stays: list[tuple[float, float]]
    free: Vector
    waiting: float

    def taken(self, more: int) -> float:
        """E[min(n + more, c)], for `more` = 0 and 1."""
        return float(self.free @ (np.arange(len(self.free)) + more)) + self.waiting * len(
            self.stays
        )

    def gap(self, time: SlotTime) -> float:
        """From the dispatch to the step that the request enters."""
        gaps = [
            time.gap(n, share, refilled=False) for n, (_, share) in enumerate(self.stays, start=1)
        ]
        at_once = float(self.free[: len(gaps)] @ gaps)
        if self.waiting == 0:
            return at_once
        share = time.parts(len(gaps), refilled=True)[1]
        return at_once + self.waiting * time.gap(len(gaps), share, refilled=True)

    def first_token(self, time: SlotTime) -> float:
        """From the dispatch to the first token."""
        entries = [
            time.first_token(n, share, refilled=False)
            for n, (_, share) in enumerate(self.stays, start=1)
        ]
        at_once = float(self.free[: len(entries)] @ entries)
        if self.waiting == 0:
            return at_once
        share = time.parts(len(entries), refilled=True)[1]
        return at_once + self.waiting * time.first_token(len(entries), share, refilled=True)


def _capacity(time: SlotTime, slots: int | None) -> float:
    return time.limit() if slots is None else time.throughput(slots, refilled=True)


def occupancy(time: SlotTime, arrival_rate: float, slots: int | None, load: float) -> _Occupancy:
    stays = _stays(time, arrival_rate, slots)
    rates = np.arange(1, len(stays) + 1) / np.array([mean for mean, _ in stays])
    weights = log_weights(arrival_rate, rates)
    weights = np.exp(weights - weights.max())
    if slots is None or len(stays) < slots:
        return _Occupancy(stays, weights / weights.sum(), 0.0)
    weights[-1] /= 1 - load  # with the states above c
    weights /= weights.sum()
    return _Occupancy(stays, weights[:-1], float(weights[-1]))


def _quantiles(waiting: float, delay: float, spread: float) -> Quantiles:
    """0 with probability 1 - waiting, else exponential; None where C^2 = `spread` is small, or
    next to the atom at 0.
    """
    clear = spread >= _SPREAD
    found = (
        _quantile(level, waiting, delay) if clear or waiting == 0 else None
        for level in LEVELS.values()
    )
    return Quantiles.of(LEVELS, delay, found)


def _quantile(level: float, waiting: float, delay: float) -> float | None:
    """Next to the atom a small error of P(Wq > 0) moves a quantile far."""
    times = waiting / (1 - level)
    if times < 0.5:
        return 0.0
    return math.log(times) * delay / waiting if times >= (1.6 if level <= 0.5 else 4) else None


def _stays(time: SlotTime, arrival_rate: float, slots: int | None) -> list[tuple[float, float]]:
    """S(n) and its share in steps for n = 1, ..., c; without a bound as many as matter."""
    if slots is not None and slots <= _ALL_FOLLOWED:
        return [time.parts(n, refilled=False) for n in range(1, slots + 1)]
    stays, height, share = [], 0.0, 0.5
    for n in range(1, _LARGEST if slots is None else min(slots + 1, _LARGEST)):
        stays.append(time.parts(n, refilled=False, share=share))
        if n > _ALL_FOLLOWED:
            share = stays[-1][1]  # near that of one more
        down = n / stays[-1][0]
        height += math.log(arrival_rate / down)
        if down > arrival_rate and height < -35:  # e^-35 of the first state, and falling
            return stays
    if len(stays) == slots:
        return stays
    raise NotConvergedError(
        f"the number of slots that {arrival_rate:.4g} requests/s take", math.exp(min(0.0, height))
    )


def lengths_ratio(time: SlotTime, arrival_rate: float, slots: int, found: _Occupancy) -> float:
    """Wq / Wq_M."""
    mean, share = time.parts(slots, refilled=True)
    scv = time.scv(slots, mean, share)
    if slots == 1:
        return (1 + scv) / 2
    if scv > 1 and slots <= _ALL_FOLLOWED:
        stays = [stay for stay, _ in found.stays[:-1]] + [mean]
        return delay_ratio(arrival_rate, stays, fitted(scv, time.third(slots, mean, share)))
    load = arrival_rate * mean / slots
    return general_service(slots, load, scv, time.smallest_of(slots, mean, share) / mean)
