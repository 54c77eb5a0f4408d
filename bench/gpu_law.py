"""The law of a 7-billion-weight Llama on a GPU: measured with a plain PyTorch decode loop and
static batches, then fitted.

Two commands, on two machines if need be. The first needs python3, PyTorch (2.4 or newer) and NumPy,
and no network: the weights
are random. It ends within its budget, whatever was measured by then, and writes every batch to
OUTPUT/NAME.jsonl as it comes:

    python3 bench/gpu_law.py --device cuda --name llama-7b-h100 --output runs/gpu-law

The second needs this project's environment and no GPU; it writes OUTPUT/NAME.json, a profile that
--latency reads, and
OUTPUT/NAME.md, the tables. Several raw files of one machine are taken together:

    .venv/bin/python bench/gpu_law.py --fit runs/gpu-law/llama-7b-h100.jsonl --name llama-7b-h100
    --output runs/gpu-law

Without a GPU and without --device it says so and measures nothing; `--model tiny --device cpu`
tries it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the measuring machine has only the files

from bench.gpu.design import PRESETS, Shape, cells_of, fitting, longest

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
NUMBER_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def numbers(text: str) -> list[int]:
    """`1,2,4`. Raises ValueError, which argparse reports."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1 or len(set(values)) < len(values):
        raise ValueError(text)
    return values


def parser() -> argparse.ArgumentParser:
    """The options; those of the shape override the preset's."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--fit",
        nargs="+",
        type=Path,
        metavar="RAW",
        help="fit these raw files instead of measuring",
    )
    options.add_argument("--name", default="gpu-law", help="of the files and of the profile")
    options.add_argument("--output", type=Path, default=Path("runs/gpu-law"), help="folder")
    options.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: the GPU, or nothing",
    )
    options.add_argument(
        "--model", choices=tuple(PRESETS), default="llama-7b", help="shape of the model"
    )
    for field in fields(Shape):
        options.add_argument(
            f"--{field.name}", type=int, help="of the model, instead of the preset's"
        )
    options.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    options.add_argument("--batch-sizes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    options.add_argument(
        "--prompt-tokens",
        type=numbers,
        default=[128, 32, 512],
        help="the first with every output length",
    )
    options.add_argument("--output-tokens", type=numbers, default=[16, 64, 256, 1024])
    options.add_argument(
        "--repeats", type=int, default=5, help="rounds over all cells; six or more if time is left"
    )
    options.add_argument(
        "--budget-seconds", type=float, default=540.0, help="no batch is begun that would end later"
    )
    options.add_argument(
        "--eager",
        action="store_true",
        help="launch every kernel of a step from Python, without CUDA graphs",
    )
    options.add_argument(
        "--seed", type=int, default=1, help="of the order, the weights and the prompts"
    )
    return options


def shape_of(options: argparse.Namespace) -> Shape:
    """The preset with what was given instead."""
    given = {
        field.name: getattr(options, field.name)
        for field in fields(Shape)
        if getattr(options, field.name) is not None
    }
    return replace(PRESETS[options.model], **given)


def lacking() -> list[str]:
    """The packages that measuring needs and this machine does not have."""
    return [
        f"the package {name}"
        for name in ("torch", "numpy")
        if importlib.util.find_spec(name) is None
    ]


def choose_device(asked: str) -> str | None:
    """cuda or cpu; None where there is no GPU."""
    import torch

    if asked == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def measure_all(options: argparse.Namespace, device: str, began: float) -> int:
    """Measure into OUTPUT/NAME.jsonl; the exit code."""
    from bench.gpu.device import energy_counter, free_memory, machine, now, versions
    from bench.gpu.measure import Bench, line_writer

    sizes = sizes_that_fit(options, free_memory(device))
    if not sizes:
        return refuse(
            f"got {free_memory(device) / 1e9:.0f} GB of free device memory; expected room for the "
            "weights and one sequence"
        )
    cells = cells_of(sizes, options.prompt_tokens, options.output_tokens)
    joules, facts = energy_counter(device)
    graphs = device != "cpu" and not options.eager
    header = configuration(options, sizes) | {
        "cuda_graphs": graphs,
        "machine": machine(device) | facts,
        "versions": versions(),
        "date": now(),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.name}.jsonl"
    with path.open("w") as file:
        write = line_writer(file)
        write(header)
        bench = Bench(
            shape_of(options),
            cells,
            device=device,
            dtype=DTYPES[options.dtype],
            seed=options.seed,
            graphs=graphs,
        )
        until = began + options.budget_seconds
        served = bench.measure(
            cells,
            repeats=options.repeats,
            seed=options.seed,
            until=until,
            joules=joules,
            write=write,
        )
    print(
        f"{served} of {options.repeats * len(cells)} batches in {perf_counter() - began:.0f} s: "
        f"{path}"
    )
    return 0


def sizes_that_fit(options: argparse.Namespace, memory: float) -> list[int]:
    """The batch sizes that `memory` bytes hold; those left out are named."""
    tokens = longest(cells_of([1], options.prompt_tokens, options.output_tokens))
    sizes = fitting(
        options.batch_sizes, shape_of(options), tokens, NUMBER_BYTES[options.dtype], memory
    )
    left_out = sorted(set(options.batch_sizes) - set(sizes))
    if left_out:
        print(
            "left out, since weights and cache would fill more than 0.9 of the memory: b = "
            f"{', '.join(map(str, left_out))}"
        )
    return sizes


def configuration(options: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    """The header's part that the options determine, with the batch sizes that fit."""
    shape, names = (
        shape_of(options),
        ("seed", "prompt_tokens", "output_tokens", "repeats", "budget_seconds"),
    )
    model = options.model if shape == PRESETS[options.model] else f"changed {options.model}"
    asked = {name: getattr(options, name) for name in names}
    return {
        "model": model,
        "shape": asdict(shape),
        "dtype": DTYPES[options.dtype],
        "batch_sizes": sizes,
    } | asked


def fit_all(options: argparse.Namespace) -> int:
    """Fit raw files into OUTPUT/NAME.json and NAME.md; the exit code."""
    from bench.gpu.fit import read_runs
    from bench.gpu.report import report
    from kendall.policies.text import SpecError

    try:
        run = read_runs(options.fit)
        fit = run.padded_law()
        text = report(run, fit)
    except SpecError as error:
        return refuse(str(error))
    run.profile(fit, options.name).save(options.output / f"{options.name}.json")
    (options.output / f"{options.name}.md").write_text(text)
    print(text)
    return 0


def refuse(reason: str) -> int:
    """Say it in one line; the exit code of a wrong argument."""
    print(reason, file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, or measure where there is a device."""
    began, options = perf_counter(), parser().parse_args(arguments)
    if options.fit:
        return fit_all(options)
    reasons = lacking()
    device = None if reasons else choose_device(options.device)
    if device is None:
        print(
            "nothing measured: this machine lacks "
            f"{', '.join(reasons) or 'a CUDA device that PyTorch sees'}",
            file=sys.stderr,
        )
        return 0 if options.device == "auto" else 1  # `make bench` goes on without a GPU
    return measure_all(options, device, began)


if __name__ == "__main__":
    sys.exit(main())
