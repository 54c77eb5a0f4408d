"""`kendall demo`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from policies import SpecError

app = typer.Typer(add_completion=False)


@app.command("demo")
def demo_command(
    once: Annotated[bool, typer.Option("--once", help="Exit after the table instead of serving on.")] = False,
    engine: Annotated[str, typer.Option(help="auto | vllm | emulated.")] = "auto",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port; another is taken where it is in use.")] = 8080,
    seed: Annotated[int, typer.Option(help="Arrivals and lengths.")] = 1,
    scale: Annotated[float, typer.Option(min=0.01, max=100, help="Factor on the time of every cell.")] = 1.0,
    policy: Annotated[list[str] | None, typer.Option(help="Only these policies; repeatable.")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Only these loads; repeatable.")] = None,
    result_dir: Annotated[Path, typer.Option(help="Folder for run files and the picture.")] = Path("runs/demo"),
) -> None:
    """Calibrate a real engine, load it under every policy at two loads, print observed beside predicted."""
    from loadgen.demo import LOADS, POLICIES, Plan, run_demo  # noqa: PLC0415 - heavy
    from loadgen.gateway_process import GatewayError, free_port  # noqa: PLC0415
    from loadgen.report import WIDTH  # noqa: PLC0415

    plan = Plan(
        engine=engine,
        port=free_port(port),
        seed=seed,
        scale=scale,
        folder=result_dir,
        policies=tuple(policy or POLICIES),
        loads=tuple(load or LOADS),
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the gateway is stopped too
    try:
        asyncio.run(run_demo(plan, console, once=once))
    except GatewayError as error:
        raise SpecError(str(error)) from None
