"""Is the live prediction right on a real engine? Six policies at four loads, unattended, one file
per cell, then a page.

Starts a gateway with the tiny model, calibrates the law's shape once, and sends every policy
stationary Poisson load until the mean delay is known to 7 % or the cell's share of the time is
over. What the gateway itself predicted while it served is set beside what its records say of the
same window. The machine should be quiet: no compiler, no browser, no other analysis.

    .venv/bin/python bench/live_validation.py [FLAGS]

    no flags                                 all 24 cells, 90 minutes, then docs/live-validation.md
    --max-seconds 500                        a piece; the next command goes on:
    --resume --max-seconds 500
    --resume --longer                        then two longer cells at loads 0.75 and 0.9
    --page                                   the page anew from the files, nothing is measured
    --design production                      continuous with 32 and 64 slots, prompts of 32 to
                                             1,024 tokens; docs/production-validation.md
    --design memory                          the same where KV memory is what requests wait for;
                                             docs/memory-validation.md
    --fast --cells dynamic --max-seconds 60  an emulated engine
    --folder runs/try

Exit status: 0 all cells of the plan are there; 1 the gateway could not go on; 2 wrong arguments; 3
cells are left; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
DONE, FAILED, WRONG, LEFT, INTERRUPTED = 0, 1, 2, 3, 130


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--design",
        choices=("table", "production", "memory"),
        default="table",
        help="six policies at four loads, or continuous batching as it is run in production, with "
        "enough KV memory or with little",
    )
    found.add_argument(
        "--folder",
        type=Path,
        help="where everything is kept (runs/live-validation, runs/production-validation, ...)",
    )
    found.add_argument("--resume", action="store_true", help="go on in a folder that has results")
    found.add_argument(
        "--total-seconds",
        type=float,
        default=5400.0,
        help="of all cells together: what each may take follows from it",
    )
    found.add_argument(
        "--max-seconds",
        type=float,
        default=7200.0,
        help="of this session; cells that are left wait for another",
    )
    found.add_argument(
        "--cells", help="comma-separated parts of names, for example single,load0.75"
    )
    found.add_argument("--loads", help="comma-separated, for example 0.3,0.5")
    found.add_argument(
        "--longer",
        action="store_true",
        help="two cells at loads 0.75 and 0.9, as long as the run-length rule advises",
    )
    found.add_argument(
        "--fast",
        action="store_true",
        help="an emulated engine and cells of seconds: tries the script, shows nothing",
    )
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--port", type=int, default=8093)
    found.add_argument(
        "--page", action="store_true", help="write the page from the folder's files and end"
    )
    found.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="where the page and its data go"
    )
    return found


async def measure(options: argparse.Namespace) -> int:
    """Measure what is left; the exit status."""
    from bench.live.design import (
        DESIGNS,
        FAST,
        MEMORY_RULES,
        PRODUCTION_RULES,
        QUIET_MACHINE,
        chosen,
        gateway_arguments,
        plan_of,
        points,
    )
    from bench.live.session import Session
    from loadgen.gateway.gateway_process import GatewayError
    from loadgen.sending.operating_system import cancelled_by
    from loadgen.sweep.gateway import OwnGateway
    from loadgen.sweep.rig import Rig
    from loadgen.sweep.status import Status
    from loadgen.sweep.store import Store

    designed = {"production": PRODUCTION_RULES, "memory": MEMORY_RULES}
    quiet = designed.get(options.design, QUIET_MACHINE)
    rules, design = FAST if options.fast else quiet, DESIGNS[options.design]
    plan = plan_of(rules, options.seed, design, fast=options.fast)
    every = [point for point in points(plan, design) if point.longer == options.longer]
    wanted = chosen(every, options.cells, options.loads)
    if options.folder.joinpath("cells").exists() and not options.resume:
        raise ValueError(
            f"got --folder {options.folder}, which has results; expected --resume to go on there, "
            "or an empty folder"
        )
    store = Store.open(options.folder, plan)
    try:
        async with Status(sys.stderr) as status:
            gateway = OwnGateway(
                plan,
                options.folder,
                options.port,
                gateway_arguments(rules, design, fast=options.fast),
            )
            apparatus = Rig(plan, store, status, gateway, repeats=rules.repeats)
            with cancelled_by(signal.SIGINT, signal.SIGTERM):
                whole = await Session(
                    apparatus, rules, every, wanted, options.max_seconds, options.total_seconds
                ).run()
    except GatewayError as lost:
        print(f"live_validation: {lost}", file=sys.stderr)
        return FAILED
    finally:
        store.journal.close()
    return DONE if whole else LEFT


def write(options: argparse.Namespace) -> None:
    """The page, its data and its picture, from the cells that there are."""
    from bench.live.page import write_page
    from bench.live.production_page import write_production_page

    if any(options.folder.joinpath("cells").glob("*.json")):
        if options.design == "table":
            print(write_page(options.folder, options.docs))
        else:
            print(write_production_page(options.folder, options.docs, options.design))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write; the exit status."""
    from policies.text import SpecError

    options = parser().parse_args(arguments)
    if options.folder is None:
        name = "live" if options.design == "table" else options.design
        name += "-validation"
        options.folder = ROOT / "runs" / name
    if options.fast and options.docs == ROOT / "docs":
        options.docs = options.folder
    try:
        status = DONE if options.page else asyncio.run(measure(options))
    except (SpecError, ValueError) as error:
        print(f"live_validation: {error}", file=sys.stderr)
        return WRONG
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = INTERRUPTED
    write(options)
    if status in (LEFT, INTERRUPTED):
        print(
            f"live_validation: cells are left; `--resume --folder {options.folder}` goes on with "
            "them",
            file=sys.stderr,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
