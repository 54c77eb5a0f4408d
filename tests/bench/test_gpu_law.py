"""The GPU bench on the processor: the decoder is transformers' Llama, the fit finds a law that
is known, the command runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu.design import PRESETS, Cell, Shape, cells_of, fitting
from bench.gpu.fit import RawRun, read_runs, window_steps
from bench.gpu.report import measured_alone, report
from kendall.policies.text import SpecError
from kendall.queueing.latency.profile import load_law
from tests.support import missing

ROOT = Path(__file__).parents[2]
TINY = PRESETS["tiny"]
K1, K2, KP, K3, K4 = 2e-3, 5e-3, 3e-5, 2e-4, 8e-3
BETA, C0 = 30.0, 900.0
CELLS = cells_of([1, 2, 4, 8, 16, 32, 64], [128, 32, 512], [16, 64, 256, 1024])


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            missing(package, "it comes with vLLM: `make setup`")


# --- the design ---


def test_the_preset_has_the_published_number_of_weights() -> None:
    assert PRESETS["llama-7b"].parameters == 6_738_415_616
    assert PRESETS["llama-7b"].cached_per_token * 2 == 524_288  # bytes in 16 bits


def test_the_default_cells_fit_an_80_gb_device_and_not_a_40_gb_one() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert fitting(sizes, PRESETS["llama-7b"], 1152, 2, 84e9) == sizes
    assert fitting(sizes, PRESETS["llama-7b"], 1152, 2, 40e9) == sizes[:-1]
    assert fitting(sizes, PRESETS["llama-7b"], 1152, 2, 12e9) == []


# --- the fit, on batches of a known law ---


def written(
    path: Path, *, growth: float = 0.0, noise: float = 0.0, rounds: int = 5, **changes: Any
) -> Path:
    """A raw file of the law above, a step growing by `growth` seconds per member and token of
    context.
    """
    header = {
        "model": "llama-7b",
        "shape": asdict(PRESETS["llama-7b"]),
        "dtype": "bfloat16",
        "prompt_tokens": [128, 32, 512],
    }
    header |= {
        "machine": {"device": "none"},
        "versions": {"torch": "0"},
        "date": "2026-01-01T00:00:00+00:00",
        "seed": 1,
    } | changes
    rng, lines = np.random.default_rng(2), [header]
    for turn in range(rounds):
        for cell in CELLS:
            lines.append(
                asdict(cell)
                | {
                    "round": turn,
                    "at": 0.0,
                    "joules": BETA * cell.batch_size + C0,
                    "ends": ends(cell, growth),
                }
            )
            lines[-1]["ends"] = (
                np.array(lines[-1]["ends"]) * (1 + noise * rng.standard_normal())
            ).tolist()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ends(cell: Cell, growth: float) -> list[float]:
    b, prompt = cell.batch_size, cell.prompt_tokens
    contexts = prompt + np.arange(1, cell.output_tokens)
    steps = K3 * b + K4 + growth * b * contexts
    first = K1 * b + K2 + KP * b * prompt + K3 * b + K4  # l counts the token of the prefill
    return [first, *(first + np.cumsum(steps)).tolist()]


@pytest.fixture
def exact(tmp_path: Path) -> RawRun:
    return read_runs([written(tmp_path / "exact.jsonl")])


def test_the_law_is_found_where_batches_obey_it(exact: RawRun) -> None:
    fit = exact.padded_law()
    assert (fit.law.k1, fit.law.k2, fit.law.kp, fit.law.k3, fit.law.k4) == pytest.approx(
        (K1, K2, KP, K3, K4), rel=1e-6
    )
    assert fit.law.cv < 1e-9
    assert exact.repeat_cv() < 1e-12
    assert exact.round_speeds() == pytest.approx([1.0] * 5)


def test_the_growth_of_the_step_is_found_and_the_law_errs_by_it_at_both_ends(
    tmp_path: Path,
) -> None:
    growth = 2e-7
    run = read_runs([written(tmp_path / "grown.jsonl", growth=growth)])
    assert run.step_growth().coefficients == pytest.approx(
        {"k3": K3, "k4": K4, "g": growth}, rel=1e-6
    )
    for cell, seconds in run.grown_law().items():
        assert seconds == pytest.approx(ends(cell, growth)[-1], rel=1e-9)
    law = run.padded_law().law
    steps, contexts = window_steps(run.longest_outputs()[64])
    assert contexts[0] < contexts[-1]
    assert (
        steps[0] < law.step(64) < steps[-1]
    )  # overrates the first steps, underrates the last ones
    assert run.padded_law().mape > 0.01


def test_scatter_is_told_from_misfit(tmp_path: Path) -> None:
    run = read_runs([written(tmp_path / "noisy.jsonl", growth=2e-7, noise=0.01, rounds=20)])
    assert run.repeat_cv() == pytest.approx(0.01, rel=0.1)
    assert run.padded_law().law.cv > 2 * run.repeat_cv()


def test_the_energy_of_a_batch_is_found_and_is_null_where_it_was_not_read(
    exact: RawRun, tmp_path: Path
) -> None:
    fit = exact.batch_energy()
    assert fit is not None
    assert (fit.law.beta, fit.law.c0) == pytest.approx((BETA, C0), rel=1e-9)
    dark = tmp_path / "dark.jsonl"
    dark.write_text(
        (tmp_path / "exact.jsonl").read_text().replace(f'"joules": {BETA + C0}', '"joules": null')
    )
    assert read_runs([dark]).batch_energy() is None


def test_the_profile_is_read_by_its_path_and_holds_every_batch(
    exact: RawRun, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    profile = exact.profile(exact.padded_law(), "found")
    profile.save(path)
    assert load_law(str(path)).padded(8, 256, 8 * 128) == pytest.approx(
        ends(Cell(8, 128, 256), 0)[-1], rel=1e-6
    )
    assert len(profile.cells) == 5 * len(CELLS)
    assert profile.cells[0]["prefill"] < profile.cells[0]["service_time"]
    assert (profile.max_num_seqs, profile.prompt_tokens, profile.max_output_tokens) == (
        64,
        128,
        1024,
    )


def test_the_paper_is_compared_with_what_was_measured_alone(exact: RawRun) -> None:
    assert measured_alone(exact, 128, 512) == pytest.approx(
        ends(Cell(1, 128, 512), 0)[-1]
    )  # within outputs of 1024
    assert measured_alone(exact, 64, 512) is None
    text = report(exact, exact.padded_law())
    assert "| 128 | 1024 | 23.47 |" in text
    assert f"{ends(Cell(1, 128, 1024), 0)[-1]:.3f}" in text
    assert "| 64 | 512 | 12.18 | not measured |" in text


def test_runs_of_one_machine_are_taken_together_and_others_refused(
    exact: RawRun, tmp_path: Path
) -> None:
    again = written(tmp_path / "again.jsonl", seed=2, rounds=2)
    both = read_runs([tmp_path / "exact.jsonl", again])
    assert len(both.batches) == 7 * len(CELLS)
    assert len(both.round_speeds()) == 7
    other = written(tmp_path / "other.jsonl", machine={"device": "another"})
    with pytest.raises(SpecError, match="different machine"):
        read_runs([again, other])


def test_a_killed_run_keeps_its_whole_lines_and_no_run_at_all_is_refused(
    exact: RawRun, tmp_path: Path
) -> None:
    text = (tmp_path / "exact.jsonl").read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[:-20])
    assert len(read_runs([cut]).batches) == len(exact.batches) - 1
    cut.write_text(text.partition("\n")[0] + "\n")
    with pytest.raises(SpecError, match="no batches"):
        read_runs([cut])
    cut.write_text("neither\n")
    with pytest.raises(SpecError, match="expected a raw file"):
        read_runs([cut])


# --- the decoder and the measurement ---


def llama_of(shape: Shape) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    configuration = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        rms_norm_eps=1e-6,
        initializer_range=0.3,  # so large that every part matters to the logits
    )
    return LlamaForCausalLM(configuration).eval()


def weights_of(theirs: Any) -> dict[str, Any]:
    """Their weights by our names."""
    import torch

    state = theirs.state_dict()
    found = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    for index in range(theirs.config.num_hidden_layers):
        part = {
            key.removeprefix(f"model.layers.{index}."): value
            for key, value in state.items()
            if f"layers.{index}." in key
        }
        projections = [part[f"self_attn.{letter}_proj.weight"] for letter in "qkv"]
        found |= {
            f"layers.{index}.attention_norm": part["input_layernorm.weight"],
            f"layers.{index}.qkv.weight": torch.cat(projections),
            f"layers.{index}.out.weight": part["self_attn.o_proj.weight"],
            f"layers.{index}.ffn_norm": part["post_attention_layernorm.weight"],
            f"layers.{index}.gate_up.weight": torch.cat(
                [part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]
            ),
            f"layers.{index}.down.weight": part["mlp.down_proj.weight"],
        }
    return found


@pytest.mark.slow  # importing transformers
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # inside transformers and what it imports
def test_the_decoder_is_transformers_llama_and_its_cache_remembers_no_earlier_batch() -> None:
    need("torch", "transformers")
    import torch

    from bench.gpu.decoder import Cache, Decoder

    theirs, ours = llama_of(TINY), Decoder(TINY, 32)
    ours.load_state_dict(weights_of(theirs))
    with torch.no_grad():
        for weight in (theirs.model.norm.weight, ours.norm):
            weight.copy_(torch.linspace(0.5, 2.0, TINY.hidden))
    cache = Cache(TINY, 4, 32, device="cpu", dtype=torch.float32)
    cache.numbers.fill_(7.0)  # what an earlier and larger batch left behind
    ids = torch.randint(TINY.vocabulary, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = theirs(ids).logits
        assert expected.std() > 1
        logits = ours(ids[:, :12], cache, 0)
        assert (logits - expected[:, 11]).abs().max() < 1e-4
        for position in range(12, 20):
            new = ids[:, position : position + 1]
            logits = ours(new, cache, position)
            assert (logits - expected[:, position]).abs().max() < 1e-4
            for length in (position + 1, 32):  # as a captured graph has it
                logits = ours.step(new, cache, torch.tensor([position]), length)
                assert (logits - expected[:, position]).abs().max() < 1e-4


@pytest.mark.slow
def test_a_graph_reads_whole_buckets_and_at_most_what_there_is() -> None:
    need("torch")
    from bench.gpu.measure import BUCKET, bucket

    assert BUCKET == 128
    lengths = [bucket(position, 300) for position in (1, 127, 128, 255, 256, 299)]
    assert lengths == [128, 128, 256, 256, 300, 300]


@pytest.mark.slow
def test_steps_by_graphs_make_the_tokens_of_steps_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor there are no graphs: a replay runs the step again, on the same tensors."""
    need("torch")
    import torch

    from bench.gpu import measure

    monkeypatch.setattr(measure, "BUCKET", 8)

    class Replayed(measure.Graphs):
        def capture(self, sequences: int, length: int) -> None:
            given, at = torch.zeros((sequences, 1), dtype=torch.int64), torch.tensor([length - 1])
            tokens = torch.zeros(sequences, dtype=torch.int64)

            def replay() -> None:
                logits = self._decoder.step(given, self._cache, at, length)
                tokens.copy_(logits.argmax(-1))
                seen.append((sequences, length, int(at)))

            self._captured[sequences, length] = SimpleNamespace(replay=replay), given, at, tokens

    monkeypatch.setattr(measure, "Graphs", Replayed)
    cells, made = [Cell(2, 6, 12), Cell(3, 20, 10)], []
    argmax = torch.Tensor.argmax
    for graphs in (False, True):
        seen: list[tuple[int, int, int]] = []
        bench = measure.Bench(TINY, cells, device="cpu", dtype="float32", seed=1, graphs=graphs)
        told: list[list[int]] = []

        def heard(logits: Any, dimension: int, told: list[list[int]] = told) -> Any:
            told.append(argmax(logits, dimension).tolist())
            return argmax(logits, dimension)

        monkeypatch.setattr(torch.Tensor, "argmax", heard)
        bench.warm_up(cells, float("inf"))
        seen.clear()
        told.clear()
        for cell in cells:
            assert len(bench.serve(cell)) == cell.output_tokens
        made.append(list(told))
    assert made[0] == made[1]
    assert seen[:4] == [(2, 8, 6), (2, 8, 7), (2, 16, 8), (2, 16, 9)]
    assert seen[-1] == (3, 30, 28)


def stopwatch(step: float = 0.0) -> Any:
    """A bench whose batches take no time; its warm-up says how long a step takes."""
    from bench.gpu.measure import Bench

    class Stopwatch(Bench):
        def __init__(self) -> None:
            self.served: list[Cell] = []

        def warm_up(
            self, cells: list[Cell], until: float
        ) -> dict[tuple[int, int], tuple[float, float]]:
            return {(cell.batch_size, cell.prompt_tokens): (0.0, step) for cell in cells}

        def serve(self, cell: Cell) -> list[float]:
            self.served.append(cell)
            return [0.0] * cell.output_tokens

    return Stopwatch()


@pytest.mark.left_out
def test_each_round_holds_every_cell_once_in_an_order_of_its_own() -> None:
    need("torch")
    bench, lines = stopwatch(), []
    assert bench.measure(
        CELLS, repeats=3, seed=1, until=float("inf"), joules=lambda: None, write=lines.append
    ) == 3 * len(CELLS)
    rounds = [
        bench.served[start : start + len(CELLS)] for start in range(0, 3 * len(CELLS), len(CELLS))
    ]
    assert all(set(one) == set(CELLS) for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert [line["round"] for line in lines] == sorted([0, 1, 2] * len(CELLS))


def test_no_batch_is_begun_that_the_budget_has_no_time_for() -> None:
    need("torch")
    from time import perf_counter

    bench, until = stopwatch(step=1.0), perf_counter() + 10
    served = bench.measure(CELLS, repeats=5, seed=1, until=until, joules=lambda: None, write=print)
    assert served == 0
    assert bench.served == []


def test_energy_is_joules_where_the_device_counts_them_and_null_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need("torch")
    from bench.gpu import device

    nvml = ModuleType("pynvml")
    counts = iter([1_000, 2_500, 4_000])
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-12": "handle"}.__getitem__  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _handle: next(counts)  # type: ignore[attr-defined]
    nvml.nvmlSystemGetDriverVersion = lambda: "1"  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda _handle: 700_000  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        device.torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="12")
    )
    joules, facts = device.energy_counter("cuda")
    assert (joules(), joules()) == (2.5, 4.0)
    assert facts["power_limit_watts"] == 700

    def refuse(handle: str) -> int:
        raise nvml.NVMLError("Not Supported")  # type: ignore[attr-defined]

    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse  # type: ignore[attr-defined]
    joules, facts = device.energy_counter("cuda")
    assert joules() is None
    assert "Not Supported" in facts["energy"]


# --- the command ---

BARE = """
import runpy, sys
for name in ("kendall", "scipy", "numba", "msgspec", "transformers", "pynvml"):
    sys.modules[name] = None  # an import of it fails
sys.argv = ["gpu_law.py", *sys.argv[1:]]
runpy.run_path("bench/gpu_law.py", run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1"
    }  # threads that wait for each other are slow on a shared machine
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow  # importing PyTorch twice
def test_the_tiny_model_is_measured_with_pytorch_alone_and_fitted_to_a_profile(
    tmp_path: Path,
) -> None:
    need("torch")
    options = (
        "--model tiny --device cpu --dtype fp32 --batch-sizes 1,2,4 --prompt-tokens 8,16 "
        "--output-tokens 4,16,32 --repeats 3"
    )
    measured = run("-c", BARE, *options.split(), "--output", str(tmp_path), "--name", "cpu")
    assert measured.returncode == 0, measured.stderr
    assert "36 of 36 batches" in measured.stdout
    fitted = run(
        "bench/gpu_law.py",
        "--fit",
        str(tmp_path / "cpu.jsonl"),
        "--name",
        "cpu",
        "--output",
        str(tmp_path),
    )
    assert fitted.returncode == 0, fitted.stderr
    law = load_law(str(tmp_path / "cpu.json"))
    times = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()[1:]]
    long = [
        one["ends"][-1] for one in times if (one["batch_size"], one["output_tokens"]) == (2, 32)
    ]
    assert law.padded(2, 32, 16) == pytest.approx(np.mean(long), rel=0.5)  # the processor is shared
    assert "Energy: null" in (tmp_path / "cpu.md").read_text()


def test_a_file_that_is_no_run_ends_the_command_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    refused = run(
        "bench/gpu_law.py", "--fit", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path)
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "gpu-law.json").exists()
