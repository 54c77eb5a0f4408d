"""Reading `vllm bench serve` result files, foreign ones too, as the header and records of a run.

What such a file does not know stays null: the intended instants (but with a bound on concurrency
the client knows when it WOULD have sent: start - queue time), the server's queue, batches. Files
that Kendall wrote say all of these. Only files written with --save-detailed hold requests; one may
hold several results (--append-result, summary.json).
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from queueing.measurement.record import Header, Outcome, Record, cut_run_of, unmarked

DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")
LEAST_HELD = 1e-6  # seconds: below, it is rounding
_REASONS: dict[str, Outcome] = {
    "Too Many Requests": "rejected"
}  # all that vLLM keeps of a status; 503 is a failure


class BenchDetails(msgspec.Struct, kw_only=True):
    """The arrays of one result, in the order of the requests; seconds."""

    completed: int
    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float]
    errors: list[str]
    queue_times: list[float] | None = None
    max_concurrency: int | None = None
    request_ids: list[str] | None = None  # from here on: in files of Kendall only
    outcomes: list[Outcome] | None = None
    intended_times: list[float | None] | None = None
    send_lateness_s: list[float | None] | None = None
    server_queue_times: list[float | None] | None = None
    server_service_times: list[float | None] | None = None
    batch_sizes: list[int | None] | None = None

    def __post_init__(self) -> None:
        arrays = {
            name: value
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), list)
        }
        if len({len(value) for value in arrays.values()}) > 1:
            sizes = ", ".join(f"{name} {len(value)}" for name, value in arrays.items())
            raise ValueError(
                f"got arrays of different lengths ({sizes}); expected one value per request in each"
            )


def from_bench_json(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a file with one result. Raises ValueError, also for a file without
    --save-detailed.
    """
    return _only(path.read_bytes(), path)


def _only(data: bytes, path: Path) -> tuple[Header, list[Record]]:
    runs = _runs(data, path)
    if len(runs) != 1:
        raise ValueError(f"{path}: got {len(runs)} results; expected one (several: split the file)")
    return runs[0]


def read_either(path: Path) -> tuple[Header, list[Record], bool]:
    """A run file of Kendall or a result of `vllm bench serve`; and whether the file's last line
    was cut. Raises ValueError, OSError.
    """
    data = path.read_bytes()  # once: it may be a pipe
    return (*_only(data, path), False) if is_bench_json(data) else cut_run_of(data, path)


def is_bench_json(data: bytes) -> bool:
    """Whether a file looks like such a result rather than a run file: it begins with one of
    their objects.
    """
    head = unmarked(data[:4096]).lstrip()
    return (
        head.startswith((b"{", b"["))
        and b'"endpoint_type"' in head
        and not head.startswith(b'{"writer"')
    )


def bench_runs(path: Path) -> list[tuple[Header, list[Record]]]:
    """Every result of a file: one object, one per line, or a list. Raises ValueError naming the
    file.
    """
    return _runs(path.read_bytes(), path)


def _runs(data: bytes, path: Path) -> list[tuple[Header, list[Record]]]:
    try:
        return [
            _run(one, f"{path.stem}-{number}" if number else path.stem)
            for number, one in enumerate(_results(unmarked(data)))
        ]
    except ValueError as error:  # msgspec's are of this kind
        raise ValueError(f"{path}: {error}") from None


def _results(data: bytes) -> list[dict[str, Any]]:
    try:
        whole = msgspec.json.decode(data)
    except msgspec.DecodeError:
        whole = [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    found = whole if isinstance(whole, list) else [whole]
    if not found or not all(isinstance(one, dict) and "completed" in one for one in found):
        raise ValueError(
            "got JSON that is no benchmark result; expected the object that `vllm bench serve "
            "--save-result` writes"
        )
    return found


def _run(result: dict[str, Any], name: str) -> tuple[Header, list[Record]]:
    if missing := [key for key in DETAILS if key not in result]:
        raise ValueError(
            f"got a result without {', '.join(missing)}; expected one written with --save-detailed"
        )
    details = msgspec.convert(result, BenchDetails)
    scalars = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
    records = [_record(details, index, name) for index in range(len(details.start_times))]
    return Header(writer="load", clock="perf_counter", configuration=scalars), records


def _record(details: BenchDetails, index: int, name: str) -> Record:
    sent_at = details.start_times[index]
    outcome = _outcome(details, index)
    done = outcome == "completed"
    intended_at, released_at = (
        _intended(details, index),
        sent_at + details.latencies[index] if done else None,
    )
    token_at = _token_at(details, index) if done else []
    return Record(
        request_id=details.request_ids[index] if details.request_ids else f"{name}-{index}",
        outcome=outcome,
        batch_size=details.batch_sizes[index] if details.batch_sizes else None,
        intended_at=intended_at,
        held_until=_held_until(details, index, intended_at),
        sent_at=sent_at,
        first_token_at=token_at[0] if token_at else None,
        last_token_at=token_at[-1] if token_at else None,
        token_at=token_at if details.itls[index] else None,
        released_at=released_at,
        queueing_delay=details.server_queue_times[index] if details.server_queue_times else None,
        service_time=details.server_service_times[index] if details.server_service_times else None,
        sojourn_time=None
        if released_at is None
        else released_at - (sent_at if intended_at is None else intended_at),
        prompt_tokens=details.input_lens[index],
        output_tokens=details.output_lens[index] if done else None,
        error=details.errors[index] or None,
    )


def _outcome(details: BenchDetails, index: int) -> Outcome:
    """vLLM does not write down who succeeded: it is who has no error and an answer."""
    if details.outcomes:
        return details.outcomes[index]
    error = details.errors[index]
    if not error and details.latencies[index] > 0:
        return "completed"
    return _REASONS.get(error, "failed")


def _intended(details: BenchDetails, index: int) -> float | None:
    if details.intended_times:
        return details.intended_times[index]
    if details.max_concurrency is None or details.queue_times is None:
        return None  # the wait in the client's event loop was never measured
    return details.start_times[index] - details.queue_times[index]


def _held_until(details: BenchDetails, index: int, intended_at: float | None) -> float | None:
    """When a limit on the requests at once had a place for it: its wait for that is no lateness.
    vLLM keeps the wait alone.
    """
    sent_at = details.start_times[index]
    late = 0.0 if details.send_lateness_s is None else details.send_lateness_s[index]
    if details.max_concurrency is None or intended_at is None or late is None:
        return None
    return sent_at - late if sent_at - late > intended_at + LEAST_HELD else None


def _token_at(details: BenchDetails, index: int) -> list[float]:
    """The instant of every chunk; one more than there are tokens is the end of the answer, which
    vLLM counts as a gap.
    """
    first = details.start_times[index] + details.ttfts[index]
    chunks = list(accumulate(details.itls[index], initial=first))
    return chunks[:-1] if len(chunks) == details.output_lens[index] + 1 else chunks
