"""The gateway before `transformers serve` on a GPU: observed beside predicted delays of continuous
and capped at loads 0.5 and 0.7.

Makes a Llama with random weights that never ends an answer by itself, starts `transformers serve`
with continuous batching and the gateway with `--engine http` before it, calibrates the law through
the gateway, then sends every cell Poisson load. The measuring machine needs PyTorch, transformers,
and what the gateway needs but vLLM. Each cell is two files of the folder: its records, and what
the live model said while requests still arrived.

    python3 bench/gpu_served.py --folder runs/gpu-served
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
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the measuring machine has only the files

from bench.gateway_cost.servers import Server, running
from bench.gpu.design import PRESETS, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "random/llama"
POLICIES = "continuous:max_batch_size={slots}", "capped:max_batch_size={slots}"
SERVE = "from transformers.cli.transformers import main; main()"
ADMIN_KEY = "the-key-of-this-bench"
LIVE_EVERY = 2.0  # seconds between two looks at the live model
LENGTHS = "uniform:low=16,high=64"
PROMPTS = "deterministic:value=64"


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--folder", type=Path, default=Path("runs/gpu-served"))
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", choices=tuple(PRESETS), default="llama-7b", help="shape")
    found.add_argument("--slots", type=int, default=16, help="of the server, and batch size")
    found.add_argument("--loads", default="0.5,0.7", help="comma-separated")
    found.add_argument("--cell-seconds", type=float, default=50.0, help="of load")
    found.add_argument("--repeats", type=int, default=3, help="of each calibrated batch")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--scratch", type=Path, default=Path("/dev/shm/kendall-gpu-served"))
    found.add_argument("--compare", action="store_true", help="compare what was measured")
    return found


def make_model(home: Path, shape: Shape, device: str) -> Path:
    """Write a model into a Hugging Face cache; its snapshot."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from server.engines.tiny import make_tiny

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
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
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
    """JSON of the gateway."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def kendall(*arguments: object) -> None:
    """A command of this tree."""
    subprocess.run([sys.executable, "-m", "kendall", *map(str, arguments)], check=True)


def serving_model(stack: ExitStack, options: argparse.Namespace, home: Path) -> Server:
    """`transformers serve`, with its first answer made."""
    command = [sys.executable, "-c", SERVE, "serve", NAME]
    command += ["--continuous-batching", "--device", options.device, "--dtype", "bfloat16"]
    command += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "4096"]  # blocks of 256 tokens
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    server = stack.enter_context(running("transformers", command, options.folder, offline))
    body = json.dumps({"model": NAME, "prompt": "the", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        body,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        print("first answer:", answer.read().decode()[:300], flush=True)
    return server


def gateway(
    stack: ExitStack, options: argparse.Namespace, behind: Server, tokenizer: Path, *more: object
) -> Server:
    """The gateway before it."""
    command = [sys.executable, "-m", "kendall", "serve", "--engine", "http", "--engine-url"]
    command += [f"http://127.0.0.1:{behind.port}", "--max-num-seqs", str(options.slots)]
    command += ["--max-model-len", "4096", "--tokenizer", str(tokenizer), "--port", "{port}"]
    command += ["--admin-key", ADMIN_KEY, "--prediction-interval", "1s"]
    command += ["--what-if-interval", "600s"]
    return stack.enter_context(
        running("gateway", [*command, *map(str, more)], options.folder, {"PYTHONPATH": here()})
    )


def here() -> str:
    """This tree before what else is there."""
    tree = str(Path(__file__).parents[1])
    return os.pathsep.join([tree, *filter(None, [os.environ.get("PYTHONPATH")])])


def rate_of(policy: str, load: float, law: Path, slots: int) -> float:
    """Requests/s at this load by the calibrated law; batches are not padded."""
    from kendall import largest_stable_rate

    unpadded = policy.replace("capped", "elastic")
    most = largest_stable_rate(
        unpadded, LENGTHS, str(law), max_num_seqs=slots, prompt_tokens=PROMPTS
    )
    return load * most


def measure(options: argparse.Namespace) -> None:
    """Everything, into the folder."""
    began, folder = perf_counter(), options.folder
    folder.mkdir(parents=True, exist_ok=True)
    home = options.scratch

    def say(text: str) -> None:
        print(f"{perf_counter() - began:6.1f} s  {text}", flush=True)

    snapshot = make_model(home, PRESETS[options.model], options.device)
    say("the model is written")
    law = folder / "law.json"
    with ExitStack() as stack:
        behind = serving_model(stack, options, home)
        say("transformers serve answers")
        with ExitStack() as around:
            front = gateway(around, options, behind, snapshot / "tokenizer.json")
            url = f"http://127.0.0.1:{front.port}"
            bounds = ("--max-batch-size", options.slots, "--max-output-tokens", 64)
            more = ("--repeats", options.repeats, "--prompt-tokens", 64, "--output", law)
            kendall("calibrate", url, *bounds, *more, "--admin-key", ADMIN_KEY)
        say("calibrated")
        for policy, load in cells(options):
            with ExitStack() as around:
                name = f"{policy.partition(':')[0]}-{load:g}"
                records = folder / f"{name}.jsonl"
                front = gateway(
                    around,
                    options,
                    behind,
                    snapshot / "tokenizer.json",
                    *("--policy", policy, "--latency", law, "--record-file", records),
                )
                rate = rate_of(policy, load, law, options.slots)
                cell(options, f"http://127.0.0.1:{front.port}", rate, name)
                say(name)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Policies and loads."""
    for load in map(float, options.loads.split(",")):
        for policy in POLICIES:
            yield policy.format(slots=options.slots), load


def cell(options: argparse.Namespace, url: str, rate: float, name: str) -> None:
    """One load, with the live model looked at while requests still arrive."""
    command = [sys.executable, "-m", "kendall", "load", "--base-url", url, "--chat"]
    command += ["--natural-lengths"]
    command += ["--request-rate", f"{rate:.6g}", "--duration", f"{options.cell_seconds:g}"]
    command += ["--output-tokens", LENGTHS, "--prompt-tokens", PROMPTS]
    command += ["--seed", str(options.seed)]
    command += ["--output", str(options.folder / f"{name}-clients.jsonl")]
    live: dict[str, Any] = {}
    with subprocess.Popen(command) as load:
        until = perf_counter() + options.cell_seconds
        while load.poll() is None:
            sleep(LIVE_EVERY)
            if perf_counter() < until:
                with suppress(OSError):  # the next look is near
                    live = ask(f"{url}/admin/prediction")
    facts = {"rate": rate, "load_exit": load.returncode, "live": live}
    (options.folder / f"{name}.live.json").write_text(json.dumps(facts, indent=1) + "\n")


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
    """Measure or compare."""
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
