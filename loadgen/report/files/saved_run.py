"""A load run read back from its file, as it was when it ended, or as far as it came when it was
killed.

A run that ended has written so into its header. The file of one that was killed stops anywhere,
even within a line; of a run with several senders only their own files are left then,
NAME.sender0.jsonl and so on, which are read as one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kendall.loadgen.compare.cells import RunFile
from kendall.loadgen.measures.missing import incomplete, missing_records
from kendall.loadgen.report.files.bench_read import read_either
from kendall.loadgen.sending.job import order_of
from kendall.loadgen.sending.run import LoadResult, held_back, lateness
from kendall.policies.text import SpecError, short_number
from kendall.queueing.measurement.record import Header, Record

RunPart = tuple[Path, Header, list[Record], bool]  # a file, and whether its last line was cut


def read_results(paths: Sequence[Path]) -> list[tuple[str, LoadResult]]:
    """Every run in the files, under the names of its files. Raises SpecError."""
    runs: dict[str, list[RunPart]] = {}
    for path in paths:
        files = [path]
        if not path.exists() or not path.stat().st_size:  # a killed run has left its senders'
            files = sorted(path.parent.glob(f"{path.stem}.sender*{path.suffix}")) or [path]
        for file in files:
            header, records, cut = _read(file)
            run = records[0].request_id.rpartition("-")[0] if records else str(file)
            runs.setdefault(run if ".sender" in file.name else str(file), []).append(
                (file, header, records, cut)
            )
    return [
        (name := ", ".join(str(part[0]) for part in parts), _result(name, parts))
        for parts in runs.values()
    ]


def read_run_file(path: Path) -> RunFile:
    """A file of anybody's, to be compared. Raises SpecError."""
    return RunFile(path, *_either(path))


def _either(path: Path) -> tuple[Header, list[Record], bool]:
    try:
        return read_either(path)
    except OSError as error:
        raise SpecError(f"got {path}: {error.strerror}; expected a run file") from None
    except ValueError as error:
        raise SpecError(str(error)) from None


def _read(path: Path) -> tuple[Header, list[Record], bool]:
    header, records, cut = _either(path)
    if header.writer != "load":
        raise SpecError(
            f"got {path}, written by a {header.writer}; expected a run file of kendall load "
            "(kendall compare reads this one)"
        )
    # some results of `vllm bench serve` know no intended instant; a run that knows some knows all
    known = any(record.intended_at is not None for record in records)
    for record in records:
        if known and (record.intended_at is None or record.intended_at < 0):
            got = "null" if record.intended_at is None else short_number(record.intended_at)
            raise SpecError(
                f"{path}: got intended_at {got} for request {record.request_id}; expected an "
                "instant >= 0: the file is damaged"
            )
    return header, records, cut


def _result(name: str, parts: Sequence[RunPart]) -> LoadResult:
    header = parts[0][1]
    records = [record for _, _, some, _ in parts for record in some]
    cut = any(cut for *_, cut in parts)
    if not records:
        why = f" ({'; '.join(known)})" if (known := incomplete(header, records, cut=cut)) else ""
        raise SpecError(
            f"got {name} without a record{why}; expected a run file with at least one request"
        )
    missing = missing_records(header, records, cut=cut)
    if "interrupted" in header.configuration:
        records.sort(key=order_of)
    return LoadResult(
        header,
        records,
        lateness(records),
        bool(header.configuration.get("interrupted")),
        held_back(records),
        missing,
    )
