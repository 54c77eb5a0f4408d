"""`kendall demo`."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from kendall.loadgen.commands.demo_plan import DemoPlan
from kendall.options import flag_option, with_options
from kendall.queueing.commands.shared_options import PolicyModules, use_policies
from kendall.queueing.commands.terminal import console

app = typer.Typer(add_completion=False)
FAILED, INTERRUPTED = 1, 130


@app.command("demo")
@with_options()
def demo_command(
    *,
    once: Annotated[
        bool,
        flag_option("", "Exit after the table instead of keeping the gateway running.", "--once"),
    ] = False,
    plan: DemoPlan,
    policy_module: PolicyModules = None,
) -> None:
    """Calibrate a real engine, load it under every policy, and put the model beside the requests
    that came.
    """
    use_policies(policy_module, *plan.policies)
    plan.check()
    if sys.stderr.isatty():
        sys.stderr.write("kendall demo: starting")  # the imports below take seconds
        sys.stderr.flush()
    try:
        from kendall.loadgen.commands.demo import run_demo  # noqa: PLC0415 - heavy
        from kendall.loadgen.gateway.gateway_process import free_port  # noqa: PLC0415

        plan = dataclasses.replace(plan, port=free_port(plan.asked_port))
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
    raise typer.Exit(asyncio.run(_status(plan, run_demo(plan, console(), once=once))))


async def _status(plan: DemoPlan, running: Coroutine[Any, Any, None]) -> int:
    """The exit status. Ctrl-C and SIGTERM end it: the gateway is stopped too."""
    from kendall.loadgen.gateway.gateway_process import GatewayError  # noqa: PLC0415 - heavy
    from kendall.loadgen.sending.operating_system import cancelled_by  # noqa: PLC0415

    with cancelled_by(signal.SIGINT, signal.SIGTERM):
        try:
            await running
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
