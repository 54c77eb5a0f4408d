"""The command `kendall load`: its flags. What they mean: loadgen/sending/options.py; what is said
of a run: loadgen/report/load_report.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kendall.loadgen.commands.flags import (
    LoadCommand,
    lateness_budget_option,
    max_failed_option,
    metrics_option,
    option,
    percentiles_option,
)
from kendall.loadgen.commands.progress import for_stderr
from kendall.loadgen.measures.failures import ALLOWED
from kendall.loadgen.report.files.result_files import (
    ResultFiles,
    ResultOptions,
    parse_metadata,
    result_files,
    save_plan,
)
from kendall.loadgen.report.load_report import Report, Wishes, parse_wishes, report_on, save_bench
from kendall.loadgen.sending.operating_system import cancelled_by
from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import LoadPlan, plan_load
from kendall.loadgen.sending.run import LoadResult
from kendall.policies.durations import Duration
from kendall.queueing.commands.environment_variables import flags_first, from_environment
from kendall.queueing.commands.terminal import console
from kendall.queueing.measurement.paths import (
    FileToWrite,
    cannot_write,
    file_or_folder,
    folder_to_write,
)
from kendall.remote import CACERT, INSECURE, host_url

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WHERE, WHEN, WHAT, HOW, SAID = "Server", "Arrivals", "Requests", "Sending", "Results"
# of arrivals: one of them
SOURCES = (
    "request_rate",
    "arrivals",
    "ramp_up_strategy",
    "trace",
    "timetable",
)


@app.command("load", cls=LoadCommand)
def load(
    ctx: typer.Context,
    *,
    base_url: Annotated[
        str | None, option("--base-url", "URL of the server. Default: http://HOST:PORT.", WHERE)
    ] = None,
    host: Annotated[str, option("--host", "Host of the server.", WHERE)] = "127.0.0.1",
    port: Annotated[int, option("--port", "Port of the server.", WHERE)] = 8080,
    model: Annotated[
        str | None,
        option("--model", "Name of the model. Default: the first that the server lists.", WHERE),
    ] = None,
    api_key: Annotated[
        str | None,
        option("--api-key", "Key sent as a bearer token; never written to a file.", WHERE),
    ] = None,
    insecure: Annotated[bool, option("--insecure", INSECURE, WHERE)] = False,
    cacert: Annotated[
        Path | None,
        option("--cacert", CACERT, WHERE),
    ] = None,
    ready_check_timeout: Annotated[
        float | None,
        option(
            "--ready-check-timeout",
            "Longest time to wait for the server to become ready (0: send without a check). "
            "Default: it must be ready at once.",
            WHERE,
            parser=Duration(),
        ),
    ] = None,
    chat: Annotated[
        bool,
        option(
            "--chat",
            "Use /v1/chat/completions; random prompts are then text of approximately the "
            "drawn length.",
            WHERE,
        ),
    ] = False,
    request_rate: Annotated[
        float | None,
        option("--request-rate", "Requests per second; inf sends all requests at once.", WHEN),
    ] = None,
    burstiness: Annotated[
        float,
        option(
            "--burstiness",
            "With --request-rate: shape of the gamma distribution of gaps (1: Poisson, below "
            "1: burstier, inf: constant).",
            WHEN,
        ),
    ] = 1.0,
    arrivals: Annotated[
        str | None,
        option(
            "--arrivals",
            "Arrival process, for example mmpp:rates=5/50,durations=10/1; also piecewise, "
            "ramp, gamma.",
            WHEN,
        ),
    ] = None,
    ramp_up_strategy: Annotated[
        str | None,
        option(
            "--ramp-up-strategy",
            "Shape of a rate ramp, linear | exponential, over --duration or about "
            "--num-prompts requests.",
            WHEN,
        ),
    ] = None,
    ramp_up_start_rps: Annotated[
        float | None,
        option("--ramp-up-start-rps", "Requests per second at the start of the ramp.", WHEN),
    ] = None,
    ramp_up_end_rps: Annotated[
        float | None,
        option("--ramp-up-end-rps", "Requests per second at the end of the ramp.", WHEN),
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            "--trace", "Replay the arrivals and lengths of a recorded trace or a run file.", WHEN
        ),
    ] = None,
    trace_format: Annotated[
        str, option("--trace-format", "Format of --trace: auto, or the name of a format.", WHEN)
    ] = "auto",
    time_scale: Annotated[
        float,
        option(
            "--time-scale",
            "Factor applied to the instants of --trace; 0.5 replays it twice as fast.",
            WHEN,
        ),
    ] = 1.0,
    timetable: Annotated[
        Path | None,
        option("--timetable", "Replay a saved timetable, with its seed.", WHEN),
    ] = None,
    num_prompts: Annotated[
        int | None,
        option(
            "--num-prompts",
            "Number of requests. Default: 1000, or as many as arrive within --duration.",
            WHEN,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        option(
            "--duration",
            "Time during which requests arrive; their number is then random.",
            WHEN,
            parser=Duration(),
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        option(
            "--max-concurrency",
            "Alone: number of users in a closed loop. With a rate or a trace: largest number "
            "of requests in flight.",
            WHEN,
        ),
    ] = None,
    think_time: Annotated[
        float,
        option(
            "--think-time",
            "Closed loop: mean think time of a user, exponentially distributed.",
            WHEN,
            parser=Duration(),
        ),
    ] = 0.0,
    seed: Annotated[
        int | None,
        option(
            "--seed",
            "Seed for arrivals, lengths and prompts; gaps scale with the rate. Default: 0.",
            WHEN,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str,
        option(
            "--prompt-tokens",
            "Distribution of random prompt lengths in tokens, for example uniform:low=16,high=64.",
            WHAT,
        ),
    ] = "deterministic:value=32",
    output_tokens: Annotated[
        str | None,
        option(
            "--output-tokens",
            "Distribution of output lengths in tokens, for example geometric:mean=64. "
            "Default: the model ends its answers, after at most 128 tokens.",
            WHAT,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            "max_tokens of every request, and the largest length drawn. Default without a "
            "distribution: 128.",
            WHAT,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        option(
            "--ignore-eos",
            "Set each length with max_tokens and ignore_eos, even if the server accepts "
            "forced lengths.",
            WHAT,
        ),
    ] = False,
    natural_lengths: Annotated[
        bool,
        option(
            "--natural-lengths",
            "Do not force lengths: max_tokens is --max-tokens or the drawn length, and the "
            "model may end earlier.",
            WHAT,
        ),
    ] = False,
    dataset_name: Annotated[
        str | None,
        option(
            "--dataset-name",
            "Source of the prompts: random | sharegpt | jsonl | custom (same as jsonl).",
            WHAT,
        ),
    ] = None,
    dataset_path: Annotated[
        Path | None, option("--dataset-path", "File of prompts: ShareGPT, or JSON lines.", WHAT)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option("--tokenizer", "File tokenizer.json that counts the tokens of a dataset.", WHAT),
    ] = None,
    predictor: Annotated[
        str | None,
        option(
            "--predictor",
            "Send a predicted length with each request: none | exact | exponential | "
            "lognormal:sigma=0.5 | onebit:threshold=200 (tokens). Default: none.",
            WHAT,
        ),
    ] = None,
    flows: Annotated[
        str | None,
        option(
            "--flows",
            "Send a fairness id with each request, for order=vtc, drawn by weight: "
            "heavy=9,light=1.",
            WHAT,
        ),
    ] = None,
    processes: Annotated[
        int, option("--processes", "Number of sender processes, which share one timetable.", HOW)
    ] = 1,
    token_times: Annotated[
        bool,
        option(
            "--token-times",
            "Record the instant of every token; implied by --save-detailed and by a metric or "
            "condition on itl (inter-token latency).",
            HOW,
        ),
    ] = False,
    drain_limit: Annotated[
        float,
        option(
            "--drain-limit",
            "Longest wait for answers after the last request is sent.",
            HOW,
            parser=Duration(),
        ),
    ] = 600.0,
    max_errors: Annotated[
        int,
        option(
            "--max-errors",
            "Stop after this many consecutive failed requests, not counting 429 and 503 (0: "
            "never).",
            HOW,
        ),
    ] = 100,
    lateness_budget: Annotated[str | None, lateness_budget_option(HOW)] = None,
    goodput: Annotated[
        list[str] | None,
        option(
            "--goodput",
            "Report goodput under these limits, for example 'ttft:100ms e2el:1s'; a bare "
            "number is in milliseconds.",
            SAID,
        ),
    ] = None,
    max_failed_fraction: Annotated[float, max_failed_option(HOW)] = ALLOWED,
    percentile_metrics: Annotated[str | None, metrics_option(SAID)] = None,
    metric_percentiles: Annotated[str | None, percentiles_option(SAID)] = None,
    assertions: Annotated[
        list[str] | None,
        option(
            "--assert",
            "Condition on the result, for example 'p99_ttft < 200ms'; exit status 3 if it does "
            "not hold. Repeatable.",
            SAID,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "Run file to write, replaced if it exists, or its folder. Default: "
            "runs/load-<time>.jsonl.",
            SAID,
            parser=file_or_folder,
        ),
    ] = None,
    no_save: Annotated[bool, option("--no-save", "Write no run file.", SAID)] = False,
    save_result: Annotated[
        Path | None,
        option(
            "--save-result",
            "Write the run file, the timetable and a result in the JSON format of `vllm bench "
            "serve`; a FILE may follow.",
            SAID,
            parser=file_or_folder,
        ),
    ] = None,
    save_detailed: Annotated[
        bool, option("--save-detailed", "Add per-request values to vLLM's JSON.", SAID)
    ] = False,
    append_result: Annotated[
        bool,
        option("--append-result", "Append a line to vLLM's JSON instead of replacing it.", SAID),
    ] = False,
    result_dir: Annotated[
        Path | None,
        option(
            "--result-dir",
            "Folder for the files of --save-result; given alone, it saves them as load-SEED.jsonl.",
            SAID,
            parser=folder_to_write,
        ),
    ] = None,
    result_filename: Annotated[
        str | None, option("--result-filename", "Name for the files of --save-result.", SAID)
    ] = None,
    save_timetable: Annotated[
        Path | None,
        option(
            "--save-timetable",
            "Write the timetable to this file; --timetable replays it.",
            SAID,
            parser=FileToWrite("load.timetable"),
        ),
    ] = None,
    label: Annotated[
        str | None, option("--label", "Label added to file names and to vLLM's JSON.", SAID)
    ] = None,
    metadata: Annotated[
        list[str] | None, option("--metadata", "KEY=VALUE pairs to store in vLLM's JSON.", SAID)
    ] = None,
    json: Annotated[
        bool, option("--json", "Print one JSON object and nothing else.", SAID)
    ] = False,
) -> None:
    """Send requests at instants drawn in advance and report delays measured from those instants.

    With --output-tokens (or a trace, a timetable, a dataset with lengths) every answer has its
    drawn length, set by a request field that `kendall serve --allow-forced-lengths` accepts,
    otherwise by ignore_eos and max_tokens. Ctrl-C or SIGTERM ends the run; the results so far are
    printed and saved.
    """
    given = flags_first(ctx, locals(), SOURCES)
    if given["request_rate"] is None and from_environment(ctx, "burstiness"):
        given["burstiness"] = 1.0
    wishes = parse_wishes(
        metrics=percentile_metrics,
        percentiles=metric_percentiles,
        goodput=goodput or [],
        assertions=assertions or [],
        budget=lateness_budget,
        max_failed=max_failed_fraction,
    )
    set_here = {
        "base_url": host_url(host, port) if base_url is None else base_url,
        "token_times": token_times or save_detailed or wishes.token_times,
    }
    options = LoadOptions(**_fields(LoadOptions, given) | set_here)
    results = ResultOptions(
        **_fields(ResultOptions, given) | {"metadata": parse_metadata(metadata or [])}
    )
    plan = plan_load(options)
    files = result_files(results, plan.seed)
    report = _run(options, plan, wishes, files)
    if json:
        typer.echo(msgspec.json.encode(report.as_object()))
    else:
        report.print(console())
    raise typer.Exit(report.status)


def _fields(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """The flags that are fields of this class of options."""
    return {
        field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given
    }


def _run(options: LoadOptions, plan: LoadPlan, wishes: Wishes, files: ResultFiles) -> Report:
    plan, note = asyncio.run(plan.for_server())
    for line in filter(None, (note, plan.announced)):
        typer.echo(f"kendall: {line}", err=True)
    files = files.reserved()
    saved = save_plan(files, plan)

    async def sent() -> LoadResult:
        with cancelled_by(signal.SIGTERM):  # as Ctrl-C does
            return await plan.run(for_stderr(), files.run, saved)

    result = asyncio.run(sent())
    report = report_on(result, wishes)
    try:
        save_bench(files, plan, options, result, report)
    except OSError as error:
        missing = (*result.missing, cannot_write(files.bench or "", error))
        report = report_on(dataclasses.replace(result, missing=missing), wishes)
    return dataclasses.replace(report, files=tuple(files.written()))


if __name__ == "__main__":
    app()
