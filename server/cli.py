"""`kendall serve` and `kendall calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from policies import SpecError, format_policy, parse_policy
from queueing.environment_twins import by_flag
from queueing.remote import CACERT, INSECURE, Trust
from server.configuration.file import ENGINE_TABLE, JSON, take_file
from server.logs import LogSettings, check_format, check_level, configure_logs
from server.overload.limits import OverloadSettings
from server.security.settings import MAX_BODY_BYTES
from server.settings import AutopilotMode, EngineName, Settings
from server.supervision.settings import SupervisionSettings

app = typer.Typer(add_completion=False)
CONFIGURATION, SECURITY, LOGS = "Configuration", "Security", "Logs"


def parse_engine_args(pairs: list[str], table: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`KEY=VALUE` texts and the `[engine-args]` table of a TOML file; the texts win."""
    values = dict(table or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise SpecError(f"got --engine-arg {pair!r}; expected KEY=VALUE, for example tensor_parallel_size=2")
        values[key.replace("-", "_")] = value
    return values


@app.command("serve")
def serve_command(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="`tiny` (made locally), a model directory, or a name that vLLM can fetch.", envvar="KENDALL_MODEL")
    ] = "tiny",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8080,
    policy: Annotated[str, typer.Option(help="Batching policy, for example capped:max_batch_size=8.")] = "continuous",
    engine: Annotated[str, typer.Option(help="auto | vllm | emulated.")] = "auto",
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="The gateway's own limit: longer answers are clipped.")] = None,
    patience: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which a waiting request is given up.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most sequences in the engine at once (vLLM's name).")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context length (vLLM's name).")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="Any vLLM engine argument, KEY=VALUE; repeatable.")] = None,
    latency: Annotated[str | None, typer.Option(help="Law or profile: predictions, and the emulated engine's timing.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure the engine's law first; what arrives meanwhile waits.")] = False,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API; repeatable, answers carry the first. Default: the model's last part.")
    ] = None,
    record_file: Annotated[Path | None, typer.Option(help="Write one JSON line per request here.")] = None,
    allow_forced_lengths: Annotated[bool, typer.Option(help="Accept the sealed test field that forces output lengths.")] = False,
    prediction_interval: Annotated[float, typer.Option(min=0, help="Seconds between live predictions; 0: none.")] = 5.0,
    what_if_interval: Annotated[float, typer.Option(min=1, help="Seconds between what-ifs of every other policy.")] = 60.0,
    prediction_window: Annotated[float, typer.Option(min=10, help="Seconds that estimates and observation go back.")] = 300.0,
    state_file: Annotated[Path | None, typer.Option(help="Keep law and estimates here, so that they survive a restart.")] = None,
    autopilot: Annotated[str, typer.Option(help="off | advise (say what it would do) | act (turn its own knobs).")] = "off",
    autopilot_policies: Annotated[
        list[str] | None, typer.Option(help="Policies autopilot may choose from; repeatable. Default: the one in force, its size free.")
    ] = None,
    max_clipped_fraction: Annotated[float, typer.Option(min=0, max=0.999, help="Most answers that autopilot may clip.")] = 0.05,
    idle_probes: Annotated[bool, typer.Option("--idle-probes", help="Measure the engine's law while it is idle.")] = False,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds that requests in service may take after SIGTERM.")] = 30.0,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of a lost engine in 10 minutes; one more ends the gateway.")] = 8,
    stuck_timeout: Annotated[float, typer.Option(min=0, help="Seconds without a token before the engine is replaced; 0: never.")] = 60.0,
    slow_reader_timeout: Annotated[float, typer.Option(min=0, help="Seconds that a client may not read; 0: for ever.")] = 60.0,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(min=1, help="Most sequences waiting or in service (vLLM's name); n counts n.")
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens waiting at which nothing more is taken (vLLM's name).")
    ] = None,
    overload_status: Annotated[int, typer.Option(help="429 or 503: the status of what is refused or timed out in the queue.")] = 429,
    slo: Annotated[str | None, typer.Option(help="Admit while the model says that it holds: p99_queueing_delay=2s.")] = None,
    queue_events: Annotated[bool, typer.Option("--queue-events", help="Streams tell their place in the queue, in SSE comments.")] = False,
    sse_keep_alive_interval: Annotated[float, typer.Option(min=0, help="Seconds of silence before a comment; 0: none.")] = 0.0,
    adaptive_concurrency: Annotated[bool, typer.Option("--adaptive-concurrency", help="Let the delay seen bound what is taken.")] = False,
    rate_limit: Annotated[float | None, typer.Option(help="Requests per second of one API key.")] = None,
    rate_limit_tokens: Annotated[float | None, typer.Option(help="Prompt and output tokens per second of one API key.")] = None,
    rate_limit_burst: Annotated[float, typer.Option(help="Seconds of either rate that may come at once.")] = 10.0,
    priority_aging: Annotated[
        float | None, typer.Option(help="Look at priorities (lower first); so many seconds of waiting are worth one level.")
    ] = None,
    wait_estimates: Annotated[bool, typer.Option(help="Tell each request its place and its predicted wait.")] = True,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send as a bearer token; repeatable.", rich_help_panel=SECURITY)
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of such keys, one per line.", rich_help_panel=SECURITY)] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(help="A key for /admin; repeatable. Without one only this machine may call /admin.", rich_help_panel=SECURITY),
    ] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="A file of such keys, one per line.", rich_help_panel=SECURITY)] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Serve other machines without --api-key.", rich_help_panel=SECURITY)
    ] = False,
    metrics_need_key: Annotated[
        bool, typer.Option("--metrics-need-key", help="/metrics and /load need a key too.", rich_help_panel=SECURITY)
    ] = False,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest body of a request.", rich_help_panel=SECURITY)] = MAX_BODY_BYTES,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; default: the model's context.", rich_help_panel=SECURITY)
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(metavar=JSON, help="Pages that may call from a browser: a JSON list (vLLM's name).", rich_help_panel=SECURITY),
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="TLS: the key, PEM (vLLM's name).", rich_help_panel=SECURITY)] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS: the certificate, PEM (vLLM's name).", rich_help_panel=SECURITY)] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="TLS: whose certificates clients must show (vLLM's name).", rich_help_panel=SECURITY)
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error.", rich_help_panel=LOGS)] = "info",
    log_format: Annotated[str, typer.Option(help="text | json: one object a line.", rich_help_panel=LOGS)] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log every prompt in full.", rich_help_panel=LOGS)] = False,
    config: Annotated[  # noqa: ARG001 - taken by its callback
        Path | None,
        typer.Option(
            is_eager=True,
            callback=take_file,
            help="TOML file: keys named as these options, and a table [engine-args] for vLLM. Environment and flags win over it.",
            rich_help_panel=CONFIGURATION,
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting with its source, and exit.", rich_help_panel=CONFIGURATION)
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="With --show-config: as one JSON object.", rich_help_panel=CONFIGURATION)
    ] = False,
) -> None:
    """Serve an OpenAI-style endpoint with a queue under a policy you choose."""
    if json_output and not show_config and by_flag(ctx, "json_output"):
        raise SpecError("got --json without --show-config; expected both")
    engine_args = parse_engine_args(engine_arg or [], ctx.meta.get(ENGINE_TABLE))
    shown_args = dict(engine_args)  # the options below have lines of their own
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            engine_args[name] = value
            shown_args.pop(name, None)
    if autopilot != "off":
        from server.live.pilot import autopilot_bounds  # noqa: PLC0415 - heavy

        autopilot_bounds(policy, autopilot_policies or (), max_clipped_fraction)
    from server.security.flags import read_security  # noqa: PLC0415 - heavy

    overload = OverloadSettings(
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        overload_status=overload_status,
        slo=slo,
        queue_events=queue_events,
        sse_keep_alive_interval=sse_keep_alive_interval,
        adaptive_concurrency=adaptive_concurrency,
        rate_limit=rate_limit,
        rate_limit_tokens=rate_limit_tokens,
        rate_limit_burst=rate_limit_burst,
        priority_aging=priority_aging,
        wait_estimates=wait_estimates,
    )
    names = served_model_name or [model.rstrip("/").rsplit("/", 1)[-1]]
    settings = Settings(
        model=model,
        served_model_name=names[0],
        served_model_aliases=tuple(names[1:]),
        host=host,
        port=port,
        engine=check_engine(engine),
        policy=format_policy(parse_policy(policy)),
        max_output_tokens=max_output_tokens,
        patience=patience,
        latency=latency,
        calibrate=calibrate,
        record_file=record_file,
        allow_forced_lengths=allow_forced_lengths,
        prediction_interval=prediction_interval,
        what_if_interval=what_if_interval,
        prediction_window=prediction_window,
        state_file=state_file,
        autopilot=check_autopilot(autopilot),
        autopilot_policies=tuple(autopilot_policies or ()),
        max_clipped_fraction=max_clipped_fraction,
        idle_probes=idle_probes,
        shutdown_timeout=shutdown_timeout,
        supervision=SupervisionSettings(max_restarts=max_restarts, stuck_timeout=stuck_timeout, slow_reader_timeout=slow_reader_timeout),
        security=read_security(
            host,
            api_key=api_key or (),
            api_key_file=api_key_file,
            admin_key=admin_key or (),
            admin_key_file=admin_key_file,
            allow_unauthenticated=allow_unauthenticated,
            metrics_need_key=metrics_need_key,
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
            allowed_origins=allowed_origins,
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            ssl_ca_certs=ssl_ca_certs,
        ),
        logs=LogSettings(level=check_level(log_level), format=check_format(log_format), prompts=log_prompts),
        overload=overload,
        engine_args=engine_args,
    )
    if show_config:
        _show(ctx, settings, shown_args, json_output=json_output)
        return
    configure_logs(settings.logs)
    from server.serving import serve  # noqa: PLC0415 - heavy

    raise typer.Exit(serve(settings))


def _show(ctx: typer.Context, settings: Settings, engine_args: Mapping[str, Any], *, json_output: bool) -> None:
    from server.configuration.show import as_json, as_toml, effective  # noqa: PLC0415

    settled: dict[str, Any] = {"policy": settings.policy, "served_model_name": [settings.served_model_name, *settings.served_model_aliases]}
    shown = effective(ctx, engine_args, settled)
    typer.echo(as_json(shown) if json_output else as_toml(shown), nl=False)


def check_engine(name: str) -> EngineName:
    """One of the engines. Raises SpecError."""
    match name:
        case "auto" | "vllm" | "emulated":
            return name
        case _:
            raise SpecError(f"got --engine {name!r}; expected auto, vllm or emulated")


def check_autopilot(mode: str) -> AutopilotMode:
    """One of the modes. Raises SpecError."""
    match mode:
        case "off" | "advise" | "act":
            return mode
        case _:
            raise SpecError(f"got --autopilot {mode!r}; expected off, advise or act")


@app.command("calibrate")
def calibrate_command(
    target: Annotated[str, typer.Argument(help="URL of a running gateway, or a model to start an engine for.")] = "tiny",
    speed_only: Annotated[bool, typer.Option(help="Five seconds: only the speed factor against the known law.")] = False,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Largest batch to measure; default: the engine's bound.")] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest answer to measure; default: the gateway's limit or 64.")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt length of the cells; default 32.")] = None,
    repeats: Annotated[int, typer.Option(min=2, max=100, help="Measurements per cell.")] = 5,
    seed: Annotated[int, typer.Option(help="Order of the cells.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default: the model's.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent to a running gateway as a bearer token.")] = None,
    admin_key: Annotated[str | None, typer.Option(help="The same, for a gateway with --admin-key; before --api-key.")] = None,
    cacert: Annotated[Path | None, typer.Option(help=CACERT)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help=INSECURE)] = False,
    output: Annotated[Path | None, typer.Option(help="File to write; default: the profile's place in the user's cache.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure the latency law of an engine, through the gateway's own dispatch path, and keep it as a profile."""
    from server.law.command import calibrate  # noqa: PLC0415 - heavy

    plan = {
        "speed_only": speed_only,
        "max_batch_size": max_batch_size,
        "max_output_tokens": max_output_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "seed": seed,
        "name": name,
    }
    calibrate(target, plan, output, key=admin_key or api_key, trust=Trust(cacert, insecure), json_output=json_output)
