"""Prompts of our own, and how many tokens a model answers: the data of docs/how-to/predictors.md.

    .venv/bin/python bench/prompt_lengths.py ask        two answers to each prompt; hours on CPUs
    .venv/bin/python bench/prompt_lengths.py write      what is there: the data, the table in docs
    .venv/bin/python bench/prompt_lengths.py evaluate   predictors on prompts that were left out

`ask` starts a gateway with smollm2, or takes the one at --url. It may be stopped at any time: every
answer is a line of runs/prompt-lengths.jsonl, and the next call asks for the rest. All prompts are
asked once before any is asked a second time.

Prompts are templates (bench/prompt_lengths.toml) filled with topics, names and sentences; half of
them have an instruction about length before or after. The seed of an answer is that of its prompt
and draw. A line of the data: `kind`, `template`, `prompt`; `tokens` of each draw, and whether the
token limit `cut` it.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.gateway_cost.page import put
from bench.length_predictors import Row, described, evaluation
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.errors import CommandError

ROOT = Path(__file__).resolve().parents[1]
WORDS = ROOT / "bench/prompt_lengths.toml"
DATA = ROOT / "bench/results/prompt-lengths.jsonl.gz"
PAGE = ROOT / "docs/how-to/predictors.md"
PROMPTS, DRAWS = 2004, 2
MAX_TOKENS, TEMPERATURE, TOGETHER = 256, 0.7, 32
RETRY = 5.0  # seconds after a call that failed
TRIES = 200
INSTRUCTED = {"rewrite": 0.2}  # of the prompts of a kind; of others: a half


class Prompt(NamedTuple):
    """A prompt; `template`: its kind and number."""

    kind: str
    template: str
    prompt: str


def prompts(count: int = PROMPTS, seed: int = 1) -> list[Prompt]:
    """So many different prompts, the kinds in turn; more begin with the same ones."""
    words, rng = tomllib.loads(WORDS.read_text(encoding="utf-8")), np.random.default_rng(seed)
    kinds, found = list(words["templates"]), dict[str, Prompt]()
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        number = int(rng.integers(len(words["templates"][kind])))
        text = words["templates"][kind][number].format(**_filling(words, rng))
        if rng.random() < INSTRUCTED.get(kind, 0.5):
            instruction = str(rng.choice(words["lengths"]))
            text = f"{instruction} {text}" if rng.random() < 0.3 else f"{text} {instruction}"
        found.setdefault(text, Prompt(kind, f"{kind} {number + 1}", text))
    return list(found.values())


def _filling(words: dict[str, Any], rng: np.random.Generator) -> dict[str, str]:
    """What the names in a template stand for."""
    topic, other = rng.choice(words["topics"], 2, replace=False)
    name, other_name = rng.choice(words["names"], 2, replace=False)
    language, language_2 = rng.choice(words["languages"], 2, replace=False)
    fixed = {"topic": topic, "other": other, "name": name, "other_name": other_name}
    chosen = rng.choice(words["sentences"], int(rng.integers(2, 10)), replace=False)
    passage = [each.format(**fixed, number=rng.integers(3, 13)) for each in chosen]
    letters = [each for each in passage[0] if rng.random() > 0.06]
    return fixed | {
        "number": str(rng.integers(3, 13)),
        "language": language,
        "language_2": language_2,
        "natural_language": rng.choice(words["natural_languages"]),
        "tone": rng.choice(words["tones"]),
        "task": rng.choice(words["tasks"]),
        "sentence": passage[0],
        "passage": " ".join(passage),
        "typos": "".join(letters),
    }


def rows() -> list[Row]:
    """The committed data."""
    if not DATA.exists():
        return []
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answered(path: Path) -> dict[tuple[str, int], tuple[int, bool]]:
    """Tokens, and whether the limit cut them, by prompt and draw: the data and the answers since,
    without a last line that was interrupted.
    """
    found: dict[tuple[str, int], tuple[int, bool]] = {}
    for row in rows():
        for draw, answer in enumerate(zip(row["tokens"], row["cut"], strict=True)):
            found[row["prompt"], draw] = answer
    for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else ():
        new = json.loads(line)
        found[new["prompt"], new["draw"]] = new["tokens"], new["cut"]
    return found


def collected(path: Path) -> list[Row]:
    """A row for each prompt that has an answer. Raises CommandError: none has."""
    known, found = answered(path), list[Row]()
    for kind, template, prompt in prompts():
        draws = [known[prompt, draw] for draw in range(DRAWS) if (prompt, draw) in known]
        if draws:
            tokens, cut = (list(each) for each in zip(*draws, strict=True))
            found.append(Row(kind=kind, template=template, prompt=prompt, tokens=tokens, cut=cut))
    if not found:
        raise CommandError(f"got no answers, neither in {DATA.name} nor in {path}: ask first")
    return found


def write(data: Sequence[Row]) -> None:
    """The data and their tables, in place."""
    tables = f"\n{described(data)}\n\n{evaluation(data, MAX_TOKENS)}\n"
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data)
    DATA.write_bytes(gzip.compress(lines.encode(), mtime=0))  # the same bytes for the same rows
    put(tables, PAGE, "prompt-lengths")


def whole_lines(path: Path) -> None:
    """Make the file, or take off a last line that was interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes() if path.exists() else b""
    path.write_bytes(lines[: lines.rfind(b"\n") + 1])


async def ask(url: str, path: Path, count: int = PROMPTS) -> None:
    """The answers that are missing, each appended to `path`, which exists, as it comes."""
    done, texts = answered(path), [each.prompt for each in prompts()[:count]]
    numbered = [(draw, *each) for draw in range(DRAWS) for each in enumerate(texts)]
    left = [(draw, place, text) for draw, place, text in numbered if (text, draw) not in done]
    print(f"{len(numbered) - len(left):,} of {len(numbered):,} answers are there", flush=True)
    waiting = iter(left)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        with path.open("a", encoding="utf-8") as file:

            async def work() -> None:
                for draw, place, prompt in waiting:  # shared by all that work
                    answer = await _answer(client, prompt, DRAWS * place + draw)
                    line = {"prompt": prompt, "draw": draw, **answer}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    file.flush()

            await asyncio.gather(*(work() for _ in range(TOGETHER)))


async def _answer(client: httpx.AsyncClient, prompt: str, seed: int) -> dict[str, Any]:
    """Its tokens, and whether it was cut. A call that fails is repeated: an engine may restart."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": TEMPERATURE,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
    }
    for _ in range(TRIES):
        try:
            response = await client.post("/v1/chat/completions", json=body)
        except httpx.UnsupportedProtocol as error:
            fault = str(error)
            break
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            fault = repr(error)
        else:
            if response.status_code == httpx.codes.OK:
                answer = response.json()
                cut = answer["choices"][0]["finish_reason"] == "length"
                return {"tokens": answer["usage"]["completion_tokens"], "cut": cut}
            fault = f"{response.status_code} {response.text[:200]}"
            if response.is_client_error:
                break
        print(f"once more in {RETRY:g} s: {fault}", file=sys.stderr, flush=True)
        await asyncio.sleep(RETRY)
    raise CommandError(f"got {fault} from {client.base_url}; expected an answer: ask again")


async def serve_and_ask(url: str | None, path: Path, count: int) -> None:
    """At a gateway that is there, or one started for it."""
    whole_lines(path)
    if url:
        await ask(url, path, count)
        return
    # a process that is stopped for an hour is not stuck
    serve = ["smollm2", "--policy", f"continuous:max_batch_size={TOGETHER}", "--stuck-timeout", "0"]
    serve += ["--max-num-seqs", str(TOGETHER), "--max-restarts", "1000"]
    log = path.with_suffix(".log")
    async with GatewayProcess(serve, free_port(8641), log) as gateway:
        await gateway.ready()
        await ask(gateway.url, path, count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("ask", "write", "evaluate"))
    parser.add_argument("--url", help="of a gateway that serves smollm2; default: started")
    parser.add_argument(
        "--prompts", type=int, default=PROMPTS, help=f"ask: the first so many; default: {PROMPTS}"
    )
    parser.add_argument("--answers", type=Path, default=ROOT / "runs/prompt-lengths.jsonl")
    given = parser.parse_args()
    try:
        if given.command == "ask":
            asyncio.run(serve_and_ask(given.url, given.answers, given.prompts))
        elif given.command == "evaluate":
            print(evaluation(collected(given.answers), MAX_TOKENS))
        else:
            write(collected(given.answers))
    except (CommandError, httpx.InvalidURL) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
