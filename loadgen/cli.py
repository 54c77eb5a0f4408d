"""The command `kendall load`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from loadgen.client import LoadError, Target, served_model
from loadgen.progress import for_stderr
from loadgen.run import LoadResult, run_load
from loadgen.summary import LoadSummary, summarise_load
from loadgen.summary_text import load_lines, load_notes, load_table
from loadgen.timetable import Timetable, draw
from policies.text import SpecError
from queueing.distributions import parse_distribution
from queueing.record import write_run

app = typer.Typer(no_args_is_help=True, help="Open-loop load.", pretty_exceptions_enable=False)


def _option(flag: str, about: str, **settings: Any) -> Any:
    return typer.Option(flag, help=about, envvar="KENDALL_" + flag.removeprefix("--").replace("-", "_").upper(), **settings)


@app.callback()
def main() -> None:
    """Open-loop load."""


@app.command()
def load(
    *,
    request_rate: Annotated[float, _option("--request-rate", "Poisson arrivals per second; inf sends all at once.")],
    base_url: Annotated[str, _option("--base-url", "Where the server listens.")] = "http://127.0.0.1:8080",
    num_prompts: Annotated[int, _option("--num-prompts", "How many requests to send.")] = 1000,
    output_tokens: Annotated[
        str, _option("--output-tokens", "Lengths of the answers, for example geometric:mean=64.")
    ] = "deterministic:value=128",
    prompt_tokens: Annotated[
        str, _option("--prompt-tokens", "Lengths of the prompts, for example uniform:low=16,high=64.")
    ] = "deterministic:value=32",
    max_tokens: Annotated[int | None, _option("--max-tokens", "max_tokens of every request; without it the largest drawn length.")] = None,
    seed: Annotated[int, _option("--seed", "The same seed sends the same requests, at every rate in the same proportions.")] = 0,
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", "Set lengths by max_tokens and ignore_eos, for servers other than Kendall.")
    ] = False,
    chat: Annotated[bool, _option("--chat", "Use /v1/chat/completions; prompts are then text of about the asked length.")] = False,
    model: Annotated[str | None, _option("--model", "Model name; without it the first that the server names.")] = None,
    api_key: Annotated[str | None, _option("--api-key", "Sent as a bearer token; never written to a file.")] = None,
    drain_limit: Annotated[float, _option("--drain-limit", "Seconds to wait for answers after the last request was sent.")] = 600.0,
    save_result: Annotated[Path | None, _option("--save-result", "Write the run file here (JSON lines).")] = None,
    result_dir: Annotated[Path | None, _option("--result-dir", "Folder of --save-result; alone: load-SEED.jsonl in it.")] = None,
    json: Annotated[bool, _option("--json", "Print one JSON object and nothing else.")] = False,
) -> None:
    """Send a Poisson stream of requests and report delays from the instants at which they were meant to be sent.

    Lengths are forced by a field that Kendall accepts under --allow-forced-lengths. Ctrl-C ends the run and keeps it.
    """
    _check_load(max_tokens, drain_limit)
    timetable = draw(request_rate, num_prompts, seed, parse_distribution(prompt_tokens), parse_distribution(output_tokens, max_tokens))
    target = Target(base_url=base_url, model=model or "", max_tokens=max_tokens, chat=chat, ignore_eos=ignore_eos, api_key=api_key)
    asked = {"request_rate": request_rate, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "drain_limit": drain_limit}
    result = _run(_load(target, timetable, seed, asked, drain_limit))
    if path := _result_path(save_result, result_dir, seed):
        write_run(path, result.header, result.records)
    summary = summarise_load(result, request_rate)
    _print_load(summary, path, json)
    if result.interrupted or not summary.outcomes.get("completed"):
        raise typer.Exit(1)


def _check_load(max_tokens: int | None, drain_limit: float) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise SpecError(f"got --max-tokens {max_tokens}; expected a whole number >= 1")
    if not drain_limit >= 0:
        raise SpecError(f"got --drain-limit {drain_limit}; expected seconds >= 0")


async def _load(target: Target, timetable: Timetable, seed: int, asked: dict[str, Any], drain_limit: float) -> LoadResult:
    model = target.model or await served_model(target.base_url, target.api_key)
    named = dataclasses.replace(target, model=model)
    return await run_load(named, timetable, seed=seed, configuration=asked, drain_limit=drain_limit, progress=for_stderr())


def _run(run: Coroutine[Any, Any, LoadResult]) -> LoadResult:
    try:
        return asyncio.run(run)
    except LoadError as error:
        typer.echo(f"kendall load: {error}", err=True)
        raise typer.Exit(1) from None


def _result_path(file: Path | None, folder: Path | None, seed: int) -> Path | None:
    if folder is None:
        return file
    return folder / (file or Path(f"load-{seed}.jsonl"))


def _print_load(summary: LoadSummary, path: Path | None, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(summary.as_object()))
        return
    for line in load_lines(summary):
        typer.echo(line)
    Console(file=sys.stdout).print(load_table(summary))
    for line in load_notes(summary):
        typer.echo(line)
    if path:
        typer.echo(f"written to {path}")


if __name__ == "__main__":
    app()
