"""The timetable of a run: who is sent when, with how many tokens, drawn as data before anything is
sent.

The instants, lengths, prompts, predicted lengths and flows come from streams of their own,
spawned from one seed: another rate, policy or prompt leaves the rest as it was (common random
numbers), and a longer run begins as the shorter one did. Several senders share the ONE timetable by
`split`. A saved timetable is JSON lines, a header and one row per request: readable, and exact,
because every number is written with the digits that read back as the same float64; what is loaded
and saved again is the same file, byte for byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import IntArray, predict_lengths
from kendall.queueing.arrivals.processes import ArrivalStream, FloatArray, Poisson, delivered_rate
from kendall.queueing.distributions.flows import Flows, check_name
from kendall.queueing.measurement.record import shown, unmarked
from kendall.queueing.predictors.predictor_text import PredictorText

__all__ = [
    "FloatArray",
    "IntArray",
    "LengthLaw",
    "Timetable",
    "delivered_rate",
    "draw",
    "draw_blocks",
    "draw_prompts",
    "draw_timetable",
    "load_timetable",
    "one_each",
    "ragged",
    "save_timetable",
    "shared_tokens",
    "split",
    "streams",
    "with_flows",
    "with_models",
    "with_predictions",
    "with_turns",
]


HASH_IDS = 2**62  # of a trace are below; above are those of blocks that only one prompt has


class LengthLaw(Protocol):
    """Where token counts come from: a
    `queueing.distributions.token_distribution.TokenDistribution`.
    """

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[Any]:
        """`size` independent counts >= 1."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """One row per request, in the order of sending; arrays of one length."""

    # seconds after the start of the run; of a turn of a conversation: its first turn's
    intended_at: FloatArray
    prompt_tokens: IntArray  # 0 where only the server can count them
    output_tokens: IntArray
    # sent along; 0: none is
    predicted_output_tokens: IntArray | None = None
    flow: NDArray[np.str_] | None = None  # whose each is, sent along
    # of the blocks of its prompt, a tuple a row: equal ids are equal tokens
    hash_ids: NDArray[np.object_] | None = None
    model: NDArray[np.str_] | None = None  # that each asks for, of several
    turn: IntArray | None = None  # in its conversation, from 1; the rows of one are consecutive
    think_time: FloatArray | None = None  # seconds between the last answer and this turn
    # when its client hangs up: seconds after sending, or tokens received; 0: never
    hang_up_after: FloatArray | None = None
    hang_up_tokens: IntArray | None = None

    def __post_init__(self) -> None:
        sizes = {column.size for column in self.columns().values()}
        if len(sizes) > 1:
            raise ValueError(f"got arrays of {sorted(sizes)} entries; expected all of one length")
        if np.any(np.diff(self.intended_at) < 0):
            raise ValueError(
                "got instants out of order; expected a timetable in the order of sending"
            )

    def __len__(self) -> int:
        return self.intended_at.size

    @property
    def rate(self) -> float:
        """Requests per second over its own span: the drawn rate, not the asked one."""
        return delivered_rate(self.intended_at)

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays that are there, by name."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: column for name, column in columns.items() if column is not None}

    def rows(self, index: IntArray) -> Timetable:
        """Some rows of it, as a timetable: what one of several senders sends."""
        return Timetable(**{name: column[index] for name, column in self.columns().items()})


def draw(
    rate: float, num_prompts: int, seed: int, prompt_tokens: LengthLaw, output_tokens: LengthLaw
) -> Timetable:
    """A Poisson timetable: `rate` in requests per second (infinity sends all at once). Raises
    SpecError.
    """
    return draw_timetable(
        Poisson(rate),
        count=num_prompts,
        seed=seed,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


def draw_timetable(
    process: ArrivalStream,
    *,
    count: int | None = None,
    duration: float | None = None,
    seed: int,
    prompt_tokens: LengthLaw,
    output_tokens: LengthLaw,
) -> Timetable:
    """`count` arrivals of a process, those within `duration` seconds, or whichever ends first.
    Raises SpecError.
    """
    stream = streams(seed)
    instants = process.instants(stream.arrivals, count=count, duration=duration)
    if not instants.size:
        raise SpecError(
            f"got no arrival of {process} within {duration} s; expected a longer duration or a "
            "higher rate"
        )
    return Timetable(
        intended_at=instants,
        prompt_tokens=np.asarray(
            prompt_tokens.sample(stream.prompt_tokens, instants.size), dtype=np.int64
        ),
        output_tokens=np.asarray(
            output_tokens.sample(stream.output_tokens, instants.size), dtype=np.int64
        ),
    )


def with_predictions(timetable: Timetable, predictor: PredictorText, seed: int) -> Timetable:
    """The same requests, each with a predicted length from a stream of its own; with none where
    the predictor is none.
    """
    predicted = predict_lengths(predictor, streams(seed).predictions, timetable.output_tokens)
    return dataclasses.replace(timetable, predicted_output_tokens=predicted)


def with_flows(timetable: Timetable, flows: Flows, seed: int) -> Timetable:
    """The same requests, each of a flow drawn from a stream of its own."""
    places = flows.draw(streams(seed).flows, len(timetable))
    return dataclasses.replace(timetable, flow=np.array(flows.names)[places])


def with_models(timetable: Timetable, models: Flows, seed: int) -> Timetable:
    """The same requests, each for a model drawn from a stream of its own."""
    places = models.draw(streams(seed).models, len(timetable))
    return dataclasses.replace(timetable, model=np.array(models.names)[places])


def with_turns(
    timetable: Timetable,
    turns: IntArray,
    seed: int,
    *,
    prompt_tokens: LengthLaw,
    output_tokens: LengthLaw,
    think_time: float,
) -> Timetable:
    """A conversation of so many turns for each row, whose instant is that of the first; lengths are
    drawn for each turn, think times exponentially distributed with mean `think_time` seconds.
    """
    stream, total = streams(seed), int(turns.sum())
    place = np.arange(total) - np.repeat(np.cumsum(turns) - turns, turns)
    return Timetable(
        intended_at=np.repeat(timetable.intended_at, turns),
        prompt_tokens=np.asarray(prompt_tokens.sample(stream.prompt_tokens, total), dtype=np.int64),
        output_tokens=np.asarray(output_tokens.sample(stream.output_tokens, total), dtype=np.int64),
        turn=place + 1,
        think_time=np.where(place > 0, stream.think_times.exponential(think_time, total), 0.0),
    )


def one_each(timetable: Timetable) -> Timetable:
    """The same, each conversation with the flow and the model of its first turn."""
    if timetable.turn is None:
        return timetable
    first = np.arange(len(timetable)) - timetable.turn + 1
    columns = {"flow": timetable.flow, "model": timetable.model}
    chosen = {name: column[first] for name, column in columns.items() if column is not None}
    return dataclasses.replace(timetable, **chosen)


class Streams(NamedTuple):
    """The independent generators of a seed, in the order of their spawning: new ones come last,
    the old ones stay.
    """

    arrivals: np.random.Generator
    output_tokens: np.random.Generator
    prompt_tokens: np.random.Generator
    prompts: np.random.Generator
    predictions: np.random.Generator
    dataset: np.random.Generator
    think_times: np.random.Generator
    flows: np.random.Generator
    cancellations: np.random.Generator
    models: np.random.Generator
    turns: np.random.Generator


def streams(seed: int) -> Streams:
    """The generators of a seed. Raises SpecError below 0."""
    if seed < 0:
        raise SpecError(f"got seed {seed}; expected a whole number >= 0")
    return Streams(
        *(
            np.random.default_rng(child)
            for child in np.random.SeedSequence(seed).spawn(len(Streams._fields))
        )
    )


def draw_prompts(timetable: Timetable, seed: int, vocabulary: range) -> list[IntArray]:
    """Token ids of every prompt, uniform over `vocabulary`; different prompts share no prefix
    but by chance.
    """
    words = streams(seed).prompts
    ids = words.integers(vocabulary.start, vocabulary.stop, size=int(timetable.prompt_tokens.sum()))
    return np.split(ids, np.cumsum(timetable.prompt_tokens)[:-1])


def draw_blocks(
    timetable: Timetable, seed: int, vocabulary: range, block_tokens: int
) -> list[IntArray]:
    """Token ids of every prompt, block by block: those of one hash id are the same in every prompt,
    whatever else is in the timetable. Tokens beyond the blocks of a row are its own.
    """
    assert timetable.hash_ids is not None
    key = int(streams(seed).prompts.integers(2**62)) << 64

    def block(number: int) -> IntArray:
        tokens = np.random.Generator(np.random.Philox(key=key | number))
        return tokens.integers(vocabulary.start, vocabulary.stop, size=block_tokens)

    prompts = []
    lengths = timetable.prompt_tokens.tolist()
    for row, (ids, length) in enumerate(zip(timetable.hash_ids, lengths, strict=True)):
        needed = -(-length // block_tokens)
        own = (HASH_IDS + (row << 32) + place for place in range(needed - len(ids)))
        prompts.append(np.concatenate([block(each) for each in (*ids[:needed], *own)])[:length])
    return prompts


def shared_tokens(timetable: Timetable, block_tokens: int) -> IntArray:
    """Prompt tokens of each row in leading blocks that came before: what a prefix cache without a
    limit has of it.
    """
    assert timetable.hash_ids is not None
    known: dict[int, int] = {}  # tokens of each block, of which the last of a prompt has some
    shared = []
    for ids, length in zip(timetable.hash_ids, timetable.prompt_tokens.tolist(), strict=True):
        hits, whole = 0, True
        for place, each in enumerate(ids):
            size = max(0, min(block_tokens, length - place * block_tokens))
            there = min(size, known.get(each, 0))
            hits += there if whole else 0
            whole = whole and there == block_tokens
            known[each] = max(size, known.get(each, 0))
        shared.append(hits)
    return np.array(shared, dtype=np.int64)


def ragged(rows: Sequence[tuple[int, ...]]) -> NDArray[np.object_]:
    """A column of tuples."""
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column


def split(timetable: Timetable, processes: int) -> list[IntArray]:
    """The rows of each of several senders, in turn: row i goes to sender i mod `processes`, and so
    do whole conversations. Raises SpecError.
    """
    if processes < 1:
        raise SpecError(f"got {processes} processes; expected a whole number >= 1")
    if timetable.turn is not None:
        conversation = np.cumsum(timetable.turn == 1) - 1
        return [np.flatnonzero(conversation % processes == first) for first in range(processes)]
    return [np.arange(first, len(timetable), processes) for first in range(processes)]


def save_timetable(
    path: Path, timetable: Timetable, header: Mapping[str, Any] | None = None
) -> None:
    """Write a timetable as JSON lines, with a header of the caller's (seed, arrivals, lengths);
    its folder is made.
    """
    encode = msgspec.json.Encoder().encode
    columns = timetable.columns()
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(
            encode({"writer": "timetable", "schema_version": 1, "header": dict(header or {})})
            + b"\n"
        )
        file.writelines(encode(dict(zip(columns, row, strict=True))) + b"\n" for row in rows)


class _Head(msgspec.Struct):
    writer: str
    schema_version: int
    header: dict[str, Any] = {}


class _Row(msgspec.Struct):
    intended_at: float
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int | None = None
    flow: str | None = None
    hash_ids: tuple[int, ...] | None = None
    model: str | None = None
    turn: int | None = None
    think_time: float | None = None
    hang_up_after: float | None = None
    hang_up_tokens: int | None = None


def load_timetable(path: Path) -> tuple[dict[str, Any], Timetable]:
    """The header and the timetable of a file. Raises ValueError naming the line that cannot be
    read.
    """
    first, *rest = unmarked(path.read_bytes()).splitlines() or [b""]
    head = _decode(first, _Head, path, 1)
    if head.writer != "timetable" or head.schema_version > 1:
        raise ValueError(
            f"{path}: got a file of {head.writer}, schema version {head.schema_version}; expected "
            "a timetable, version 1"
        )
    rows = [
        _decode(line, _Row, path, number)
        for number, line in enumerate(rest, start=2)
        if line.strip()
    ]
    for flow in {row.flow for row in rows if row.flow is not None}:
        check_name(flow)
    return head.header, Timetable(
        intended_at=np.array([row.intended_at for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array([row.output_tokens for row in rows], dtype=np.int64),
        predicted_output_tokens=_of_all(
            [row.predicted_output_tokens for row in rows], "a predicted length", path
        ),
        flow=_of_all([row.flow for row in rows], "a flow", path),
        hash_ids=None
        if not any(row.hash_ids for row in rows)
        else ragged([row.hash_ids or () for row in rows]),
        model=_of_all([row.model for row in rows], "a model", path),
        turn=_of_all([row.turn for row in rows], "turn", path),
        think_time=_of_all([row.think_time for row in rows], "think_time", path),
        hang_up_after=_of_all([row.hang_up_after for row in rows], "hang_up_after", path),
        hang_up_tokens=_of_all([row.hang_up_tokens for row in rows], "hang_up_tokens", path),
    )


def _of_all(column: list[Any], named: str, path: Path) -> NDArray[Any] | None:
    """A column that is there in all rows or in none. Raises ValueError."""
    given = [value for value in column if value is not None]
    if 0 < len(given) < len(column):
        raise ValueError(f"{path}: got {named} in some rows; expected one in all or in none")
    return np.array(given) if given else None


_T = TypeVar("_T")


def _decode(line: bytes, kind: type[_T], path: Path, number: int) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        expected = (
            "a timetable, as `kendall load --save-timetable` writes it"
            if number == 1
            else f"a timetable's line ({error})"
        )
        raise ValueError(f"{path}, line {number}: got {shown(line)}; expected {expected}") from None
