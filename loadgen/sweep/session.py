"""A sweep as the command runs it: signals, progress, the report at the end whatever happened,
the exit status.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kendall.loadgen.gateway.gateway_process import GatewayError, KeyRefusedError
from kendall.loadgen.report.conditions import broken, parse_conditions
from kendall.loadgen.sending.client.target import NO_KEYS, Keys
from kendall.loadgen.sending.operating_system import cancelled_by
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.report.report import as_json, print_results, write_results
from kendall.loadgen.sweep.report.report_data import of_sweep
from kendall.loadgen.sweep.report.results import Results, results_of
from kendall.loadgen.sweep.rig import Rig, given_server
from kendall.loadgen.sweep.run import Sweep
from kendall.loadgen.sweep.search import search_all
from kendall.loadgen.sweep.status import Status
from kendall.loadgen.sweep.store import Store
from kendall.queueing.commands.terminal import console, say

DONE, FAILED, CHECK_FAILED, INTERRUPTED = 0, 1, 3, 130


async def run_session(
    plan: SweepPlan,
    folder: Path,
    port: int,
    assertions: Sequence[str],
    keys: Keys = NO_KEYS,
    *,
    json: bool,
) -> int:
    """Measure what is left of the plan, report what there is; the exit status.

    Raises GatewayError where no cell was measured or a key is refused.
    """
    conditions = parse_conditions(assertions)
    gateway = given_server(plan, keys)
    if gateway is not None and not (folder / "plan.json").exists():
        try:  # before anything is written
            await gateway.start()
        finally:
            await gateway.stop()
    loop = asyncio.get_running_loop()
    store = Store.open(folder, plan)
    async with Status(sys.stderr) as status:
        rig = Rig.of(plan, store, status, port, keys)
        ended = await _measure(Sweep(plan, store, status, rig))
        if ended.interrupted and store.is_unmeasured():
            store.journal.close()
            _say(
                "interrupted before a cell was measured; the same command, or another "
                f"plan in {folder}/, starts anew"
            )
            return INTERRUPTED

        def on_cell(number: int, count: int) -> None:
            loop.call_soon_threadsafe(status.phase, f"setting cell {number}/{count} beside theory")

        status.left_after = 0.0
        results = await asyncio.to_thread(results_of, folder, on_cell)
        status.phase("writing the report")
        data = await asyncio.to_thread(of_sweep, folder, results)
        written = await asyncio.to_thread(write_results, store, results, data)
    store.journal.close()
    _print(results, written, ended, json=json)
    if ended.interrupted:
        return INTERRUPTED
    something = results.comparisons or results.searches or results.of("unstable")
    if ended.error or not something or results.of("missing") or results.missing_searches:
        return FAILED
    not_held = broken(conditions, data)
    for line in not_held:
        _say(line)
    return CHECK_FAILED if not_held else DONE


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the measuring ended, where not by itself."""

    error: str | None = None
    interrupted: bool = False


async def _measure(sweep: Sweep) -> _Ended:
    """Raises GatewayError where no cell was measured or a key is refused."""
    with cancelled_by(signal.SIGINT, signal.SIGTERM):
        try:
            await sweep.run(search_all)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return _Ended(interrupted=True)
        except GatewayError as lost:
            if sweep.store.is_unmeasured() or isinstance(lost, KeyRefusedError):
                sweep.store.journal.close()
                raise
            return _Ended(error=str(lost))
    return _Ended()


def _print(results: Results, written: Sequence[Path], ended: _Ended, *, json: bool) -> None:
    if ended.error:
        _say(ended.error)
    missing = results.of("missing") or results.missing_searches
    if ended.interrupted or missing:
        _say(
            f"`kendall sweep --resume {shlex.quote(str(results.folder))}` measures what is missing"
        )
    if json:
        sys.stdout.write(
            msgspec.json.encode(as_json(results, written), enc_hook=float).decode() + "\n"
        )
        return
    if ended.error and not (results.comparisons or results.searches or results.of("unstable")):
        return  # nothing was measured: an empty table and its files say nothing
    to = console()
    print_results(results, to)
    say(to, f"written to {results.folder}/: {', '.join(path.name for path in written)}")


def _say(line: str) -> None:
    sys.stderr.write(f"kendall: {line}\n")
