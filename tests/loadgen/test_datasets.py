"""Prompts of a dataset: read whole, drawn by a stream of their own, and honest about the lengths
that nobody counted.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import numpy as np
import pytest

from kendall.loadgen.datasets import (
    Prompt,
    draw_dataset,
    load_token_counter,
    random_prompts,
    read_dataset,
)
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.arrivals.timetable import Timetable, draw_prompts, draw_timetable, split
from kendall.queueing.distributions.token_distribution import parse_distribution

SAMPLES = Path(__file__).parent / "samples"
SHAREGPT, LINES = SAMPLES / "sharegpt.json", SAMPLES / "prompts.jsonl"
LENGTHS = parse_distribution("uniform:low=1,high=50")


def _words(text: str) -> int:
    return len(text.split())


def _table(count: int, seed: int = 1) -> Timetable:
    return draw_timetable(
        Poisson(10.0), count=count, seed=seed, prompt_tokens=LENGTHS, output_tokens=LENGTHS
    )


def _hashable(prompt: Prompt) -> str:
    return json.dumps(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)


def test_sharegpt_gives_the_first_question_that_has_an_answer() -> None:
    dataset = read_dataset(SHAREGPT)
    conversations = [entry["conversations"] for entry in json.loads(SHAREGPT.read_text())]
    assert len(dataset.prompts) + dataset.skipped == len(conversations) == 22
    assert dataset.skipped == 2  # one without an answer, one empty
    assert dataset.prompts[0] == conversations[0][0]["value"]
    assert dataset.prompts[6] == conversations[6][1]["value"]  # the sixth begins with an answer
    assert dataset.lengths == "server"
    assert set(dataset.prompt_tokens) == set(dataset.output_tokens) == {None}


def test_lmsys_gives_the_first_question_that_has_an_answer(tmp_path: Path) -> None:
    """Lines as of LMSYS-Chat-1M, with the fields that are of no use here."""
    said = [[("user", "why is tea hot"), ("assistant", "it was boiled")], [("user", "hello")]]
    rows = [
        {
            "conversation_id": str(number),
            "model": "vicuna-13b",
            "conversation": [{"role": role, "content": content} for role, content in turns],
            "turn": 1,
            "redacted": False,
        }
        for number, turns in enumerate(said)
    ]
    file = tmp_path / "lmsys.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    dataset = read_dataset(file, _words)
    assert (dataset.prompts, dataset.skipped) == (["why is tea hot"], 1)
    assert (dataset.prompt_tokens, dataset.output_tokens) == ([4], [3])


def test_a_tokenizer_counts_questions_and_answers() -> None:
    dataset = read_dataset(SHAREGPT, _words)
    question, answer = json.loads(SHAREGPT.read_text())[0]["conversations"][:2]
    assert dataset.prompt_tokens[0] == _words(question["value"])
    assert dataset.output_tokens[0] == _words(answer["value"])
    assert dataset.lengths == "counted"


def test_json_lines_hold_text_token_ids_and_messages() -> None:
    dataset = read_dataset(LINES, _words)
    rows = [json.loads(line) for line in LINES.read_text().splitlines()]
    assert [_hashable(prompt) for prompt in dataset.prompts] == [
        json.dumps(row.get("prompt") or row["messages"]) for row in rows
    ]
    assert dataset.output_tokens == [row.get("output_tokens") for row in rows]
    ids = [i for i, row in enumerate(rows) if isinstance(row.get("prompt"), list)]
    assert [dataset.prompt_tokens[i] for i in ids] == [6] * len(ids)
    chats = [i for i, row in enumerate(rows) if "messages" in row]
    assert dataset.prompt_tokens[chats[0]] == sum(
        _words(message["content"]) for message in rows[chats[0]]["messages"]
    )
    assert dataset.lengths == "counted"


def test_token_ids_alone_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt":[1,2,3]}\n\n{"prompt":[4]}\n')
    dataset = read_dataset(path)
    assert (dataset.lengths, dataset.prompt_tokens) == ("exact", [3, 1])


def test_no_prompt_comes_twice_before_all_have_come() -> None:
    dataset = read_dataset(SHAREGPT)
    _, prompts = draw_dataset(_table(50), dataset, seed=1)
    drawn = [_hashable(prompt) for prompt in prompts]
    everything = sorted(map(_hashable, dataset.prompts))
    assert sorted(drawn[:20]) == sorted(drawn[20:40]) == everything
    assert drawn[:20] != drawn[20:40]
    assert drawn[:20] != [_hashable(prompt) for prompt in dataset.prompts]


def test_the_draw_repeats_with_its_seed_and_begins_alike_in_a_longer_run() -> None:
    dataset = read_dataset(SHAREGPT)
    short, long, other = (
        draw_dataset(_table(n), dataset, seed)[1] for n, seed in ((15, 1), (45, 1), (15, 2))
    )
    assert list(short) == list(long[:15])
    assert list(short) != list(other)


def test_known_lengths_replace_drawn_ones_and_unknown_ones_do_not() -> None:
    table, dataset = _table(20), read_dataset(LINES)
    drawn, prompts = draw_dataset(table, dataset, seed=1)
    assert np.array_equal(drawn.intended_at, table.intended_at)
    known = dict(
        zip(
            map(_hashable, dataset.prompts),
            zip(dataset.prompt_tokens, dataset.output_tokens, strict=True),
            strict=True,
        )
    )
    for i, prompt in enumerate(prompts):
        prompt_tokens, output_tokens = known[_hashable(prompt)]
        assert drawn.prompt_tokens[i] == (prompt_tokens or 0)
        assert drawn.output_tokens[i] == (output_tokens or table.output_tokens[i])
    assert 0 in drawn.prompt_tokens
    assert prompts.lengths == "server"


def test_senders_together_hold_every_prompt_once() -> None:
    table, dataset = _table(37), read_dataset(LINES)
    _, prompts = draw_dataset(table, dataset, seed=1)
    for processes in (1, 2, 4):
        together: dict[int, str] = {}
        for index in split(table, processes):
            part = prompts.rows(index)
            together |= {row: _hashable(part[i]) for i, row in enumerate(index.tolist())}
        assert [together[i] for i in range(37)] == [_hashable(prompt) for prompt in prompts]


def test_random_prompts_are_those_of_the_timetable() -> None:
    table = _table(30)
    prompts = random_prompts(table, 1, range(10, 250))
    assert prompts.lengths == "exact"
    for prompt, expected in zip(prompts, draw_prompts(table, 1, range(10, 250)), strict=True):
        assert np.array_equal(prompt, expected)  # type: ignore[arg-type]


def test_a_tokenizer_file_counts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"queue": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_token_counter(path)("queue of queue") == 3
    with pytest.raises(SpecError, match=r"expected a tokenizer.json or a folder with one"):
        load_token_counter(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no prompt .0 conversations without one."),
        (
            '[{"conversations":[{"from":"human","value":"alone"}]}]',
            "got no prompt .1 conversations",
        ),
        (
            '[{"conversations":[{"from":"human"}]}]',
            "expected a list of ShareGPT conversations.*value",
        ),
        (
            '{"prompt":"a"}\n{"text":"b"}\n',
            "line 2: got no prompt; expected one of prompt, messages, conversations",
        ),
        ('{"prompt":""}\n', "line 1: got no prompt"),
        (
            '{"prompt":"a","output_tokens":0}\n',
            "line 1: got output_tokens 0; expected a whole number >= 1",
        ),
        (
            '{"prompt":"a","output_tokens":"x"}\n',
            "line 1: got .*expected an object with prompt or messages",
        ),
        ('{"prompt":"a"}\n{oops\n', "line 2: got '{oops'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dataset"
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as error:
        read_dataset(path)
    assert str(path) in str(error.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        read_dataset(tmp_path / "absent.json")


def test_the_prompts_shipped_for_smollm2_are_120_different_conversations() -> None:
    path = Path(str(importlib.resources.files("kendall.loadgen"))) / "prompts" / "smollm2.jsonl"
    dataset = read_dataset(path, _words)
    assert len({_hashable(prompt) for prompt in dataset.prompts}) == len(dataset.prompts) == 120
    assert all(isinstance(prompt, list) for prompt in dataset.prompts)  # for the chat endpoint
    lengths = sorted(length or 0 for length in dataset.prompt_tokens)
    assert lengths[0] <= 5
    assert lengths[-1] >= 60  # of several lengths: words, and whole paragraphs
