"""What happened to one request: the record that gateway, simulator and load generator all write.

A run file is JSON lines: one header (configuration, seed, versions, hardware), then one record per
request. A writer leaves null what it cannot know. Instants are seconds on the writer's own clock,
whose origin the header names.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

SCHEMA_VERSION = 2  # 1 had no preemptions; its files are read as well
RUN_FILE = "a run file, as `kendall load` and `kendall serve --record-file` write it"
Outcome = Literal["completed", "failed", "rejected", "abandoned", "cancelled"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request, one line. Durations and instants in seconds, counts in tokens."""

    request_id: str  # unique within its writer; a gateway's ends with the number of the sequence
    # the caller's own name for its call, which joins a gateway's record to a client's
    client_request_id: str | None = None
    outcome: Outcome  # how it ended
    policy: str | None = None  # the policy in force at its dispatch, or at its end
    epoch: int | None = None  # the epoch of its dispatch, or of its end
    server_id: int | None = None  # the server that served it
    batch_id: int | None = None  # one per dispatch of a process; members of a batch share it
    batch_size: int | None = None  # at dispatch; for continuous: in service just after it
    intended_at: float | None = None  # arrival time in the timetable
    held_until: float | None = None  # when --max-concurrency of the sender had a place for it
    sent_at: float | None = None  # when the client began to send it
    first_byte_at: float | None = None  # when the client had the headers of the answer
    # when the gateway's kernel had its last byte, however busy the gateway was
    received_at: float | None = None
    arrived_at: float | None = None  # when the gateway had read and validated the body
    first_dispatched_at: float | None = None  # its first dispatch
    dispatched_at: float | None = None  # its last dispatch; later than the first if preempted
    first_token_at: float | None = None  # when its first token came
    last_token_at: float | None = None  # when its last token came
    token_at: list[float] | None = None  # the instant of every token, with --token-times
    released_at: float | None = None  # when the last byte was handed to the transport
    server_free_at: float | None = None  # when its server could take another request
    queueing_delay: float | None = None  # dispatch - arrival; of a preempted request all waits
    batch_forming_delay: float | None = None  # wait for the batch to be complete (policy fixed)
    service_time: float | None = None  # time in service; of a preempted request all stints
    sojourn_time: float | None = None  # last byte - arrival
    prompt_tokens: int | None = None  # tokens of the prompt
    cached_tokens: int | None = None  # tokens of the prompt that were in the prefix cache
    output_tokens: int | None = None  # tokens of the answer
    max_output_tokens: int | None = None  # token limit in force for it
    predicted_output_tokens: float | None = None  # predicted length, sent along with the request
    sender_id: int | None = None  # the load generator's process
    model: str | None = None  # that it asked for, where a load asks for several
    flow: str | None = None  # flow for fair shares: the name of a key, or a fairness id
    turn: int | None = None  # in its conversation, from 1
    finish_reason: str | None = None  # stop, length, ...
    clipped: bool | None = None  # whether the gateway's token limit ended the answer
    preemptions: int | None = None  # times it was put back into the queue
    # engines lost while it was in service; its service time includes the restarts
    interruptions: int | None = None
    error: str | None = None  # code or text of the error

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, for this request."""
        return (self.prompt_tokens or 0) - (self.cached_tokens or 0)


def call_of(request_id: str) -> str | None:
    """The call that a gateway's sequence is of: its id without the sequence's own number. None:
    it names none.
    """
    return request_id.rpartition("-")[0] or None


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a run file."""

    writer: Literal["gateway", "simulator", "load"]  # kind of program that wrote the file
    schema_version: int = SCHEMA_VERSION  # of the fields of the records
    clock: str = "monotonic"  # origin of the instants
    configuration: dict[str, Any] = {}  # options of the run
    seed: int | None = None  # seed of the run
    versions: dict[str, str] = {}  # versions of Kendall and of what it used
    hardware: dict[str, Any] = {}  # processor, cores, GPU


_encoder = msgspec.json.Encoder()


def to_line(value: Record | Header) -> bytes:
    """One JSON line, newline included."""
    return _encoder.encode(value) + b"\n"


def write_run(path: Path, header: Header, records: Iterable[Record]) -> None:
    """A whole run file at once; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(to_line(header))
        file.writelines(to_line(record) for record in records)


def read_run(path: Path) -> tuple[Header, list[Record]]:
    """Header and records. Raises ValueError naming the file and line that cannot be read.

    A last line that was cut, because its writer was killed in the middle of it, is left out.
    """
    return read_cut_run(path)[:2]


def read_cut_run(path: Path) -> tuple[Header, list[Record], bool]:
    """The same, and whether a last line that was cut is left out."""
    return cut_run_of(path.read_bytes(), path)


def cut_run_of(data: bytes, path: Path) -> tuple[Header, list[Record], bool]:
    """The same of what has been read already: a pipe gives it once."""
    data = unmarked(data)
    if not data.strip():
        raise ValueError(f"{path}: the file is empty; expected {RUN_FILE}")
    first, *lines = data.splitlines()
    cut = bool(lines) and not data.endswith(b"\n")
    if cut:
        try:
            msgspec.json.decode(lines[-1])
            cut = False
        except msgspec.DecodeError:
            lines.pop()
    header = _decode(first, Header, path, 1)
    if header.schema_version > SCHEMA_VERSION:
        raise ValueError(
            f"{path}: got schema version {header.schema_version}; this Kendall reads up to "
            f"{SCHEMA_VERSION}"
        )
    numbered = enumerate(lines, start=2)
    records = [_decode(line, Record, path, number) for number, line in numbered if line.strip()]
    return header, records, cut


def unmarked(data: bytes) -> bytes:
    """Text without the byte order mark that some editors put before it."""
    return data.removeprefix(codecs.BOM_UTF8)


_T = TypeVar("_T")


def shown(line: bytes) -> str:
    """The beginning of a line for an error message, without the bytes of a binary file."""
    try:
        start = line.decode()[:80]
    except UnicodeDecodeError:
        start = "\0"
    return (
        repr(start)
        if start.replace("\t", " ").isprintable()
        else f"{len(line)} bytes that are no text"
    )


def _decode(line: bytes, kind: type[_T], path: Path, number: int) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        expected = RUN_FILE if number == 1 else f"a {kind.__name__.lower()} ({error})"
        raise ValueError(f"{path}, line {number}: got {shown(line)}; expected {expected}") from None
