"""Where a load run is written: the run file that grows with it, its timetable, and the JSON of `vllm bench serve`.

Three files of one name: NAME.jsonl, NAME.timetable, NAME.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.bench_json import BENCH_METRICS, BenchOptions, bench_result, write_bench_json
from loadgen.goodput import Limit
from loadgen.options import LoadOptions
from loadgen.plan import LoadPlan
from loadgen.run import LoadResult
from loadgen.timetable import save_timetable
from policies.text import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """What is to be written; nothing where `run` is None."""

    run: Path | None
    timetable: Path | None
    bench: Path | None
    append: bool = False
    detailed: bool = False
    label: str | None = None
    metadata: Mapping[str, str]

    def written(self) -> list[Path]:
        """Those that are there now."""
        return [path for path in (self.run, self.timetable, self.bench) if path is not None and path.exists()]


def result_files(
    *, save: Path | None, folder: Path | None, name: str | None, save_table: Path | None, seed: int, label: str | None, **settings: Any
) -> ResultFiles:
    """The paths that the flags mean: `--save-result` with or without a file, `--result-dir`, `--result-filename`."""
    asked = save is not None or folder is not None or name is not None
    chosen = name if name is not None else str(save) if save not in (None, Path()) else f"{label or 'load'}-{seed}.jsonl"
    stem = (folder or Path()) / chosen
    run = stem.with_suffix(".jsonl") if stem.suffix in {".json", ".jsonl"} else stem
    return ResultFiles(
        run=run if asked else None,
        timetable=save_table or (run.with_suffix(".timetable") if asked else None),
        bench=stem.with_suffix(".json") if asked else None,
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
        save_timetable(files.timetable, plan.timetable, {"seed": plan.seed, **plan.header})
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
    """The file that readers of `vllm bench serve` understand; `extras` stand under a key of their own."""
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
    write_bench_json(files.bench, bench_result(result.records, shown, extras={"kendall": dict(extras)}), append=files.append)
