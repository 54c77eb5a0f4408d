"""What `kendall demo` measures: its options, the cells that follow from them, and what is known of
each model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kendall.options import option
from kendall.policies import SpecError, parse_policy
from kendall.policies.text import suggest
from kendall.queueing.measurement.paths import folder_to_write

ENGINES = ("auto", "vllm", "emulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The cells that the demo measures of one model, and its lengths."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seconds: float  # of a cell, about
    count: int | None = None  # requests of a cell; None: what comes in its seconds
    output_tokens: (
        str  # forced; of prompts that the model answers: what their answers are taken for
    )
    prompt_tokens: str
    prompts: str | None = None  # a file of loadgen/prompts, answered at natural lengths
    max_output_tokens: int
    max_num_seqs: int
    calibration: Mapping[str, Any]
    calibrating: float  # seconds, about
    starting: float


WORKLOADS = {
    "tiny": Workload(
        policies=(
            "single",
            "dynamic",
            "fixed:batch_size=4",
            "capped:max_batch_size=8",
            "elastic:max_batch_size=8",
            "continuous:max_batch_size=4",
        ),
        # on a shared machine the engine is slower under load than when it is calibrated, and the
        # queue busier
        loads=(0.3, 0.5),
        seconds=12.0,  # the pairs need no steady state
        output_tokens="uniform:low=6,high=18",
        prompt_tokens="deterministic:value=32",
        max_output_tokens=32,
        max_num_seqs=16,
        calibration={"max_output_tokens": 32, "prompt_tokens": 32, "repeats": 5},
        calibrating=15.0,
        starting=20.0,
    ),
    "smollm2": Workload(
        policies=(
            "capped:max_batch_size=8",
            "elastic:max_batch_size=8",
            "continuous:max_batch_size=8",
        ),
        loads=(0.4,),
        seconds=60.0,
        count=40,
        # its answers to these prompts, cut at 64: mean 42, 38 % of them cut (120 answers, bfloat16,
        # 2 cores, November 2026); their prompts 34 to 102 tokens, mean 46
        output_tokens="uniform:low=4,high=96",
        prompt_tokens="uniform:low=36,high=56",
        prompts="smollm2.jsonl",
        max_output_tokens=64,
        max_num_seqs=8,
        calibration={"max_output_tokens": 64, "prompt_tokens": 46, "repeats": 2},
        calibrating=75.0,
        starting=60.0,
    ),
}
BETWEEN_CELLS = 2.5  # seconds, about


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The cells of a demo."""

    model: str = option(
        "",
        (
            "Model to measure: tiny (random weights, forced lengths; 4 minutes) | smollm2 (answers "
            "questions at its own lengths; 4 to 6 minutes)."
        ),
        default="tiny",
    )
    engine: str = option(
        "",
        "Engine to measure: auto (vllm if installed, else emulated) | vllm | emulated.",
        default="auto",
    )
    asked_port: int = option(
        "",
        "Port of the gateway; another one if it is in use.",
        "--port",
        default=8080,
        min=1,
        max=65535,
    )
    port: int = 8080  # another one where that is in use
    seed: int = option("", "Seed for arrivals and lengths.", default=1, min=0)
    scale: float = option(
        "", "Factor applied to the measuring time of every cell.", default=1.0, min=0.01, max=100
    )
    policies: tuple[str, ...] = option(
        "",
        "Policy to measure; repeatable. Default: all six, of smollm2 three.",
        "--policy",
        default=(),
    )
    loads: tuple[float, ...] = option(
        "",
        (
            "Load to measure, as a fraction of the policy's largest stable rate; repeatable. "
            "Default: 0.3 and 0.5, of smollm2 0.4."
        ),
        "--load",
        default=(),
    )
    folder: Path = option(
        "",
        "Folder for run files and the plot.",
        "--output",
        "--result-dir",
        default=Path("runs/demo"),
        parser=folder_to_write,
    )

    def __post_init__(self) -> None:
        for name in ("policies", "loads"):
            if not getattr(self, name):
                object.__setattr__(self, name, getattr(self.workload, name))

    def check(self) -> None:
        """Raises SpecError where the cells cannot be measured; policies of modules are known by
        then.
        """
        if self.engine not in ENGINES:
            raise SpecError(f"got --engine {self.engine!r}; expected one of {', '.join(ENGINES)}")
        for load in self.loads:
            if not 0 < load < 1:
                raise SpecError(
                    f"got --load {load:g}; expected a fraction of the largest stable rate, above "
                    "0 and below 1"
                )
        for policy in self.policies:
            parse_policy(policy)
        if self.folder.exists() and not self.folder.is_dir():
            raise SpecError(f"got --output {self.folder}, which is a file; expected a folder")

    @property
    def workload(self) -> Workload:
        """The workload of the model. Raises SpecError."""
        if self.model not in WORKLOADS:
            raise SpecError(
                f"got --model {self.model!r}; expected one of {', '.join(WORKLOADS)}"
                f"{suggest(self.model, tuple(WORKLOADS))}"
            )
        return WORKLOADS[self.model]

    @property
    def serve_arguments(self) -> list[str]:
        """The arguments of `kendall serve`, but for the port."""
        return [
            self.model,
            *("--engine", self.engine),
            "--allow-forced-lengths",
            *("--max-output-tokens", str(self.workload.max_output_tokens)),
            *("--max-num-queued-reqs", "0"),  # the theory's queue has no bound
            *("--max-num-seqs", str(self.workload.max_num_seqs)),
            *("--record-file", str(self.folder / "gateway.jsonl")),
            *("--served-model-name", self.model),
        ]

    @property
    def cells(self) -> list[tuple[float, str]]:
        """Loads and policies in the order of measurement."""
        return [(load, policy) for load in self.loads for policy in self.policies]

    def name(self, load: float, policy: str) -> str:
        """The stem of a cell's files: the policy's parameters only where its name is not enough."""
        names = Counter(each.partition(":")[0] for each in self.policies)
        short = policy.partition(":")[0]
        return (
            f"{load:g}-"
            f"{short if names[short] == 1 else policy.translate(str.maketrans(':,=', '---'))}"
        )

    @property
    def seconds(self) -> float:
        """How long load is sent in a cell."""
        return self.workload.seconds * self.scale

    def count(self, rate: float, batch_size: int) -> int:
        """Requests of a cell, in whole batches."""
        asked = self.workload.count
        wanted = rate * self.seconds if asked is None else asked * self.scale
        return batch_size * max(1, round(wanted / batch_size))

    @property
    def lasts(self) -> float:
        """About how long all of it takes, seconds."""
        before = self.workload.starting + self.workload.calibrating
        return before + len(self.cells) * (self.seconds + BETWEEN_CELLS)
