"""The gateway before `transformers serve` on a GPU: observed beside predicted delays of continuous
and capped at loads 0.5 and 0.7.

Makes a Llama with random weights that never ends an answer by itself, starts `transformers serve`
with continuous batching and the gateway with `--engine http` before it, calibrates the law through
the gateway, then sends every cell Poisson load. An engine may be slower under load than alone: a
pilot of each cell says by how much, and its rate follows. After a cell that fails the next have
servers of their own. The measuring machine needs PyTorch, transformers, and what the gateway needs
but vLLM. Each cell is two files of the folder: its records, and what the live model said while
requests still arrived.

    python3 bench/gpu_served.py --layers 8 --cuda-graphs --folder runs/gpu-served
    python3 bench/gpu_served.py --device cpu --model tiny --cell-seconds 10 --folder runs/try

The comparison needs no GPU:

    .venv/bin/python bench/gpu_served.py --compare --folder runs/gpu-served
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the measuring machine has only the files

from bench.gateway_cost.servers import Server, running
from bench.gpu.design import PRESETS, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "random/llama"
POLICIES = "continuous:max_batch_size={slots}", "capped:max_batch_size={slots}"
SERVE = "from transformers.cli.transformers import main; main()"
ADMIN_KEY = "the-key-of-this-bench"
LIVE_EVERY = 2.0  # seconds between two looks at the live model
LONGEST = 32  # tokens of an answer
LENGTHS = f"uniform:low=8,high={LONGEST}"
PROMPTS = "deterministic:value=64"
BLOCKS = 16  # of 256 tokens, in the server's cache: a captured step reads them all
Live = dict[str, Any]  # what /admin/prediction says
FAILURES = (OSError, RuntimeError, subprocess.SubprocessError)  # of one cell


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, default=Path("runs/gpu-served"))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--model", choices=tuple(PRESETS), default="llama-7b", help="shape")
    options.add_argument("--layers", type=int, help="of the model, instead of the preset's")
    options.add_argument(
        "--cuda-graphs", action="store_true", help="ask `transformers serve` for it"
    )
    options.add_argument("--slots", type=int, default=8, help="of the server, and batch size")
    options.add_argument("--loads", default="0.5,0.7", help="comma-separated")
    options.add_argument("--cell-seconds", type=float, default=60.0, help="of load")
    options.add_argument("--pilot-seconds", type=float, default=12.0, help="of load before a cell")
    options.add_argument("--repeats", type=int, default=5, help="of each calibrated batch")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--scratch", type=Path, default=Path("/dev/shm/kendall-gpu-served"))
    options.add_argument("--compare", action="store_true", help="compare what was measured")
    return options


def make_model(home: Path, shape: Shape, device: str) -> Path:
    """Write a model into a Hugging Face cache; its snapshot."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kendall.server.engines.tiny import make_tiny

    tiny = make_tiny(home / "tiny")
    snapshot = home / f"hub/models--{NAME.replace('/', '--')}/snapshots/1"
    config = LlamaConfig(
        vocab_size=1024,  # the tokenizer's
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(snapshot)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, snapshot / name)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text("1")
    return snapshot


def ask(url: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def kendall(*arguments: object) -> None:
    """A command of this tree."""
    subprocess.run([sys.executable, "-m", "kendall", *map(str, arguments)], check=True)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`transformers serve` with the model, and the gateway before it."""

    options: argparse.Namespace
    server: Server
    tokenizer: Path

    @property
    def law(self) -> Path:
        """The file of the calibrated law."""
        law: Path = self.options.folder / "law.json"
        return law

    @contextmanager
    def gateway(self, *more: object) -> Iterator[str]:
        """One before the server; its URL."""
        command = [sys.executable, "-m", "kendall", "serve", "--engine", "http", "--engine-url"]
        command += [self.server.url, "--max-num-seqs", str(self.options.slots), "--max-model-len"]
        command += ["4096", "--tokenizer", str(self.tokenizer), "--port", "{port}", "--admin-key"]
        command += [ADMIN_KEY, "--prediction-interval", "1s", "--what-if-interval", "600s"]
        command += map(str, more)
        path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(path)}
        with running("gateway", command, self.options.folder, own) as server:
            yield server.url

    def calibrate(self) -> None:
        """The law, through the gateway; once before, for what the engine prepares at its first use.
        Raises CalledProcessError.
        """
        bounds = ("--max-batch-size", self.options.slots, "--max-output-tokens", LONGEST)
        with self.gateway() as url:
            for repeats in (2, self.options.repeats):
                more = ("--repeats", repeats, "--prompt-tokens", 64, "--output", self.law)
                kendall("calibrate", url, *bounds, *more, "--admin-key", ADMIN_KEY)

    def serve(
        self,
        left: list[tuple[str, float]],
        known: dict[str, Live],
        say: Callable[[str], None],
    ) -> None:
        """Take the cells off `left` until there are none or one fails; `known`: the last look at
        each policy.
        """
        while left:
            policy, load = left.pop(0)
            guess = rate_at(load, self.rate(policy, load), known.get(policy))
            try:
                known[policy] = self.cell(policy, load, guess)
            except FAILURES as error:
                say(f"{policy}, {load}: {error}")
                return
            say(f"{policy}, {load}: {in_words(known[policy])}")

    def rate(self, policy: str, load: float) -> float:
        """Requests/s at this load by the calibrated law; batches are not padded."""
        from kendall import largest_stable_rate

        unpadded, slots = policy.replace("capped", "elastic"), self.options.slots
        return load * largest_stable_rate(
            unpadded, LENGTHS, str(self.law), max_num_seqs=slots, prompt_tokens=PROMPTS
        )

    def cell(self, policy: str, load: float, guess: float) -> Live:
        """A pilot at `guess` requests/s, then one load before a gateway of its own; what the live
        model said of it. Raises FAILURES.
        """
        options, name = self.options, f"{policy.partition(':')[0]}-{load:g}"
        given = ("--policy", policy, "--latency", self.law)
        with self.gateway(*given) as url:
            _, pilot = flow(options, url, guess, options.pilot_seconds)
        print(f"pilot at {guess:.4g}/s: {in_words(pilot)}", flush=True)
        rate = rate_at(load, guess, pilot)
        with self.gateway(*given, "--record-file", options.folder / f"{name}.jsonl") as url:
            ended, live = flow(options, url, rate, options.cell_seconds)
        facts = {"rate": rate, "pilot": {"rate": guess, "live": pilot}, "load_exit": ended}
        path = options.folder / f"{name}.live.json"
        path.write_text(json.dumps({**facts, "live": live}, indent=1))
        return live


@contextmanager
def serving_model(options: argparse.Namespace, snapshot: Path) -> Iterator[ServedModel]:
    """`transformers serve`, with its first answer made."""
    command = [sys.executable, "-c", SERVE, "serve", NAME]
    command += ["--continuous-batching", "--device", options.device, "--dtype", "bfloat16"]
    command += ["--cb-num-blocks", str(BLOCKS), "--cb-max-batch-tokens", "1024"]
    command += ["--cb-use-cuda-graph"] * options.cuda_graphs
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    offline = {"HF_HOME": str(options.scratch), "HF_HUB_OFFLINE": "1"}
    with running("transformers", command, options.folder, offline) as server:
        body = json.dumps({"model": NAME, "prompt": "the", "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            print("first answer:", answer.read().decode()[:300], flush=True)
        yield ServedModel(options, server, snapshot / "tokenizer.json")


def measure(options: argparse.Namespace) -> None:
    """Measure every cell into the folder."""
    began = perf_counter()

    def say(text: str) -> None:
        print(f"{perf_counter() - began:6.1f} s  {text}", flush=True)

    options.folder.mkdir(parents=True, exist_ok=True)
    shape = PRESETS[options.model]
    shape = replace(shape, layers=options.layers or shape.layers)
    snapshot = make_model(options.scratch, shape, options.device)
    say("the model is written")
    left, known, calibrated = list(cells(options)), dict[str, Live](), False
    while left or not calibrated:
        with serving_model(options, snapshot) as served:
            say("transformers serve answers")
            if not calibrated:
                served.calibrate()
                say("calibrated")
                calibrated = True
            served.serve(left, known, say)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Policies and loads; none without loads."""
    for load in map(float, filter(None, options.loads.split(","))):
        for policy in POLICIES:
            yield policy.format(slots=options.slots), load


def rate_at(load: float, guess: float, live: Live | None) -> float:
    """Requests/s for this load by the last look at the same policy; without one, `guess`."""
    prediction = (live or {}).get("prediction")
    if not prediction or not prediction["load"]:
        return guess
    return float(load * prediction["arrival_rate"] / prediction["load"])


def in_words(live: Live) -> str:
    prediction = live.get("prediction")
    if not prediction:
        return str(live.get("reason", "nothing"))
    return str({name: prediction.get(name) for name in ("n", "arrival_rate", "load", "speed")})


def flow(options: argparse.Namespace, url: str, rate: float, seconds: float) -> tuple[int, Live]:
    """One load; its exit status, and the live model's last words while requests still arrived."""
    command = [sys.executable, "-m", "kendall", "load", "--base-url", url, "--chat", "--no-save"]
    command += ["--natural-lengths", "--request-rate", f"{rate:.6g}", "--duration", f"{seconds:g}"]
    command += ["--output-tokens", LENGTHS, "--prompt-tokens", PROMPTS]
    command += ["--seed", str(options.seed)]
    live: Live = {}
    with subprocess.Popen(command) as load:
        until = perf_counter() + seconds
        while load.poll() is None:
            sleep(LIVE_EVERY)
            if perf_counter() < until:
                with suppress(OSError):  # the next look is near
                    live = ask(f"{url}/admin/prediction")
    return load.returncode, live


def compare(options: argparse.Namespace) -> None:
    """The table of `kendall compare`, and what the live model said."""
    for path in sorted(options.folder.glob("*.live.json")):
        facts = json.loads(path.read_text())
        records = path.with_name(path.name.replace(".live.json", ".jsonl"))
        if facts["load_exit"]:
            print(f"{records}: the load ended with status {facts['load_exit']}; not compared")
            continue
        given = ("--latency", options.folder / "law.json", "--output-tokens", LENGTHS)
        kendall("compare", records, *given, "--request-rate", facts["rate"])
        live = facts["live"].get("prediction")
        if live is None:
            print(f"live: {facts['live'].get('reason', 'nothing')}")
        else:
            print(f"live: {live['compared']} {live[live['compared']]}, at speed {live['speed']}")


def main() -> int:
    options = parser().parse_args()
    if options.compare:
        compare(options)
    else:
        try:
            measure(options)
        finally:
            shutil.rmtree(options.scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
