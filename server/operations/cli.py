"""`kendall serve` and `kendall calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kendall.policies import SpecError, format_policy, parse_policy
from kendall.policies.durations import Duration
from kendall.policies.registry import use_modules
from kendall.policies.text import CommaList, one_of
from kendall.queueing.commands.environment_variables import by_flag, is_given
from kendall.queueing.commands.policy_option import ABOUT_MODULE
from kendall.queueing.measurement.paths import FileToWrite
from kendall.remote import CACERT, INSECURE, Trust, checked_host, key_for_admin
from kendall.server.admission.limits import MAX_QUEUED, OverloadSettings
from kendall.server.operations.configuration.again import is_read_again, reader_of
from kendall.server.operations.configuration.file import ENGINE_TABLE, JSON, take_file
from kendall.server.operations.servers_behind import check_http
from kendall.server.runtime.logs import (
    LogFormat,
    LogSettings,
    check_level,
    configure_logs,
    end_logs,
)
from kendall.server.security.settings import SecuritySettings, TlsSettings
from kendall.server.settings import AutopilotMode, EngineName, Settings, UnknownFields
from kendall.server.supervision.settings import MOST_REPLICAS, SupervisionSettings

app = typer.Typer(add_completion=False)
LISTENING, QUEUE, ENGINE = "Listening", "Queue and policy", "Engine"
TOOLS, FAILURES = "Tools and reasoning", "Engine starts, failures and shutdown"
BEHIND = "Servers behind the gateway (--engine http)"
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
                "`tiny` (built locally; random text), `smollm2` (a small model that answers; "
                "fetched once), a model directory, or a model name on the Hugging Face Hub."
            ),
            envvar="KENDALL_MODEL",
        ),
    ] = "tiny",
    host: Annotated[str, _option(LISTENING, "Address to listen on.")] = Settings.host,
    port: Annotated[
        int, _option(LISTENING, "Port to listen on (0: any free port).", min=0, max=65535)
    ] = Settings.port,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            LISTENING,
            (
                "Model name in the API; repeatable, responses carry the first. Default: the last "
                "part of MODEL."
            ),
        ),
    ] = None,
    unknown_fields: Annotated[
        str,
        _option(
            LISTENING,
            (
                "Request fields that neither OpenAI nor vLLM defines: refuse (400) | ignore. "
                "Fields that they define and Kendall does not support get 501."
            ),
        ),
    ] = Settings.unknown_fields,
    policy: Annotated[
        str, _option(QUEUE, "Batching policy, for example capped:max_batch_size=8.")
    ] = Settings.policy,
    policy_module: Annotated[list[str] | None, _option(QUEUE, ABOUT_MODULE)] = None,
    max_output_tokens: Annotated[
        int | None,
        _option(
            QUEUE,
            (
                "Largest number of output tokens per request; longer answers are clipped. "
                "Default: only the client's limit."
            ),
            min=1,
        ),
    ] = None,
    patience: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest wait in the queue; a request that waits longer is answered with 429. "
                "Default: no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest time from the arrival of a request to the end of its answer; after that "
                "it fails with 504. Default: no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Longest time from the arrival of a request to its first token; after that it "
                "fails with 504. Default: no limit."
            ),
            parser=Duration(0.001),
        ),
    ] = None,
    priority_aging: Annotated[
        float | None,
        _option(
            QUEUE,
            (
                "Order the queue by the `priority` of requests (lower first); a request gains one "
                "level each time it has waited this long. Default: priorities are ignored."
            ),
            parser=Duration(),
        ),
    ] = None,
    engine: Annotated[
        str,
        _option(
            ENGINE,
            "Engine: auto (vllm if installed, else emulated) | vllm | emulated | http | ray.",
        ),
    ] = Settings.engine,
    replicas: Annotated[
        int,
        _option(
            ENGINE,
            (
                "Number of engines to start, each one server of the one queue; PUT /admin/servers "
                "changes it if it is 2 or more."
            ),
            min=1,
            max=MOST_REPLICAS,
        ),
    ] = Settings.replicas,
    ray_address: Annotated[
        str | None,
        _option(
            ENGINE,
            (
                "Address of a Ray cluster for --engine ray, HOST:PORT or auto (the one of this "
                "machine). Default: a Ray of its own."
            ),
        ),
    ] = Settings.ray_address,
    engine_url: Annotated[
        list[str] | None,
        _option(
            BEHIND,
            (
                "URL of a server with OpenAI's API behind the gateway; repeatable, "
                "all with the same models."
            ),
        ),
    ] = None,
    engine_api_key: Annotated[
        str | None,
        _option(
            BEHIND,
            "Key sent to the servers of --engine-url as a bearer token, and to no other origin.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        _option(
            BEHIND,
            (
                "Tokenizer that counts prompts where the servers behind do not: "
                "a tokenizer.json, a folder with one, or a model name. Default: estimated from "
                "their usage."
            ),
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        _option(
            ENGINE,
            (
                "Largest number of sequences in the engine at once (vLLM's name). Default: vLLM's; "
                "with --engine http what each server says, or 64."
            ),
            min=1,
        ),
    ] = None,
    reserved_tokens: Annotated[
        int | None,
        _option(
            ENGINE,
            (
                "Output tokens for which KV memory is kept free when a request starts. Beyond "
                "them vLLM may have to interrupt requests and compute them again. Default: the "
                "token limit of the request where the memory holds --max-num-seqs contexts, else "
                "half of an equal share of the memory."
            ),
            min=1,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        _option(ENGINE, "Context length in tokens (vLLM's name). Default: the model's.", min=1),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        _option(ENGINE, "Any other vLLM engine argument as KEY=VALUE; repeatable."),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        _option(
            TOOLS,
            "Let the model decide whether it calls tools (vLLM's name); needs --tool-call-parser.",
            "--enable-auto-tool-choice",
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        _option(
            TOOLS,
            (
                "Parser of the model's tool calls, by vLLM's name, for example hermes. Default: "
                "none, and calls that may use tools are refused."
            ),
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        _option(
            TOOLS,
            (
                "Parser that separates reasoning from the answer, by vLLM's name, for example "
                "qwen3. Default: none."
            ),
        ),
    ] = None,
    start_timeout: Annotated[
        float,
        _option(
            FAILURES,
            "Time limit of the engine's first start, including the download of a model.",
            parser=Duration(1.0),
        ),
    ] = SupervisionSettings.start_timeout,
    max_restarts: Annotated[
        int,
        _option(
            FAILURES,
            (
                "Number of engine restarts allowed within --restart-window; after one more "
                "failure the gateway exits."
            ),
            min=0,
        ),
    ] = SupervisionSettings.max_restarts,
    restart_window: Annotated[
        float,
        _option(
            FAILURES, "Length of the window in which restarts are counted.", parser=Duration(1.0)
        ),
    ] = SupervisionSettings.restart_window,
    restart_timeout: Annotated[
        float,
        _option(
            FAILURES,
            (
                "Time limit of an engine restart; never below the longest start so far. Doubled "
                "after each restart that exceeds it."
            ),
            parser=Duration(1.0),
        ),
    ] = SupervisionSettings.restart_timeout,
    max_interruptions: Annotated[
        int,
        _option(
            FAILURES,
            (
                "Number of engine failures that a request may survive; after one more it fails, "
                "because it may be the cause."
            ),
            min=0,
        ),
    ] = SupervisionSettings.max_interruptions,
    suspect_after: Annotated[
        int,
        _option(
            FAILURES,
            (
                "Number of engine failures during a request after which it is run alone, as a "
                "possible cause."
            ),
            min=1,
        ),
    ] = SupervisionSettings.suspect_after,
    max_parked: Annotated[
        int,
        _option(
            FAILURES,
            (
                "Largest number of text prompts that wait for the tokenizer while the engine "
                "restarts; further ones get 503."
            ),
            min=0,
        ),
    ] = SupervisionSettings.max_parked,
    stuck_timeout: Annotated[
        float,
        _option(
            FAILURES,
            (
                "Restart an engine that has work but produces no token for this long, or give up a "
                "call of which a server behind sends nothing (0: never)."
            ),
            parser=Duration(),
        ),
    ] = SupervisionSettings.stuck_timeout,
    shutdown_delay: Annotated[
        float,
        _option(
            FAILURES,
            (
                "Time after SIGTERM during which requests are still accepted while /ready answers "
                "503."
            ),
            parser=Duration(),
        ),
    ] = Settings.shutdown_delay,
    shutdown_timeout: Annotated[
        float,
        _option(
            FAILURES,
            "Time that requests in service have to finish after SIGTERM.",
            parser=Duration(),
        ),
    ] = Settings.shutdown_timeout,
    latency: Annotated[
        str | None,
        _option(
            MODEL,
            (
                "Latency law (k1=..,k2=..,k3=..,k4=.. in seconds) or profile; predictions use it, "
                "the emulated engine follows it."
            ),
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        _option(
            MODEL,
            "Measure the engine's latency law before serving; requests wait until it is done.",
            "--calibrate",
        ),
    ] = False,
    idle_probes: Annotated[
        bool, _option(MODEL, "Measure the latency law while the engine is idle.", "--idle-probes")
    ] = False,
    prediction_interval: Annotated[
        float,
        _option(MODEL, "Time between live predictions (0: no live prediction).", parser=Duration()),
    ] = Settings.prediction_interval,
    what_if_interval: Annotated[
        float,
        _option(MODEL, "Time between predictions for the other policies.", parser=Duration(1.0)),
    ] = Settings.what_if_interval,
    prediction_window: Annotated[
        float,
        _option(
            MODEL,
            "Length of the window over which delays are observed and estimates are made.",
            parser=Duration(10.0),
        ),
    ] = Settings.prediction_window,
    state_file: Annotated[
        Path | None,
        _option(
            MODEL,
            "File that keeps the latency law and the estimates across restarts. Default: none.",
            parser=FileToWrite("state.json", tried=False),
        ),
    ] = None,
    autopilot: Annotated[
        str,
        _option(
            AUTOPILOT,
            ("off | advise (log the changes it would make) | act (change policy and token limit)."),
        ),
    ] = Settings.autopilot,
    autopilot_policies: Annotated[
        list[str] | None,
        _option(
            AUTOPILOT,
            (
                "Policy that the autopilot may choose; repeatable. Default: the policy in force, "
                "with any batch size."
            ),
        ),
    ] = None,
    max_clipped_fraction: Annotated[
        float,
        _option(
            AUTOPILOT,
            "Largest fraction of answers that a token limit set by the autopilot may clip.",
            min=0,
            max=0.999,
        ),
    ] = Settings.max_clipped_fraction,
    max_num_queued_reqs: Annotated[
        int,
        _option(
            OVERLOAD,
            (
                "Largest number of sequences waiting or in service (vLLM's name); a request with "
                "n answers counts n times (0: no limit)."
            ),
            min=0,
        ),
    ] = MAX_QUEUED,
    max_sequences_per_call: Annotated[
        int,
        _option(
            OVERLOAD,
            "Largest number of sequences in one call, prompts times n; larger calls get 400.",
            min=1,
        ),
    ] = OverloadSettings.max_sequences_per_call,
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
                "Reject requests predicted to miss this objective, for example "
                "p99_queueing_delay=2s or p95_sojourn_time=10s."
            ),
            parser=CommaList(),
        ),
    ] = None,
    adaptive_concurrency: Annotated[
        bool,
        _option(
            OVERLOAD,
            "Adapt the limit on sequences in the system to the observed queueing delay (AIMD).",
            "--adaptive-concurrency",
        ),
    ] = False,
    rate_limit: Annotated[
        float | None,
        _option(OVERLOAD, "Requests per second allowed per API key. Default: no limit."),
    ] = None,
    rate_limit_tokens: Annotated[
        float | None,
        _option(
            OVERLOAD,
            "Prompt and output tokens per second allowed per API key. Default: no limit.",
        ),
    ] = None,
    rate_limit_burst: Annotated[
        float,
        _option(
            OVERLOAD,
            "Burst that the rate limits allow, as the time in which they admit that much.",
            parser=Duration(),
        ),
    ] = OverloadSettings.rate_limit_burst,
    overload_status: Annotated[
        int,
        _option(
            OVERLOAD,
            (
                "HTTP status for rejected requests and for requests whose patience ran out: 429 "
                "or 503."
            ),
        ),
    ] = OverloadSettings.overload_status,
    queue_events: Annotated[
        bool,
        _option(
            STREAMS,
            "Send a stream's headers at once and its place in the queue as SSE comments.",
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
    ] = OverloadSettings.sse_keep_alive_interval,
    slow_reader_timeout: Annotated[
        float,
        _option(
            STREAMS,
            (
                "Time a client may leave its response unread before it is disconnected (0: no "
                "limit)."
            ),
            parser=Duration(),
        ),
    ] = SupervisionSettings.slow_reader_timeout,
    wait_estimates: Annotated[
        bool,
        _option(
            STREAMS,
            (
                "Report each request's place in the queue and predicted wait in response headers "
                "and error bodies."
            ),
        ),
    ] = OverloadSettings.wait_estimates,
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
            (
                "Key for /admin; repeatable. Default: a key generated for this run and printed in "
                "the log."
            ),
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None, _option(SECURITY, "File of such keys, one per line.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        _option(SECURITY, "Let other machines connect without a key.", "--allow-unauthenticated"),
    ] = False,
    metrics_need_key: Annotated[
        bool, _option(SECURITY, "Require a key for /metrics and /load too.", "--metrics-need-key")
    ] = False,
    max_body_bytes: Annotated[
        int, _option(SECURITY, "Largest request body in bytes; larger ones get 413.", min=1024)
    ] = SecuritySettings.max_body_bytes,
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
                "Largest structured-output definition (JSON schema, grammar, choices) in bytes; "
                "larger ones get 400."
            ),
            min=64,
        ),
    ] = SecuritySettings.max_form_bytes,
    max_form_compile_time: Annotated[
        float,
        _option(
            SECURITY,
            (
                "Longest time a structured-output definition may take to compile; slower ones get "
                "400."
            ),
            parser=Duration(0.1),
        ),
    ] = SecuritySettings.max_form_compile_time,
    max_connections_per_address: Annotated[
        int | None,
        _option(
            SECURITY,
            (
                "Largest number of connections per client address; further ones get 429. Default: "
                "no limit."
            ),
            min=1,
        ),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        _option(
            SECURITY,
            (
                "Origins from which browsers may call (CORS), as a JSON list (vLLM's name). "
                "Default: none."
            ),
            metavar=JSON,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, _option(SECURITY, "PEM file of the TLS private key (vLLM's name).")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, _option(SECURITY, "PEM file of the TLS certificate (vLLM's name).")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        _option(
            SECURITY,
            (
                "PEM file of the authorities that may sign client certificates; clients must "
                "present one (vLLM's name)."
            ),
        ),
    ] = None,
    record_file: Annotated[
        Path | None,
        _option(
            LOGS,
            (
                "Write one JSON line per finished request to this file; an existing file is "
                "renamed. Default: none."
            ),
            parser=FileToWrite("gateway.jsonl", tried=False),
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            LOGS,
            ("Send an OpenTelemetry trace of every call to this URL (vLLM's name). Default: none."),
        ),
    ] = None,
    log_level: Annotated[
        str, _option(LOGS, "Log level: debug | info | warning | error.")
    ] = LogSettings.level,
    log_format: Annotated[
        str, _option(LOGS, "Log format: text | json (one object per line).")
    ] = LogSettings.format,
    log_prompts: Annotated[
        bool, _option(LOGS, "Log every prompt in full.", "--log-prompts")
    ] = False,
    allow_forced_lengths: Annotated[
        bool,
        _option(
            LOGS,
            (
                "Accept the request field with which `kendall load` forces output lengths (for "
                "experiments)."
            ),
        ),
    ] = False,
    config: Annotated[  # noqa: ARG001 - taken by its callback
        Path | None,
        _option(
            CONFIGURATION,
            (
                "TOML file with these option names as keys, and a table [engine-args] for vLLM. "
                "Environment variables and flags override it."
            ),
            is_eager=True,
            callback=take_file,
        ),
    ] = None,
    show_config: Annotated[
        bool,
        _option(CONFIGURATION, "Print every setting and its source, then exit.", "--show-config"),
    ] = False,
    json_output: Annotated[
        bool,
        _option(
            CONFIGURATION, "With --show-config: print one JSON object instead of TOML.", "--json"
        ),
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint whose requests are queued and batched under a policy."""
    use_modules(policy_module)
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
        from kendall.server.live.pilot import autopilot_bounds  # noqa: PLC0415 - heavy

        autopilot_bounds(policy, autopilot_policies or (), max_clipped_fraction)
    from kendall.server.security.flags import KeyFlags, read_security  # noqa: PLC0415 - heavy

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
    model = model if engine != "http" or is_given(ctx, "model") else ""
    names = served_model_name or [model.rstrip("/").rsplit("/", 1)[-1] or engine]
    settings = Settings(
        model=model,
        served_model_name=names[0],
        served_model_aliases=tuple(names[1:]),
        host=host,
        port=port,
        engine=one_of("--engine", engine, EngineName),
        replicas=replicas,
        ray_address=ray_address,
        engine_url=tuple(engine_url or ()),
        engine_api_key=engine_api_key,
        tokenizer=tokenizer,
        policy=format_policy(parse_policy(policy)),
        max_output_tokens=max_output_tokens,
        reserved_tokens=reserved_tokens,
        patience=patience,
        request_timeout=request_timeout,
        first_token_timeout=first_token_timeout,
        latency=latency,
        calibrate=calibrate,
        record_file=record_file,
        otlp_traces_endpoint=otlp_traces_endpoint,
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
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        engine_args=engine_args,
    )
    check_http(settings, named=bool(served_model_name))
    if show_config:
        _show(ctx, settings, shown_args, json_output=json_output)
        return
    if is_read_again(ctx, settings):
        return
    configure_logs(settings.logs)
    from kendall.server.operations.serving import serve  # noqa: PLC0415 - heavy

    try:
        raise typer.Exit(serve(settings, read_again=reader_of(ctx)))
    finally:
        end_logs()


def _show(
    ctx: typer.Context, settings: Settings, engine_args: Mapping[str, Any], *, json_output: bool
) -> None:
    from kendall.server.operations.configuration.show import as_json, as_toml, effective  # noqa: PLC0415

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
            ("Measure only the speed factor relative to the law in force; takes about 5 seconds."),
        ),
    ] = False,
    resume_cost: Annotated[
        bool,
        _option(
            MEASUREMENT,
            (
                "Also measure kr, the seconds that resuming a preempted request takes. Default: "
                "only if the policy in force preempts requests."
            ),
            "--resume-cost",
        ),
    ] = False,
    max_batch_size: Annotated[
        int | None,
        _option(MEASUREMENT, "Largest batch size to measure. Default: the engine's limit.", min=1),
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
        int,
        _option(
            MEASUREMENT, "Number of measurements of each batch size and length.", min=2, max=100
        ),
    ] = 5,
    seed: Annotated[int, _option(MEASUREMENT, "Seed for the order of the measurements.")] = 0,
    api_key: Annotated[
        str | None, _option(ACCESS, "Key sent to a running gateway as a bearer token.")
    ] = None,
    admin_key: Annotated[
        str | None, _option(ACCESS, "Key for a gateway with --admin-key; overrides --api-key.")
    ] = None,
    cacert: Annotated[Path | None, _option(ACCESS, CACERT)] = None,
    insecure: Annotated[bool, _option(ACCESS, INSECURE, "--insecure")] = False,
    name: Annotated[
        str | None, _option(RESULT, "Name of the profile. Default: the model's name.")
    ] = None,
    output: Annotated[
        Path | None,
        _option(
            RESULT,
            (
                "File to write. Default: a file in the user's cache; none for an emulated engine "
                "or --speed-only."
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
    from kendall.server.operations.calibrate import calibrate  # noqa: PLC0415 - heavy

    plan = {
        "speed_only": speed_only,
        "resume_cost": resume_cost,
        "max_batch_size": max_batch_size,
        "max_output_tokens": max_output_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "seed": seed,
        "name": name,
    }
    key = key_for_admin(target, admin_key, api_key)
    calibrate(target, plan, output, key=key, trust=Trust(cacert, insecure), json_output=json_output)
