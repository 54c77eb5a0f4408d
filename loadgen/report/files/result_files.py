"""The files of a load run: the run file that grows with it, its timetable, and the JSON of
`vllm bench serve`.

The run file is written unless --no-save is given, into `runs/` where nothing names it.
--save-result writes three files of one name: NAME.jsonl, NAME.timetable, NAME.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from kendall.loadgen.sending.client.target import LoadError
from kendall.loadgen.sending.options import RESULTS
from kendall.loadgen.sending.plan import LoadPlan
from kendall.options import option
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable
from kendall.queueing.measurement.paths import (
    FileToWrite,
    cannot_write,
    check_folder,
    file_or_folder,
    folder_to_write,
    is_folder,
    tell_missing_folder,
)

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """The flags on results as given; None: not given."""

    output: Path | None = option(
        RESULTS,
        "Run file to write, replaced if it exists, or its folder. Default: runs/load-<time>.jsonl.",
        parser=file_or_folder,
    )
    no_save: bool = option(RESULTS, "Write no run file.", "--no-save", default=False)
    save_result: Path | None = option(
        RESULTS,
        (
            "Write the run file, the timetable and a result in the JSON format of `vllm bench "
            "serve`; a FILE may follow."
        ),
        parser=file_or_folder,
    )
    result_dir: Path | None = option(
        RESULTS,
        "Folder for the files of --save-result; given alone, it saves them as load-SEED.jsonl.",
        parser=folder_to_write,
    )
    result_filename: str | None = option(RESULTS, "Name for the files of --save-result.")
    append_result: bool = option(
        RESULTS,
        "Append a line to vLLM's JSON instead of replacing it.",
        "--append-result",
        default=False,
    )
    save_detailed: bool = option(
        RESULTS, "Add per-request values to vLLM's JSON.", "--save-detailed", default=False
    )
    save_timetable: Path | None = option(
        RESULTS,
        "Write the timetable to this file; --timetable replays it.",
        parser=FileToWrite("load.timetable"),
    )
    label: str | None = option(RESULTS, "Label added to file names and to vLLM's JSON.")
    metadata: Mapping[str, str] = field(default_factory=dict)

    def of_three_files(self) -> list[str]:
        """The flags that ask for run file, timetable and vLLM's JSON."""
        given = {
            "--save-result": self.save_result,
            "--result-dir": self.result_dir,
            "--result-filename": self.result_filename,
        }
        return [flag for flag, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """The files to be written; none where `run` is None."""

    run: Path | None
    timetable: Path | None
    bench: Path | None
    options: ResultOptions
    named_by_time: bool = False  # `run` takes a number where a file of that name is there already

    def written(self) -> list[Path]:
        """The files that are there now."""
        return [
            path
            for path in (self.run, self.timetable, self.bench)
            if path is not None and path.exists()
        ]

    def reserved(self) -> ResultFiles:
        """Check that the run file can be written; one that is named by the time is created, so
        that no other run takes the same name. Raises LoadError.
        """
        if self.run is None:
            return self
        try:
            if not self.named_by_time:
                check_folder(self.run.parent)
                tell_missing_folder(self.run)
            self.run.parent.mkdir(parents=True, exist_ok=True)
            if not self.named_by_time:
                was_there = self.run.exists()
                self.run.open("ab").close()  # what is there is left as it is
                if not was_there:
                    self.run.unlink()
                return self
            return dataclasses.replace(self, run=_created(self.run))
        except OSError as error:
            where = f"cannot write {self.run}: {error.strerror}"
            raise LoadError(
                f"{where}; --output FILE names another place, --no-save writes no file"
            ) from None


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


def result_files(options: ResultOptions, seed: int) -> ResultFiles:
    """The paths that the flags mean. Raises SpecError where they contradict one another."""
    output, flags = options.output, options.of_three_files()
    if options.no_save and (output is not None or flags):
        raise SpecError(
            f"got --no-save with {flags[0] if output is None else '--output'}; expected one of them"
        )
    if output is not None and (
        flags not in ([], ["--save-result"]) or options.save_result not in (None, Path())
    ):
        raise SpecError(
            f"got --output {output} with {flags[-1]}; expected one name for the run file"
        )
    label = options.label or "load"
    if flags:
        name, folder = options.result_filename, options.result_dir
        if output is not None and is_folder(output):
            folder = output
        elif output is not None:
            name = str(output)
        saved, default = options.save_result, f"{label}-{seed}.jsonl"
        if name is None:
            name = default if saved is None else str(saved / default if is_folder(saved) else saved)
        stem = Path(folder or "") / name
        first = stem.with_suffix(".jsonl") if stem.suffix in {".json", ".jsonl"} else stem
        return ResultFiles(
            run=first,
            timetable=options.save_timetable or first.with_suffix(".timetable"),
            bench=stem.with_suffix(".json"),
            options=options,
        )
    unnamed = output is None or is_folder(output)
    now = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")  # local time
    run = Path(output or RUNS) / f"{label}-{now}.jsonl" if unnamed else output
    return ResultFiles(
        run=None if options.no_save else run,
        timetable=options.save_timetable,
        bench=None,
        options=options,
        named_by_time=unnamed,
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
