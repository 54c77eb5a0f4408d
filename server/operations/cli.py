"""`kendall serve` and `kendall calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from policies import SpecError, format_policy, parse_policy
from policies.durations import Duration
from policies.text import one_of
from queueing.commands.environment_twins import by_flag
from queueing.commands.local_key import key_for_admin
from queueing.commands.remote import CACERT, INSECURE, Trust, checked_host
from queueing.measurement.paths import FileToWrite
from server.admission.limits import MAX_QUEUED, MAX_SEQUENCES, OverloadSettings
from server.operations.configuration.again import is_read_again, reader_of
from server.operations.configuration.file import ENGINE_TABLE, JSON, take_file
from server.runtime.logs import LogFormat, LogSettings, check_level, configure_logs, end_logs
from server.security.settings import (
    MAX_BODY_BYTES,
    MAX_FORM_BYTES,
    MAX_FORM_COMPILE_TIME,
    SecuritySettings,
    TlsSettings,
)
from server.settings import AutopilotMode, EngineName, Settings, UnknownFields
from server.supervision.settings import SupervisionSettings

app = typer.Typer(add_completion=False)
LISTENING, QUEUE, ENGINE = "Listening", "Queue and policy", "Engine"
MODEL, AUTOPILOT, OVERLOAD = "Latency law and prediction", "Autopilot", "Overload"
STREAMS, SECURITY, LOGS, CONFIGURATION = (
    "Streams and responses",
    "Security",
    "Records and logs",
    "Configuration",
)
MEASUREMENT, ACCESS, RESULT = "Measurement", "Access", "Result"


def _option(panel: str, about: str, *flags: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=about, rich_help_panel=panel, **settings)


def parse_engine_args(pairs: list[str], table: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`KEY=VALUE` texts and the `[engine-args]` table of a TOML file; the texts win."""
    values = dict(table or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise SpecError(
                f"got --engine-arg {pair!r}; expected KEY=VALUE, for example tensor_parallel_size=2"
            )
        values[key.replace("-", "_")] = value
    return values


@app.command("serve")
def serve_command(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "`tiny` (a small model made locally), the directory of a model, or the name of "
                "one on the Hugging Face hub."
            ),
            envvar="KENDALL_MODEL",
        ),
    ] = "tiny",
    host: Annotated[str, _option(LISTENING, "Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, _option(LISTENING, "Port to listen on; 0: a free one.", min=0, max=65535)
    ] = 8080,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            LISTENING,
            (
                "Name of the model in the API; repeatable, answers carry the first. Default: the "
                "last part of MODEL."
            ),
        ),
    ] = None,
    unknown_fields: Annotated[
        str,
        _option(
            LISTENING,
            (
                "Fields of requests that neither OpenAI nor vLLM has: refuse (400) | ignore. "
                "Fields of theirs that are not supported get 501."
            ),
        ),
    ] = "refuse",
    policy: Annotated[
        str, _option(QUEUE, "Batching policy, for example capped:max_batch_size=8.")
    ] = "continuous",
    max_output_tokens: Annotated[
        int | None,
        _option(
            QUEUE,
            (
                "Most output tokens of any request; longer answers are clipped. Default: no limit "
                "but the client's."
            ),
            min=1,
        ),
    ] = None,
    patience: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest wait in the queue; a request that waits longer is answered 429. Default: "
                "no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest time from the arrival of a request to the end of its answer; then it "
                "fails with 504. Default: no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest time from the arrival of a request to its first token; then it fails with "
                "504. Default: no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    priority_aging: Annotated[
        float | None,
        _option(
            QUEUE,
            "Order the queue by the `priority` of requests (lower first); a waiting request gains "
            "one level per this time. Default: priorities are ignored.",
            parser=Duration(),
        ),
    ] = None,
    engine: Annotated[
        str, _option(ENGINE, "auto (vllm if installed, else emulated) | vllm | emulated.")
    ] = "auto",
    max_num_seqs: Annotated[
        int | None,
        _option(
            ENGINE, "Most sequences in the engine at once (vLLM's name). Default: vLLM's.", min=1
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        _option(ENGINE, "Context length in tokens (vLLM's name). Default: the model's.", min=1),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        _option(ENGINE, "Any other engine argument of vLLM as KEY=VALUE; repeatable."),
    ] = None,
    start_timeout: Annotated[
        float,
        _option(
            ENGINE,
            "Longest first start of the engine, the download of a model included.",
            parser=Duration(1.0),
        ),
    ] = 3600.0,
    max_restarts: Annotated[
        int,
        _option(
            ENGINE,
            (
                "Restarts of a failed engine allowed in --restart-window; after one more failure "
                "the gateway exits."
            ),
            min=0,
        ),
    ] = 8,
    restart_window: Annotated[
        float, _option(ENGINE, "Window in which restarts are counted.", parser=Duration(1.0))
    ] = 600.0,
    restart_timeout: Annotated[
        float,
        _option(
            ENGINE,
            (
                "Longest restart of the engine. As long as the longest start so far if that is "
                "more; doubled after each that ran out of time."
            ),
            parser=Duration(1.0),
        ),
    ] = 300.0,
    max_interruptions: Annotated[
        int,
        _option(
            ENGINE,
            (
                "Engine failures that a request may survive; after one more it fails, as it may be "
                "the cause."
            ),
            min=0,
        ),
    ] = 3,
    suspect_after: Annotated[
        int,
        _option(
            ENGINE,
            "Engine failures under a request after which it is tried alone, as the possible cause.",
            min=1,
        ),
    ] = 2,
    max_parked: Annotated[
        int,
        _option(
            ENGINE,
            (
                "Most text prompts that wait for the tokenizer while the engine restarts; others "
                "get 503."
            ),
            min=0,
        ),
    ] = 1024,
    stuck_timeout: Annotated[
        float,
        _option(
            ENGINE,
            "Restart an engine that has work but makes no token for this long (0: never).",
            parser=Duration(),
        ),
    ] = 60.0,
    shutdown_delay: Annotated[
        float,
        _option(
            ENGINE,
            "Time after SIGTERM in which requests are still accepted while /ready answers 503.",
            parser=Duration(),
        ),
    ] = 0.0,
    shutdown_timeout: Annotated[
        float,
        _option(
            ENGINE,
            "Time that requests in service may take to finish after SIGTERM.",
            parser=Duration(),
        ),
    ] = 30.0,
    latency: Annotated[
        str | None,
        _option(
            MODEL,
            (
                "Latency law (k1=..,k2=..,k3=..,k4=.. in seconds) or profile; predictions use it, "
                "the emulated engine obeys it."
            ),
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        _option(
            MODEL,
            "Measure the latency law of the engine before serving; requests wait meanwhile.",
            "--calibrate",
        ),
    ] = False,
    idle_probes: Annotated[
        bool, _option(MODEL, "Measure the latency law while the engine is idle.", "--idle-probes")
    ] = False,
    prediction_interval: Annotated[
        float,
        _option(
            MODEL, "Time between two live predictions (0: no live prediction).", parser=Duration()
        ),
    ] = 5.0,
    what_if_interval: Annotated[
        float,
        _option(MODEL, "Time between two predictions of every other policy.", parser=Duration(1.0)),
    ] = 60.0,
    prediction_window: Annotated[
        float,
        _option(
            MODEL,
            "Length of the window that estimates and observed delays are taken from.",
            parser=Duration(10.0),
        ),
    ] = 300.0,
    state_file: Annotated[
        Path | None,
        _option(
            MODEL,
            "File that keeps the latency law and the estimates over a restart. Default: none.",
            parser=FileToWrite("state.json", tried=False),
        ),
    ] = None,
    autopilot: Annotated[
        str,
        _option(
            AUTOPILOT,
            "off | advise (log what it would change) | act (change policy and token limit).",
        ),
    ] = "off",
    autopilot_policies: Annotated[
        list[str] | None,
        _option(
            AUTOPILOT,
            (
                "Policy that autopilot may choose; repeatable. Default: the policy in force, with "
                "any batch size."
            ),
        ),
    ] = None,
    max_clipped_fraction: Annotated[
        float,
        _option(
            AUTOPILOT,
            "Largest fraction of answers that a token limit of autopilot may clip.",
            min=0,
            max=0.999,
        ),
    ] = 0.05,
    max_num_queued_reqs: Annotated[
        int,
        _option(
            OVERLOAD,
            (
                "Most sequences waiting or in service (vLLM's name); a request with n answers "
                "counts n (0: no limit)."
            ),
            min=0,
        ),
    ] = MAX_QUEUED,
    max_sequences_per_call: Annotated[
        int,
        _option(
            OVERLOAD, "Most sequences of one call, prompts times n; larger calls get 400.", min=1
        ),
    ] = MAX_SEQUENCES,
    max_num_queued_tokens: Annotated[
        int | None,
        _option(
            OVERLOAD,
            "Reject requests while this many prompt tokens wait (vLLM's name). Default: no limit.",
            min=1,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        _option(
            OVERLOAD,
            (
                "Reject requests that are predicted to miss this objective, for example "
                "p99_queueing_delay=2s."
            ),
        ),
    ] = None,
    adaptive_concurrency: Annotated[
        bool,
        _option(
            OVERLOAD,
            "Bound the sequences in the system by the observed queueing delay (AIMD).",
            "--adaptive-concurrency",
        ),
    ] = False,
    rate_limit: Annotated[
        float | None,
        _option(OVERLOAD, "Requests per second allowed for one API key. Default: no limit."),
    ] = None,
    rate_limit_tokens: Annotated[
        float | None,
        _option(
            OVERLOAD,
            "Prompt and output tokens per second allowed for one API key. Default: no limit.",
        ),
    ] = None,
    rate_limit_burst: Annotated[
        float,
        _option(
            OVERLOAD,
            "Size of a burst that the rate limits allow, as the time in which they would admit it.",
            parser=Duration(),
        ),
    ] = 10.0,
    overload_status: Annotated[
        int,
        _option(
            OVERLOAD,
            "HTTP status of rejected requests and of those whose patience ran out: 429 or 503.",
        ),
    ] = 429,
    queue_events: Annotated[
        bool,
        _option(
            STREAMS,
            "Send a stream's headers at once, and its place in the queue as SSE comments.",
            "--queue-events",
        ),
    ] = False,
    sse_keep_alive_interval: Annotated[
        float,
        _option(
            STREAMS,
            "Send an SSE comment after this long without a byte (0: never).",
            parser=Duration(),
        ),
    ] = 0.0,
    slow_reader_timeout: Annotated[
        float,
        _option(
            STREAMS,
            (
                "Time that a client may leave its response unread before it is disconnected (0: no "
                "limit)."
            ),
            parser=Duration(),
        ),
    ] = 60.0,
    wait_estimates: Annotated[
        bool,
        _option(
            STREAMS,
            (
                "Send each request's place in the queue and predicted wait in response headers and "
                "error bodies."
            ),
        ),
    ] = True,
    api_key: Annotated[
        list[str] | None,
        _option(
            SECURITY, "Key that clients must send as a bearer token; repeatable. Default: no key."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, _option(SECURITY, "File of such keys, one per line.")
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        _option(
            SECURITY,
            "Key for /admin; repeatable. Default: one made for this run, printed in the log.",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None, _option(SECURITY, "File of such keys, one per line.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        _option(
            SECURITY, "Allow other machines to connect without a key.", "--allow-unauthenticated"
        ),
    ] = False,
    metrics_need_key: Annotated[
        bool, _option(SECURITY, "Require a key for /metrics and /load too.", "--metrics-need-key")
    ] = False,
    max_body_bytes: Annotated[
        int, _option(SECURITY, "Largest request body in bytes; larger ones get 413.", min=1024)
    ] = MAX_BODY_BYTES,
    max_prompt_tokens: Annotated[
        int | None,
        _option(
            SECURITY, "Longest prompt in tokens. Default: what the model's context allows.", min=1
        ),
    ] = None,
    max_form_bytes: Annotated[
        int,
        _option(
            SECURITY,
            (
                "Largest form of an answer (JSON schema, grammar, choices) in bytes; larger ones "
                "get 400."
            ),
            min=64,
        ),
    ] = MAX_FORM_BYTES,
    max_form_compile_time: Annotated[
        float,
        _option(
            SECURITY,
            "Longest time that a form may take to compile; slower ones get 400.",
            parser=Duration(0.1),
        ),
    ] = MAX_FORM_COMPILE_TIME,
    max_connections_per_address: Annotated[
        int | None,
        _option(
            SECURITY,
            "Most connections from one client address; further ones get 429. Default: no limit.",
            min=1,
        ),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        _option(
            SECURITY,
            "Origins that browsers may call from (CORS), a JSON list (vLLM's name). Default: none.",
            metavar=JSON,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, _option(SECURITY, "TLS private key, PEM (vLLM's name).")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, _option(SECURITY, "TLS certificate, PEM (vLLM's name).")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        _option(
            SECURITY,
            "TLS certificates, PEM, one of which must have signed the client's (vLLM's name).",
        ),
    ] = None,
    record_file: Annotated[
        Path | None,
        _option(
            LOGS,
            (
                "Write one JSON line per finished request to this file; an older file is renamed. "
                "Default: none."
            ),
            parser=FileToWrite("gateway.jsonl", tried=False),
        ),
    ] = None,
    log_level: Annotated[str, _option(LOGS, "debug | info | warning | error.")] = "info",
    log_format: Annotated[str, _option(LOGS, "text | json (one object per line).")] = "text",
    log_prompts: Annotated[
        bool, _option(LOGS, "Log every prompt in full.", "--log-prompts")
    ] = False,
    allow_forced_lengths: Annotated[
        bool,
        _option(
            LOGS,
            (
                "Accept the request field by which `kendall load` forces output lengths (for "
                "experiments)."
            ),
        ),
    ] = False,
    config: Annotated[  # noqa: ARG001 - taken by its callback
        Path | None,
        _option(
            CONFIGURATION,
            (
                "TOML file: keys named as these options, and a table [engine-args] for vLLM. "
                "Environment and flags win over it."
            ),
            is_eager=True,
            callback=take_file,
        ),
    ] = None,
    show_config: Annotated[
        bool,
        _option(CONFIGURATION, "Print every setting with its source, then exit.", "--show-config"),
    ] = False,
    json_output: Annotated[
        bool,
        _option(
            CONFIGURATION, "With --show-config: print one JSON object instead of TOML.", "--json"
        ),
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint whose requests are queued and batched under a policy."""
    if json_output and not show_config and by_flag(ctx, "json_output"):
        raise SpecError("got --json without --show-config; expected both")
    if host:  # an empty one is every address of the machine
        host = checked_host(host)
    engine_args = parse_engine_args(engine_arg or [], ctx.meta.get(ENGINE_TABLE))
    shown_args = dict(engine_args)  # the options below have lines of their own
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            engine_args[name] = value
            shown_args.pop(name, None)
    if autopilot != "off":
        from server.live.pilot import autopilot_bounds  # noqa: PLC0415 - heavy

        autopilot_bounds(policy, autopilot_policies or (), max_clipped_fraction)
    from server.security.flags import KeyFlags, read_security  # noqa: PLC0415 - heavy

    overload = OverloadSettings(
        max_num_queued_reqs=max_num_queued_reqs or None,
        max_sequences_per_call=max_sequences_per_call,
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
        engine=one_of("--engine", engine, EngineName),
        policy=format_policy(parse_policy(policy)),
        max_output_tokens=max_output_tokens,
        patience=patience,
        request_timeout=request_timeout,
        first_token_timeout=first_token_timeout,
        latency=latency,
        calibrate=calibrate,
        record_file=record_file,
        allow_forced_lengths=allow_forced_lengths,
        unknown_fields=one_of("--unknown-fields", unknown_fields, UnknownFields),
        prediction_interval=prediction_interval,
        what_if_interval=what_if_interval,
        prediction_window=prediction_window,
        state_file=state_file,
        autopilot=one_of("--autopilot", autopilot, AutopilotMode),
        autopilot_policies=tuple(autopilot_policies or ()),
        max_clipped_fraction=max_clipped_fraction,
        idle_probes=idle_probes,
        shutdown_delay=shutdown_delay,
        shutdown_timeout=shutdown_timeout,
        supervision=SupervisionSettings(
            start_timeout=start_timeout,
            max_restarts=max_restarts,
            restart_window=restart_window,
            restart_timeout=restart_timeout,
            max_interruptions=max_interruptions,
            suspect_after=suspect_after,
            max_parked=max_parked,
            stuck_timeout=stuck_timeout,
            slow_reader_timeout=slow_reader_timeout,
        ),
        security=read_security(
            host,
            SecuritySettings(
                allow_unauthenticated=allow_unauthenticated,
                metrics_need_key=metrics_need_key,
                max_body_bytes=max_body_bytes,
                max_prompt_tokens=max_prompt_tokens,
                max_form_bytes=max_form_bytes,
                max_form_compile_time=max_form_compile_time,
                max_connections_per_address=max_connections_per_address,
                tls=TlsSettings(keyfile=ssl_keyfile, certfile=ssl_certfile, ca_certs=ssl_ca_certs),
            ),
            KeyFlags(
                api_key=api_key or (),
                api_key_file=api_key_file,
                admin_key=admin_key or (),
                admin_key_file=admin_key_file,
            ),
            allowed_origins,
        ),
        logs=LogSettings(
            level=check_level(log_level),
            format=one_of("--log-format", log_format, LogFormat),
            prompts=log_prompts,
        ),
        overload=overload,
        engine_args=engine_args,
    )
    if show_config:
        _show(ctx, settings, shown_args, json_output=json_output)
        return
    if is_read_again(ctx, settings):
        return
    configure_logs(settings.logs)
    from server.operations.serving import serve  # noqa: PLC0415 - heavy

    try:
        raise typer.Exit(serve(settings, read_again=reader_of(ctx)))
    finally:
        end_logs()


def _show(
    ctx: typer.Context, settings: Settings, engine_args: Mapping[str, Any], *, json_output: bool
) -> None:
    from server.operations.configuration.show import as_json, as_toml, effective  # noqa: PLC0415

    settled: dict[str, Any] = {
        "policy": settings.policy,
        "served_model_name": [settings.served_model_name, *settings.served_model_aliases],
    }
    shown = effective(ctx, engine_args, settled)
    typer.echo(as_json(shown) if json_output else as_toml(shown), nl=False)


@app.command("calibrate")
def calibrate_command(
    target: Annotated[
        str, typer.Argument(help="URL of a running gateway, or a model to start an engine for.")
    ] = "tiny",
    speed_only: Annotated[
        bool,
        _option(
            MEASUREMENT,
            "Measure the speed factor against the law in force only; takes about 5 seconds.",
        ),
    ] = False,
    max_batch_size: Annotated[
        int | None,
        _option(MEASUREMENT, "Largest batch to measure. Default: the engine's bound.", min=1),
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        _option(
            MEASUREMENT,
            "Longest answer to measure, in tokens. Default: the gateway's limit, or 64.",
            min=2,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, _option(MEASUREMENT, "Length of every prompt, in tokens. Default: 32.", min=1)
    ] = None,
    repeats: Annotated[
        int, _option(MEASUREMENT, "Measurements of each batch size and length.", min=2, max=100)
    ] = 5,
    seed: Annotated[int, _option(MEASUREMENT, "Seed of the order of the measurements.")] = 0,
    api_key: Annotated[
        str | None, _option(ACCESS, "Key sent to a running gateway as a bearer token.")
    ] = None,
    admin_key: Annotated[
        str | None, _option(ACCESS, "Key for a gateway with --admin-key; wins over --api-key.")
    ] = None,
    cacert: Annotated[Path | None, _option(ACCESS, CACERT)] = None,
    insecure: Annotated[bool, _option(ACCESS, INSECURE, "--insecure")] = False,
    name: Annotated[
        str | None, _option(RESULT, "Name of the profile. Default: the model's.")
    ] = None,
    output: Annotated[
        Path | None,
        _option(
            RESULT,
            (
                "File to write. Default: in the user's cache; none for an emulated engine or "
                "--speed-only."
            ),
            parser=FileToWrite("law.json"),
        ),
    ] = None,
    json_output: Annotated[
        bool, _option(RESULT, "Print the profile as one JSON object and nothing else.", "--json")
    ] = False,
) -> None:
    """Measure the latency law of an engine through the gateway's dispatch path and save it as a
    profile.
    """
    from server.operations.calibrate import calibrate  # noqa: PLC0415 - heavy

    plan = {
        "speed_only": speed_only,
        "max_batch_size": max_batch_size,
        "max_output_tokens": max_output_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "seed": seed,
        "name": name,
    }
    key = key_for_admin(target, admin_key, api_key)
    calibrate(target, plan, output, key=key, trust=Trust(cacert, insecure), json_output=json_output)
