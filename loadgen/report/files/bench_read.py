"""Reading `vllm bench serve` result files, foreign ones too, as the header and records of a run.

What such a file does not know stays null: the intended instants (but with a bound on concurrency
the client knows when it WOULD have sent: start - queue time), the server's queue, batches. Files
that Kendall wrote say all of these. Only files written with --save-detailed hold requests; one with
several results (--append-result, summary.json) is refused.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.report.files.foreign import foreign_format, foreign_run
from kendall.queueing.measurement.record import Header, Outcome, Record, cut_run_of, unmarked

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

    def record(self, index: int, name: str) -> Record:
        """The request of that place; `name` is that of the run."""
        sent_at, error = self.start_times[index], self.errors[index]
        # vLLM does not write down who succeeded: it is who has no error and an answer
        outcome: Outcome = _REASONS.get(error, "failed")
        if self.outcomes:
            outcome = self.outcomes[index]
        elif not error and self.latencies[index] > 0:
            outcome = "completed"
        done = outcome == "completed"
        intended_at = None  # the wait in the client's event loop was never measured
        if self.intended_times:
            intended_at = self.intended_times[index]
        elif self.max_concurrency is not None and self.queue_times is not None:
            intended_at = sent_at - self.queue_times[index]
        # when a limit on the requests at once had a place for it: its wait for that is no lateness;
        # vLLM keeps the wait alone
        late = 0.0 if self.send_lateness_s is None else self.send_lateness_s[index]
        held_until = None
        if (
            self.max_concurrency is not None
            and intended_at is not None
            and late is not None
            and sent_at - late > intended_at + LEAST_HELD
        ):
            held_until = sent_at - late
        # of every chunk; one more than there are tokens is the end of the answer, which vLLM counts
        # as a gap
        token_at = list(accumulate(self.itls[index], initial=sent_at + self.ttfts[index]))
        if len(token_at) == self.output_lens[index] + 1:
            token_at.pop()
        if not done:
            token_at = []
        released_at = sent_at + self.latencies[index] if done else None
        return Record(
            request_id=self.request_ids[index] if self.request_ids else f"{name}-{index}",
            outcome=outcome,
            batch_size=self.batch_sizes[index] if self.batch_sizes else None,
            intended_at=intended_at,
            held_until=held_until,
            sent_at=sent_at,
            first_token_at=token_at[0] if token_at else None,
            last_token_at=token_at[-1] if token_at else None,
            token_at=token_at if self.itls[index] else None,
            released_at=released_at,
            queueing_delay=self.server_queue_times[index] if self.server_queue_times else None,
            service_time=self.server_service_times[index] if self.server_service_times else None,
            sojourn_time=None
            if released_at is None
            else released_at - (sent_at if intended_at is None else intended_at),
            prompt_tokens=self.input_lens[index],
            output_tokens=self.output_lens[index] if done else None,
            error=error or None,
        )


def read_either(path: Path) -> tuple[Header, list[Record], bool]:
    """A run file of Kendall, a result of `vllm bench serve` or one of another load generator; and
    whether the file's last line was cut. Raises ValueError, OSError.
    """
    data = path.read_bytes()  # once: it may be a pipe
    if is_bench_json(data):
        return *bench_run(data, path), False
    form = foreign_format(unmarked(data[:4096]).lstrip())
    if form is not None:
        return *foreign_run(unmarked(data), path, form), False
    return cut_run_of(data, path)


def is_bench_json(data: bytes) -> bool:
    """Tell such a result from a run file by its beginning: it begins with one of
    their objects.
    """
    head = unmarked(data[:4096]).lstrip()
    return (
        head.startswith((b"{", b"["))
        and b'"endpoint_type"' in head
        and not head.startswith(b'{"writer"')
    )


def bench_run(data: bytes, path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a file with one result. Raises ValueError naming the file, also where
    it was written without --save-detailed.
    """
    text = unmarked(data)
    try:
        try:
            whole = msgspec.json.decode(text)
        except msgspec.DecodeError:
            whole = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
        results = whole if isinstance(whole, list) else [whole]
        if not results or not all(isinstance(r, dict) and "completed" in r for r in results):
            raise ValueError(  # noqa: TRY301 - named with the file below, as msgspec's are
                "got JSON that is no benchmark result; expected the object that `vllm bench serve "
                "--save-result` writes"
            )
        runs = [_run(result, path.stem) for result in results]
    except ValueError as error:  # msgspec's are of this kind
        raise ValueError(f"{path}: {error}") from None
    if len(runs) != 1:
        raise ValueError(f"{path}: got {len(runs)} results; expected one (several: split the file)")
    return runs[0]


def _run(result: dict[str, Any], name: str) -> tuple[Header, list[Record]]:
    if missing := [key for key in DETAILS if key not in result]:
        raise ValueError(
            f"got a result without {', '.join(missing)}; expected one written with --save-detailed"
        )
    details = msgspec.convert(result, BenchDetails)
    scalars = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
    records = [details.record(index, name) for index in range(len(details.start_times))]
    return Header(writer="load", clock="perf_counter", configuration=scalars), records
