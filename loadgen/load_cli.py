"""The command `kendall load`: its flags. What they mean: loadgen/options.py; what is said of a run: loadgen/load_report.py."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from loadgen.failures import ALLOWED
from loadgen.flags import LoadCommand, option
from loadgen.load_report import Report, Wishes, parse_wishes, report_on
from loadgen.options import LoadOptions
from loadgen.plan import LoadPlan, plan_load
from loadgen.progress import for_stderr
from loadgen.result_files import ResultFiles, parse_metadata, result_files, save_bench, save_plan
from loadgen.target import LoadError
from loadgen.termination import until_sigterm
from queueing.environment_twins import flags_first, from_environment
from queueing.remote import CACERT, INSECURE
from queueing.terminal import console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WHERE, WHEN, WHAT, HOW, SAID = "Where to", "When requests come", "What they are", "How they are sent", "What is said of them"
SOURCES = ("request_rate", "arrivals", "ramp_up_strategy", "trace", "timetable")  # of arrivals: one of them


@app.command("load", cls=LoadCommand, no_args_is_help=True)
def load(
    ctx: typer.Context,
    *,
    base_url: Annotated[str | None, option("--base-url", "Where the server listens; else --host and --port.", WHERE)] = None,
    host: Annotated[str, option("--host", "The server's host.", WHERE)] = "127.0.0.1",
    port: Annotated[int, option("--port", "The server's port.", WHERE)] = 8080,
    model: Annotated[str | None, option("--model", "Model name; without it the first that the server names.", WHERE)] = None,
    api_key: Annotated[str | None, option("--api-key", "Sent as a bearer token; never written to a file.", WHERE)] = None,
    insecure: Annotated[bool, option("--insecure", INSECURE, WHERE)] = False,
    cacert: Annotated[
        Path | None,
        option("--cacert", CACERT, WHERE),
    ] = None,
    ready_check_timeout: Annotated[
        float | None,
        option(
            "--ready-check-timeout",
            "Seconds to wait until the server is ready; 0 sends without a check. Default: it must be ready at once.",
            WHERE,
        ),
    ] = None,
    chat: Annotated[
        bool, option("--chat", "Use /v1/chat/completions; random prompts are then text of about the asked length.", WHERE)
    ] = False,
    request_rate: Annotated[float | None, option("--request-rate", "Requests per second; inf sends all at once.", WHEN)] = None,
    burstiness: Annotated[
        float, option("--burstiness", "With --request-rate: shape of gamma gaps; 1 Poisson, below 1 burstier, inf constant.", WHEN)
    ] = 1.0,
    arrivals: Annotated[
        str | None, option("--arrivals", "A process, for example mmpp:rates=5/50,durations=10/1 or piecewise, ramp, gamma.", WHEN)
    ] = None,
    ramp_up_strategy: Annotated[
        str | None, option("--ramp-up-strategy", "linear | exponential in time, over --duration or about --num-prompts requests.", WHEN)
    ] = None,
    ramp_up_start_rps: Annotated[float | None, option("--ramp-up-start-rps", "Rate at the start of the ramp.", WHEN)] = None,
    ramp_up_end_rps: Annotated[float | None, option("--ramp-up-end-rps", "Rate at the end of the ramp.", WHEN)] = None,
    trace: Annotated[Path | None, option("--trace", "Replay a recorded trace, or a run file.", WHEN)] = None,
    trace_format: Annotated[str, option("--trace-format", "Of --trace: auto, or a format's name.", WHEN)] = "auto",
    time_scale: Annotated[float, option("--time-scale", "Multiplies the instants of --trace; 0.5 is twice as fast.", WHEN)] = 1.0,
    timetable: Annotated[Path | None, option("--timetable", "Send a saved timetable again, with its seed.", WHEN)] = None,
    num_prompts: Annotated[int | None, option("--num-prompts", "How many requests [1000 where no duration is given].", WHEN)] = None,
    duration: Annotated[float | None, option("--duration", "Seconds in which requests come; their number is then random.", WHEN)] = None,
    max_concurrency: Annotated[
        int | None, option("--max-concurrency", "Alone: a closed loop of so many users. With arrivals: most at once, partly closed.", WHEN)
    ] = None,
    think_time: Annotated[float, option("--think-time", "Closed loop: mean seconds a user waits, exponential.", WHEN)] = 0.0,
    seed: Annotated[
        int | None, option("--seed", "The same seed sends the same requests, at every rate in the same proportions [0].", WHEN)
    ] = None,
    prompt_tokens: Annotated[
        str, option("--prompt-tokens", "Lengths of random prompts, for example uniform:low=16,high=64.", WHAT)
    ] = "deterministic:value=32",
    output_tokens: Annotated[
        str | None,
        option(
            "--output-tokens",
            "Law of the answers' lengths, for example geometric:mean=64. Default: the model ends its answers.",
            WHAT,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        option("--max-tokens", "max_tokens of every request, and the largest length that is drawn. Default without a law: 128.", WHAT),
    ] = None,
    ignore_eos: Annotated[
        bool, option("--ignore-eos", "Set each length by max_tokens and ignore_eos, whatever the server accepts.", WHAT)
    ] = False,
    natural_lengths: Annotated[
        bool, option("--natural-lengths", "Force no length; max_tokens is --max-tokens or the drawn length.", WHAT)
    ] = False,
    dataset_name: Annotated[str | None, option("--dataset-name", "random | sharegpt | jsonl (custom).", WHAT)] = None,
    dataset_path: Annotated[Path | None, option("--dataset-path", "Prompts from a ShareGPT file or JSON lines.", WHAT)] = None,
    tokenizer: Annotated[Path | None, option("--tokenizer", "A tokenizer.json that counts a dataset's tokens.", WHAT)] = None,
    length_prediction: Annotated[
        str | None, option("--length-prediction", "Send a predicted length: exact, exponential, lognormal:sigma=.., one_bit:..", WHAT)
    ] = None,
    processes: Annotated[int, option("--processes", "Sender processes, which share one timetable.", HOW)] = 1,
    token_times: Annotated[
        bool, option("--token-times", "Record the instant of every token; so do --save-detailed and asking for itl.", HOW)
    ] = False,
    drain_limit: Annotated[float, option("--drain-limit", "Seconds to wait for answers after the last request was sent.", HOW)] = 600.0,
    max_errors: Annotated[
        int, option("--max-errors", "Stop after this many failed requests in a row (not 429 or 503); 0: never.", HOW)
    ] = 100,
    lateness_budget: Annotated[
        str | None, option("--lateness-budget", "Beyond it the run is INVALID [mean=1ms,p99=5ms]; where given, exit 3.", HOW)
    ] = None,
    max_failed_fraction: Annotated[
        float, option("--max-failed-fraction", "Share of requests that may fail; beyond it the run is INVALID, exit 3.", HOW)
    ] = ALLOWED,
    goodput: Annotated[list[str] | None, option("--goodput", "Limits in ms: ttft:100 e2el:500 queue:50.", SAID)] = None,
    percentile_metrics: Annotated[
        str | None, option("--percentile-metrics", "Which durations, for example ttft,tpot,itl,e2el.", SAID)
    ] = None,
    metric_percentiles: Annotated[str | None, option("--metric-percentiles", "Which percentiles [50,90,95,99].", SAID)] = None,
    assertions: Annotated[
        list[str] | None, option("--assert", "A condition, such as 'p99_ttft < 200ms'; exit 3 where broken.", SAID)
    ] = None,
    output: Annotated[Path | None, option("--output", "The run file, or a folder for it. Default: runs/load-<time>.jsonl.", SAID)] = None,
    no_save: Annotated[bool, option("--no-save", "Write no run file.", SAID)] = False,
    save_result: Annotated[
        Path | None, option("--save-result", "Write run file, timetable and vLLM's JSON; a FILE may follow.", SAID)
    ] = None,
    save_detailed: Annotated[bool, option("--save-detailed", "vLLM's JSON with a value per request.", SAID)] = False,
    append_result: Annotated[bool, option("--append-result", "Add to vLLM's JSON as a line instead of replacing it.", SAID)] = False,
    result_dir: Annotated[Path | None, option("--result-dir", "Folder of the files; alone: load-SEED.jsonl in it.", SAID)] = None,
    result_filename: Annotated[str | None, option("--result-filename", "Name of the files.", SAID)] = None,
    save_timetable: Annotated[
        Path | None, option("--save-timetable", "Write the timetable here; --timetable sends it again.", SAID)
    ] = None,
    label: Annotated[str | None, option("--label", "Names the files and stands in vLLM's JSON.", SAID)] = None,
    metadata: Annotated[list[str] | None, option("--metadata", "KEY=VALUE pairs for vLLM's JSON.", SAID)] = None,
    json: Annotated[bool, option("--json", "Print one JSON object and nothing else.", SAID)] = False,
) -> None:
    """Send requests at instants drawn beforehand and report delays from the instants at which they were meant to be sent.

    With --output-tokens (or a trace, a timetable, a dataset with lengths) every answer gets its drawn length: by a field that Kendall
    accepts under --allow-forced-lengths, else by ignore_eos and max_tokens. Ctrl-C or SIGTERM ends the run, prints what
    it has measured and keeps it.
    """
    given = flags_first(ctx, locals(), SOURCES)
    if given["request_rate"] is None and from_environment(ctx, "burstiness"):
        given["burstiness"] = 1.0
    fields = {field.name: given[field.name] for field in dataclasses.fields(LoadOptions) if field.name in given}
    wishes = parse_wishes(
        metrics=percentile_metrics,
        percentiles=metric_percentiles,
        goodput=goodput or [],
        assertions=assertions or [],
        budget=lateness_budget,
        max_failed=max_failed_fraction,
    )
    set_here = {"base_url": base_url or f"http://{host}:{port}", "token_times": token_times or save_detailed or wishes.token_times}
    options = LoadOptions(**fields | set_here)
    shown: dict[str, Any] = {"append": append_result, "detailed": save_detailed, "metadata": parse_metadata(metadata or [])}
    plan = plan_load(options)
    named: dict[str, Any] = {"output": output, "save": save_result, "folder": result_dir, "name": result_filename}
    files = result_files(**named, no_save=no_save, save_table=save_timetable, seed=plan.seed, label=label, **shown)
    report = _run(options, plan, wishes, files)
    if json:
        typer.echo(msgspec.json.encode(report.as_object()))
    else:
        report.print(console())
    raise typer.Exit(report.status)


def _run(options: LoadOptions, plan: LoadPlan, wishes: Wishes, files: ResultFiles) -> Report:
    try:
        plan, note = asyncio.run(plan.for_server())
        if note is not None:
            typer.echo(f"kendall: {note}", err=True)
        files = files.reserved()
        saved = save_plan(files, plan)
        result = asyncio.run(until_sigterm(plan.run(for_stderr(), files.run, saved)))
    except LoadError as error:
        typer.echo(f"kendall load: {error}", err=True)
        raise typer.Exit(1) from None
    report = report_on(result, wishes)
    shown: dict[str, Any] = {"metrics": wishes.metrics, "percentiles": wishes.percentiles, "limits": wishes.limits}
    save_bench(files, plan, options, result, **shown, extras=report.as_object())
    return dataclasses.replace(report, files=tuple(files.written()))


if __name__ == "__main__":
    app()
