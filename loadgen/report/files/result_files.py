"""Where a load run is written: the run file that grows with it, its timetable, and the JSON of
`vllm bench serve`.

The run file is written unless --no-save is given, into `runs/` where nothing names it.
--save-result writes three files of one name: NAME.jsonl, NAME.timetable, NAME.json.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from loadgen.arrivals.timetable import save_timetable
from loadgen.measures.goodput import Limit
from loadgen.report.files.bench_json import (
    BENCH_METRICS,
    BenchOptions,
    bench_result,
    write_bench_json,
)
from loadgen.sending.client.target import LoadError
from loadgen.sending.options import LoadOptions
from loadgen.sending.plan import LoadPlan
from loadgen.sending.run import LoadResult
from policies.text import SpecError
from queueing.measurement.paths import cannot_write, is_folder

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """What is to be written; nothing where `run` is None."""

    run: Path | None
    timetable: Path | None
    bench: Path | None
    named_by_time: bool = False  # `run` takes a number where a file of that name is there already
    append: bool = False
    detailed: bool = False
    label: str | None = None
    metadata: Mapping[str, str]

    def written(self) -> list[Path]:
        """Those that are there now."""
        return [
            path
            for path in (self.run, self.timetable, self.bench)
            if path is not None and path.exists()
        ]

    def reserved(self) -> ResultFiles:
        """The same, with a run file that nobody else writes where its name is the time. Raises
        LoadError where it cannot be written.
        """
        if self.run is None:
            return self
        try:
            self.run.parent.mkdir(parents=True, exist_ok=True)
            if not self.named_by_time:
                _try_to_write(self.run)
                return self
            return dataclasses.replace(self, run=_created(self.run))
        except OSError as error:
            where = f"cannot write {self.run}: {error.strerror}"
            raise LoadError(
                f"{where}; --output FILE names another place, --no-save writes no file"
            ) from None


def _try_to_write(path: Path) -> None:
    """Raises OSError. What is there is left as it is."""
    was_there = path.exists()
    path.open("ab").close()
    if not was_there:
        path.unlink()


def _created(path: Path) -> Path:
    """A new file of this name, or of the first NAME-2, NAME-3, ... that is free."""
    for number in count(1):
        candidate = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            candidate.touch(exist_ok=False)
        except FileExistsError:
            continue
        return candidate
    raise AssertionError


def result_files(
    *,
    output: Path | None,
    no_save: bool,
    save: Path | None,
    folder: Path | None,
    name: str | None,
    save_table: Path | None,
    seed: int,
    label: str | None,
    **settings: Any,
) -> ResultFiles:
    """The paths that the flags mean. Raises SpecError where they contradict one another."""
    given = [
        flag
        for flag, value in (
            ("--save-result", save),
            ("--result-dir", folder),
            ("--result-filename", name),
        )
        if value is not None
    ]
    if no_save and (output is not None or given):
        raise SpecError(
            f"got --no-save with {given[0] if output is None else '--output'}; expected one of them"
        )
    if output is not None and (given not in ([], ["--save-result"]) or save not in (None, Path())):
        raise SpecError(
            f"got --output {output} with {given[-1]}; expected one name for the run file"
        )
    if given:
        if output is not None and is_folder(output):
            output, folder = None, output
        chosen = str(output) if output is not None else name
        return _three_files(
            save=save,
            folder=folder,
            name=chosen,
            save_table=save_table,
            seed=seed,
            label=label,
            **settings,
        )
    unnamed = output is None or is_folder(output)
    run = Path(output or RUNS) / f"{label or 'load'}-{_now()}.jsonl" if unnamed else output
    return ResultFiles(
        run=None if no_save else run,
        timetable=save_table,
        bench=None,
        named_by_time=unnamed,
        label=label,
        **settings,
    )


def _now() -> str:
    """The local time, as it stands in the name of a file."""
    return datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")


def _three_files(
    *,
    save: Path | None,
    folder: Path | None,
    name: str | None,
    save_table: Path | None,
    seed: int,
    label: str | None,
    **settings: Any,
) -> ResultFiles:
    default = f"{label or 'load'}-{seed}.jsonl"
    saved = default if save is None else str(save / default) if is_folder(save) else str(save)
    stem = Path(folder or "") / (saved if name is None else name)
    run = stem.with_suffix(".jsonl") if stem.suffix in {".json", ".jsonl"} else stem
    return ResultFiles(
        run=run,
        timetable=save_table or run.with_suffix(".timetable"),
        bench=stem.with_suffix(".json"),
        label=label,
        **settings,
    )


def parse_metadata(texts: Sequence[str]) -> dict[str, str]:
    """`["host=a", "tp=2"]`. Raises SpecError."""
    pairs = [text.partition("=") for text in texts]
    for text, (key, equals, _) in zip(texts, pairs, strict=True):
        if not key or not equals:
            raise SpecError(f"got metadata {text!r}; expected KEY=VALUE")
    return {key: value for key, _, value in pairs}


def save_plan(files: ResultFiles, plan: LoadPlan) -> Path | None:
    """Write the timetable before anything is sent; where it is."""
    if files.timetable is not None:
        try:
            save_timetable(files.timetable, plan.timetable, {"seed": plan.seed, **plan.header})
        except OSError as error:
            raise LoadError(cannot_write(files.timetable, error)) from None
    return files.timetable


def save_bench(
    files: ResultFiles,
    plan: LoadPlan,
    options: LoadOptions,
    result: LoadResult,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    limits: Sequence[Limit],
    extras: Mapping[str, Any],
) -> None:
    """The file that readers of `vllm bench serve` understand; `extras` stand under a key of
    their own.
    """
    if files.bench is None:
        return
    shown = BenchOptions(
        model_id=str(result.header.configuration.get("model")),
        backend="openai-chat" if options.chat else "openai",
        label=files.label,
        num_prompts=len(plan.timetable),
        metadata=files.metadata,
        request_rate=plan.asked_rate or math.inf,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        percentile_metrics=tuple(name for name in metrics if name in BENCH_METRICS),
        metric_percentiles=percentiles,
        goodput=limits,
        save_detailed=files.detailed,
    )
    write_bench_json(
        files.bench,
        bench_result(result.records, shown, extras={"kendall": dict(extras)}),
        append=files.append,
    )
