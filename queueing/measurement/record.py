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

    request_id: str
    # the caller's own name for its call, which joins a gateway's record to a client's
    client_request_id: str | None = None
    outcome: Outcome
    policy: str | None = None
    epoch: int | None = None
    server_id: int | None = None
    batch_id: int | None = None  # one per dispatch of a process; members of a batch share it
    batch_size: int | None = None  # at dispatch; for continuous: in service just after it
    intended_at: float | None = None  # the timetable's instant
    # the sender's limit on requests at once: when a place became free for this one
    held_until: float | None = None
    sent_at: float | None = None
    first_byte_at: float | None = None  # of the answer: its headers are in
    # at the gateway: the kernel had its last byte, however busy the gateway was
    received_at: float | None = None
    arrived_at: float | None = None  # at the gateway: body read and validated
    first_dispatched_at: float | None = None
    dispatched_at: float | None = None  # the last time, of a preempted request
    first_token_at: float | None = None
    last_token_at: float | None = None
    token_at: list[float] | None = None  # every token's instant, where it was asked for
    released_at: float | None = None  # last byte handed to the transport
    server_free_at: float | None = None  # when this request's server could be dispatched to again
    queueing_delay: float | None = None  # the sum of all waits, of a preempted request
    batch_forming_delay: float | None = None
    service_time: float | None = None  # the sum of all stints in service
    sojourn_time: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, that the engine had computed before
    output_tokens: int | None = None
    max_output_tokens: int | None = None
    predicted_output_tokens: float | None = None  # sent along with the request
    sender_id: int | None = None  # the load generator's process
    flow: str | None = None  # whom its service counts to: a key's name, or a fairness id
    finish_reason: str | None = None
    clipped: bool | None = None
    preemptions: int | None = None  # times it was put back into the queue
    interruptions: int | None = (
        # engines that were lost while it was in service; its service time includes the restarts
        None
    )
    error: str | None = None

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

    writer: Literal["gateway", "simulator", "load"]
    schema_version: int = SCHEMA_VERSION
    clock: str = "monotonic"
    configuration: dict[str, Any] = {}
    seed: int | None = None
    versions: dict[str, str] = {}
    hardware: dict[str, Any] = {}


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
