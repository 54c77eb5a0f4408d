"""What is measured: orders of service on few slots and on many, all orders of a round on the same
arrivals, lengths and predictions.

Lengths are lognormal with a median of 24 tokens and sigma 1, cut at 200: a mean of 38. The load is
that of the live model: the arrival rate over the largest stable one under the calibrated law, at
the speed of a pilot under load at the begin of the round. The rate of a round is one number, so
that its orders share their random numbers; how fast the engine was under each order is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadgen.sweep.grid import cell_name
from loadgen.sweep.plan import SweepPlan

LENGTHS, LIMIT = f"lognormal:mu={math.log(24):.6g},sigma=1", 200
PROMPT_TOKENS = "deterministic:value=32"
LOAD = 0.8
PREDICTION = "exact"
FIRST_COME = ""
EMULATED_LAW = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,turnaround=0.0015"  # of --fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Orders on an engine of so many slots."""

    name: str
    slots: int
    orders: tuple[str, ...]  # behind `max_batch_size`
    max_num_seqs: int  # of the engine: the calibration goes up to it
    requests: int  # counted, of each order and round
    rounds: int
    repeats: int  # of every cell of the calibration of the law's shape
    load: float = LOAD
    # load of each pilot by the law, then by what the pilot before showed: an engine of many slots
    # shares its processors with a gateway that has more to do, so the load is raised in steps
    pilots: tuple[float, ...] = (LOAD,)

    @property
    def policies(self) -> tuple[str, ...]:
        """First come, first served before the others."""
        return tuple(f"continuous:max_batch_size={self.slots}{order}" for order in self.orders)

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Round and policy."""
        return [(number, text) for number in range(1, self.rounds + 1) for text in self.policies]


FEW = Part(
    name="slots4",
    slots=4,
    # the engine serves a token in about a millisecond: 0.002 s a token lets the shortest overtake
    # who came up to 0.4 s before
    orders=(
        FIRST_COME,
        ",order=spjf",
        ",order=spjf,aging=0.002",
        ",order=sprpt",
        ",order=trail",
    ),
    max_num_seqs=8,
    requests=4000,
    rounds=3,
    repeats=16,
)
MANY = Part(
    name="slots64",
    slots=64,
    orders=(FIRST_COME, ",order=spjf", ",order=sprpt"),
    max_num_seqs=64,
    requests=4000,
    rounds=1,
    repeats=5,
    # an engine of many slots shares two cores with the gateway and the sender of its tokens: nearer
    # to saturation one slow second makes all of them slower, and it stays so
    load=0.6,
    pilots=(0.4, 0.5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Seconds, and fractions."""

    warm_up: float = 0.1  # of the counted requests, sent before them
    run_out: float = 0.025  # sent behind them: nobody overtakes who comes last
    pilot: float = 15.0  # of load: how fast the engine is under it
    block: float = 5.0  # over which the engine's speed is averaged
    # of a block's speed from the cell's, and of the cell's from the pilot's: beyond, the cell is
    # measured once more. Whether theory and engine agree has no say
    block_deviation: float = 0.25
    pilot_deviation: float = 0.12
    attempts: int = 3  # of a cell that was not quiet
    overhead: float = 6.0  # of a cell besides its load

    def sent(self, counted: int) -> int:
        """Requests of a cell."""
        return counted + self.first(counted) + math.ceil(self.run_out * counted)

    def first(self, counted: int) -> int:
        """Place of the first that counts."""
        return math.ceil(self.warm_up * counted)


QUIET_MACHINE = Rules()
FAST = Rules(pilot=2.0, block=1.0, block_deviation=1.0, pilot_deviation=1.0)


def plan_of(part: Part, seed: int, *, fast: bool) -> SweepPlan:
    """As a sweep's plan, whose rig measures it."""
    return SweepPlan(
        policies=part.policies,
        loads=(part.load,),
        output_tokens=LENGTHS,
        max_output_tokens=(LIMIT,),
        prompt_tokens=PROMPT_TOKENS,
        seed=seed,
        num_prompts=part.requests,
        bracket=0.0,
        model="tiny",
        engine="emulated" if fast else "vllm",
        max_num_seqs=part.max_num_seqs,
    )


def gateway_arguments(*, fast: bool) -> list[str]:
    """Flags of `kendall serve` beyond those of a sweep."""
    return ["--latency", EMULATED_LAW] if fast else []


def name_of(round_number: int, policy: str) -> str:
    """Of a cell, for its files."""
    return cell_name(policy, None, f"round{round_number}")
