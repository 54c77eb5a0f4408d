"""Does shortest-first pay on a real engine as predicted? Orders of service with predicted lengths
on a few slots and on many, unattended, one file per cell, then a page.

Starts a gateway with the tiny model, calibrates the law, and sends first come, first served,
shortest first (plain and with aging), and two preemptive orders the same arrivals, lengths and
predictions, round after round in random order. The machine should be quiet: no compiler, no
browser, no other analysis. About half an hour; the same command goes on where it was cut.

    .venv/bin/python bench/orders.py [FLAGS]

    no flags                          everything, then docs/orders-measured.md and its data
    --requests 4000 --rounds 3        counted requests of each order in a round; rounds
    --page                            the page anew from the files, nothing is measured
    --folder runs/orders              where the files are kept
    --output docs                     where the page and its data go
    --fast --requests 300 --rounds 1 --output /tmp/try    an emulated engine: tries the script

Exit status: 0 measured, and ratios and ranks are as predicted; 1 the gateway could not go on; 2
wrong arguments; 3 measured, and a ratio or a rank is not as predicted; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.ordering.design import Part

ROOT = Path(__file__).parents[1]
DONE, FAILED, WRONG, NOT_AS_PREDICTED, INTERRUPTED = 0, 1, 2, 3, 130


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--requests", type=int, default=4000, help="counted, of each order in a round"
    )
    found.add_argument("--rounds", type=int, default=3, help="on four slots; on many slots one")
    found.add_argument("--folder", type=Path, default=ROOT / "runs/orders")
    found.add_argument("--output", type=Path, default=ROOT / "docs")
    found.add_argument("--part", choices=("slots4", "slots64"), help="only this one")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--port", type=int, default=8094)
    found.add_argument("--fast", action="store_true", help="an emulated engine")
    found.add_argument("--page", action="store_true", help="measure nothing")
    return found


def parts_of(options: argparse.Namespace) -> list[Part]:
    """What is measured. Raises ValueError."""
    from bench.ordering.design import FEW, MANY

    if options.requests < 100 or options.rounds < 1:
        raise ValueError(
            f"got --requests {options.requests} --rounds {options.rounds}; expected at least 100 "
            "requests and one round"
        )
    few = dataclasses.replace(FEW, requests=options.requests, rounds=options.rounds)
    parts = [few, dataclasses.replace(MANY, requests=options.requests)]
    return [part for part in parts if options.part in (None, part.name)]


async def measure(options: argparse.Namespace, parts: Sequence[Part]) -> None:
    """What has no file yet. Raises GatewayError."""
    from bench.ordering.design import FAST, QUIET_MACHINE, gateway_arguments, plan_of
    from bench.ordering.session import Session
    from loadgen.sending.operating_system import cancelled_by
    from loadgen.sweep.gateway import OwnGateway
    from loadgen.sweep.rig import Rig
    from loadgen.sweep.status import Status
    from loadgen.sweep.store import Store

    rules = FAST if options.fast else QUIET_MACHINE
    async with Status(sys.stderr, 10.0) as status:
        for part in parts:
            plan, folder = (
                plan_of(part, options.seed, fast=options.fast),
                options.folder / part.name,
            )
            store = Store.open(folder, plan)
            flags = gateway_arguments(fast=options.fast)
            rig = Rig(
                plan,
                store,
                status,
                OwnGateway(plan, folder, options.port, flags),
                repeats=2 if options.fast else part.repeats,
            )
            try:
                with cancelled_by(signal.SIGINT, signal.SIGTERM):
                    await Session(rig, part, rules).run()
            finally:
                store.journal.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge, write; the exit status."""
    from bench.ordering.report import write_report
    from loadgen.gateway.gateway_process import GatewayError
    from policies.text import SpecError

    options = parser().parse_args(arguments)
    try:
        parts = parts_of(options)
        if not options.page:
            asyncio.run(measure(options, parts))
        page, holds = write_report(options.folder, options.output, [part.name for part in parts])
    except GatewayError as lost:
        print(f"orders: {lost}", file=sys.stderr)
        return FAILED
    except (SpecError, ValueError) as error:
        print(f"orders: {error}", file=sys.stderr)
        return WRONG
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("orders: the same command goes on with what is left", file=sys.stderr)
        return INTERRUPTED
    print(page)
    return DONE if holds else NOT_AS_PREDICTED


if __name__ == "__main__":
    sys.exit(main())
