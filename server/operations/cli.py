"""`kendall serve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kendall.options import flag_option, with_options
from kendall.policies import SpecError, format_policy, parse_policy
from kendall.policies.registry import use_modules
from kendall.queueing.commands.environment_variables import by_flag, is_given
from kendall.queueing.commands.shared_options import ABOUT_MODULE
from kendall.remote import checked_host
from kendall.server.operations.configuration.file import ENGINE_TABLE, take_file
from kendall.server.operations.configuration.reread import is_read_again, reader_of
from kendall.server.operations.servers_behind import check_http
from kendall.server.runtime.logs import configure_logs, end_logs
from kendall.server.runtime.option_panels import Panel
from kendall.server.security.settings import KeyFlags
from kendall.server.settings import Settings

app = typer.Typer(add_completion=False)


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
@with_options(tuple(Panel))
def serve_command(
    ctx: typer.Context,
    settings: Settings,
    keys: KeyFlags,
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
    served_model_name: Annotated[
        list[str] | None,
        flag_option(
            Panel.LISTENING,
            (
                "Model name in the API; repeatable, responses carry the first. Default: the last "
                "part of MODEL."
            ),
        ),
    ] = None,
    policy_module: Annotated[list[str] | None, flag_option(Panel.QUEUE, ABOUT_MODULE)] = None,
    max_num_seqs: Annotated[
        int | None,
        flag_option(
            Panel.ENGINE,
            (
                "Largest number of sequences in the engine at once (vLLM's name). Default: vLLM's; "
                "with --engine http what each server says, or 64."
            ),
            min=1,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        flag_option(
            Panel.ENGINE, "Context length in tokens (vLLM's name). Default: the model's.", min=1
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        flag_option(Panel.ENGINE, "Any other vLLM engine argument as KEY=VALUE; repeatable."),
    ] = None,
    config: Annotated[  # noqa: ARG001 - taken by its callback
        Path | None,
        flag_option(
            Panel.CONFIGURATION,
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
        flag_option(
            Panel.CONFIGURATION, "Print every setting and its source, then exit.", "--show-config"
        ),
    ] = False,
    json_output: Annotated[
        bool,
        flag_option(
            Panel.CONFIGURATION,
            "With --show-config: print one JSON object instead of TOML.",
            "--json",
        ),
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint whose requests are queued and batched under a policy."""
    use_modules(policy_module)
    if json_output and not show_config and by_flag(ctx, "json_output"):
        raise SpecError("got --json without --show-config; expected both")
    # an empty one is every address of the machine
    host = checked_host(settings.host) if settings.host else ""
    engine_args = parse_engine_args(engine_arg or [], ctx.meta.get(ENGINE_TABLE))
    shown_args = dict(engine_args)  # the options below have lines of their own
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            engine_args[name] = value
            shown_args.pop(name, None)
    if settings.autopilot != "off":
        from kendall.server.live.pilot import autopilot_bounds  # noqa: PLC0415 - heavy

        autopilot_bounds(
            settings.policy, settings.autopilot_policies, settings.max_clipped_fraction
        )
    from kendall.server.security.flags import read_security  # noqa: PLC0415 - heavy

    model = model if settings.engine != "http" or is_given(ctx, "model") else ""
    names = served_model_name or [model.rstrip("/").rsplit("/", 1)[-1] or settings.engine]
    settings = dataclasses.replace(
        settings,
        model=model,
        served_model_name=names[0],
        served_model_aliases=tuple(names[1:]),
        host=host,
        policy=format_policy(parse_policy(settings.policy)),
        security=read_security(host, settings.security, keys),
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
