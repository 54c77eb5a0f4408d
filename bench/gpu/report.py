"""The tables of a run: the law, each cell beside it, steps along the output, prefill, energy,
and the paper's statements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.latency.fit import COEFFICIENTS, Fit
from kendall.queueing.latency.regression import fit_line
from papers.measured_laws import YANG, yang_times
from papers.measurements import load_measurement
from papers.reproduction.yang.batches import SETS

from .design import Shape
from .fit import (
    RawRun,
    mean_time,
    window_steps,
)


def report(run: RawRun, fit: Fit) -> str:
    parts = [
        law_text(run, fit),
        cell_table(run, fit),
        step_table(run, fit),
        prefill_table(run),
        energy_text(run),
        paper_text(run, fit),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of right-aligned columns."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["--:"] * len(head), *rows))


def law_text(run: RawRun, fit: Fit) -> str:
    """The coefficients with their intervals, and how well they fit."""
    header, speeds = run.header, run.round_speeds()
    intervals = ", ".join(
        f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in fit.intervals.items()
    )
    wander = f"{min(speeds):.4f} to {max(speeds):.4f}" if speeds else "no whole round"
    return "\n".join(
        (
            f"{header['model']}, {header['dtype']}, {header['machine']['device']}, "
            f"{'CUDA graphs' if header['cuda_graphs'] else 'eager steps'}, "
            f"{header['date']}, {len(run.batches)} batches",
            "law: "
            + ", ".join(f"{name} = {getattr(fit.law, name):.4g}" for name in COEFFICIENTS)
            + " s",
            f"95 % intervals (of the repeats, not of the law's form): {intervals}",
            f"R2 {fit.r2:.5f}, mean absolute error of the cells' means {fit.mape:.2%}",
            (
                f"cv {fit.law.cv:.4f} about the law, {run.repeat_cv():.4f} among the repeats of a "
                f"cell; rounds' mean speed {wander}"
            ),
        )
    )


def cell_table(run: RawRun, fit: Fit) -> str:
    """Each cell's mean beside the law, with and without the growth of the step."""
    try:
        grown = run.grown_law()
    except SpecError:  # too few cells to tell the growth apart
        grown = {}
    rows, errors = [], []
    for cell, batches in run.cells().items():
        mean, times = mean_time(batches), [batch.service_time for batch in batches]
        cv = float(np.std(times, ddof=1)) / mean if len(times) > 1 else math.nan
        lawful = fit.law.padded(
            cell.batch_size, cell.output_tokens, cell.batch_size * cell.prompt_tokens
        )
        errors += [grown[cell] / mean - 1] if grown else []
        numbers = [cell.batch_size, cell.prompt_tokens, cell.output_tokens, len(times)]
        rows.append(
            [
                *map(str, numbers),
                f"{mean:.4f}",
                f"{cv:.2%}",
                f"{lawful:.4f}",
                f"{lawful / mean - 1:+.1%}",
                f"{errors[-1]:+.1%}" if grown else "-",
            ]
        )
    head = [
        "b",
        "prompt",
        "output",
        "repeats",
        "mean H (s)",
        "cv",
        "law (s)",
        "law's error",
        "error with growth",
    ]
    growth = f"{np.mean(np.abs(errors)):.2%}" if grown else "not fitted (too few output lengths)"
    return (
        f"{table(head, rows)}\n\nMean absolute error with growth {growth}, without {fit.mape:.2%}."
    )


def step_table(run: RawRun, fit: Fit) -> str:
    """The step along the longest outputs; the law has one value for all of them."""
    longest, rows = run.longest_outputs(), []
    for size, batches in longest.items():
        steps, _ = window_steps(batches)
        errors = [fit.law.step(size) / steps[index] - 1 for index in (0, -1)]
        rows.append(
            [
                str(size),
                *(f"{1e3 * step:.3f}" for step in steps),
                f"{1e3 * fit.law.step(size):.3f}",
                *(f"{e:+.1%}" for e in errors),
            ]
        )
    parts = [f"part {part + 1} (ms)" for part in range(len(rows[0]) - 4)]
    head = ["b", *parts, "law (ms)", "law's error, first part", "last part"]
    output = next(iter(longest.values()))[0].cell.output_tokens
    return (
        f"Mean step in each part of {output} tokens of "
        f"output:\n\n{table(head, rows)}\n\n{growth_text(run)}"
    )


def growth_text(run: RawRun) -> str:
    """The growth of the step, and the speed of the cache's reading that it means."""
    try:
        fit = run.step_growth()
    except SpecError as error:
        return f"Growth of the step: {error}"
    g, (low, high) = fit.coefficients["g"], fit.intervals["g"]
    number_bytes = 4 if run.header["dtype"] == "float32" else 2
    speed = (
        Shape(**run.header["shape"]).cached_per_token * number_bytes / g / 1e12
        if g > 0
        else math.inf
    )
    meaning = f"as if the cache were read at {speed:.3g} TB/s" if low > 0 else "no growth is seen"
    return (
        f"Step = {fit.coefficients['k3']:.4g} b + {fit.coefficients['k4']:.4g} + g b n s, n "
        f"tokens of context, g = {g:.4g} ({low:.4g} to {high:.4g}), R2 {fit.r2:.5f}: {meaning}."
    )


def prefill_table(run: RawRun) -> str:
    """Seconds until the first tokens, by batch size and prompt."""
    times_by_size: dict[tuple[int, int], list[float]] = {}
    for batch in run.batches:
        times_by_size.setdefault((batch.cell.batch_size, batch.cell.prompt_tokens), []).append(
            batch.ends[0]
        )
    rows = [
        [
            str(size),
            str(prompt),
            str(len(times)),
            f"{1e3 * np.mean(times):.2f}",
            f"{size * prompt / np.mean(times):.0f}",
        ]
        for (size, prompt), times in sorted(times_by_size.items())
    ]
    return f"Prefill:\n\n{table(['b', 'prompt', 'batches', 'mean (ms)', 'prompt tokens/s'], rows)}"


def energy_text(run: RawRun) -> str:
    """Energy of a batch of the longest output, and the line through it."""
    why = run.header["machine"].get("energy", "this device has no counter that is read")
    try:
        fit = run.batch_energy()
    except SpecError as error:
        return f"Energy: {error}"
    if fit is None:
        return f"Energy: null ({why})."
    output = next(iter(run.longest_outputs().values()))[0].cell.output_tokens
    rows = []
    for size, batches in run.longest_outputs().items():
        joules = float(np.mean([batch.joules for batch in batches if batch.joules is not None]))
        watts = joules / mean_time(batches)
        rows.append([str(size), f"{joules:.1f}", f"{watts:.0f}", f"{joules / (size * output):.3f}"])
    line = f"c[b] = {fit.law.beta:.4g} b + {fit.law.c0:.4g} J, R2 {fit.line.r2:.5f}"
    return (
        f"Energy of a batch with {output} tokens of output ({why}): "
        f"{line}\n\n{table(['b', 'J', 'W', 'J per output token'], rows)}"
    )


def paper_text(run: RawRun, fit: Fit) -> str:
    """One request at a time beside Yang et al., Table I, and the ratio k3 / k4 beside the sets
    that the reproduction assumes.
    """
    printed, rows = load_measurement(YANG), []
    for cell in printed.cells():
        prompt, output = int(cell["input_tokens"]), int(cell["output_tokens"])
        seconds = measured_alone(run, prompt, output)
        here = f"{seconds:.3f}" if seconds else "not measured"
        lawful = fit.law.padded(1, output, prompt)
        rows.append(
            [
                str(prompt),
                str(output),
                f"{cell['seconds']:.2f}",
                here,
                f"{lawful:.3f}",
                f"{cell['seconds'] / (seconds or lawful):.2f}",
            ]
        )
    head = ["input", "output", f"{printed.device} (s)", "here (s)", "here, law (s)", "ratio"]
    ratio = fit.law.k3 / fit.law.k4 if fit.law.k4 else math.inf
    ratios = ", ".join(f"{k3 / k4:.3g} (set {name})" for name, (_, _, k3, k4) in SETS.items())
    return "\n".join(
        (
            f"Beside {printed.model} on {printed.device}, one request at a time (another device "
            "and program: the ratio is no verdict):",
            "",
            table(head, rows),
            "",
            lines_text(run),
            (
                f"What a member adds to a step, k3 / k4: here {ratio:.3g}; the paper prints no "
                f"k1..k4, its reproduction assumes {ratios}."
            ),
        )
    )


def lines_text(run: RawRun) -> str:
    """S = a n + c of one request alone, here and there."""
    alone = [
        batch
        for batch in run.batches
        if batch.cell.batch_size == 1 and batch.cell.prompt_tokens == run.header["prompt_tokens"][0]
    ]
    all_rows, few = yang_times(), yang_times(128)
    there = (
        f"there {all_rows.slope:.5f} n + {all_rows.intercept:.3f} (all rows), {few.slope:.5f} "
        f"n + {few.intercept:.3f} (input 128)"
    )
    there += ", 0.0220 n + 0.78 (asked for by its printed delays)"
    try:
        line = fit_line(
            [batch.cell.output_tokens for batch in alone], [batch.service_time for batch in alone]
        )
    except SpecError as error:
        return f"S = a n + c, seconds: here not fitted ({error}); {there}"
    return (
        f"S = a n + c, seconds: here {line.slope:.5f} n + {line.intercept:.3f} (R2 "
        f"{line.r2:.5f}); {there}"
    )


def measured_alone(run: RawRun, prompt: int, output: int) -> float | None:
    """Mean seconds until token number `output` of a request served alone; None where none was
    that long.
    """
    times = [
        batch.ends[output - 1]
        for batch in run.batches
        if batch.cell.batch_size == 1
        and batch.cell.prompt_tokens == prompt
        and len(batch.ends) >= output
    ]
    return float(np.mean(times)) if times else None
