"""Prompts and the lengths of their answers: the committed data, asking, judging predictors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau

from bench import prompt_lengths
from bench.length_predictors import Row, best_tau, described, evaluation, longest_tenth
from bench.prompt_lengths import DATA, DRAWS, MAX_TOKENS, PAGE, PROMPTS, main, prompts, rows

ENGINE = 3  # calls that fail before it is there


def test_prompts_are_many_and_not_the_same() -> None:
    made = prompts()
    assert len({each.prompt for each in made}) == PROMPTS >= 2000
    assert set(Counter(each.kind for each in made).values()) == {PROMPTS // 6}
    assert len({each.template for each in made}) >= 60
    assert not [each for each in made if "{" in each.prompt]
    assert prompts(60) == made[:60]
    assert prompts(60, seed=2) != made[:60]


def test_the_page_says_what_the_data_hold() -> None:
    data = rows()
    assert described(data) in PAGE.read_text()
    assert DATA.stat().st_size < 600_000
    made = {each.prompt: each for each in prompts()}
    for row in data:
        assert made.pop(row["prompt"])[:2] == (row["kind"], row["template"])
        assert len(row["tokens"]) == len(row["cut"]) in range(1, DRAWS + 1)
        for tokens, cut in zip(row["tokens"], row["cut"], strict=True):
            assert 1 <= tokens <= MAX_TOKENS
            assert tokens == MAX_TOKENS or not cut
    assert len(data) >= 2000
    assert len({row["kind"] for row in data}) == 6
    assert not made


class _Engine(ThreadingHTTPServer):
    """Answers with as many tokens as the prompt has characters; the first calls fail."""

    calls: list[dict[str, Any]]


class _Answering(BaseHTTPRequestHandler):
    server: _Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.calls.append(body)
        tokens = len(body["messages"][0]["content"])
        cut = tokens > body["max_tokens"]
        answer = {
            "choices": [{"finish_reason": "length" if cut else "stop"}],
            "usage": {"completion_tokens": min(tokens, body["max_tokens"])},
        }
        status = 400 if tokens == 0 else 503 if len(self.server.calls) <= ENGINE else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def engine() -> Iterator[_Engine]:
    with _Engine(("127.0.0.1", 0), _Answering) as server:
        server.calls = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.left_out
def test_asking_goes_on_where_it_was_interrupted(
    engine: _Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, made = tmp_path / "runs" / "answers.jsonl", prompts(12)
    monkeypatch.setattr(prompt_lengths, "DATA", tmp_path / "data.jsonl.gz")
    monkeypatch.setattr(prompt_lengths, "RETRY", 0.01)
    url = f"http://127.0.0.1:{engine.server_port}"
    command = ["", "ask", "--url", url, "--answers", str(answers), "--prompts"]
    monkeypatch.setattr("sys.argv", [*command, "5"])
    main()
    assert len(engine.calls) == ENGINE + 5 * DRAWS
    assert [call["seed"] for call in engine.calls[ENGINE:]].count(0) == 1
    answers.write_text(answers.read_text() + '{"prompt": "interrup')
    engine.calls = [{}] * ENGINE
    monkeypatch.setattr("sys.argv", [*command, "12"])
    main()
    asked = Counter(call["messages"][0]["content"] for call in engine.calls[ENGINE:])
    assert asked == {each.prompt: DRAWS for each in made[5:]}
    assert len({call["seed"] for call in engine.calls[ENGINE:]}) == 7 * DRAWS
    found = prompt_lengths.collected(answers)
    assert [row["prompt"] for row in found] == [each.prompt for each in made]
    for row in found:
        assert row["tokens"] == [min(len(row["prompt"]), MAX_TOKENS)] * DRAWS
        assert row["cut"] == [len(row["prompt"]) > MAX_TOKENS] * DRAWS


LONG, SHORT = ("detail", "thorough", "paragraphs", "200"), ("one", "brief", "single", "at most 20")


def _answered(rng: np.random.Generator) -> list[Row]:
    """Lengths that depend on the kind, on instructions and on chance."""
    data = []
    for kind, template, prompt in prompts(600):
        asked = any(word in prompt for word in LONG) - any(word in prompt for word in SHORT)
        draws = np.exp(3.5 + (kind == "story") + asked + 0.3 * rng.normal(size=2))
        tokens = np.clip(draws, 1, MAX_TOKENS).astype(int).tolist()
        cut = [each == MAX_TOKENS for each in tokens]
        data.append(Row(kind=kind, template=template, prompt=prompt, tokens=tokens, cut=cut))
    return data


@pytest.mark.left_out
def test_evaluation_tells_predictors_apart() -> None:
    table = evaluation(_answered(np.random.default_rng(5)), MAX_TOKENS)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    for part, left_out in ((lines[:4], "prompts"), (lines[4:], "templates")):
        limit, law, history, learned = part
        assert {line[0] for line in part} == {left_out}
        assert limit[2:4] == law[2:4] == ["0.00", "0.00"]
        assert float(limit[4]) > float(law[4]) > max(float(history[4]), float(learned[4]))
        assert float(learned[2]) > 0.2
        assert float(learned[3]) > float(history[3]) + 0.1  # a template does not tell it
        # intervals are of prompts like those that were learned: fewer lengths of others lie in them
        fewest = 0.86 if left_out == "prompts" else 0.75
        assert all(fewest < float(line[5]) < 0.95 for line in (law, history, learned))


def test_the_best_tau_is_that_of_the_means() -> None:
    """Against means and two answers that are drawn."""
    rng, rho = np.random.default_rng(8), 0.6
    taus = []
    for _ in range(40):
        mean = rng.normal(size=1000)
        one, two = (rho**0.5 * mean + (1 - rho) ** 0.5 * rng.normal(size=1000) for _ in range(2))
        taus.append([kendalltau(one, two).statistic, kendalltau(mean, one).statistic])
    (between, best), error = np.mean(taus, axis=0), np.std(taus, axis=0) / 40**0.5
    assert error.max() < 0.05 * best
    assert best_tau(between) == pytest.approx(best, abs=4 * error.sum())
    assert best > between + 0.05


def test_the_longest_tenth_waits_for_all_that_are_predicted_shorter() -> None:
    """Ten classes of equal work at load 0.5: the last has (1 - 0.5) / ((1 - 0.45) (1 - 0.5))."""
    lengths = np.repeat(100.0, 10)
    lengths[-1] = 100.0 + 1e-9
    assert longest_tenth(lengths, np.arange(10.0), 0.5) == pytest.approx(1 / 0.55)
    assert longest_tenth(lengths, np.ones(10), 0.5) == pytest.approx(1.0)
