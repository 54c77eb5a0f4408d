"""The SLO bill of three public traces: attainment against cost, by rules that set the replicas.

    .venv/bin/python bench/slo_bill.py FOLDER

`FOLDER` has the traces of `TRACES` as their owners publish them (Azure/AzurePublicDataset and
kvcache-ai/Mooncake). Each is replayed whole by `kendall plan --trace`; writes
bench/results/slo-bill.json, and the table and the picture of docs/why/slo-bill.md. Two minutes on
one core; nothing but the seed and the traces decides the numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench.gateway_cost.page import put
from kendall.queueing.choosing.slo_bill import BillLine, SloBill, Terms
from kendall.queueing.commands.plan_picture import draw_bill

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/slo-bill.json"
PAGE = ROOT / "docs/why/slo-bill.md"
PICTURE = ROOT / "docs/slo-bill/attained-and-cost.png"
TRACES = {
    "Azure 2023, conversation": "azure-2023-conversation.csv",
    "Azure 2023, code": "azure-2023-code.csv",
    "Mooncake, conversation": "mooncake-conversation.jsonl",
}
# bench/results/gpu-law, LLaMA-7B on an H100, every time ten times as long
LAW = "k1=0,k2=0,k3=4.57e-4,k4=7.13e-2,kp=2.59e-4"
ARGUMENTS = {
    "--slo": "p99_queueing_delay<=2s",
    "--latency": LAW,
    "--max-num-seqs": "32",
    "--start-up": "60s",
    "--hpa-waiting": "1,5,16,250",
    "--seed": "0",
}


def planned(trace: Path) -> dict[str, Any]:
    """What `kendall plan` answers. Raises CalledProcessError."""
    given = [text for pair in ARGUMENTS.items() for text in pair]
    command = [sys.executable, "-m", "kendall", "plan", "--trace", str(trace), *given, "--json"]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(found.stdout)
    return told


def bill_of(told: Mapping[str, Any]) -> SloBill:
    """The bill in an answer."""
    bill = told["bill"]
    lines = [BillLine(**line) for line in bill["lines"]]
    terms = Terms(start_up=bill["start_up"], seed=bill["seed"])
    return SloBill(slo=bill["slo"], requests=bill["requests"], terms=terms, lines=lines)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Every bill in one table."""
    rows = [
        "| trace | rule | attained | cost | replicas: fewest, mean, most |",
        "|---|---|--:|--:|---|",
    ]
    for name, told in results.items():
        bill = bill_of(told)
        for line in bill.lines:
            of = f"{name}, {bill.requests:,} requests" if line is bill.lines[0] else ""
            attained = f"{line.attained:.2%}" if line.kept else f"*{line.attained:.2%}*"
            rows.append(
                f"| {of} | {line.rule} | {attained} | {line.cost:.1%} | "
                f"{line.fewest}, {line.mean:.2f}, {line.most} |"
            )
        load = told["best"]["load"]
        rows.append(f"| | *work alone, every slot always busy* | | {load:.1%} | |")
    shown = " ".join(f'{flag} "{text}"' for flag, text in ARGUMENTS.items())
    command = f"    kendall plan --trace azure-2023-code.csv {shown}"
    return "\n".join([*rows, "", "One of them:", "", command])


def draw(results: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel for each trace."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(15, 4.6), layout="constrained")
    for axis, (name, told) in zip(axes, results.items(), strict=True):
        draw_bill(axis, bill_of(told))
        axis.axhline(99, color="#16191d", linestyle=":", linewidth=1)
        axis.axvline(74, color="#16191d", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=11)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Every trace, then the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the traces lie")
    folder = parser.parse_args().folder
    if missing := [name for name in TRACES.values() if not (folder / name).is_file()]:
        sys.exit(f"got {folder} without {', '.join(missing)}; expected the three public traces")
    results = {name: planned(folder / file) for name, file in TRACES.items()}
    RESULTS.write_text(json.dumps({"arguments": ARGUMENTS, "traces": results}, indent=1) + "\n")
    put(table(results), PAGE, "slo-bill")
    draw(results)


if __name__ == "__main__":
    main()
