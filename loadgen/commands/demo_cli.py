"""`kendall demo`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kendall.queueing.commands.policy_option import PolicyModules, use_policies
from kendall.queueing.measurement.paths import folder_to_write

if TYPE_CHECKING:
    from kendall.loadgen.commands.demo import DemoPlan

app = typer.Typer(add_completion=False)
FAILED, INTERRUPTED = 1, 130


@app.command("demo")
def demo_command(
    once: Annotated[
        bool,
        typer.Option("--once", help="Exit after the table instead of keeping the gateway running."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Model to measure: tiny (random weights, forced lengths; 4 minutes) | smollm2 "
            "(answers questions at its own lengths; 4 to 6 minutes).",
        ),
    ] = "tiny",
    engine: Annotated[
        str,
        typer.Option(
            help="Engine to measure: auto (vllm if installed, else emulated) | vllm | emulated."
        ),
    ] = "auto",
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="Port of the gateway; another one if it is in use."),
    ] = 8080,
    seed: Annotated[int, typer.Option(min=0, help="Seed for arrivals and lengths.")] = 1,
    scale: Annotated[
        float,
        typer.Option(min=0.01, max=100, help="Factor applied to the measuring time of every cell."),
    ] = 1.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy to measure; repeatable. Default: all six, of smollm2 three."),
    ] = None,
    policy_module: PolicyModules = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            help="Load to measure, as a fraction of the policy's largest stable rate; repeatable. "
            "Default: 0.3 and 0.5, of smollm2 0.5.",
        ),
    ] = None,
    result_dir: Annotated[
        Path,
        typer.Option(
            "--output",
            "--result-dir",
            help="Folder for run files and the plot.",
            parser=folder_to_write,
        ),
    ] = Path("runs/demo"),
) -> None:
    """Calibrate a real engine, load it under every policy, and put the model beside the requests
    that came.
    """
    use_policies(policy_module, *(policy or ()))
    if sys.stderr.isatty():
        sys.stderr.write("kendall demo: starting")  # the imports below take seconds
        sys.stderr.flush()
    from kendall.loadgen.commands.demo import DemoPlan  # noqa: PLC0415 - heavy
    from kendall.loadgen.gateway.gateway_process import free_port  # noqa: PLC0415

    try:
        plan = DemoPlan(
            model=model,
            engine=engine,
            asked_port=port,
            port=free_port(port),
            seed=seed,
            scale=scale,
            folder=result_dir,
            policies=tuple(policy or ()),
            loads=tuple(load or ()),
        )
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
    raise typer.Exit(asyncio.run(_run(plan, once=once)))


async def _run(plan: DemoPlan, *, once: bool) -> int:
    """The exit status. Ctrl-C and SIGTERM end it: the gateway is stopped too."""
    from kendall.loadgen.commands.demo import run_demo  # noqa: PLC0415 - heavy
    from kendall.loadgen.gateway.gateway_process import GatewayError  # noqa: PLC0415
    from kendall.loadgen.sending.operating_system import cancelled_by  # noqa: PLC0415
    from kendall.queueing.commands.terminal import console  # noqa: PLC0415

    with cancelled_by(signal.SIGINT, signal.SIGTERM):
        try:
            await run_demo(plan, console(), once=once)
        except GatewayError as error:
            sys.stderr.write(f"kendall: {error}\n")
            return FAILED
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            measured = any(plan.folder.glob("load-*.jsonl"))
            kept = f"what was measured is in {plan.folder}/" if measured else "nothing was measured"
            sys.stderr.write(f"kendall: interrupted; {kept}\n")
            return INTERRUPTED
    return 0
