"""What is measured: six policies at four loads, or continuous batching as it is run in production,
and the rules by which a cell ends, counts as quiet, or is repeated.

The loads are fractions of each policy's largest stable rate under the calibrated law at the speed
of a pilot under load just before the cell: an engine that was idle is 5 to 30 % faster than under
load, and a cell meant for 0.75 would run near 1. Answers have 16 tokens on average: geometric in
half of the cells, uniform in the others; in two cells every call asks for two sequences of 16
tokens each (the length that a call forces is that of both). Two longer cells, at loads 0.75 and
0.9, run as long as `queueing.simulation.run_length` advises; they are measured where they are asked
for. The plan that a folder is bound to is that of a sweep.

With little memory: 32 slots, and KV memory for five requests.

In production: 32 and 64 slots, prompts of 32 to 1,024 tokens, and at each load three kinds of
lengths with 40 tokens on average, before the limit cuts them: geometric, lognormal with a squared
coefficient of variation of 4, and bimodal, an eighth of the answers ten times as long as the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from loadgen.sweep.grid import cell_name
from loadgen.sweep.plan import SweepPlan

PAIRS = 2  # sequences of a call
KINDS = {  # of output lengths: name, text, sequences of a call
    "u": ("uniform", "uniform:low=1,high=31", 1),
    "g": ("geometric", "geometric:mean=16", 1),
    "p": ("pairs", "deterministic:value=16", PAIRS),
    "G": ("geometric", "geometric:mean=40", 1),
    "L": ("lognormal", "lognormal:mu=2.884,sigma=1.269", 1),
    "B": ("bimodal", "mixture:weights=0.875+0.125,parts=geometric:mean=19+geometric:mean=190", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """A table of cells. `kinds`: of each policy at each of the loads, one letter or several."""

    loads: tuple[float, ...]
    kinds: Mapping[str, Sequence[str]]
    prompt_tokens: str
    max_num_seqs: int
    # tokens: the gateway's limit while a cell settles; one more while it is measured, which begins
    # an epoch
    longest: int
    # tokens of KV memory, where that is what requests wait for
    memory: int | None = None

    @property
    def policies(self) -> tuple[str, ...]:
        """In the order of the table."""
        return tuple(self.kinds)


TABLE = Design(
    loads=(0.3, 0.5, 0.6, 0.75),
    kinds={
        "single": "uuuu",
        "dynamic": "pggg",
        "fixed:batch_size=4": "gguu",
        "capped:max_batch_size=8": "ugpu",
        "elastic:max_batch_size=8": "gguu",
        "continuous:max_batch_size=4": "gggg",
    },
    prompt_tokens="deterministic:value=32",
    max_num_seqs=16,
    longest=96,
)
PRODUCTION = Design(
    loads=(0.5, 0.7, 0.85),
    kinds=dict.fromkeys(
        ("continuous:max_batch_size=32", "continuous:max_batch_size=64"), ("GLB",) * 3
    ),
    prompt_tokens="uniform:low=32,high=1024",
    max_num_seqs=64,
    longest=512,
)
BLOCK = 32  # tokens of vLLM's memory
MEMORY = replace(
    PRODUCTION,
    loads=(0.5,),  # beyond it so few at once need an hour a cell
    kinds={"continuous:max_batch_size=32": ("GLB",)},
    memory=163 * BLOCK,  # five requests: prompts of 528 tokens on average, 513 kept for the answer
)
DESIGNS = {"table": TABLE, "production": PRODUCTION, "memory": MEMORY}
LONGER_POLICY, LONGER_LOADS = "capped:max_batch_size=8", (0.75, 0.9)  # of the table
EMULATED_LAW = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.1,turnaround=0.0015"  # of --fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Seconds, and fractions."""

    # of the observed mean: enough. At 10 % chance alone makes a median error of 3.4 %, at 7 % one
    # of 2.4 %
    half_width: float = 0.07
    look: float = 12.0  # between two looks at a running cell
    # of load, at the speed measured before it: how fast the engine is under load
    pilot: float = 12.0
    # of load before the measured epoch begins: the queue is then no longer empty
    settle: float = 4.0
    least: float = 30.0  # of a cell
    most: float = 500.0
    most_longer: float = 2400.0  # of a longer cell
    planned: float = 45.0  # of a cell, at least: the advice knows nothing of the machine's noise
    pilots: bool = True  # lengths are advised by simulation; else every cell is planned alike
    share: float = 2.0  # of its advised length, which a cell may take at most
    block: float = 5.0  # over which the engine's speed is averaged
    block_deviation: float = 0.10  # of every block's speed from the cell's, at most: a quiet cell
    bracket_deviation: float = 0.05  # of the speeds before and after
    bracket: float = 5.0  # of one calibration of the speed
    repeats: int = 48  # of every cell of the one calibration of the law's shape
    law_error: float = 0.05  # of its cells, on average, at most: else the machine was not quiet
    prediction_interval: float = 5.0
    overhead: float = 30.0  # of a cell besides its load: the pilot, settling, calibrating, judging


QUIET_MACHINE = Rules()
# the law has no term for the context behind which a token is made: cells of 64 answers of 400
# tokens take a quarter longer than it says, whatever the machine does. A pilot tells the speed by
# requests that began and ended in it: some take 7 s
PRODUCTION_RULES = Rules(repeats=12, law_error=0.1, pilot=20.0)
# the p95 of who waits behind so few comes in bursts: minutes, whatever the mean says
MEMORY_RULES = replace(PRODUCTION_RULES, planned=180.0, half_width=0.02)
FAST = Rules(
    look=1.0,
    pilot=1.5,
    settle=0.5,
    least=4.0,
    planned=4.0,
    pilots=False,
    most=40.0,
    most_longer=60.0,
    share=10.0,
    block=1.0,
    bracket=0.3,
    repeats=2,
    prediction_interval=1.0,
    overhead=5.0,
    half_width=0.2,
)


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the table; `seed` is its own, so that no two cells share their luck."""

    name: str
    policy: str
    load: float
    seed: int
    output_tokens: str = KINDS["u"][1]
    sequences: int = 1  # of a call
    memory: int | None = None  # tokens, where it may be what requests wait for
    longer: bool = False  # as long as the run-length rule advises


def plan_of(rules: Rules, seed: int, design: Design = TABLE, *, fast: bool) -> SweepPlan:
    """As a sweep's plan, whose apparatus measures it."""
    return SweepPlan(
        policies=design.policies,
        loads=design.loads,
        output_tokens=KINDS["g"][1],
        max_output_tokens=(design.longest,),
        prompt_tokens=design.prompt_tokens,
        seed=seed,
        precision=rules.half_width,
        cell_limit=rules.most,
        bracket=rules.bracket,
        model="tiny",
        engine="emulated" if fast else "vllm",
        max_num_seqs=design.max_num_seqs,
    )


def gateway_arguments(rules: Rules, design: Design = TABLE, *, fast: bool) -> list[str]:
    """Flags of `kendall serve` beyond those of a sweep: the live prediction, its window as long
    as any cell.
    """
    window = [
        "--prediction-interval",
        f"{rules.prediction_interval:g}",
        "--prediction-window",
        f"{max(60.0, rules.most_longer):g}",
    ]
    limit = ["--max-output-tokens", str(design.longest), "--what-if-interval", "100000"]
    if design.memory is not None:
        blocks = f"num_gpu_blocks_override={design.memory // BLOCK}"
        given = f"kv_cache_tokens={design.memory}" if fast else blocks
        limit += ["--engine-arg", given, "--reserved-tokens", str(design.longest + 1)]
    return window + limit + (["--latency", EMULATED_LAW] if fast else [])


def points(plan: SweepPlan, design: Design = TABLE) -> Iterator[Point]:
    """All policies at one load, then the next; then, of the table, the longer cells."""
    seeds = count(plan.seed * 1000)
    for place, load in enumerate(design.loads):
        for policy, kinds in design.kinds.items():
            for kind in kinds[place]:
                called, lengths, sequences = KINDS[kind]
                name = cell_name(policy, None, f"load{load:g}")
                name += f"_{called}" if len(kinds[place]) > 1 else ""
                yield Point(name, policy, load, next(seeds), lengths, sequences, design.memory)
    for load in LONGER_LOADS if design is TABLE else ():
        yield Point(
            "longer_" + cell_name(LONGER_POLICY, None, f"load{load:g}"),
            LONGER_POLICY,
            load,
            next(seeds),
            longer=True,
        )


def chosen(every: Sequence[Point], names: str | None, loads: str | None) -> list[Point]:
    """Those whose name has one of the comma-separated `names` in it, at one of the
    comma-separated `loads`. Raises ValueError.
    """
    wanted = (
        {float(load) for load in loads.split(",")} if loads else {point.load for point in every}
    )
    parts = [part.strip() for part in (names or "").split(",") if part.strip()]
    found = [
        point
        for point in every
        if point.load in wanted and (not parts or any(part in point.name for part in parts))
    ]
    if not found:
        known = ", ".join(point.name for point in every)
        raise ValueError(
            f"got --cells {names} and --loads {loads}, which name no cell; expected parts of: "
            f"{known}"
        )
    return found
