"""Prompts that are real text: conversations of ShareGPT and LMSYS-Chat-1M, and JSON lines.

    ShareGPT    [{"conversations": [{"from": "human", "value": ...},
                                    {"from": "gpt", "value": ...}, ...]}, ...]
    LMSYS       {"conversation": [{"role": "user", "content": ...},
                                  {"role": "assistant", "content": ...}, ...]}, one a line
    JSON lines  {"prompt": text or token ids, "output_tokens": n}
                {"messages": [{"role": ..., "content": ...}, ...], "output_tokens": n}
                one a line; `output_tokens` may be left out

Of such a conversation the first question that has an answer is taken: the question is the
prompt, the answer's length the output length. A conversation without such a pair is left out and
counted. A load of conversations (`--turns`) takes all such pairs, and all messages of a user, in
turn; the answers that are sent along are those of the server.

How lengths are known: of token ids exactly; of text only by a tokenizer, where one is given; else
by the server alone, and the timetable then says 0 prompt tokens. Output lengths come from the file
where it has them (or from the answer, by the tokenizer), else from the law that the run was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import msgspec
import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import (
    IntArray,
    Timetable,
    draw_blocks,
    draw_prompts,
    streams,
)
from kendall.queueing.measurement.record import shown, unmarked

Message = dict[str, Any]
Prompt = IntArray | str | list[Message]  # token ids, text, or a conversation for a chat endpoint
TokenCounter = Callable[[str], int]
Known = Literal["exact", "counted", "server"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompts(Sequence[Prompt]):
    """The prompts of a run: `prompts[i]` belongs to row i of its timetable."""

    items: Sequence[Prompt]
    # how their numbers of tokens are known: from token ids, by a tokenizer, by the server
    lengths: Known

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.items[index]

    def rows(self, index: IntArray) -> Prompts:
        """Those of one of several senders."""
        return Prompts([self.items[i] for i in index.tolist()], self.lengths)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file's prompts, in its order; a length is None where it is not known."""

    prompts: list[Prompt]
    prompt_tokens: list[int | None]
    output_tokens: list[int | None]
    skipped: int = 0  # conversations without a question and its answer

    @property
    def lengths(self) -> Known:
        """How the prompts' numbers of tokens are known."""
        if any(count is None for count in self.prompt_tokens):
            return "server"
        return (
            "exact" if all(isinstance(prompt, np.ndarray) for prompt in self.prompts) else "counted"
        )


def random_prompts(
    timetable: Timetable, seed: int, vocabulary: range, block_tokens: int | None = None
) -> Prompts:
    """Random token ids of the timetable's lengths; where it has hash ids of blocks of so many
    tokens, equal ids are equal tokens.
    """
    if timetable.hash_ids is None or block_tokens is None:
        return Prompts(draw_prompts(timetable, seed, vocabulary), "exact")
    return Prompts(draw_blocks(timetable, seed, vocabulary, block_tokens), "exact")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: what the user adds to it; lengths in tokens, None where they are
    not known.
    """

    prompt: Prompt  # text or messages
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def choose(seed: int, size: int, count: int) -> list[int]:
    """Places of so many prompts out of `size`: every one once in random order, then every one again
    in another order, and so on: none comes twice before all have come.
    """
    rng, rounds = streams(seed).dataset, -(-count // size)
    places: list[int] = np.concatenate([rng.permutation(size) for _ in range(rounds)]).tolist()
    return places[:count]


def draw_turns(
    timetable: Timetable, conversations: Sequence[Sequence[Turn]], seed: int
) -> tuple[Timetable, Prompts, bool]:
    """The turns of a conversation for each one of the timetable, which is as long at most; the
    timetable with their lengths; and whether all answers have lengths.
    """
    assert timetable.turn is not None
    places = (np.cumsum(timetable.turn == 1) - 1).tolist()
    chosen = choose(seed, len(conversations), places[-1] + 1)
    try:
        turns = [
            conversations[chosen[place]][turn - 1]
            for place, turn in zip(places, timetable.turn.tolist(), strict=True)
        ]
    except IndexError:
        raise SpecError(
            "got a timetable with more turns than the dataset's conversations have; expected the "
            "dataset that it was drawn from"
        ) from None
    outputs = [
        turn.output_tokens or drawn
        for turn, drawn in zip(turns, timetable.output_tokens.tolist(), strict=True)
    ]
    timetable = dataclasses.replace(
        timetable,
        prompt_tokens=np.array([turn.prompt_tokens or 0 for turn in turns], dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )
    known = all(turn.output_tokens is not None for turn in turns)
    return timetable, Prompts([turn.prompt for turn in turns], "server"), known


def draw_dataset(timetable: Timetable, dataset: Dataset, seed: int) -> tuple[Timetable, Prompts]:
    """A prompt of the dataset for each row, and the timetable with the lengths that the dataset
    knows.

    No prompt comes twice before all have come. Predicted lengths are dropped; draw them anew with
    `with_predictions`.
    """
    chosen = choose(seed, len(dataset.prompts), len(timetable))
    outputs = [
        dataset.output_tokens[i] or drawn
        for i, drawn in zip(chosen, timetable.output_tokens.tolist(), strict=True)
    ]
    drawn_table = dataclasses.replace(
        timetable,
        prompt_tokens=np.array([dataset.prompt_tokens[i] or 0 for i in chosen], dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        predicted_output_tokens=None,
    )
    return drawn_table, Prompts([dataset.prompts[i] for i in chosen], dataset.lengths)


def read_dataset(path: Path, count_tokens: TokenCounter | None = None) -> Dataset:
    """The prompts of a file. Raises SpecError naming the file, the line, what was got and what
    was expected.
    """
    rows = [_row(where, entry, count_tokens) for where, entry in _entries(path)]
    usable = [row for row in rows if row is not None]
    if not usable:
        raise SpecError(
            f"{path}: got no prompt ({len(rows)} conversations without one); expected at least one"
        )
    prompts, prompt_tokens, output_tokens = (list(column) for column in zip(*usable, strict=True))
    return Dataset(prompts, prompt_tokens, output_tokens, len(rows) - len(usable))


def read_conversations(path: Path, count_tokens: TokenCounter | None = None) -> list[list[Turn]]:
    """The turns of every conversation that has one. Raises SpecError as `read_dataset`."""
    found = [_conversation(where, entry, count_tokens) for where, entry in _entries(path)]
    if not any(found):
        raise SpecError(
            f"{path}: got no turn ({len(found)} conversations without one); expected at least one"
        )
    return [turns for turns in found if turns]


def _conversation(where: str, entry: _Entry, count: TokenCounter | None) -> list[Turn]:
    turns = entry.conversation if entry.conversations is None else entry.conversations
    if turns is not None:
        return [
            Turn(question, count(question), count(answer)) if count else Turn(question)
            for question, answer in _pairs(turns)
        ]
    if entry.messages:
        user = [place for place, one in enumerate(entry.messages) if one.get("role") == "user"]
        before = [one for one in entry.messages[: user[0]] if one] if user else []
        said = [[entry.messages[place]] for place in user]
        return [Turn([*before, *new] if new is said[0] else new) for new in said]
    row = _row(where, entry, count)
    return [] if row is None else [Turn(*row)]


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    try:
        data = unmarked(path.read_bytes())
    except OSError as error:
        raise SpecError(
            f"got dataset {path}: {error.strerror}; expected a ShareGPT file or JSON lines"
        ) from None
    return _array(path, data) if data.lstrip().startswith(b"[") else _lines(path, data)


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _LmsysTurn(msgspec.Struct):
    speaker: str = msgspec.field(name="role")
    value: str = msgspec.field(name="content")


class _Entry(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    conversations: list[_Turn] | None = None
    conversation: list[_LmsysTurn] | None = None
    output_tokens: int | None = None


def _array(path: Path, data: bytes) -> Iterator[tuple[str, _Entry]]:
    try:
        entries = msgspec.json.decode(data, type=list[_Entry])
    except msgspec.MsgspecError as error:
        raise SpecError(
            f"{path}: got a file that begins with [; expected a list of ShareGPT conversations "
            f"({error})"
        ) from None
    for number, entry in enumerate(entries, start=1):
        yield f"{path}, entry {number}", entry


def _lines(path: Path, data: bytes) -> Iterator[tuple[str, _Entry]]:
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", msgspec.json.decode(line, type=_Entry)
            except msgspec.MsgspecError as error:
                raise SpecError(
                    f"{path}, line {number}: got {shown(line)}; expected an object with prompt or "
                    f"messages ({error})"
                ) from None


_Row = tuple[Prompt, int | None, int | None]


def _row(where: str, entry: _Entry, count: TokenCounter | None) -> _Row | None:
    if entry.output_tokens is not None and entry.output_tokens < 1:
        raise SpecError(
            f"{where}: got output_tokens {entry.output_tokens}; expected a whole number >= 1"
        )
    turns = entry.conversation if entry.conversations is None else entry.conversations
    if turns is not None:
        return _first_pair(turns, count)
    if entry.messages:
        text = "\n".join(str(message.get("content", "")) for message in entry.messages)
        return entry.messages, count(text) if count else None, entry.output_tokens
    if isinstance(entry.prompt, list) and entry.prompt:
        return np.array(entry.prompt, dtype=np.int64), len(entry.prompt), entry.output_tokens
    if isinstance(entry.prompt, str) and entry.prompt:
        return entry.prompt, count(entry.prompt) if count else None, entry.output_tokens
    raise SpecError(
        f"{where}: got no prompt; expected one of prompt, messages, conversations, conversation "
        "that is not empty"
    )


def _first_pair(turns: Sequence[_Turn | _LmsysTurn], count: TokenCounter | None) -> _Row | None:
    for question, answer in _pairs(turns):
        return (question, count(question), count(answer)) if count else (question, None, None)
    return None


def _pairs(turns: Sequence[_Turn | _LmsysTurn]) -> Iterator[tuple[str, str]]:
    """Questions that have answers."""
    for question, answer in pairwise(turns):
        if (
            question.speaker in {"human", "user"}
            and answer.speaker in {"gpt", "assistant", "chatgpt"}
            and question.value
            and answer.value
        ):
            yield question.value, answer.value


def load_token_counter(path: Path) -> TokenCounter:
    """Counts tokens by the tokenizer of a folder, or of a `tokenizer.json`. Raises SpecError."""
    from tokenizers import Tokenizer  # noqa: PLC0415  loaded only where a tokenizer is given

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise SpecError(
            f"got tokenizer {path}: {error}; expected a tokenizer.json or a folder with one"
        ) from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
