"""Replay of traces: recorded instants and lengths as a timetable.

The first arrival is instant 0, unless the file is a saved timetable; beyond that and `time_scale`
the instants are the recorded ones. Rows that are out of order are sorted by their instants.
Requests that made no token failed when they were recorded, and requests without prompt tokens
cannot be made again: both are left out and counted.

The formats and how they are recognised: queueing/arrivals/trace_formats.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from kendall.policies.text import SpecError, suggest
from kendall.queueing.arrivals.timetable import Timetable, ragged
from kendall.queueing.arrivals.trace_formats import FORMATS, Row, TraceFormat, detect
from kendall.queueing.distributions.laws import LONGEST


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """What a file gave."""

    kind: str
    timetable: Timetable
    skipped: int  # rows without prompt or output tokens
    out_of_order: int  # rows earlier than the one before them
    block_tokens: int | None = None  # of a block with a hash id


def read_trace(
    path: Path, kind: str = "auto", time_scale: float = 1.0, *, count: int | None = None
) -> Timetable:
    """The timetable of a trace.

    `time_scale` multiplies the instants: 0.5 replays twice as fast, 2 at half the speed (as
    `time_scale` of GuideLLM and `--timed-trace-sec-multiplier` of vLLM). `count` takes the first
    rows of the file only. Raises SpecError naming the file, the line, what was got and what was
    expected.
    """
    return load_trace(path, kind, time_scale, count=count).timetable


def load_trace(
    path: Path, kind: str = "auto", time_scale: float = 1.0, *, count: int | None = None
) -> LoadedTrace:
    """As `read_trace`, with the kind that was found and the number of rows that were left out."""
    if not 0 < time_scale < math.inf:
        raise SpecError(f"got time scale {time_scale}; expected a number > 0 (0.5: twice as fast)")
    if kind != "auto" and kind not in FORMATS:
        raise SpecError(
            f"got trace format {kind!r}; expected auto, "
            f"{', '.join(FORMATS)}{suggest(kind, tuple(FORMATS))}"
        )
    if count is not None and count < 1:
        raise SpecError(f"got {count} prompts; expected a whole number >= 1")
    try:
        found = detect(path) if kind == "auto" else kind
        rows, skipped = _usable(FORMATS[found], path, count)
    except OSError as error:
        raise SpecError(
            f"got trace {path}: {error.strerror}; expected a file of one of {', '.join(FORMATS)}"
        ) from None
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(str(error)) from None
    if not rows:
        raise SpecError(
            f"{path}: got no request with prompt and output tokens ({skipped} without); expected "
            "at least one"
        )
    late = sum(later[0] < earlier[0] for earlier, later in pairwise(rows))
    form = FORMATS[found]
    return LoadedTrace(found, _timetable(rows, form, time_scale), skipped, late, form.block_tokens)


def _usable(form: TraceFormat, path: Path, count: int | None) -> tuple[list[Row], int]:
    """Rows with tokens, at most `count`, and how many without were skipped among them."""
    rows: list[Row] = []
    skipped = 0
    for row in form.read(path):
        if row.prompt_tokens and row.output_tokens:
            rows.append(row)
        else:
            skipped += 1
        if len(rows) == count:
            break
    return rows, skipped


def _timetable(rows: list[Row], form: TraceFormat, time_scale: float) -> Timetable:
    *columns, hash_ids = zip(*rows, strict=True)
    at, prompts, outputs, predicted, flows = map(np.array, columns)
    given = np.array([value is not None for value in predicted])
    tokens = np.where(given, predicted, 0).astype(float)
    if (lowest := tokens.min()) < 0:
        raise SpecError(
            f"got a predicted length of {lowest:g} tokens in the trace; expected numbers > 0"
        )
    # a longer one is no longer than any limit; 0 where a request has none
    whole = np.where(given, np.clip(np.rint(tokens), 1, LONGEST), 0).astype(np.int64)
    order = np.argsort(at, kind="stable")
    # before the division: dates are whole numbers, exact
    since = at - at.min() if form.from_first else at
    return Timetable(
        intended_at=(since / form.per_second * time_scale)[order].astype(np.float64),
        prompt_tokens=prompts[order].astype(np.int64),
        output_tokens=outputs[order].astype(np.int64),
        predicted_output_tokens=whole[order] if given.any() else None,
        flow=None if None in flows else flows[order],
        hash_ids=None
        if not any(hash_ids)
        else ragged([hash_ids[place] or () for place in order.tolist()]),
    )
