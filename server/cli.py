"""`kendall serve` and `kendall calibrate`."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from policies import SpecError, format_policy, parse_policy
from server.settings import AutopilotMode, EngineName, Settings

app = typer.Typer()


def parse_engine_args(pairs: list[str], config: Path | None = None) -> dict[str, Any]:
    """`KEY=VALUE` texts and the `[engine-args]` table of a TOML file; the texts win."""
    values: dict[str, Any] = {}
    if config is not None:
        try:
            table = tomllib.loads(config.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"got --config {config}; expected a readable TOML file ({error})") from None
        values |= {key.replace("-", "_"): value for key, value in table.get("engine-args", {}).items()}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise SpecError(f"got --engine-arg {pair!r}; expected KEY=VALUE, for example tensor_parallel_size=2")
        values[key.replace("-", "_")] = value
    return values


@app.command("serve")
def serve_command(
    model: Annotated[str, typer.Argument(help="`tiny` (made locally), a model directory, or a name that vLLM can fetch.")] = "tiny",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8080,
    policy: Annotated[str, typer.Option(help="Batching policy, for example capped:max_batch_size=8.")] = "continuous",
    engine: Annotated[str, typer.Option(help="auto | vllm | emulated.")] = "auto",
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="The gateway's own limit: longer answers are clipped.")] = None,
    patience: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which a waiting request is given up.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most sequences in the engine at once (vLLM's name).")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context length (vLLM's name).")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="Any vLLM engine argument, KEY=VALUE; repeatable.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; its [engine-args] table goes to vLLM.")] = None,
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
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error.")] = "info",
) -> None:
    """Serve an OpenAI-style endpoint with a queue under a policy you choose."""
    from server.live.pilot import autopilot_bounds  # noqa: PLC0415 - heavy
    from server.serving import serve  # noqa: PLC0415

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s  %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    engine_args = parse_engine_args(engine_arg or [], config)
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            engine_args[name] = value
    if autopilot != "off":
        autopilot_bounds(policy, autopilot_policies or (), max_clipped_fraction)
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
        engine_args=engine_args,
    )
    raise typer.Exit(serve(settings))


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
    calibrate(target, plan, output, json_output=json_output)
