"""A load run read back from its file, as it was when it ended, or as far as it came when it was killed.

A run that ended has written so into its header. The file of one that was killed stops anywhere, even within a line; of a
run with several senders only their own files are left then, NAME.sender0.jsonl and so on, which are read as one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from loadgen.bench_read import from_bench_json, is_bench_json
from loadgen.job import row_of
from loadgen.run import LoadResult, held_back, lateness
from policies.text import SpecError
from queueing.record import Header, Record, read_run


def read_results(paths: Sequence[Path]) -> list[tuple[str, LoadResult]]:
    """Every run in the files, under the names of its files. Raises SpecError."""
    runs: dict[str, list[tuple[Path, Header, list[Record]]]] = {}
    for path in chain.from_iterable(map(_with_senders, paths)):
        header, records = _read(path)
        run = records[0].request_id.rpartition("-")[0] if records else str(path)
        runs.setdefault(run if ".sender" in path.name else str(path), []).append((path, header, records))
    return [(", ".join(str(path) for path, _, _ in parts), _result(parts)) for parts in runs.values()]


def _with_senders(path: Path) -> list[Path]:
    """The file; where a killed run has left none or an empty one, those of its senders."""
    if path.exists() and path.stat().st_size:
        return [path]
    return sorted(path.parent.glob(f"{path.stem}.sender*{path.suffix}")) or [path]


def _read(path: Path) -> tuple[Header, list[Record]]:
    try:
        header, records = from_bench_json(path) if is_bench_json(path) else read_run(path)
    except OSError as error:
        raise SpecError(f"got {path}: {error.strerror}; expected a run file of kendall load") from None
    except ValueError as error:
        raise SpecError(str(error)) from None
    if header.writer != "load":
        raise SpecError(f"got {path}, written by a {header.writer}; expected a run file of kendall load (kendall compare reads this one)")
    return header, records


def _result(parts: Sequence[tuple[Path, Header, list[Record]]]) -> LoadResult:
    header = parts[0][1]
    records = [record for _, _, records in parts for record in records]
    if "interrupted" in header.configuration:
        records.sort(key=row_of)
    asked, ended = header.configuration.get("num_prompts"), header.configuration.get("interrupted")
    missing = tuple(header.configuration.get("missing") or ())
    if ended is None and isinstance(asked, int) and len(records) < asked:
        missing = (f"the run was killed, or still goes on: {len(records)} of {asked} requests recorded",)
    elif ended is False and not missing and isinstance(asked, int) and len(records) < asked:
        missing = (f"the file was cut: {len(records)} of {asked} requests are in it",)
    missing += tuple(_repeated(records))
    return LoadResult(header, records, lateness(records), bool(ended), held_back(records), missing)


def _repeated(records: Sequence[Record]) -> Iterator[str]:
    """A sentence on ids that several records share."""
    counts = Counter(record.request_id for record in records)
    if repeated := sum(count > 1 for count in counts.values()):
        yield f"request ids with more than one record: {repeated}; the file is damaged, or joined from several"
