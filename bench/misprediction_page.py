"""The page of `bench/misprediction.py`: every sentence and number of it follows from the results.

Intervals are 95 %, from the means of 20 blocks, or of the pieces in which a cell was measured
(`queueing.measurement.batch_means`); those of two cells are paired: their requests came at the same
instants with the same lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.misprediction import (
    BIT,
    BITS,
    BURST,
    CLOSE,
    ERRORS,
    FALSE_LONG,
    FALSE_SHORT,
    FCFS,
    GRACEFUL,
    HALF_LONG,
    HALF_SHORT,
    HIGH,
    INTERRUPTING,
    KINDS,
    LEARNED,
    LENGTHS,
    LONGEST,
    LOW,
    MAIN,
    NONE,
    PROMPTS,
    QUESTIONS,
    RESULTS,
    TRAILS,
    Cell,
    Kind,
    Results,
    design,
)
from kendall.policies.text import counted
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.measurement.batch_means import Interval, batch_means_interval

HELD = 0.8  # of the cells of a kind: their ratios are as predicted
RIGHT, SIGMA_2 = ERRORS["0"], ERRORS["2"]
PREDICTORS = (*ERRORS.values(), LOW, HIGH)


def ratio(own: Vector, base: Vector) -> Interval:
    """Of two means, whose blocks are paired."""
    value = float(own.mean() / base.mean())
    return replace(batch_means_interval((own - value * base) / base.mean()), mean=value)


def text(found: Interval) -> str:
    digits = 2 if abs(found.mean) < 9.995 else 1
    return f"{found.mean:.{digits}f} ± {found.half_width:.{digits}f}"


class Findings:
    """What the results say."""

    def __init__(self, results: Results, cells: Sequence[Cell] | None = None) -> None:
        self.data = results.data
        known = self.data["cells"]
        self.cells = {
            cell: known[str(cell)]
            for cell in cells or design()
            if "speed" in known.get(str(cell), ())
        }

    def main(self, order: str, predictor: str) -> Cell | None:
        """A cell of the main group, where it has been measured."""
        cell = Cell(*MAIN, order, predictor)
        return cell if cell in self.cells else None

    def burst(self, order: str, predictor: str) -> Cell | None:
        """A cell of the bursts, where they have been measured; else of the main group."""
        if Cell(*BURST, FCFS, NONE, name=QUESTIONS) not in self.cells:
            return self.main(order, predictor)
        cell = Cell(*BURST, order, predictor, name=QUESTIONS)
        return cell if cell in self.cells else None

    def blocks(self, name: str, cell: Cell) -> Vector:
        return np.array(self.cells[cell][name])

    def at_one_speed(self, quantity: str, cell: Cell) -> Vector:
        """Blocks whose mean is that of the simulation at the speed of fcfs, times observed over
        simulated at the cell's own; they scatter as what the simulation does not explain.
        """
        seen, own = self.blocks(quantity, cell), self.blocks(f"{quantity}_simulated", cell)
        at_fcfs = own + self.blocks(f"{quantity}_shift", cell)
        ratio, share = seen.mean() / own.mean(), at_fcfs.mean() / own.mean()
        return np.asarray(ratio * at_fcfs + share * (seen - ratio * own))

    def price(self, quantity: str, cell: Cell, base: Cell) -> Interval:
        """Mean of a cell over that of another, at one speed."""
        return ratio(self.at_one_speed(quantity, cell), self.at_one_speed(quantity, base))

    # the questions

    def graceful(self) -> str:
        """Whether E[T] / E[T_SRPT] <= G alpha / beta, and what sigma 2 costs."""
        base = self.main("sprpt", RIGHT)
        needed: list[tuple[Interval, Cell]] = []
        for order, told in itertools.product(INTERRUPTING, PREDICTORS):
            if base and (cell := self.main(order, told)):
                spread = self.cells[cell]["alpha_over_beta"]
                own = self.at_one_speed("sojourn", cell) / spread
                needed.append((ratio(own, self.at_one_speed("sojourn", base)), cell))
        if not needed:
            return "Not measured."
        most, where = max(needed, key=lambda pair: pair[0].high)
        beyond = [pair for pair in needed if pair[0].low > GRACEFUL]
        if beyond:
            most, where = max(beyond, key=lambda pair: pair[0].low)
            said = f"Degradation is not graceful: it needs more than G = {GRACEFUL}"
        elif most.high > GRACEFUL:
            said = f"Whether degradation is graceful (G at most {GRACEFUL}) cannot be told"
        else:
            said = f"Degradation is graceful: none of {len(needed)} cells needs more than "
            said += f"G = {GRACEFUL}"
        return (
            f"{said}; most with `{where.order}` and `{where.predictor}`, which needs {text(most)} "
            f"in E[T] <= G α/β E[T_SRPT]. {self._against_fcfs()}"
        )

    def _against_fcfs(self) -> str:
        """How the orders stand with sigma = 2."""
        fcfs = self.main(FCFS, NONE)
        said: dict[str, list[str]] = {"worse": [], "better": [], "not told apart": []}
        for order in ("spjf", *INTERRUPTING):
            cell = self.main(order, SIGMA_2)
            if cell and fcfs:
                found = self.price("delay", cell, fcfs)
                how = "worse" if found.low > 1 else "better" if found.high < 1 else "not told apart"
                said[how].append(f"`{order}` ({text(found)})")
        parts = [f"{how}: {', '.join(orders)}" for how, orders in said.items() if orders]
        return f"With σ = 2, mean delay over that of `fcfs`: {'; '.join(parts) or 'not measured'}."

    def false_bits(self) -> str:
        """What a false long costs against a false short."""
        parts = []
        for order in BITS:
            wrong = (HALF_LONG, HALF_SHORT), (FALSE_LONG, FALSE_SHORT)
            every = [[self.burst(order, bit) for bit in (BIT, *pair)] for pair in wrong]
            cells = next((found for found in every if None not in found), None)
            if cells is None:
                continue
            right, long, short = (cell for cell in cells if cell)
            zero, x, y = (self.at_one_speed("delay", cell) for cell in (right, long, short))
            of_long = 1e3 * (x - zero) / self.cells[long]["false_long"]
            of_short = 1e3 * (y - zero) / self.cells[short]["false_short"]
            more = batch_means_interval(of_short - of_long)
            how = (
                "a false short costs more than a false long"
                if more.low > 0
                else "a false long costs more than a false short"
                if more.high < 0
                else "a false short and a false long cannot be told apart"
            )
            parts.append(
                f"Under `{order}` {how}: {text(batch_means_interval(of_short))} ms and "
                f"{text(batch_means_interval(of_long))} ms of delay, summed over all requests, for "
                f"each false bit (difference {text(more)} ms)."
            )
        return " ".join(parts) or "Not measured."

    def trail(self) -> str:
        """Whether TRAIL's c pays against sprpt, over all predictors that both have."""
        parts = []
        for order in ("trail", *TRAILS):
            pairs = [(self.burst(order, told), self.burst("sprpt", told)) for told in PREDICTORS]
            both = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
            if not both:
                continue
            own, base = (
                np.sum([self.at_one_speed("sojourn", pair[side]) for pair in both], axis=0)
                for side in (0, 1)
            )
            found = ratio(own, base)
            said, of_sprpt = (
                sum(
                    np.sum(self.blocks(f"sojourn_{what}", pair[side]))
                    for pair in both
                    for what in ("simulated", "shift")
                )
                for side in (0, 1)
            )
            how = "pays" if found.high < 1 else "costs" if found.low > 1 else "cannot be told"
            often = [
                np.mean([np.mean(self.cells[pair[side]]["preemptions"]) for pair in both])
                for side in (0, 1)
            ]
            c = order.partition("c=")[2] or "0.8"
            parts.append(
                f"c = {c} {how}: mean sojourn time {text(found)} of that under `sprpt` "
                f"(simulated {said / of_sprpt:.2f}), over "
                f"{counted(len(both), 'predictor')}; {often[0]:.2f} preemptions a request, not "
                f"{often[1]:.2f}."
            )
        return " ".join(parts) or "Not measured."

    def harm(self) -> str:
        """At which loads predictions that cost tokens of the engine pay, by simulation."""
        found = self.data["costs"]
        parts = []
        for order, ratios in found.get("ratios", {}).items():
            pairs = list(zip(found["loads"], ratios, strict=True))
            pays = [load for load, value in pairs if value is not None and value < 1]
            beyond = [load for load, _ in pairs if pays and load > pays[-1]]
            if not pays:
                parts.append(f"`{order}` does harm at every load")
                continue
            till = f"s {pays[0]:g} to {pays[-1]:g}" if len(pays) > 1 else f" {pays[0]:g}"
            harm = f", does harm from {beyond[0]:g} on" if beyond else ""
            parts.append(f"`{order}` pays at load{till}{harm}")
        return f"With `{found['cost']}`: {'; '.join(parts)}." if parts else "Not simulated."

    # the tables

    def learned(self) -> str:
        """What predictions from prompts cost against exact ones, and against no order."""
        group = [cell for cell in self.cells if cell.name == LEARNED]
        fcfs = next((cell for cell in group if cell.order == FCFS), None)
        if fcfs is None or len(group) < 2:
            return "Not measured."
        parts = [
            f"`{cell.order}` {cell.predictor} {text(self.price('delay', cell, fcfs))}"
            for cell in group
            if cell != fcfs
        ]
        return f"Mean delay over that of `fcfs`: {', '.join(parts)}."

    def agreement(self, name: str | None = None) -> tuple[int, int, int, int]:
        """Cells, of a kind or all, whose ratio to fcfs is as predicted for the same requests, of
        how many; the same of the stationary law.
        """
        own = [cell for cell in self.cells if name is None or cell.name == name]
        rows = [self.compared(cell) for cell in own if cell.order != FCFS]
        same = [holds(observed, predicted) for observed, predicted, _ in rows]
        long = [holds(observed, law) for observed, _, law in rows if law is not None]
        return sum(same), len(same), sum(long), len(long)

    def compared(self, cell: Cell) -> tuple[Interval, float, float | None]:
        """A cell's ratio of delays, or of its kind's quantity, to fcfs: observed, predicted for the
        same requests, and by the stationary law where there is one.
        """
        of = cell.kind.quantity
        observed, same = (
            ratio(self.blocks(name, cell), self.blocks(name, cell.fcfs))
            for name in (of, f"{of}_simulated")
        )
        own, base = (self.cells[one]["stationary"] for one in (cell, cell.fcfs))
        return observed, same.mean, None if own is None or base is None else own / base

    def kinds(self) -> str:
        """The agreement of each kind of cells against `HELD` of them."""
        parts = []
        for name in KINDS:
            same, cells, _, _ = self.agreement(name)
            if cells:
                verdict = "holds" if same >= HELD * cells else "does not hold"
                parts.append(f"{name or 'synthetic lengths'} {same} of {cells} ({verdict})")
        return "; ".join(parts)

    def table(self, group: str) -> str:
        head = ("order", "predictor", "delay (ms)", "observed", "same requests", "stationary")
        rows = [(*head, "formula (ms)", "sojourn (ms)", "preemptions", "speed", "result")]
        for cell in self.cells:
            if cell.group != group:
                continue
            observed, predicted, law = self.compared(cell)
            known = self.cells[cell]
            formula = "-" if known["formula"] is None else f"{1e3 * known['formula']:.1f}"
            cost = f", {cell.cost}" if cell.cost else ""
            rows.append(
                (
                    f"`{cell.order}`",
                    f"`{cell.predictor}`{cost}",
                    f"{1e3 * np.mean(known['delay']):.1f}",
                    "1" if cell.order == FCFS else text(observed),
                    "1" if cell.order == FCFS else f"{predicted:.2f}",
                    "-" if law is None else f"{law:.2f}",
                    formula,
                    f"{1e3 * np.mean(known['sojourn']):.1f}",
                    f"{np.mean(known['preemptions']):.2f}",
                    f"{np.mean(known['speed']):.3f}",
                    ""
                    if cell.order == FCFS
                    else "holds"
                    if holds(observed, predicted)
                    else "differs",
                )
            )
        return markdown(rows)

    def prices(self) -> str:
        """Mean delay over the order's own with exact lengths, by sigma or bias."""
        names = (*(f"σ = {sigma}" for sigma in ERRORS), "predicted low", "predicted high")
        rows: list[tuple[str, ...]] = [("order", *names)]
        for order in ("spjf", *INTERRUPTING):
            base, row = self.main(order, RIGHT), [f"`{order}`"]
            for told in PREDICTORS:
                cell = self.main(order, told)
                found = text(self.price("delay", cell, base)) if base and cell else "-"
                row.append("1" if base and told == RIGHT else found)
            rows.append(tuple(row))
        return markdown(rows)

    def costs(self) -> str:
        found = self.data["costs"]
        if not found:
            return "Not simulated."
        rows: list[tuple[str, ...]] = [("order", *(f"{load:g}" for load in found["loads"]))]
        for order, ratios in found["ratios"].items():
            cells = ("unstable" if value is None else f"{value:.2f}" for value in ratios)
            rows.append((f"`{order}`", *cells))
        return markdown(rows)


def holds(observed: Interval, predicted: float) -> bool:
    return abs(observed.mean - predicted) <= max(CLOSE * predicted, observed.half_width)


def requests_of(kind: Kind) -> str:
    """Of a kind of cells: what is not as in the others."""
    parts = [f"prompts `{kind.prompts}`"]
    if kind.dataset:
        parts = [f"prompts and lengths of bench/prompt_lengths.py, cut at {kind.limit}"]
    if kind.pieces > 1:
        parts.append(f"{kind.pieces} bursts on an empty queue, in each of them all cells in turn")
    parts += [f"{name} {value}" for name, value in kind.bounds.items()]
    if kind.quantity == "sojourn":
        parts.append("compared by sojourn times, as requests wait in vLLM too")
    return ", ".join(parts)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def page(findings: Findings, inside: str = "") -> str:
    """The whole page; `inside`: the section of the orders in vLLM's own queue."""
    data, cells = findings.data, findings.cells
    same, compared, long, laws = findings.agreement()
    speeds = [speed for found in cells.values() for speed in found["speed"]]
    pairs = [findings.compared(cell)[:2] for cell in cells if cell.order != FCFS]
    near = sum(abs(observed.mean - told) <= CLOSE * told for observed, told in pairs)
    groups = dict.fromkeys((cell.group, cell.name, cell.slots, cell.load) for cell in cells)
    tables = "\n\n".join(
        f"## {f'{name}, ' if name else ''}{slots} slots, load {load:g}\n\n{findings.table(group)}"
        for group, name, slots, load in groups
    )
    wrong = "30 %" if findings.burst(FCFS, NONE) == findings.main(FCFS, NONE) else "half"
    late = max(max(found["late"]) for found in cells.values())
    dates = sorted(found["date"] for found in cells.values())
    sent = "\n".join(
        f"- Group {name}: {group['count']:,} requests at {group['rate']:.2f}/s, "
        f"seed {group['seed']}, pilot at speed {group['speed']:.3f}."
        for name, group in data["groups"].items()
    )
    laws_of = "\n".join(f"- Law {name}: `{law}`." for name, law in data["laws"].items())
    runs = "\n".join(
        f"- Run {number}, {run['began']}: engine {run['engine']}, model tiny; "
        f"{', '.join(f'{key} {value}' for key, value in run['hardware'].items())}; "
        f"{', '.join(f'{name} {version}' for name, version in run['versions'].items())}; "
        f"seed {run['seed']}, {run['minutes']:g} minutes; `{' '.join(run['gateway'])}`; "
        f"{sum(number - 1 in found['runs'] for found in cells.values())} cells."
        for number, run in enumerate(data["runs"], 1)
    )
    kinds = "".join(
        f"\n- {name}: {requests_of(KINDS[name])}."
        for name in dict.fromkeys(cell.name for cell in cells)
        if name
    )
    return f"""# The price of a misprediction

The delay of a real engine over the error of a predictor of output lengths, beside the simulation
of its calibrated law, resumes included. All cells of one number of slots and one load serve the
same arrivals and lengths. `bench/misprediction.py` writes this page from
[misprediction.json](../../{RESULTS}).

- **Is degradation graceful?** {findings.graceful()}
- **What does a false long cost against a false short?** {findings.false_bits()}
- **Does TRAIL's c pay?** {findings.trail()}
- **What do lengths predicted from prompts gain?** {findings.learned()}
- **Up to which load may predicting take the engine's time?** {findings.harm()}

Of {compared} cells {same} have a ratio of delays to `fcfs` as predicted for the same requests,
within {100 * CLOSE:.0f} % or the interval, {near} of them within {100 * CLOSE:.0f} %. Of {laws}
with a stationary prediction {long}. By kind, where {100 * HELD:.0f} % have to:
{findings.kinds()}. The engine took {min(speeds):.2f} to
{max(speeds):.2f} times as long as its law says, cell by cell.

## The price by error

Mean delay over that of the same order with exact lengths, {MAIN[0]} slots, load {MAIN[1]:g}. σ is
that of the logarithm of predicted over true length; low: `{LOW}`;
high: `{HIGH}`.

{findings.prices()}

{tables}

delay, sojourn: observed means. observed, same requests, stationary: mean delay over that of `fcfs`,
observed (± 95 %, paired block means), simulated on the same requests, and on 20,000 others (-: the
queue would grow). formula: what `kendall predict` answers where it has a formula for the order.
result: observed against the same requests. The engine makes the tokens of a cost as a part of the
request that is predicted.

## What predicting may cost, simulated

Mean sojourn time over that of `fcfs` by load, {MAIN[0]} slots, exact predictions that cost the
engine `{data["costs"].get("cost", "nothing")}`.

{findings.costs()}

{inside and inside + chr(10)}## How

- Measured from {dates[0]} to {dates[-1]} (UTC):
{runs}
- Output tokens `{LENGTHS}`, cut at {LONGEST}; prompts `{PROMPTS}`, others in
  every cell. Lengths are forced, predictions are sent with the requests.{kinds}
- No prediction uses a delay. The law is calibrated before, with the cost of a resume. The speed is
  the factor on it at which the simulator serves a cell's own requests for as many seconds as the
  engine did. The four answers and the prices are at the speed of `fcfs`: each observed mean is
  multiplied by the simulated mean of the same requests at that speed over that at the cell's own.
- α/β: the largest predicted over true length of the requests sent, over the smallest. SRPT is
  `sprpt` with exact lengths on the same slots. A lognormal error has no bound: its α/β grows with
  the number of requests, which makes the slides' bound weak.
- A false bit: {wrong} of the short lengths, or of the long ones, get the wrong bit.
- Senders were late by {1e3 * late:.3f} ms at most (p99).
{sent}
{laws_of}

    .venv/bin/python bench/misprediction.py --minutes 60
"""
